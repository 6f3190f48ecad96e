"""From rules for a mesh of ranks to layouts: how a tensor is split, before its shape is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from slimckpt.errors import CheckFailedError, UsageError
from slimckpt.layouts.layout import Box, Layout, Piece, Shape, Shard, TensorLayout
from slimckpt.layouts.splits import Places, Range, Split
from slimckpt.model import compact_ranks

Typed = tuple[str, Shape]
"""The dtype and shape of a tensor."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a tensor lies on a mesh of ranks: split axis by axis, else replicated.

    Attributes
    ----------
    mesh
        Sizes of its axes; ranks vary fastest along the last.
    splits
        In order: a later one of the same ``dim`` splits what the earlier ones left.
    first
        The global rank of the first of the mesh (of a pipeline stage).
    only
        Only on ranks with this coordinate on that axis: ``(axis, coordinate)``.
    among
        Only on these ranks, counted from ``first``; ``None``: on all.
    """

    mesh: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    first: int = 0
    only: tuple[tuple[int, int], ...] = ()
    among: tuple[int, ...] | None = None

    def ranks(self) -> Iterable[tuple[int, tuple[Places, ...]]]:
        """The ranks that hold the tensor, and which part of each split they have."""
        among = None if self.among is None else frozenset(self.among)
        for number, coords in enumerate(product(*map(range, self.mesh))):
            if among is not None and number not in among:
                continue
            if all(coords[axis] == at for axis, at in self.only):
                places = tuple(split.places(self.mesh, coords) for split in self.splits)
                yield self.first + number, places

    def part(self, shape: Shape, places: Sequence[Places]) -> tuple[Shape, tuple[Piece, ...]]:
        """The shape of the local tensor of a rank, and what of the whole one it is.

        Raises
        ------
        UsageError
            A tensor of that shape cannot be split like that.
        """
        axes: list[list[Range]] = [[(0, dim)] if dim else [] for dim in shape]
        lengths = list(shape)
        for split, place in zip(self.splits, places, strict=True):
            if split.dim >= len(shape):
                raise UsageError(f"it has no axis {split.dim}")
            ranges = split.ranges(lengths[split.dim], place)
            axes[split.dim] = cut(axes[split.dim], ranges)
            lengths[split.dim] = sum(high - low for low, high in axes[split.dim])
        return tuple(lengths), pieces_of(axes)

    def shards(self, shape: Shape) -> tuple[Shard, ...]:
        """What every rank holds of a tensor of that shape."""
        parts: dict[tuple[Places, ...], tuple[Shape, tuple[Piece, ...]]] = {}
        found = []
        for rank, places in self.ranks():
            if places not in parts:
                parts[places] = self.part(shape, places)
            found.append(Shard(rank, *parts[places]))
        return tuple(found)


class Rules(ABC):
    """How tensors are split over ranks, by their names.

    Attributes
    ----------
    origin
        Where they are from, as errors name them.
    n_ranks
        How many ranks they are for.
    """

    origin: str
    n_ranks: int

    @abstractmethod
    def placements(self, name: str) -> tuple[Placement, ...]:
        """How a tensor lies, one placement for each mesh that holds it (a pipeline stage each);
        none where it is outside the layout."""

    def unused(self, names: Iterable[str]) -> list[str]:
        """What of the rules is for none of these tensors, where rules are written by hand."""
        return []

    def place(self, wholes: Mapping[str, Typed]) -> Layout:
        """The layout of tensors whose whole shapes are known.

        Raises
        ------
        UsageError
            A tensor cannot be split as the rules say.
        """
        known: dict[tuple[tuple[Placement, ...], Shape], tuple[Shard, ...]] = {}
        tensors = {}
        for name, (dtype, shape) in wholes.items():
            key = self.placements(name), shape
            if not key[0]:
                continue
            if key not in known:
                try:
                    known[key] = tuple(s for each in key[0] for s in each.shards(shape))
                except UsageError as error:
                    raise UsageError(
                        f"tensor {name!a} of shape {list(shape)} cannot be placed as {self.origin}"
                        f" says: {error}"
                    ) from None
            tensors[name] = TensorLayout(dtype, shape, known[key])
        return Layout(tensors, tuple(range(self.n_ranks)), self.origin)


class Inference:
    """Whole shapes from those of what ranks hold; what was inferred once is not again."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._known: dict[object, TensorLayout] = {}

    def tensor(self, name: str, found: Mapping[int, Typed]) -> TensorLayout | None:
        """A tensor from its dtype and shape on each rank that has it; ``None`` where it is outside
        the layout.

        Raises
        ------
        CheckFailedError
            Dtypes differ, a part is on no rank, or shapes are not those that the rules lead to.
        """
        placements = self._rules.placements(name)
        if not placements or not found:
            return None
        key = placements, tuple(found.items())
        if key not in self._known:
            self._known[key] = self._infer(name, placements, found)
        return self._known[key]

    def _infer(
        self, name: str, placements: tuple[Placement, ...], found: Mapping[int, Typed]
    ) -> TensorLayout:
        dtype, shape = "", None
        shards: list[Shard] = []
        for placement in placements:
            held = {r: found[r] for r, _ in placement.ranks() if r in found}
            if not held:
                continue
            first = min(held)
            for rank, (other, local) in held.items():
                if other != (dtype or held[first][0]) or len(local) != len(held[first][1]):
                    raise self._differ(name, first, rank, found)
            dtype = held[first][0]
            whole = self._whole(name, placement, held)
            if shape not in (None, whole):
                raise CheckFailedError(
                    f"tensor {name!a}: by {self._rules.origin} it has shape {list(shape or ())} on"
                    f" some stages and {list(whole)} on others"
                )
            shape = whole
            shards += self._placed(name, placement, whole, held)
        outside = sorted(set(found) - {shard.holder for shard in shards})
        if outside or shape is None:
            raise CheckFailedError(
                f"tensor {name!a} is on {_ranks(outside)}, where {self._rules.origin} has none"
            )
        return TensorLayout(dtype, shape, tuple(shards))

    def _whole(self, name: str, placement: Placement, held: Mapping[int, Typed]) -> Shape:
        """The sum, on each axis, of the lengths of its parts."""
        first = min(held)
        shape = list(held[first][1])
        for dim in sorted({split.dim for split in placement.splits}):
            if dim >= len(shape):
                raise CheckFailedError(
                    f"tensor {name!a}: {self._rules.origin} splits its axis {dim}; rank {first} has"
                    f" shape {shape}"
                )
            mine = [n for n, split in enumerate(placement.splits) if split.dim == dim]
            lengths: dict[tuple[Places, ...], tuple[int, int]] = {}
            wanted = set()
            for rank, places in placement.ranks():
                part = tuple(places[n] for n in mine)
                wanted.add(part)
                if rank in held:
                    length = held[rank][1][dim]
                    other, known = lengths.setdefault(part, (rank, length))
                    if known != length:
                        raise self._differ(name, other, rank, held)
            if len(lengths) != len(wanted):
                raise CheckFailedError(
                    f"tensor {name!a}: by {self._rules.origin} its axis {dim} is in {len(wanted)}"
                    f" parts, of which {_ranks(held)}, all that have it, hold {len(lengths)}"
                )
            shape[dim] = sum(length for _, length in lengths.values())
        return tuple(shape)

    def _placed(
        self, name: str, placement: Placement, whole: Shape, held: Mapping[int, Typed]
    ) -> list[Shard]:
        try:
            shards = [shard for shard in placement.shards(whole) if shard.holder in held]
        except UsageError as error:
            first = min(held)
            raise CheckFailedError(
                f"tensor {name!a} has shape {list(held[first][1])} on rank {first} and so"
                f" {list(whole)} in all, by {self._rules.origin}, but cannot be split like that:"
                f" {error}"
            ) from None
        for shard in shards:
            assert isinstance(shard.holder, int)
            if held[shard.holder][1] != shard.shape:
                raise CheckFailedError(
                    f"tensor {name!a} on rank {shard.holder}: expected shape {list(shard.shape)} of"
                    f" {list(whole)} in all, as {self._rules.origin} says, found"
                    f" {list(held[shard.holder][1])}; the layout is of another save"
                )
        return shards

    def _differ(
        self, name: str, one: int, other: int, found: Mapping[int, Typed]
    ) -> CheckFailedError:
        (dtype, shape), (dtype_2, shape_2) = found[one], found[other]
        return CheckFailedError(
            f"tensor {name!a} is {dtype} {list(shape)} on rank {one} and {dtype_2} {list(shape_2)}"
            f" on rank {other}, which {self._rules.origin} does not explain; the layout is of"
            " another save"
        )


