"""Cutting what a rank has out of whole tensors, and knowing when that was done before."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from slimckpt.errors import CheckFailedError, UnknownRankError
from slimckpt.formats.mindspore_strategy import Groups
from slimckpt.layouts.boxes import blocks_of
from slimckpt.layouts.layout import Box, Piece, Shape, Shard, TensorLayout, whole_box
from slimckpt.layouts.mindspore import layout_of_tuple

Array = npt.NDArray[Any]
log = logging.getLogger(__name__)


class Whole(Protocol):
    """A whole tensor: an array, or one that is read as it is sliced."""

    def __getitem__(self, key: tuple[Any, ...]) -> Any: ...


def local_of(whole: Whole, shard: Shard, dtype: np.dtype[Any]) -> Array:
    """The local tensor of a shard; a view of ``whole`` where one box is all of it."""
    if len(shard.pieces) == 1:
        blocks = blocks_of(shard.pieces[0])
        if len(blocks) == 1 and math.prod(blocks[0].box.lengths) == math.prod(shard.shape):
            found: Array = whole[_key(blocks[0].box)]
            return found if found.shape == shard.shape else found.reshape(shard.shape)
    # What no piece names is padding.
    out = np.zeros(shard.shape, dtype)
    fill(out, whole, shard)
    return out


def fill(out: Array, whole: Whole, shard: Shard, start: int = 0) -> None:
    """Put what ``whole`` has of a shard into ``out``, which is C-contiguous and of any shape: the
    elements of the local tensor from ``start`` on, in C order. What is padding is left alone."""
    flat = out.reshape(-1)
    stop = start + flat.size
    runs = blocks_of(Piece(whole_box(shard.shape), 0, (start, stop)))
    for piece in shard.pieces:
        for box, at in blocks_of(piece):
            if isinstance(at, int):
                first, last = max(at, start), min(at + math.prod(box.lengths), stop)
                for part, there in blocks_of(Piece(box, first - start, (first - at, last - at))):
                    assert isinstance(there, int)
                    found = whole[_key(part)]
                    flat[there : there + found.size] = found.reshape(-1)
                continue
            extra = len(at) - len(box.lengths)
            ends = (1,) * extra + box.lengths
            for run, before in runs:
                low = tuple(map(max, at, run.offsets))
                high = tuple(min(a + n, b + m) for a, n, b, m in zip(at, ends, *run, strict=True))
                sizes = tuple(b - a for a, b in zip(low, high, strict=True))
                if min(sizes, default=1) <= 0:
                    continue
                assert isinstance(before, int)
                room = flat[before : before + math.prod(run.lengths)].reshape(run.lengths)
                inside = zip(low[extra:], at[extra:], box.offsets, strict=True)
                offsets = tuple(a - b + c for a, b, c in inside)
                there_at = tuple(a - b for a, b in zip(low, run.offsets, strict=True))
                block_in(room, sizes[extra:], there_at)[...] = whole[
                    _key(Box(offsets, sizes[extra:]))
                ]


def block_in(local: Array, lengths: Shape, at: Shape | int) -> Array:
    """The elements of a box in the local tensor that has them at ``at``: a view, where the tensor
    is C-contiguous or ``at`` are offsets."""
    if isinstance(at, int):
        return local.reshape(-1)[at : at + math.prod(lengths)].reshape(lengths)
    first = len(at) - len(lengths)
    inner = [slice(low, low + size) for low, size in zip(at[first:], lengths, strict=True)]
    key: tuple[Any, ...] = (*at[:first], *inner, ...)
    found: Array = local[key]
    return found


def slice_of(
    array: Array, name: str, tensor: TensorLayout, rank: int, origin: str = "its layout"
) -> Array:
    """What a rank has of a tensor, from the whole one; what already is a slice stays as it is.

    Parameters
    ----------
    array
        The whole tensor, or the slice of this rank (which is logged).
    name
        Of the tensor, for errors.
    tensor
        Its layout.
    rank
        The global rank.
    origin
        What errors call the layout.

    Raises
    ------
    UnknownRankError
        The layout has nothing of the tensor on that rank.
    CheckFailedError
        The array has another shape.
    """
    shards = [shard for shard in tensor.shards if shard.holder == rank]
    if len(shards) != 1:
        raise UnknownRankError(
            f"{origin} has {len(shards)} local tensors of {name!a} on rank {rank}; expected one"
        )
    if array.shape == tensor.shape:
        return local_of(array, shards[0], array.dtype)
    if array.shape == shards[0].shape:
        log.info(
            "tensor %a has shape %s, that of the slice of rank %s: not sliced again",
            *(name, list(array.shape), rank),
        )
        return array
    cause = (
        "it is smaller than the slice of this rank: it looks sliced twice"
        if array.size < math.prod(shards[0].shape)
        else "the layout is of another model, or the array is a slice by another layout"
    )
    raise CheckFailedError(
        f"tensor {name!a} of shape {list(array.shape)} is neither whole {list(tensor.shape)} nor"
        f" the slice {list(shards[0].shape)} that {origin} gives rank {rank}; {cause}"
    )


def slice_by_tuple(
    array: Array,
    name: str,
    described: Sequence[Any],
    rank: int,
    dtype: str = "",
    groups: Groups | None = None,
) -> Array:
    """:func:`slice_of` by a tuple of MindSpore's ``parameter_layout_dict``.

    Parameters
    ----------
    array, name, rank
        As there; the rank may be one of any pipeline stage.
    described, dtype, groups
        As in :func:`~slimckpt.layouts.mindspore.layout_of_tuple`.
    """
    tensor = layout_of_tuple(name, described, dtype, groups)
    return slice_of(array, name, tensor, rank % len(tensor.shards), f"layout {described!a}")


def _key(box: Box) -> tuple[Any, ...]:
    # An ellipsis, lest what has no axes becomes a number.
    spans = (slice(low, low + size) for low, size in zip(*box, strict=True))
    return (*spans, ...)
