"""The geometry of boxes: runs of elements cut into boxes, and proof that boxes cover a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from slimckpt.layouts.layout import Box, Piece, Shape

Ends = tuple[Shape, Shape]
"""A box by its first elements and those behind its last."""


class Block(NamedTuple):
    """A box of a whole tensor and, as in :class:`~slimckpt.layouts.layout.Piece`, where its
    elements lie in a local one."""

    box: Box
    at: Shape | int


class Coverage(NamedTuple):
    """What some boxes leave out of a tensor (one box of it), and one place where they overlap."""

    gap: Box | None
    overlap: Box | None


def blocks_of(piece: Piece) -> list[Block]:
    """A piece as boxes that are full: a run of elements of a box of ``n`` axes is ``2 n - 1``."""
    box, at, flat = piece
    if flat is None:
        return [Block(box, at)]
    assert isinstance(at, int)
    found = []
    for offsets, lengths, skipped in _runs(box.lengths, *flat):
        start = tuple(map(sum, zip(box.offsets, offsets, strict=True)))
        found.append(Block(Box(start, lengths), at + skipped))
    return found


def _runs(lengths: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Elements ``start`` to ``stop`` of a C-ordered array as boxes of it: offsets, lengths, and how
    many elements of the run come before."""
    if start >= stop:
        return
    if not lengths:
        yield (), (), 0
        return
    row = math.prod(lengths[1:])
    first, last = -(-start // row), stop // row
    parts = [(last, start - last * row, stop - last * row)]
    if first <= last:
        parts = [(first - 1, start - (first - 1) * row, row), (last, 0, stop - last * row)]
    for number, (index, low, high) in enumerate(parts):
        if number and first < last:
            inner = (0,) * (len(lengths) - 1)
            yield (first, *inner), (last - first, *lengths[1:]), first * row - start
        if low < high:
            for offsets, sizes, skipped in _runs(lengths[1:], low, high):
                yield (index, *offsets), (1, *sizes), index * row + low + skipped - start


def coverage(shape: Shape, boxes: Sequence[Box]) -> Coverage:
    """Whether boxes inside a tensor cover each of its elements, and none twice.

    Exact: every element counts, by the planes on which boxes begin or end, axis by axis.
    """
    ends = [
        (box.offsets, tuple(map(sum, zip(box.offsets, box.lengths, strict=True))))
        for box in boxes
        if 0 not in box.lengths
    ]
    if 0 in shape:
        return Coverage(None, None)
    gap, overlap = _sweep(shape, ends, 0)
    return Coverage(gap and _as_box(gap), overlap and _as_box(overlap))


def is_inside(box: Box, shape: Shape) -> bool:
    """Whether a box lies in a tensor and has its number of axes."""
    axes = {len(box.offsets), len(box.lengths), len(shape)}
    return len(axes) == 1 and all(
        min(offset, length) >= 0 and offset + length <= dim
        for offset, length, dim in zip(box.offsets, box.lengths, shape, strict=True)
    )


def _sweep(shape: Shape, ends: list[Ends], axis: int) -> tuple[Ends | None, Ends | None]:
    """What is not covered of the axes from ``axis`` on, and what is twice."""
    if axis == len(shape):
        return (None if ends else ((), ())), (((), ()) if len(ends) > 1 else None)
    gap = overlap = None
    starting: dict[int, list[Ends]] = {}
    for box in ends:
        starting.setdefault(box[0][axis], []).append(box)
    cuts = sorted({0, shape[axis], *starting, *(box[1][axis] for box in ends)})
    active: list[Ends] = []
    for low, high in pairwise(cuts):
        active = [box for box in active if box[1][axis] > low] + starting.get(low, [])
        for number, found in enumerate(_sweep(shape, active, axis + 1)):
            if found is not None:
                wider = ((low, *found[0]), (high, *found[1]))
                gap, overlap = (gap or wider, overlap) if not number else (gap, overlap or wider)
        if gap and overlap:
            break
    return gap, overlap


def _as_box(ends: Ends) -> Box:
    low, high = ends
    return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))
