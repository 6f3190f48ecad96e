"""Rules from what MindSpore records: strategy files, and tuples of ``parameter_layout_dict``.

As MindSpore 2.10 has it, verified on 990 tensors that it sliced itself: ranks vary fastest along
the last axis of ``dev_matrix``; a number in ``tensor_map`` is an axis of it counted from the right,
-1 none. Optimizer sharding splits axis 0 of the slice once more, over the axes that ``tensor_map``
leaves unused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slimckpt.errors import NotUnderstoodError, UsageError
from slimckpt.formats.mindspore_strategy import Groups, ParameterLayout, Strategy
from slimckpt.formats.numpy_arrays import is_shape
from slimckpt.layouts.layout import Shape, TensorLayout
from slimckpt.layouts.placement import Placement, Rules
from slimckpt.layouts.splits import Split


class StrategyRules(Rules):
    """The rules of one strategy file, or of those of all pipeline stages.

    Parameters
    ----------
    strategies
        One file (a merged one has all stages), or one for each stage. Equal ones count once.
    origin
        What errors call them.

    Raises
    ------
    NotUnderstoodError
        A parameter is split in a way that is not known here: field slices, say.
    UsageError
        Two files are of one stage, or a stage is missing.
    """

    def __init__(self, strategies: Sequence[Strategy], origin: str) -> None:
        self.origin = origin
        stages: dict[int, dict[str, ParameterLayout]] = {}
        for strategy in strategies:
            for stage, parameters in _by_stage(strategy).items():
                if stages.setdefault(stage, parameters) != parameters:
                    raise UsageError(
                        f"{origin}: two different strategies are of pipeline stage {stage}; say"
                        " which is meant (layout=…; --layout FILE, of reshard --source-layout FILE)"
                    )
        sizes = {
            math.prod(layout.dev_matrix[0])
            for parameters in stages.values()
            for layout in parameters.values()
            if layout.dev_matrix
        }
        if len(sizes) != 1 or sorted(stages) != list(range(len(stages))):
            raise UsageError(
                f"{origin}: expected one strategy for each pipeline stage, all for as many ranks;"
                f" found stages {sorted(stages)} for {sorted(sizes)} ranks; give the files of all"
                " stages, or the merged one"
            )
        size = sizes.pop()
        self.n_ranks = size * len(stages)
        self._placements: dict[str, tuple[Placement, ...]] = {}
        known: dict[tuple[ParameterLayout, int], Placement] = {}
        for stage, parameters in sorted(stages.items()):
            for name, layout in parameters.items():
                key = layout, stage
                if key not in known:
                    known[key] = _placement(layout, stage * size, f"{origin}: parameter {name!a}")
                self._placements[name] = (*self._placements.get(name, ()), known[key])

    def placements(self, name: str) -> tuple[Placement, ...]:
        return self._placements.get(name, ())


def ranks_of(strategy: Strategy) -> int:
    """How many ranks a strategy is for: those of one pipeline stage, or of all in a merged one."""
    stages = _by_stage(strategy)
    sizes = [
        math.prod(layout.dev_matrix[0])
        for parameters in stages.values()
        for layout in parameters.values()
        if layout.dev_matrix
    ]
    return max(sizes, default=0) * len(stages)


def layout_of_tuple(
    name: str, described: Sequence[Any], dtype: str, groups: Groups | None = None
) -> TensorLayout:
    """The layout of a parameter from its tuple in ``net.parameter_layout_dict``.

    Parameters
    ----------
    name
        Of the parameter.
    described
        6 to 8 items: device matrix, tensor map, shape of the slice after all splits, size of a
        field, whether the split is uniform, name of the group of optimizer sharding or ``""``;
        from 2.10 on the whole shape; shape of the slice after a reshape (not used here).
    dtype
        As safetensors spells it.
    groups
        The ranks that the name of the group stands for are compared with these, if given.

    Raises
    ------
    NotUnderstoodError
        It is split in a way that is not known here.
    UsageError
        The tuple is no such tuple, or does not give the whole shape.
    """
    what = f"layout {described!a} of {name!a}"
    if not 6 <= len(described) <= 8:
        raise UsageError(f"{what} has {len(described)} items; expected 6 to 8")
    devices, tensor_map, part, field, uniform, group, *more = described
    if not is_shape(tuple(devices)) or not is_shape(tuple(part)) or not isinstance(group, str):
        raise UsageError(f"{what}: expected lists of sizes and the name of a group")
    if not uniform:
        raise NotUnderstoodError(f"{what}: it is split unevenly, and the tuple does not say how")
    size = 0
    if group:
        head = group.partition("-")[0]
        if not head.isdecimal():
            raise UsageError(f"{what}: expected a group such as '8-1234', found {group!a}")
        size = int(head)
    nested = any(isinstance(axis, list | tuple) for axis in tensor_map)
    maps = [tuple(axis) if isinstance(axis, list | tuple) else (axis,) for axis in tensor_map]
    entry = ParameterLayout(
        dev_matrix=(tuple(devices),),
        tensor_map=tuple(maps) if nested else (tuple(tensor_map),),
        field=int(field),
        opt_weight_shard_size=size,
        opt_weight_shard_step=_step(tuple(devices), maps) if size else 0,
    )
    placement = _placement(entry, 0, what)
    whole = tuple(more[0]) if more and more[0] else _unsplit(tuple(part), placement)
    if not whole and maps:
        raise UsageError(
            f"{what} gives neither the shape of the slice nor the whole one, as before the network"
            " was compiled; compile it, or give the whole shape as the seventh item"
        )
    found = TensorLayout(dtype, whole, placement.shards(whole))
    for shard in found.shards:
        if part and shard.shape != tuple(part):
            raise UsageError(
                f"{what}: a whole tensor of {list(whole)} has slices of {list(shard.shape)}, and"
                f" the tuple says {list(part)}"
            )
    if groups is not None and group:
        _check_group(what, group, placement, groups)
    return found


def _by_stage(strategy: Strategy) -> Mapping[int, dict[str, ParameterLayout]]:
    """Parameters by pipeline stage, names without the prefixes of merged files."""
    heads = [name.partition("-") for name in strategy.parameters]
    stages = {stage for stage, _ in strategy.operators.values()}
    prefixed = bool(heads) and all(head.isdecimal() and dash for head, dash, _ in heads)
    if prefixed and strategy.current_stage == 1:
        found: dict[int, dict[str, ParameterLayout]] = {}
        for (head, _, name), layout in zip(heads, strategy.parameters.values(), strict=True):
            found.setdefault(int(head), {})[name] = layout
        return found
    return {min(stages, default=0): strategy.parameters}


def _placement(layout: ParameterLayout, first: int, what: str) -> Placement:
    if layout.field:
        raise NotUnderstoodError(
            f"{what} is a field slice (field {layout.field}) of an embedding, which is not read;"
            " its ranks can be read one by one"
        )
    if len(layout.dev_matrix) != 1 or not layout.tensor_map or not all(layout.dev_matrix[0]):
        raise NotUnderstoodError(f"{what}: expected a device matrix and a tensor map: {layout}")
    (mesh,) = layout.dev_matrix
    maps = [entry for entry in layout.tensor_map if entry]
    if len(layout.tensor_map) == 1:
        maps = [(number,) for number in layout.tensor_map[0]]
    splits = []
    sizes = layout.param_split_shape[0] if layout.param_split_shape else ()
    for dim, numbers in enumerate(maps):
        axes = tuple(len(mesh) - 1 - number for number in numbers if number != -1)
        if any(not 0 <= axis < len(mesh) for axis in axes):
            raise NotUnderstoodError(
                f"{what}: its tensor map {layout.tensor_map} names an axis that the device matrix"
                f" {list(mesh)} has not"
            )
        if axes:
            splits.append(Split(dim, axes, sizes if sizes and dim == 0 else "even"))
    if sizes:
        _check_uneven(layout, what, splits, mesh)
    used = [axis for split in splits for axis in split.axes]
    if len(set(used)) != len(used):
        raise NotUnderstoodError(f"{what}: two axes of it are split over one: {layout.tensor_map}")
    if layout.opt_weight_shard_size:
        splits.append(_optimizer_shard(layout, what, mesh, used))
    return Placement(mesh, tuple(splits), first)


def _check_uneven(layout: ParameterLayout, what: str, splits: Sequence[Split], mesh: Shape) -> None:
    sizes = layout.param_split_shape[0]
    starts = tuple(sum(sizes[:n]) for n in range(len(sizes)))
    offsets = layout.indices_offset[0] if layout.indices_offset else ()
    parts = splits[0].count(mesh) if splits and splits[0].dim == 0 else 1
    if offsets not in ((), starts) or len(sizes) != parts:
        raise NotUnderstoodError(
            f"{what} is in {parts} parts of {list(sizes)} rows that start at {list(offsets)};"
            f" expected starts {list(starts)}"
        )


def _optimizer_shard(layout: ParameterLayout, what: str, mesh: Shape, used: Sequence[int]) -> Split:
    """Axis 0 once more, over the unused axes: a rank's number among them, modulo the parts."""
    unused = tuple(axis for axis in range(len(mesh)) if axis not in used)
    ranks = math.prod(mesh[axis] for axis in unused)
    size, step = layout.opt_weight_shard_size, layout.opt_weight_shard_step
    parts = ranks if size == -1 else size
    expected = math.prod(mesh[unused[-1] + 1 :]) if unused else 0
    if not unused or parts < 1 or ranks % parts or step != expected:
        raise NotUnderstoodError(
            f"{what}: optimizer sharding of size {size} and step {step} over device matrix"
            f" {list(mesh)}, axes {list(used)} of which are used, is not known here (expected step"
            f" {expected} and a size that divides {ranks})"
        )
    return Split(0, unused, parts=None if parts == ranks else parts)


