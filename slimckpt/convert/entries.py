"""What is to be written: tensors, read some elements at a time, and texts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from slimckpt.dtypes import BY_NAME, numpy_dtype
from slimckpt.layouts.boxes import blocks_of
from slimckpt.layouts.layout import Piece, Shape, whole_box
from slimckpt.model import RAW, Bytes
from slimckpt.views.arrays import Array, Arrays, described
from slimckpt.views.providers import Holding
from slimckpt.views.whole import WholeTensor

CHUNK = 8 * 1024 * 1024
"""Bytes that are made at a time, of a tensor that does not lie as it is to be written."""


class LeftOut(NamedTuple):
    """Something that is not written, and why."""

    name: str
    reason: str


class Entry(ABC):
    """A tensor to be written under a name.

    Attributes
    ----------
    name
    dtype : str
        As safetensors spells it.
    shape : tuple of int
    stored : tuple of int
        Of the array that has its bytes: for packed dtypes, of bytes.
    nbytes : int
    divisible : bool
        Whether parts of it are to be had at the cost of a part. Where they are not, each call of
        :meth:`read` makes all of it.
    """

    divisible = True

    def __init__(self, name: str, dtype: str, shape: Shape, stored: Shape, itemsize: int) -> None:
        self.name, self.dtype, self.shape, self.stored = name, dtype, shape, stored
        self.itemsize, self.nbytes = itemsize, math.prod(stored) * itemsize

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterator[Bytes]:
        """Bytes ``start`` to ``stop`` of its elements, in C order, little endian, some at a time.

        Both are multiples of the size of an element.
        """


@dataclass(slots=True)
class Contents:
    """What a file, or several that belong together, are to hold; and what was left out.

    ``formats`` are those of the files that it comes from. ``failed`` could not be written though
    it was asked for.
    """

    entries: list[Entry] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    failed: list[LeftOut] = field(default_factory=list)
    formats: set[str] = field(default_factory=set)


class LocalEntry(Entry):
    """A tensor of one file."""

    def __init__(self, name: str, arrays: Arrays, holding: Holding, row: int) -> None:
        tensor, dtype, shape = described(holding, row)
        super().__init__(name, tensor.dtype, tensor.shape, shape, dtype.itemsize)
        self.arrays, self.holding, self.tensor, self.row = arrays, holding, tensor, row
        self.divisible = tensor.encoding == RAW

    def read(self, start: int, stop: int) -> Iterator[Bytes]:
        if self.tensor.strides is None and self.tensor.payload is not None:
            yield from self.stream(self.tensor.offset + start, self.tensor.offset + stop)
        elif start < stop:
            array = self.arrays.array(self.holding, self.row)
            yield from elements_of(array, self, start, stop)

    def stream(self, start: int, stop: int) -> Iterator[Bytes]:
        """The same of the stream of its payload, in which other tensors may be too."""
        step = CHUNK if self.divisible else max(stop - start, 1)
        for at in range(start, stop, step):
            data = self.arrays.part(self.holding, self.tensor, at, min(at + step, stop))
            yield _swapped(data, self.dtype) if self.tensor.big_endian else data


class StreamEntry(Entry):
    """A run of the stream of a payload, with all that several tensors have of it."""

    def __init__(self, first: LocalEntry, start: int, stop: int) -> None:
        count = (stop - start) // first.itemsize
        super().__init__(first.name, first.dtype, (count,), (count,), first.itemsize)
        self.first, self.at, self.divisible = first, start, first.divisible

    def read(self, start: int, stop: int) -> Iterator[Bytes]:
        return self.first.stream(self.at + start, self.at + stop)


class WholeEntry(Entry):
    """A whole tensor, put together of what ranks or files hold."""

    def __init__(self, name: str, whole: WholeTensor) -> None:
        itemsize = numpy_dtype(whole.dtype).itemsize
        super().__init__(name, whole.dtype, whole.shape, whole.shape, itemsize)
        self.whole = whole
        self.divisible = not whole.is_encoded

    def read(self, start: int, stop: int) -> Iterator[Bytes]:
        whole: Any = self.whole if self.divisible else np.asarray(self.whole)
        yield from elements_of(whole, self, start, stop)


def elements_of(array: Any, entry: Entry, start: int, stop: int) -> Iterator[Bytes]:
    """:meth:`Entry.read` of an entry whose elements are those of ``array``: something that is
    indexed as numpy's are."""
    if start == stop:
        return
    inner = entry.itemsize
    for dim in reversed(entry.stored):
        if inner * dim > CHUNK:
            break
        inner *= dim
    step = max(CHUNK // inner, 1) * inner
    for at in range(start, stop, step):
        yield _run(array, entry, at, min(at + step, stop))


def _run(array: Any, entry: Entry, start: int, stop: int) -> Bytes:
    """The same at once."""
    itemsize = entry.itemsize
    run = Piece(whole_box(entry.stored), 0, (start // itemsize, stop // itemsize))
    out: Bytes | None = None
    for box, at in blocks_of(run):
        assert isinstance(at, int)
        spans = (slice(low, low + size) for low, size in zip(*box, strict=True))
        key = (*spans, ...)  # an array always, never a number
        part = _little_endian(array[key], entry.dtype)
        if part.nbytes == stop - start:
            return part
        if out is None:
            out = np.empty(stop - start, np.uint8)
        out[at * itemsize : at * itemsize + part.nbytes] = part
    assert out is not None, "no run is empty"
    return out


def _little_endian(part: Array, dtype: str) -> Bytes:
    """The bytes of an array in C order; as they lie, where they lie so."""
    found: Bytes = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return _swapped(found, dtype) if part.dtype.byteorder == ">" else found


def _swapped(data: Bytes, dtype: str) -> Bytes:
    """Numbers in the other byte order."""
    width = BY_NAME[dtype].bits // (16 if dtype[0] == "C" else 8)
    found: Bytes = data.reshape(-1, width)[:, ::-1].reshape(-1)
    return found
