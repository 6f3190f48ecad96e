"""Writing a layout as rules in TOML, to be read by people and edited.

Only boxes are looked at, not where they came from: along each axis of a tensor, the part that a
rank has must be a digit of its number (or a few digits), in some mesh that all tensors share. Each
rule is placed again and compared before it is written; a tensor that no rule gives is named in a
comment.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from itertools import pairwise, permutations, product
from typing import NamedTuple

import numpy as np

from slimckpt.analysis.roles import role_of
from slimckpt.errors import SlimckptError
from slimckpt.layouts.layout import Box, Holder, Layout, Shape, Shard, TensorLayout
from slimckpt.layouts.placement import Placement
from slimckpt.layouts.splits import RULES, How, Split
from slimckpt.model import Ints, decode_path

_UNKNOWN, _NOTHING = -1, -2
"""Of a rank of which it is not known which part it has, and of one that has none."""
Digit = tuple[int, int]
"""``rank // stride % size``, as stride and size."""
Run = tuple[int, int]


class _Axis(NamedTuple):
    """How one axis of a tensor is split: digits of the rank, the most significant first; the sizes
    of parts, of each section where there are some; numbers of groups that there may be."""

    dim: int
    digits: tuple[Digit, ...]
    sizes: tuple[int, ...]
    sections: tuple[int, ...]
    groups: tuple[int, ...]


def to_toml(layout: Layout) -> str:
    """A layout as rules, which :func:`~slimckpt.layouts.toml_rules.read_toml` reads. Tensors whose
    layout is refused stand in comments."""
    made: dict[str, TensorLayout] = {}
    refused: dict[str, SlimckptError] = {}
    for name in layout.tensors:
        try:
            made[name] = layout.tensors[name]
        except SlimckptError as error:
            refused[name] = error
    layout = Layout(made, layout.ranks, layout.origin)
    held = _Ranks(layout)
    axes: dict[str, tuple[_Axis, ...] | None] = {}
    known: dict[tuple[int, Shape], tuple[_Axis, ...] | None] = {}
    for name, tensor in layout.tensors.items():
        key = id(tensor.shards), tensor.shape
        if key not in known:
            known[key] = held.axes_of(tensor)
        axes[name] = known[key]
    strides = _strides(held.count, [axis for found in known.values() for axis in found or ()])
    placed: dict[Placement | None, list[str]] = {}
    done: dict[tuple[int, Shape], Placement | None] = {}
    for name, tensor in layout.tensors.items():
        key = id(tensor.shards), tensor.shape
        if key not in done:
            done[key] = held.placement(tensor, axes[name], strides)
        placed.setdefault(done[key], []).append(name)
    return "".join(_lines(layout, strides, placed, refused))


