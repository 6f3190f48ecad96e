"""Whether one tensor is another one, rounded: what a weight is to its master copy."""

from __future__ import annotations

import math
import os

import numpy as np

from slimckpt.analysis.sharing import Bodies
from slimckpt.dtypes import numpy_dtype
from slimckpt.model import RAW, Span, Tensor
from slimckpt.sources.positioned import cut, open_for_reading, read_spans_into

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BLOCK = 1 << 20
"""Elements compared at a time."""


def is_rounded(bodies: Bodies, master: int, weight: int) -> bool:
    """Whether every element of the tensor ``weight`` (a row) is that of ``master``, rounded to the
    nearest value of its dtype; as equal bytes, so that of NaNs some are not.

    Only contiguous floating-point tensors that are stored as they are can be compared; of others
    the answer is no.
    """
    tensors = [bodies.catalog.table.tensor(row) for row in (master, weight)]
    if not all(map(_plain, tensors)) or _count(tensors[0]) != _count(tensors[1]):
        return False
    files = bodies.catalog.files_of((master, weight))
    fds = []
    try:
        for file in files.tolist():
            fds.append(open_for_reading(bodies.path(file), bodies.catalog.files[file].label))
        for start in range(0, _count(tensors[0]), _BLOCK):
            wide, narrow = (
                _block(bodies, fd, tensor, start) for fd, tensor in zip(fds, tensors, strict=True)
            )
            with np.errstate(all="ignore"):
                if wide.astype(narrow.dtype).tobytes() != narrow.tobytes():
                    return False
    finally:
        for fd in fds:
            os.close(fd)
    return True


def _plain(tensor: Tensor) -> bool:
    return (
        tensor.dtype in FLOATS
        and tensor.payload is not None
        and tensor.strides is None
        and tensor.encoding == RAW
    )


def _count(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _block(bodies: Bodies, fd: int, tensor: Tensor, start: int) -> np.ndarray:
    """Up to ``_BLOCK`` elements from ``start`` on."""
    dtype = numpy_dtype(tensor.dtype, tensor.big_endian)
    count = min(_BLOCK, _count(tensor) - start)
    found = np.empty(count, dtype)
    assert tensor.payload is not None
    spans: list[Span] = cut(
        bodies.catalog.table.spans(tensor.payload),
        tensor.offset + start * dtype.itemsize,
        found.nbytes,
    )
    read_spans_into(fd, spans, found.view(np.uint8).data, "a tensor")
    return found
