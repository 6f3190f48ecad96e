"""Local tensors in pieces of bounded size, for whatever writes them somewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from slimckpt.layouts.layout import Piece, Shape, Shard, whole_box
from slimckpt.layouts.slicing import Whole, cut, fill, local_of
from slimckpt.model import Bytes
from slimckpt.views.arrays import Array

PIECE = 8 * 1024 * 1024
"""Bytes of a piece; more only where one element of an axis has more and no other axis is left."""


def pieces_of(
    parts: Sequence[tuple[Whole, Shard]], dtype: np.dtype[Any], most: int = PIECE
) -> Iterator[Bytes]:
    """The bytes of a local tensor in C order.

    Parameters
    ----------
    parts
        What it is made of, all of one local shape: whole tensors, and its parts of each.
    most
        Bytes of a piece.
    """
    shape = parts[0][1].shape
    if 0 not in shape:
        yield from _pieces(parts, shape, 0, dtype, most)


def pieces_of_array(array: Array, most: int = PIECE) -> Iterator[Bytes]:
    """The bytes of an array in C order."""
    shard = Shard(0, array.shape, (Piece(whole_box(array.shape), (0,) * array.ndim),))
    return pieces_of([(array, shard)], array.dtype, most)


def _pieces(
    parts: Sequence[tuple[Whole, Shard]], shape: Shape, axis: int, dtype: np.dtype[Any], most: int
) -> Iterator[Bytes]:
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes <= most or axis == len(shape):
        yield _together(parts, shape, dtype)
        return
    step = max(most * shape[axis] // nbytes, 1)
    for low in range(0, shape[axis], step):
        high = min(low + step, shape[axis])
        inner = [(whole, cut(shard, axis, low, high)) for whole, shard in parts]
        yield from _pieces(inner, inner[0][1].shape, axis + (step == 1), dtype, most)


def _together(parts: Sequence[tuple[Whole, Shard]], shape: Shape, dtype: np.dtype[Any]) -> Bytes:
    if len(parts) == 1:
        found = local_of(*parts[0], dtype)
    else:
        found = np.zeros(shape, dtype)
        for whole, shard in parts:
            fill(found, whole, shard)
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)