def _step(mesh: Shape, maps: Sequence[Sequence[int]]) -> int:
    """What a strategy file would say of neighbours in the group of optimizer sharding."""
    used = {len(mesh) - 1 - number for numbers in maps for number in numbers}
    unused = [axis for axis in range(len(mesh)) if axis not in used]
    return math.prod(mesh[unused[-1] + 1 :]) if unused else 0


def _unsplit(part: Shape, placement: Placement) -> Shape:
    whole = list(part)
    for split in placement.splits if part else ():
        if split.dim < len(whole):
            whole[split.dim] *= split.count(placement.mesh)
    return tuple(whole)


def _check_group(what: str, group: str, placement: Placement, groups: Groups) -> None:
    if group not in groups.groups:
        known = ", ".join(list(groups.groups)[:8])
        raise UsageError(f"{what}: the group file has no group {group!a}; it has {known}")
    ranks = groups.groups[group]
    members: dict[object, list[int]] = {}
    parts = placement.splits[-1].count(placement.mesh)
    for rank, places in placement.ranks():
        members.setdefault(places[:-1], []).append(rank)
    rows = [same[at : at + parts] for same in members.values() for at in range(0, len(same), parts)]
    if list(ranks) not in rows:
        raise UsageError(f"{what}: group {group} is ranks {list(ranks)}; expected one of {rows}")