class _Ranks:
    """The ranks of a layout; files count as the rank that their path states, or, of so many files
    as there are ranks, in the order of the coordinates that paths state."""

    def __init__(self, layout: Layout) -> None:
        self._by_files = not layout.ranks
        self._of_path: dict[str, int] = {}
        if layout.ranks:
            self.count = layout.ranks[-1] + 1
            shards = (shard for tensor in layout.tensors.values() for shard in tensor.shards)
            paths = {shard.holder for shard in shards if isinstance(shard.holder, str)}
            if len(paths) == len(layout.ranks):
                in_order = sorted(paths, key=_coordinates)
                self._of_path = dict(zip(in_order, layout.ranks, strict=True))
            return
        for tensor in layout.tensors.values():
            for shard in tensor.shards:
                self._rank(shard.holder)
        self.count = max(self._of_path.values(), default=0) + 1

    def _rank(self, holder: Holder) -> int:
        if isinstance(holder, int):
            return holder
        if holder not in self._of_path:
            self._of_path[holder] = role_of(decode_path(holder)).rank or 0
        return self._of_path[holder]

    def axes_of(self, tensor: TensorLayout) -> tuple[_Axis, ...] | None:
        """How each axis is split; ``None`` where it is not known."""
        runs: dict[int, list[list[Run]]] = {}
        empty: dict[int, Shape] = {}
        for shard in tensor.shards:
            axes = _runs(shard)
            if axes is None:
                return None
            if self._by_files and self._rank(shard.holder) in runs:
                continue
            if self._by_files and axes:
                axes = self._grid(tensor, self._rank(shard.holder))
                if axes is None:
                    return None
            if axes or not shard.shape:
                runs[self._rank(shard.holder)] = axes
            else:
                empty[self._rank(shard.holder)] = shard.shape
        found = []
        for dim, length in enumerate(tensor.shape):
            parts = {rank: axes[dim] for rank, axes in runs.items()}
            parts |= {rank: [] for rank, shape in empty.items() if length and not shape[dim]}
            if set(map(tuple, parts.values())) <= {((0, length),)}:
                continue
            axis = self._axis(dim, length, parts)
            if axis is None:
                return None
            found.append(axis)
        return tuple(found)

    def _grid(self, tensor: TensorLayout, rank: int) -> list[list[Run]] | None:
        """What a file has of each axis, in all of its items; ``None`` where they are no grid."""
        shards = [shard for shard in tensor.shards if self._rank(shard.holder) == rank]
        boxes = {p.box for shard in shards for p in shard.pieces if 0 not in p.box.lengths}
        axes: list[list[Run]] = []
        for dim in range(len(tensor.shape)):
            runs = {(box.offsets[dim], box.offsets[dim] + box.lengths[dim]) for box in boxes}
            axes.append(sorted(runs))
        if len(boxes) != math.prod(map(len, axes)):
            return None
        return [_joined(runs) for runs in axes]

    def _axis(self, dim: int, length: int, parts: dict[int, list[Run]]) -> _Axis | None:
        distinct = sorted({tuple(runs) for runs in parts.values() if runs})
        index = np.full(self.count, _UNKNOWN, np.int64)
        for rank, runs in parts.items():
            index[rank] = distinct.index(tuple(runs)) if runs else _NOTHING
        found = _digits(index, len(distinct), self.count)
        if found is None:
            return None
        digits, order = found
        sections, groups = _fused(length, distinct)
        each = [sum(high - low for low, high in runs) for runs in distinct]
        sizes = [each[part] // max(len(sections), 1) if part >= 0 else 0 for part in order]
        return _Axis(dim, digits, tuple(sizes), sections, groups)

    def placement(
        self, tensor: TensorLayout, axes: Sequence[_Axis] | None, strides: Sequence[int]
    ) -> Placement | None:
        """The placement that gives a tensor's shards; ``None`` where there is none."""
        if axes is None:
            return None
        mesh = tuple(high // low for high, low in pairwise(strides)) or (1,)
        held = [Placement(mesh)]
        if not self._by_files:
            ranks = tuple(sorted({self._rank(shard.holder) for shard in tensor.shards}))
            held = [Placement(mesh, only=self._only(tensor, strides)), Placement(mesh, among=ranks)]
        for where in held:
            alone = {axis for axis, _ in where.only}
            for splits in _splits(axes, strides):
                placement = replace(where, splits=splits)
                if alone & {axis for split in splits for axis in split.axes}:
                    break
                if self._gives(placement, tensor):
                    return placement
        return None

    def _only(self, tensor: TensorLayout, strides: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Coordinates that all ranks with the tensor share and others have not."""
        ranks = np.array([self._rank(shard.holder) for shard in tensor.shards])
        found = []
        for axis, (high, low) in enumerate(pairwise(strides)):
            coords = set((ranks % high // low).tolist())
            if len(coords) == 1 and high > low:
                found.append((axis, coords.pop()))
        return tuple(found)

    def _gives(self, placement: Placement, tensor: TensorLayout) -> bool:
        try:
            shards = placement.shards(tensor.shape)
        except ValueError:
            return False
        if not self._by_files:
            held = ((self._rank(s.holder), s.shape, s.pieces) for s in tensor.shards)
            wanted = {(rank, shape, tuple(sorted(pieces))) for rank, shape, pieces in held}
            return wanted == {(s.holder, s.shape, tuple(sorted(s.pieces))) for s in shards}
        given = {(s.holder, piece.box) for s in shards for piece in s.pieces}
        boxes = set()
        for rank in {self._rank(shard.holder) for shard in tensor.shards}:
            axes = self._grid(tensor, rank)
            if axes is None:
                return False
            for runs in product(*axes):
                lows = tuple(low for low, _ in runs)
                lengths = tuple(high - low for low, high in runs)
                boxes.add((rank, Box(lows, lengths)))
        return boxes <= given and {box for _, box in boxes} == {box for _, box in given}


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for low, high in runs:
        if joined and joined[-1][1] == low:
            joined[-1] = joined[-1][0], high
        else:
            joined.append((low, high))
    return joined


def _coordinates(path: str) -> tuple[int | str, ...]:
    """A sort key by which ranks vary fastest along tensor parallelism."""
    coords = role_of(decode_path(path)).coords
    return (*(coords.get(name, 0) for name in ("pp", "ep", "dp", "tp")), path)


def _runs(shard: Shard) -> list[list[Run]] | None:
    """For each axis, what of it a shard has, in its own order; nothing where it has nothing;
    ``None`` where its pieces are no grid of boxes that make up the local tensor."""
    if any(isinstance(piece.at, int) or piece.flat for piece in shard.pieces):
        return None
    axes: list[dict[int, Run]] = [{} for _ in shard.shape]
    count = 0
    for box, at, _ in shard.pieces:
        assert not isinstance(at, int)
        if len(at) != len(axes):
            return None
        count += math.prod(box.lengths)
        for runs, low, length, place in zip(axes, box.offsets, box.lengths, at, strict=True):
            runs[place] = low, low + length
    if count != math.prod(shard.shape):
        return None
    return [[run for _, run in sorted(runs.items())] for runs in axes] if count else []


def _digits(index: Ints, count: int, ranks: int) -> tuple[tuple[Digit, ...], list[int]] | None:
    """Digits of the rank that number the parts of an axis, and for each number which of ``count``
    parts it is, -1 for none. ``index`` is the part that each rank has."""
    full, empty = np.flatnonzero(index >= 0), np.flatnonzero(index == _NOTHING)
    everything = len(full) == ranks
    if count == 1 and not len(empty):
        return (), [0]
    single = [
        (stride, size)
        for stride in _divisors(ranks)
        for size in _divisors(ranks // stride)
        if size > 1
    ]
    depths = (1, 2, 3) if len(single) < 40 else (1, 2)
    chosen = [digits for depth in depths for digits in permutations(single, depth)]
    gapped = None
    for digits in sorted(chosen, key=lambda digits: math.prod(size for _, size in digits)):
        size = math.prod(size for _, size in digits)
        if size < count or size > ranks or (everything and size != count):
            continue
        if any(high % (low * size) for (low, size), (high, _) in pairwise(sorted(digits))):
            continue  # they share digits
        order = np.full(size, -1, np.int64)
        order[_number(full, digits)] = index[full]
        if (
            (order[_number(full, digits)] == index[full]).all()
            and (order[_number(empty, digits)] < 0).all()
            and order[order >= 0].tolist() == list(range(count))
        ):
            if (order[:count] >= 0).all():
                return digits, order.tolist()
            gapped = gapped or (digits, order.tolist())
    return gapped


def _number(ranks: Ints, digits: Sequence[Digit]) -> Ints:
    found = np.zeros(len(ranks), np.int64)
    for stride, radix in digits:
        found = found * radix + ranks // stride % radix
    return found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _fused(
    length: int, parts: Sequence[tuple[Run, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sections that parts of several runs tell of, and how many groups there may be of them."""
    first = parts[0]
    count = next((n for n, (a, b) in enumerate(pairwise(first), 1) if b < a), len(first))
    if len(first) == 1 or len(first) % count:
        return (), (1,)
    starts = [low for low, _ in first[:count]]
    sections = [high - low for low, high in pairwise([*starts, length])]
    unit = math.gcd(*sections)
    groups = sum(len(runs) // count for runs in parts)
    return tuple(size // unit for size in sections), (groups,) if len(first) > count else (
        1,
        groups,
    )


def _strides(ranks: int, axes: Sequence[_Axis]) -> list[int]:
    """The strides of a mesh that has all digits, from the number of ranks down to 1; those that do
    not divide each other are left out."""
    cuts = {ranks, 1}
    for axis in axes:
        for stride, size in axis.digits:
            wider = sorted({*cuts, stride, stride * size})
            if all(high % low == 0 for low, high in pairwise(wider)):
                cuts = set(wider)
    return sorted(cuts, reverse=True)


def _splits(axes: Sequence[_Axis], strides: Sequence[int]) -> Iterator[tuple[Split, ...]]:
    """What may give some axes, the simplest first."""
    rules: list[How] = ["even", *(rule for rule in RULES if rule != "even")]
    hows = [[*rules, axis.sizes] for axis in axes]
    for groups in product(*(axis.groups for axis in axes)):
        for how in product(*hows):
            every = zip(axes, how, groups, strict=True)
            yield tuple(_as_split(axis, rule, number, strides) for axis, rule, number in every)


def _as_split(axis: _Axis, how: How, groups: int, strides: Sequence[int]) -> Split:
    axes: list[int] = []
    for stride, size in axis.digits:
        within = [n for n, low in enumerate(strides[1:]) if stride <= low < stride * size]
        axes += within
    if not axes:  # all have the same: whole, but in an order of its own
        return Split(axis.dim, (0,), how, axis.sections, groups, parts=1)
    return Split(axis.dim, tuple(axes), how, axis.sections, groups)


def _lines(
    layout: Layout,
    strides: Sequence[int],
    placed: dict[Placement | None, list[str]],
    refused: Mapping[str, SlimckptError],
) -> Iterator[str]:
    names = ["rank"] if len(strides) <= 2 else [f"axis{n}" for n in range(len(strides) - 1)]
    yield f"# {layout.origin}\n# Ranks vary fastest along the last axis; rename the axes freely.\n"
    yield "[mesh]\n"
    for name, (high, low) in zip(names, pairwise(strides), strict=False):
        yield f"{name} = {high // low}\n"
    if len(strides) == 1:
        yield "rank = 1\n"
    everything = [name for group in placed.values() for name in group]
    for placement, group in placed.items():
        if placement is None:
            yield "\n# No rule gives how these lie; write one of how they are wanted, or leave\n"
            yield "# them out (reshard --skip):\n"
            yield from (f"#   {_quoted(name)}\n" for name in group)
            continue
        patterns = list(_patterns(group, everything))
        lines = ",\n    ".join(map(_quoted, patterns))
        yield "\n[[rule]]\n"
        yield f"match = {lines}\n" if len(patterns) == 1 else f"match = [\n    {lines},\n]\n"
        if placement.only:
            only = ", ".join(f"{names[axis]} = {at}" for axis, at in placement.only)
            yield f"only = {{{only}}}\n"
        if placement.among is not None:
            yield f"ranks = {list(placement.among)}\n"
        for number, split in enumerate(placement.splits):
            if number:
                yield "[[rule.then]]\n"
            yield from _split_lines(split, names)
    if refused:
        yield "\n# Refused:\n"
        yield from (f"#   {_quoted(name)}: {_quoted(str(why))}\n" for name, why in refused.items())
    yield '\n# What is not named above: of each rank its own.\n[[rule]]\nmatch = "*"\n'
    yield "per_rank = true\n"


def _split_lines(split: Split, names: Sequence[str]) -> Iterator[str]:
    axes = [_quoted(names[axis]) for axis in split.axes]
    yield f"dim = {split.dim}\n"
    yield f"axis = {axes[0] if len(axes) == 1 else '[' + ', '.join(axes) + ']'}\n"
    how = split.how
    yield f"split = {_quoted(how) if isinstance(how, str) else list(how)}\n"
    if split.sections:
        yield f"sections = {list(split.sections)}\n"
    if split.groups > 1:
        yield f"groups = {split.groups}\n"
    if split.parts:
        yield f"parts = {split.parts}\n"


def _patterns(group: Sequence[str], everything: Sequence[str]) -> Iterator[str]:
    """Names as globs with ``*`` for numbers, where these match no other tensor."""
    own = set(group)
    by_glob: dict[str, list[str]] = {}
    for name in group:
        escaped = re.sub(r"[*?\[]", lambda found: f"[{found[0]}]", name)
        by_glob.setdefault(re.sub(r"(?<![^./])[0-9]+(?![^./])", "*", escaped), []).append(name)
    for glob, names in by_glob.items():
        matches = re.compile(translate(glob)).match
        if len(names) > 1 and all(name in own for name in everything if matches(name)):
            yield glob
        else:
            yield from (re.sub(r"[*?\[]", lambda found: f"[{found[0]}]", name) for name in names)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
