"""Who holds which box of a tensor, with proof that nothing is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from slimckpt.errors import CheckFailedError
from slimckpt.layouts.boxes import blocks_of, coverage, is_inside
from slimckpt.layouts.layout import (
    Box,
    Holder,
    Piece,
    Shape,
    Shard,
    TensorLayout,
    whole_box,
)
from slimckpt.model import Ints, Span

Local = tuple[Holder, str | None, Span | None, Shape]
"""What tells one local tensor from another."""


class Held(NamedTuple):
    """A box of a whole tensor in a local one; ``at`` as in
    :class:`~slimckpt.layouts.layout.Piece`."""

    shard: Shard
    at: Shape | int


class Covering:
    """The distinct boxes of a tensor and all who hold each, the lowest rank first.

    Attributes
    ----------
    boxes, held
        One entry for each distinct box that is not empty.
    overlap
        A place that two distinct boxes have in common, where there is one: they have to agree.
    """

    def __init__(self, shape: Shape, shards: Sequence[Shard]) -> None:
        self.boxes: list[Box] = []
        self.held: list[list[Held]] = []
        self.overlap: Box | None = None
        local: dict[Local, list[Box]] = {}
        self._fault = self._gather(shape, shards, local) or self._prove(shape, local)
        if not self._fault:
            form = (len(self.boxes), len(shape))
            self._lows: Ints = np.array([box.offsets for box in self.boxes], np.int64).reshape(form)
            lengths = np.array([box.lengths for box in self.boxes], np.int64).reshape(form)
            self._highs: Ints = self._lows + lengths

    def touching(self, low: Sequence[int], high: Sequence[int]) -> list[int]:
        """The boxes that have elements of the box from ``low`` to before ``high``."""
        if len(self.boxes) == 1:
            return [0]
        touched = ((self._lows < high) & (self._highs > low)).all(axis=1)
        found: list[int] = np.flatnonzero(touched).tolist()
        return found

    def require(self, name: str, shape: Shape, origin: str) -> None:
        """Every element of the tensor is held, and no local one is two of them.

        Raises
        ------
        CheckFailedError
            So it is not, or boxes are not inside their tensors.
        """
        if self._fault:
            raise CheckFailedError(
                f"tensor {name!a} of shape {list(shape)}: by {origin} {self._fault}; files are"
                " missing, or the layout is of another save"
            )

    def _gather(self, shape: Shape, shards: Sequence[Shard], local: dict[Local, list[Box]]) -> str:
        """Fill ``boxes``, ``held`` and what is used of local tensors; what is wrong, if anything
        is."""
        if min(shape, default=0) < 0:
            return "it has a negative size"
        rows: dict[Box, int] = {}
        for shard in sorted(shards, key=lambda shard: holder_key(shard.holder)):
            inside: list[Box] = []
            for piece in shard.pieces:
                if not _is_sound(piece, shape):
                    return f"{who(shard.holder)} holds {piece}, which is not inside it"
                for box, at in blocks_of(piece):
                    if 0 in box.lengths:
                        continue
                    places = _local_boxes(shard.shape, box, at)
                    if not places:
                        return (
                            f"{show_box(box)} of it is at {at} of what {who(shard.holder)} has, a"
                            f" tensor of shape {list(shard.shape)}, where it does not fit"
                        )
                    inside += places
                    row = rows.setdefault(box, len(self.boxes))
                    if row == len(self.boxes):
                        self.boxes.append(box)
                        self.held.append([])
                    self.held[row].append(Held(shard, at))
            key = shard.holder, shard.name, shard.within, shard.shape
            local.setdefault(key, []).extend(inside)
        return ""

    def _prove(self, shape: Shape, local: dict[Local, list[Box]]) -> str:
        for (holder, _, _, whole), boxes in local.items():
            twice = coverage(whole, boxes).overlap if len(boxes) > 1 else None
            if twice is not None:
                return f"{show_box(twice)} of what {who(holder)} has is two parts of it"
        gap, self.overlap = coverage(shape, self.boxes)
        if gap is None:
            return ""
        total = sum(math.prod(box.lengths) for box in self.boxes)
        return (
            f"nobody holds {show_box(gap)} of it ({total} of {math.prod(shape)} elements are in"
            f" {len(self.boxes)} boxes)"
        )


class Coverings:
    """Coverings of tensors; those that share their shards, or have equal ones, share them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Shape], tuple[tuple[Shard, ...], Covering]] = {}

    def of(self, name: str, tensor: TensorLayout, origin: str) -> Covering:
        """The covering of a tensor, proved; see :meth:`Covering.require`."""
        key = id(tensor.shards), tensor.shape
        if key not in self._known:
            # The shards are kept, lest their id is given to others.
            self._known[key] = tensor.shards, Covering(tensor.shape, tensor.shards)
        found = self._known[key][1]
        found.require(name, tensor.shape, origin)
        return found


def _is_sound(piece: Piece, shape: Shape) -> bool:
    """Whether a piece is of a tensor of that shape at all."""
    if piece.flat is None:
        return is_inside(piece.box, shape)
    start, stop = piece.flat
    return (
        is_inside(piece.box, shape)
        and isinstance(piece.at, int)
        and 0 <= start <= stop <= math.prod(piece.box.lengths)
    )


def _local_boxes(shape: Shape, box: Box, at: Shape | int) -> list[Box]:
    """Where a box lies in a local tensor of that shape; nothing where it does not fit."""
    if isinstance(at, int):
        stop = at + math.prod(box.lengths)
        if at < 0 or stop > math.prod(shape):
            return []
        return [block.box for block in blocks_of(Piece(whole_box(shape), 0, (at, stop)))]
    inner = Box(at, (1,) * (len(at) - len(box.lengths)) + box.lengths)
    return [inner] if is_inside(inner, shape) else []


def holder_key(holder: Holder) -> tuple[bool, int, str]:
    """A sort key: ranks by number, then files by path."""
    return (False, holder, "") if isinstance(holder, int) else (True, 0, holder)


def who(holder: Holder) -> str:
    """A holder, as errors name it."""
    return f"rank {holder}" if isinstance(holder, int) else f"file {holder}"


def show_box(box: Box) -> str:
    """A box as numpy would be asked for it: ``[0:4, 8:16]``."""
    spans = (f"{low}:{low + size}" for low, size in zip(*box, strict=False))
    return f"[{', '.join(spans)}]"
