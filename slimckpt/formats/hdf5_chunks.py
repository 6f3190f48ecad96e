"""The chunks of an HDF5 dataset: five kinds of index.

"HDF5 File Format Specification Version 3.0", sections III.A.1, III.A.2 and VII; how elements of
extensible arrays are found follows ``H5EAhdr.c``, ``H5EAiblock.c`` and ``H5Dearray.c``.
(``H5Dchunk_iter`` is wrong about them: up to 2.0.0 it gives wrong coordinates where the axis
without end is not the first, and 1.14.2 leaves the user block out of addresses.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slimckpt.formats.hdf5_file import Cursor, Hdf5File
from slimckpt.formats.hdf5_links import btree, btree2
from slimckpt.formats.hdf5_messages import Dataset

_Element = tuple[int | None, int, int]
_Elements = Iterator[tuple[int, _Element]]

_TREE, _SINGLE, _IMPLICIT, _FIXED, _EXTENSIBLE, _TREE_2 = range(6)


class Chunk(NamedTuple):
    """A stored chunk: its number in the grid (C order), where it is, which filters it skipped."""

    number: int
    offset: int
    nbytes: int
    mask: int


class _Found(NamedTuple):
    """A stored chunk by its place in the grid; the address may be undefined."""

    scaled: tuple[int, ...]
    address: int | None
    nbytes: int
    mask: int


def read_chunks(file: Hdf5File, dataset: Dataset) -> list[Chunk]:
    """The stored chunks of a dataset that has elements, in C order of the grid."""
    layout, shape = dataset.layout, dataset.shape or ()
    if layout.address is None:
        return []
    index = _Index(file, dataset)
    found: dict[int, Chunk] = {}
    for scaled, address, nbytes, mask in index.each():
        if any(at >= count for at, count in zip(scaled, index.grid, strict=True)):
            raise file.damaged(f"a chunk {list(scaled)} is outside its grid {list(index.grid)}")
        number = _ravel(scaled, index.grid)
        if number in found:
            raise file.damaged(f"its chunk {list(scaled)} is stored twice")
        if not dataset.filters and nbytes != index.whole:
            raise file.damaged(
                f"its chunk {list(scaled)} has {nbytes} bytes, expected {index.whole}"
            )
        if layout.edges_unfiltered and any(
            (at + 1) * step > dim for at, step, dim in zip(scaled, layout.chunk, shape, strict=True)
        ):
            mask = 0xFFFFFFFF
        found[number] = Chunk(number, file.claim(address, nbytes), nbytes, mask)
    return [found[number] for number in sorted(found)]


def grid_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    """Chunks along each axis."""
    return tuple(-(-dim // step) for dim, step in zip(shape, chunk, strict=True))


def _ravel(scaled: tuple[int, ...], grid: tuple[int, ...]) -> int:
    number = 0
    for at, count in zip(scaled, grid, strict=True):
        number = number * count + at
    return number


def _unravel(number: int, grid: Sequence[int]) -> tuple[int, ...]:
    """The place of a number; of the slowest axis only that the others are done counts."""
    found = []
    for count in reversed(grid[1:]):
        number, at = divmod(number, max(count, 1))
        found.append(at)
    return (number, *reversed(found))


class _Index:
    """The chunk index of one dataset."""

    def __init__(self, file: Hdf5File, dataset: Dataset) -> None:
        self.file = file
        self.chunk = dataset.layout.chunk
        self.layout = dataset.layout
        self.filtered = bool(dataset.filters)
        self.grid = grid_of(dataset.shape or (), self.chunk)
        self.whole = math.prod(self.chunk) * dataset.type.nbytes
        """Bytes of a chunk that went through no filter."""
        self.most = [
            None if most is None else -(-most // step)
            for most, step in zip(dataset.max_shape, self.chunk, strict=True)
        ]
        """Chunks along each axis of the largest shape."""
        self._seen: set[int] = set()

    def each(self) -> Iterator[_Found]:
        kind, address = self.layout.chunk_index, self.layout.address
        assert address is not None
        if kind == _TREE:
            yield from self._tree(address)
        elif kind == _SINGLE:
            yield _Found((0,) * len(self.grid), address, *(self.layout.single or (self.whole, 0)))
        elif kind == _IMPLICIT:
            # One run of all chunks of the largest shape.
            most = [count for count in self.most if count is not None]
            if self.filtered or len(most) < len(self.grid):
                raise self.file.damaged("expected an axis with an end, and no filters")
            self.file.place(address, math.prod(most) * self.whole)
            for number in range(math.prod(self.grid)):
                scaled = _unravel(number, self.grid)
                at = address + _ravel(scaled, tuple(most)) * self.whole
                yield _Found(scaled, at, self.whole, 0)
        elif kind == _TREE_2:
            yield from self._tree_2(address)
        elif kind == _FIXED:
            yield from self._placed(self._fixed(address), 0)
        else:
            free = [axis for axis, count in enumerate(self.most) if count is None]
            if len(free) != 1:
                raise self.file.damaged(f"expected one axis without end, found {len(free)}")
            yield from self._placed(self._extensible(address), free[0])

    def _placed(self, elements: _Elements, slowest: int) -> Iterator[_Found]:
        """Chunks of an array of elements, in whose order the axis ``slowest`` comes first."""
        counts = [count or 1 for count in self.most]
        counts.insert(0, counts.pop(slowest))
        for number, (address, nbytes, mask) in elements:
            if address is not None:
                scaled = list(_unravel(number, counts))
                scaled.insert(slowest, scaled.pop(0))
                yield _Found(tuple(scaled), address, nbytes, mask)

    def _tree(self, address: int) -> Iterator[_Found]:
        for key, child in btree(self.file, address, 1, 16 + 8 * len(self.chunk)):
            nbytes, mask = key.number(4), key.number(4)
            offsets = [key.number(8) for _ in self.chunk]
            if any(at % step for at, step in zip(offsets, self.chunk, strict=True)):
                raise self.file.damaged(f"a chunk of {list(self.chunk)} starts at {offsets}")
            scaled = tuple(at // step for at, step in zip(offsets, self.chunk, strict=True))
            yield _Found(scaled, child, nbytes, mask)

    def _tree_2(self, address: int) -> Iterator[_Found]:
        for record in btree2(self.file, address, (10, 11)):
            element = self._element(record, len(record.data) - 8 * len(self.chunk))
            yield _Found(tuple(record.number(8) for _ in self.chunk), *element)

    def _element(self, cursor: Cursor, nbytes: int) -> _Element:
        """Address, stored bytes and mask of a chunk, in an entry of ``nbytes`` bytes."""
        width = nbytes - self.file.address_nbytes - 4
        if self.filtered and 0 < width <= 8:
            return cursor.address(), cursor.number(width), cursor.number(4)
        if self.filtered or width != -4:
            raise self.file.damaged(f"its index of chunks has entries of {nbytes} bytes")
        return cursor.address(), self.whole, 0

    def _run(self, cursor: Cursor, first: int, count: int, nbytes: int) -> _Elements:
        for number in range(first, first + count):
            yield number, self._element(cursor, nbytes)

    def _pages(
        self, address: int, kept: bytes, first: int, count: int, nbytes: int, bits: int
    ) -> _Elements:
        """Elements in pages of ``2 ** bits``; those that ``kept`` leaves out are not there."""
        for page, done in enumerate(range(0, count, 1 << bits)):
            if kept[page // 8] & 0x80 >> page % 8:
                some = min(1 << bits, count - done)
                body = self.file.checked(address, some * nbytes + 4, b"")
                yield from self._run(body, first + done, some, nbytes)
            address += (nbytes << bits) + 4

    def _fixed(self, address: int) -> _Elements:
        file = self.file
        wide = file.address_nbytes
        header = file.checked(address, 12 + file.length_nbytes + wide, b"FAHD\0")
        _, nbytes, bits = header.take(3)
        count, block = header.length(), header.address()
        if block is None:
            return
        if bits > 63 or count <= 1 << bits:
            body = file.checked(block, 10 + wide + count * nbytes, b"FADB\0")
            body.take(1 + wide)
            yield from self._run(body, 0, count, nbytes)
            return
        marks = -(-count // (8 << bits))
        body = file.checked(block, 10 + wide + marks, b"FADB\0")
        body.take(1 + wide)
        start = block + 10 + wide + marks
        yield from self._pages(start, body.take(marks), 0, count, nbytes, bits)

    def _extensible(self, address: int) -> _Elements:
        """Elements in the index block, then in data blocks, then in those of super blocks.

        Super block ``n`` has ``2 ** (n // 2)`` data blocks, each ``2 ** ((n + 1) // 2)`` times as
        long as the shortest. The data blocks of the first ones are in the index block instead.
        """
        file = self.file
        wide = file.address_nbytes
        header = file.checked(address, 16 + 6 * file.length_nbytes + wide, b"EAHD\0")
        _, nbytes, most_bits, inline, shortest, pointers, bits = header.take(7)
        header.take(6 * file.length_nbytes)
        index = header.address()
        if index is None:
            return
        powers = all(n and not n & (n - 1) for n in (shortest, pointers))
        if not powers or pointers < 2 or most_bits > 64 or bits > 63:
            raise file.damaged("the sizes of its extensible array cannot be")
        blocks = 1 + most_bits - (shortest.bit_length() - 1)
        direct = 2 * (pointers.bit_length() - 1)
        addresses = 2 * (pointers - 1) + max(blocks - direct, 0)
        body = file.checked(index, 10 + wide + inline * nbytes + addresses * wide, b"EAIB\0")
        body.take(1 + wide)
        yield from self._run(body, 0, inline, nbytes)
        start = 6 + wide + -(-most_bits // 8)
        first = inline
        for number in range(blocks):
            many, count = 1 << number // 2, shortest << (number + 1) // 2
            marks = -(-(count >> bits) // 8) if count > 1 << bits else 0
            inside, kept = body, b""
            if number < direct:
                if marks:
                    raise file.damaged("the pages of its extensible array cannot be")
            else:
                block = body.address()
                if block is None:
                    first += many * count
                    continue
                self._once(block)
                inside = file.checked(block, start + many * (marks + wide) + 4, b"EASB\0")
                inside.take(start - 5)
                kept = inside.take(many * marks)
            for one in range(many):
                block = inside.address()
                if block is not None:
                    self._once(block)
                    some = kept[one * marks : (one + 1) * marks]
                    yield from self._data_block(block, start, some, first, count, nbytes, bits)
                first += count

    def _data_block(
        self, block: int, start: int, kept: bytes, first: int, count: int, nbytes: int, bits: int
    ) -> _Elements:
        if kept:
            self.file.checked(block, start + 4, b"EADB\0")
            yield from self._pages(block + start + 4, kept, first, count, nbytes, bits)
        else:
            body = self.file.checked(block, start + count * nbytes + 4, b"EADB\0")
            body.take(start - 5)
            yield from self._run(body, first, count, nbytes)

    def _once(self, address: int) -> None:
        if address in self._seen:
            raise self.file.damaged(f"its extensible array has the block at {address} twice")
        self._seen.add(address)
