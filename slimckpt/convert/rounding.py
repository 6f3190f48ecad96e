"""Tensors that are written in another floating dtype than they have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from slimckpt.convert.entries import Entry
from slimckpt.dtypes import numpy_dtype
from slimckpt.model import Bytes
from slimckpt.views.arrays import Array

DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
"""What tensors can be written in, as the command spells it."""
FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
"""What is converted. Of eight bits and fewer are the values of quantized tensors, which mean
nothing without the scales beside them: they stay as they are."""


class RoundedEntry(Entry):
    """An entry in another floating dtype, each value rounded once.

    ``overflowed`` tells, when it was read, whether finite values became infinite.
    """

    def __init__(self, inner: Entry, dtype: str) -> None:
        itemsize = numpy_dtype(dtype).itemsize
        super().__init__(inner.name, dtype, inner.shape, inner.stored, itemsize)
        self.inner, self.divisible, self.overflowed = inner, inner.divisible, False

    def read(self, start: int, stop: int) -> Iterator[Bytes]:
        source, target = numpy_dtype(self.inner.dtype), numpy_dtype(self.dtype)
        low, high = (at // self.itemsize * self.inner.itemsize for at in (start, stop))
        for part in self.inner.read(low, high):
            values = part.view(source)
            found = rounded(values, target)
            infinite = np.isinf(found)
            if infinite.any() and not np.isinf(values[infinite]).all():
                self.overflowed = True
            yield found.view(np.uint8)


def in_dtype(entry: Entry, dtype: str | None) -> Entry:
    """An entry in a dtype, where both are floating; else as it is."""
    if dtype in (None, entry.dtype) or not {dtype, entry.dtype} <= FLOATS:
        return entry
    return RoundedEntry(entry, str(dtype))


def rounded(values: Array, target: np.dtype[Any]) -> Array:
    """Floating values in another floating dtype: the nearest, of two as near the even one; what is
    no number stays none.

    Notes
    -----
    ml_dtypes converts float64 to bfloat16 by way of float32, which would round twice; here that is
    rounded to odd in between.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if values.dtype == np.float64 and target.name == "bfloat16":
            values = _to_odd(values)
        return values.astype(target)


def _to_odd(values: Array) -> Array:
    """float64 as float32, truncated, and made odd where something was lost."""
    found = values.astype(np.float32)
    inexact = ~np.isnan(values) & (found != values)
    bits = found.view(np.uint32)
    bits[inexact & (np.abs(found) > np.abs(values))] -= 1
    bits[inexact] |= 1
    return found