def pieces_of(axes: Iterable[Iterable[Range]]) -> tuple[Piece, ...]:
    """The boxes of a whole tensor that a local one is made of, which on each axis has some ranges
    of the whole one, one behind the other."""
    runs = []
    for ranges in axes:
        at, placed = 0, []
        for low, high in _joined(ranges):
            placed.append((low, high - low, at))
            at += high - low
        runs.append(placed)
    pieces = []
    for chosen in product(*runs):
        offsets, sizes, ats = zip(*chosen, strict=True) if chosen else ((), (), ())
        pieces.append(Piece(Box(offsets, sizes), ats))
    return tuple(pieces)


def cut(runs: list[Range], ranges: Iterable[Range]) -> list[Range]:
    """``ranges`` of what ``runs`` joined are, in terms of what the runs are in."""
    found = []
    for low, high in ranges:
        at = 0
        for start, stop in runs:
            first, last = max(low, at), min(high, at + stop - start)
            if first < last:
                found.append((start + first - at, start + last - at))
            at += stop - start
    return found


def _joined(ranges: Iterable[Range]) -> list[Range]:
    joined: list[Range] = []
    for low, high in ranges:
        if joined and joined[-1][1] == low:
            joined[-1] = (joined[-1][0], high)
        else:
            joined.append((low, high))
    return joined


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {compact_ranks(ranks)}"
