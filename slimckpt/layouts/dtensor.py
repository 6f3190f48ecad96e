"""The layout that DTensors carry: what each rank saved by itself (``torch.save`` of a state dict
under FSDP2 or tensor parallelism) has, beside each local tensor, the mesh and the placements.

As torch 2.13 places them (``torch/distributed/tensor/_utils.py``,
``_compute_local_shape_and_global_offset``): axis after axis of the mesh, left to right, each splits
by ``ceil`` what those before left. A ``_StridedShard`` cuts into ``split_factor`` parts first and
takes its share of each: so FSDP over tensor parallelism is written, where the axis to the left is
split last. Where that does not divide, FSDP's local tensors are not those of the left-to-right
rule but of the splits as they were done, for which ``split_factor`` stands; shapes tell which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from slimckpt.errors import CheckFailedError, NotUnderstoodError, UnknownTensorError
from slimckpt.formats.torch_dtensors import REPLICATE, SHARD, STRIDED, Placement, Spec, specs_in
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Layout, Piece, Shape, Shard, TensorLayout
from slimckpt.layouts.placement import cut, pieces_of
from slimckpt.layouts.splits import Range, sizes_of
from slimckpt.model import encode_path

_LISTED = 5


class _Step(NamedTuple):
    """One axis of a mesh splits one of a tensor, in each of ``factor`` parts of it by itself."""

    dim: int
    axis: int
    factor: int = 1


class _Local(NamedTuple):
    """A local tensor and its spec (or what is wrong with it)."""

    file: File
    dtype: str
    shape: Shape
    spec: Spec | str | None


def dtensor_layout(files: Sequence[File]) -> Layout | None:
    """The layout of a step whose files have DTensors; ``None`` where none has.

    Raises
    ------
    DamagedFileError
        A file with some is damaged.
    """
    holding = [file for file in files if file.holding.file.facts.get("dtensors")]
    if not holding:
        return None
    held: dict[str, list[_Local]] = {}
    whole: set[str] = set()
    ranks: set[int] = set()
    for file in holding:
        table = file.holding.require()
        with file.holding.source() as source:
            specs = specs_in(file.holding.file.format, source)
        for row, name in enumerate(table.names()):
            spec = specs.get(name)
            held.setdefault(name, []).append(_Local(file, table.dtype(row), table.shape(row), spec))
        whole |= specs.keys()
        for spec in specs.values():
            if isinstance(spec, Spec):
                ranks |= set(spec.mesh.ranks)
    return Layout(
        _DTensors({name: held[name] for name in held if name in whole}),
        tuple(sorted(ranks)),
        "the specs of its DTensors",
    )


class _DTensors(Mapping[str, TensorLayout]):
    """Tensors by the names of their local ones."""

    def __init__(self, held: Mapping[str, list[_Local]]) -> None:
        self._held = held
        self._made: dict[str, TensorLayout] = {}
        self._shared: dict[tuple[Shard, ...], tuple[Shard, ...]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __getitem__(self, name: str) -> TensorLayout:
        if name not in self._held:
            near = ", ".join(list(self._held)[:_LISTED])
            raise UnknownTensorError(f"no DTensor {name!a}; there are {len(self)}, such as {near}")
        if name not in self._made:
            found = _layout(name, self._held[name])
            shards = self._shared.setdefault(found.shards, found.shards)
            self._made[name] = TensorLayout(found.dtype, found.shape, shards)
        return self._made[name]


def _layout(name: str, held: Sequence[_Local]) -> TensorLayout:
    """Of one tensor.

    Raises
    ------
    CheckFailedError
        A local tensor is not what its spec says, or two specs contradict each other.
    NotUnderstoodError
        The ranks have to add it up (Partial), or it lies in a way that is not known here.
    """
    sound = [(local, _checked(name, local)) for local in held]
    (first, spec), *_ = sound
    for local, other in sound[1:]:
        one = first.dtype, list(spec.shape), list(spec.mesh.shape), spec.placements, spec.order
        two = local.dtype, list(other.shape), list(other.mesh.shape), other.placements, other.order
        if one != two:
            raise CheckFailedError(
                f"{local.file.holding.label}: tensor {name!a}: expected the spec that"
                f" {first.file.holding.label} has, {_show(first.dtype, spec)}, found"
                f" {_show(local.dtype, other)}; are these files of one save, and of one pipeline"
                " stage?"
            )
    readings = [
        [_held(name, local, spec, steps) for local, spec in sound]
        for steps in _readings(f"{first.file.holding.label}: tensor {name!a}", spec)
    ]
    for reading in readings:
        if all(shape == local.shape for (shape, _), (local, _) in zip(reading, sound, strict=True)):
            shards = [
                Shard(encode_path(local.file.path), shape, pieces)
                for (shape, pieces), (local, _) in zip(reading, sound, strict=True)
            ]
            return TensorLayout(first.dtype, spec.shape, tuple(shards))
    for (shape, _), (local, other) in zip(readings[0], sound, strict=True):
        if shape != local.shape:
            raise CheckFailedError(
                f"{local.file.holding.label}: tensor {name!a}: expected a local tensor of shape"
                f" {list(shape)} of {_show(local.dtype, other)}, on rank"
                f" {_rank(name, local, other)}, found {list(local.shape)}; the file was changed,"
                " or is another rank's"
            )
    raise AssertionError(name)


def _checked(name: str, local: _Local) -> Spec:
    """The spec of a local tensor, where it has one that is known here."""
    label, spec = local.file.holding.label, local.spec
    if spec is None:
        raise CheckFailedError(
            f"{label}: tensor {name!a}: expected a DTensor, as other files have, found a tensor"
            " without a spec"
        )
    if isinstance(spec, str):
        raise NotUnderstoodError(
            f"{label}: tensor {name!a}: {spec}; its local tensor is read by rank or file only"
        )
    for placement in spec.placements:
        if "Partial" in placement.kind:
            raise NotUnderstoodError(
                f"{label}: tensor {name!a} is {placement.kind}: what it is as a whole only the sum"
                " (or other reduction) of its ranks says, and nothing is computed here; save"
                " tensor.redistribute(placements=[Replicate()]) instead"
            )
        if placement.kind not in (SHARD, STRIDED, REPLICATE):
            raise NotUnderstoodError(
                f"{label}: tensor {name!a}: expected Shard, _StridedShard or Replicate, found"
                f" {placement.kind[:99]!a}; its local tensor is read by rank or file only"
            )
    return spec


def _rank(name: str, local: _Local, spec: Spec) -> int:
    """The rank that has a local tensor, by its mesh or else by the path of its file."""
    stated, label = local.file.role.rank, local.file.holding.label
    rank = stated if spec.mesh.saver is None else spec.mesh.saver
    if rank is None:
        raise CheckFailedError(
            f"{label}: tensor {name!a}: expected a file whose name tells its rank (rank_0.pt),"
            " since the mesh does not; found none"
        )
    if stated not in (None, rank):
        raise CheckFailedError(
            f"{label}: tensor {name!a}: expected a mesh of rank {stated}, as the path says, found"
            f" that of rank {rank}; was the file renamed, or copied over another?"
        )
    if rank not in spec.mesh.ranks:
        raise CheckFailedError(
            f"{label}: tensor {name!a}: expected rank {rank} in its mesh, found ranks"
            f" {list(spec.mesh.ranks)}"
        )
    return rank


def _held(
    name: str, local: _Local, spec: Spec, steps: Sequence[_Step]
) -> tuple[Shape, tuple[Piece, ...]]:
    """The shape of what a file has, and which parts of the whole tensor these are."""
    at = spec.mesh.coordinates(_rank(name, local, spec))
    assert at is not None
    axes: list[list[Range]] = [[(0, length)] if length else [] for length in spec.shape]
    for dim, axis, factor in steps:
        length = sum(high - low for low, high in axes[dim])
        start, ranges = 0, []
        for size in sizes_of("ceil", length, factor):
            part = -(-size // spec.mesh.shape[axis])
            low, high = (min(number * part, size) for number in (at[axis], at[axis] + 1))
            ranges.append((start + low, start + high))
            start += size
        axes[dim] = cut(axes[dim], ranges)
    shape = tuple(sum(high - low for low, high in ranges) for ranges in axes)
    return shape, pieces_of(axes)


def _readings(where: str, spec: Spec) -> list[list[_Step]]:
    """The splits, in order; two orders where FSDP may have done them in another than the spec has
    them. ``where`` is the file and tensor, as errors name them."""
    given = [
        _Step(placement.dim, axis, placement.factor if placement.kind == STRIDED else 1)
        for axis, placement in enumerate(spec.placements)
        if placement.kind != REPLICATE
    ]
    split: dict[int, list[_Step]] = {}
    for step in given:
        split.setdefault(step.dim, []).append(step)
    for dim, axes in spec.order.items():
        if sorted(axes) != sorted(step.axis for step in split.get(dim, [])):
            raise NotUnderstoodError(
                f"{where}: expected an order of the splits of axis {dim} by the axes"
                f" {[step.axis for step in split.get(dim, [])]} of its mesh, found {list(axes)}"
            )
    if all(list(axes) == sorted(axes) for axes in spec.order.values()):
        undone = [_undone(steps, spec.mesh.shape) for steps in split.values()]
        others = [[step for steps in undone if steps for step in steps]]
        return [given, *(others if None not in undone and others[0] != given else [])]
    if any(step.factor > 1 for step in given):
        raise NotUnderstoodError(
            f"{where}: expected either _StridedShard or an order of its splits, found both"
        )
    in_order = [
        _Step(dim, axis)
        for dim, steps in split.items()
        for axis in spec.order.get(dim, tuple(step.axis for step in steps))
    ]
    return [in_order]


def _undone(steps: Sequence[_Step], mesh: Shape) -> list[_Step] | None:
    """Plain splits, in the order in which they were done, of those of one axis of a tensor: a
    ``split_factor`` is how many parts there were already. ``None`` where it is not."""
    done: list[_Step] = []
    for step in reversed(steps):
        counts = [math.prod(mesh[each.axis] for each in done[:n]) for n in range(len(done) + 1)]
        if step.factor not in counts:
            return None
        done.insert(counts.index(step.factor), step._replace(factor=1))
    return done


def _show(dtype: str, spec: Spec) -> str:
    """A spec as errors name it."""
    return (
        f"{dtype} {list(spec.shape)} placed {', '.join(map(_show_placement, spec.placements))} on a"
        f" mesh of {list(spec.mesh.shape)}"
    )


def _show_placement(placement: Placement) -> str:
    if placement.kind == STRIDED:
        return f"_StridedShard({placement.dim}, split_factor={placement.factor})"
    return f"Shard({placement.dim})" if placement.kind == SHARD else placement.kind
