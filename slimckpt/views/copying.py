"""A tensor's elements into memory of the caller's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slimckpt.errors import UsageError
from slimckpt.model import RAW
from slimckpt.sources.backends import WARM
from slimckpt.sources.threads import copiers, share_out
from slimckpt.views.arrays import Array, Arrays, described
from slimckpt.views.providers import Holding

LARGE = 1024 * 1024
"""Fewer bytes are copied from the mapping; more are read straight into the caller's memory, which
takes no page faults, by several threads."""


def room(out: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> Array:
    """The caller's memory as an array of ``dtype`` and ``shape``.

    Raises
    ------
    UsageError
        It is neither such an array nor a writable buffer of as many bytes.
    """
    nbytes = math.prod(shape) * dtype.itemsize

    def refusal(found: str) -> UsageError:
        return UsageError(
            f"{what}: expected a writable array {dtype} {list(shape)} or buffer of {nbytes} bytes,"
            f" found {found}"
        )

    if isinstance(out, np.ndarray):
        if (out.dtype, out.shape) == (dtype, shape):
            if not out.flags.writeable:
                raise refusal("such an array, but read-only")
            return np.asarray(out)
        if (out.dtype, out.ndim) != (np.uint8, 1):
            raise refusal(f"an array {out.dtype} {list(out.shape)}")
    try:
        buffer = memoryview(out)
    except TypeError:
        raise refusal(f"{type(out).__name__}; of a torch tensor give tensor.numpy()") from None
    if buffer.nbytes != nbytes:
        raise refusal(f"{buffer.nbytes} bytes")
    if buffer.readonly:
        raise refusal("a buffer that is read-only")
    if not buffer.c_contiguous:
        raise refusal("a buffer whose bytes lie apart")
    if not nbytes:
        return np.empty(shape, dtype)
    found: Array = np.ndarray(shape, dtype, np.frombuffer(buffer, np.uint8))
    return found


def copy_tensor(arrays: Arrays, holding: Holding, row: int, out: Any, what: str) -> None:
    """Copy a tensor into the caller's memory, errors of which are those of :func:`room`."""
    tensor, dtype, shape = described(holding, row)
    target = room(out, dtype, shape, what)
    as_stored = tensor.encoding == RAW and tensor.strides is None and tensor.fill is None
    if not as_stored or arrays.writable or target.nbytes < LARGE or not target.flags.c_contiguous:
        return _copy(target, arrays.array(holding, row))
    memory, at = target.reshape(-1).view(np.uint8), 0
    for path, offset, nbytes, size in arrays.pieces(holding, row, check=True):
        part = memory[at : at + nbytes]
        if path is None:
            part[...] = offset
        else:
            arrays.backend.read_into(path, offset, part, size)
        at += nbytes


def _copy(target: Array, array: Array) -> None:
    if array.nbytes < LARGE or array.ndim == 0 or np.may_share_memory(target, array):
        return np.copyto(target, array)
    rows = -(-len(array) * WARM // array.nbytes)

    def copy(at: int) -> None:
        np.copyto(target[at : at + rows], array[at : at + rows])

    blocks = range(0, len(array), rows)
    share_out(copy, blocks, min(copiers(), len(blocks)))
