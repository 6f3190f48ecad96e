"""The links of HDF5 groups, old and new.

"HDF5 File Format Specification Version 3.0", sections III.A to III.G and IV.A.2.g; sizes inside
fractal heaps and B-trees of version 2 follow ``H5HFhdr.c``, ``H5HFdtable.c`` and ``H5B2hdr.c``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slimckpt.formats.hdf5_file import LINK, LINK_INFO, SYMBOL_TABLE, Cursor, Hdf5File, Message

HARD, SOFT, EXTERNAL = 0, 1, 64
_MAX_DEPTH = 32
_MAX_NAME = 1024 * 1024


class Link(NamedTuple):
    """What a name in a group leads to: an object's address, or for a soft link a path."""

    kind: int
    address: int | None = None
    target: bytes = b""


def read_links(file: Hdf5File, messages: list[Message]) -> dict[bytes, Link]:
    """The links of a group, in no order that matters."""
    found: dict[bytes, Link] = {}
    for kind, body in messages:
        if kind == LINK:
            _add(file, found, *_link(body))
        elif kind == LINK_INFO:
            for text in _dense_links(body):
                _add(file, found, *_link(text))
        elif kind == SYMBOL_TABLE:
            for name, link in _symbols(body):
                _add(file, found, name, link)
    return found


def _add(file: Hdf5File, found: dict[bytes, Link], name: bytes, link: Link) -> None:
    if not name or b"/" in name or b"\0" in name:
        raise file.damaged(f"a link is named {name[:100]!a}")
    if found.setdefault(name, link) is not link:
        raise file.damaged(f"two links are named {name[:100]!a}")


def _link(body: Cursor) -> tuple[bytes, Link]:
    version, flags = body.number(1), body.number(1)
    if version != 1:
        raise body.file.damaged(f"expected a link of version 1, found {version}")
    kind = body.number(1) if flags & 8 else HARD
    body.take((8 if flags & 4 else 0) + (1 if flags & 16 else 0))
    name = body.take(body.number(1 << (flags & 3)))
    if kind == HARD:
        return name, Link(HARD, body.address())
    return name, Link(kind, None, body.take(body.number(2)))


def _symbols(body: Cursor) -> Iterator[tuple[bytes, Link]]:
    """Links of a group of the first kind: a B-tree of symbol tables, names in a heap."""
    file = body.file
    tree, heap = body.address(), body.address()
    header = file.signed(heap, 8 + 2 * file.length_nbytes + file.address_nbytes, b"HEAP\0")
    header.take(3)
    nbytes = header.length()
    header.length()
    names = header.address()
    file.place(names, nbytes)
    assert names is not None
    for _, child in btree(file, tree, 0, file.length_nbytes):
        table = file.signed(child, 8, b"SNOD\1")
        table.take(1)
        count, width = table.number(2), 2 * file.address_nbytes + 24
        entries = file.read(8 + (child or 0), count * width)
        for _ in range(count):
            at, address, kind = entries.address(), entries.address(), entries.number(4)
            entries.take(4)
            scratch = entries.take(16)
            name = _string(file, names, nbytes, at)
            if kind == 2:
                target = int.from_bytes(scratch[:4], "little")
                yield name, Link(SOFT, None, _string(file, names, nbytes, target))
            else:
                yield name, Link(HARD, address)


def _string(file: Hdf5File, start: int, nbytes: int, at: int | None) -> bytes:
    """The text at ``at`` of a local heap of ``nbytes`` bytes at ``start``."""
    if at is None:
        raise file.damaged("a link has no name")
    wanted = 128
    while at < nbytes and wanted <= _MAX_NAME:
        found = file.read(start + at, min(wanted, nbytes - at)).data
        end = found.find(b"\0")
        if end >= 0:
            return found[:end]
        if len(found) < wanted:
            break
        wanted *= 8
    raise file.damaged(f"a name at {at} of a heap of {nbytes} bytes does not end")


def btree(
    file: Hdf5File, root: int | None, kind: int, key_nbytes: int
) -> Iterator[tuple[Cursor, int | None]]:
    """Keys and children of the leaves of a B-tree of version 1; the key is the one before."""
    seen: set[int | None] = set()
    todo: list[tuple[int | None, int | None]] = [(root, None)]
    while todo:
        address, expected = todo.pop()
        if address in seen:
            raise file.damaged(f"the B-tree at {address} goes in a circle")
        seen.add(address)
        node = file.signed(address, 8 + 2 * file.address_nbytes, b"TREE" + bytes([kind]))
        level, count = node.number(1), node.number(2)
        if expected is not None and level != expected:
            raise file.damaged(f"the B-tree at {address} has level {level}, expected {expected}")
        width = key_nbytes + file.address_nbytes
        entries = file.read((address or 0) + len(node.data), count * width)
        below = []
        for _ in range(count):
            key = Cursor(file, entries.take(key_nbytes), entries.offset)
            child = entries.address()
            if level:
                below.append((child, level - 1))
            else:
                yield key, child
        todo += reversed(below)


def btree2(file: Hdf5File, address: int | None, kinds: tuple[int, ...]) -> Iterator[Cursor]:
    """The records of a B-tree of version 2."""
    wide, long = file.address_nbytes, file.length_nbytes
    header = file.checked(address, 22 + wide + long, b"BTHD\0")
    kind, node_nbytes, nbytes, depth = (header.number(n) for n in (1, 4, 2, 2))
    header.take(2)
    root, count = header.address(), header.number(2)
    total = header.length()
    if kind not in kinds or not nbytes or node_nbytes < 10 + nbytes or depth > _MAX_DEPTH:
        raise file.damaged(f"the B-tree at {address} is not what is expected here")
    most = (node_nbytes - 10) // nbytes
    count_nbytes = _nbytes_to_count(most)
    # A pointer to a node that is no leaf also says how many records are below it, in as many
    # bytes as their largest possible number takes.
    total_nbytes, below = [0], most
    for _ in range(depth):
        pointer = wide + count_nbytes + total_nbytes[-1]
        here = (node_nbytes - 10 - pointer) // (nbytes + pointer)
        below = (here + 1) * below + here
        total_nbytes.append(_nbytes_to_count(below))
    found = 0
    seen: set[int | None] = set()
    todo: list[tuple[int | None, int, int]] = [] if root is None else [(root, count, depth)]
    while todo:
        at, count, level = todo.pop()
        if at in seen:
            raise file.damaged(f"the B-tree at {address} goes in a circle")
        seen.add(at)
        pointer = wide + count_nbytes + total_nbytes[level - 1] if level else 0
        magic = (b"BTIN\0" if level else b"BTLF\0") + bytes([kind])
        node = file.checked(at, 10 + count * nbytes + (count + 1) * pointer, magic)
        found += count
        for _ in range(count):
            yield Cursor(file, node.take(nbytes), node.offset)
        for _ in range(count + 1 if level else 0):
            child, records = node.address(), node.number(count_nbytes)
            node.take(total_nbytes[level - 1])
            todo.append((child, records, level - 1))
    if found != total:
        raise file.damaged(f"the B-tree at {address} has {found} records, expected {total}")


def _nbytes_to_count(most: int) -> int:
    return max(most.bit_length() - 1, 0) // 8 + 1


def _dense_links(body: Cursor) -> Iterator[Cursor]:
    """Link messages in a fractal heap, found by the B-tree of their names."""
    file = body.file
    version, flags = body.number(1), body.number(1)
    if version != 0:
        raise file.damaged(f"expected link info of version 0, found {version}")
    body.take(8 if flags & 1 else 0)
    heap_at, names = body.address(), body.address()
    if heap_at is None:
        return
    heap = _Heap(file, heap_at)
    for record in btree2(file, names, (5,)):
        record.take(4)
        yield heap.object(record)


class _Heap:
    """A fractal heap: objects in direct blocks of a doubling table."""

    def __init__(self, file: Hdf5File, address: int) -> None:
        self.file = file
        wide, long = file.address_nbytes, file.length_nbytes
        header = file.checked(address, 26 + 3 * wide + 12 * long, b"FRHP\0")
        self.id_nbytes, filters, flags = header.number(2), header.number(2), header.number(1)
        if filters:
            raise file.unknown("its links are in a filtered heap")
        self.checksums = bool(flags & 2)
        most = header.number(4)
        header.take(2 * wide + 10 * long)
        self.width, self.start, self.largest = header.number(2), header.length(), header.length()
        bits, _, self.root, self.rows = (
            header.number(2),
            header.number(2),
            header.address(),
            header.number(2),
        )
        powers = all(n and not n & (n - 1) for n in (self.width, self.start, self.largest))
        if not powers or self.largest < self.start or bits > 64:
            raise file.damaged(f"the heap at {address} has impossible sizes")
        self.offset_nbytes = -(-bits // 8)
        by_block = (self.largest.bit_length() + 6) // 8
        self.length_nbytes = min(by_block, _nbytes_to_count(most)) if most else by_block
        self._blocks: dict[int | None, Cursor] = {}

    def object(self, record: Cursor) -> Cursor:
        """The object of a heap ID, which is what is left of ``record``."""
        kind = record.number(1)
        if kind:
            raise self.file.unknown("a link is too long for its heap")
        offset, nbytes = record.number(self.offset_nbytes), record.number(self.length_nbytes)
        if self.rows:
            block, inside = self._below(self.root, self.rows, offset, 0)
        else:
            block, inside = self._block(self.root, self.start), offset
        block.at = inside
        at = block.offset + inside
        return Cursor(self.file, block.take(nbytes), at)

    def _below(self, address: int | None, rows: int, offset: int, depth: int) -> tuple[Cursor, int]:
        """The direct block that holds ``offset`` of an indirect one, and where in it."""
        first_bits = (self.width * self.start).bit_length() - 1
        row, before = 0, 0
        if offset >= self.width * self.start:
            row, before = offset.bit_length() - first_bits, 1 << offset.bit_length() - 1
        size = self.start << max(row - 1, 0)
        column, inside = divmod(offset - before, size)
        if row >= rows or depth > _MAX_DEPTH:
            raise self.file.damaged(f"a heap has no offset {offset}")
        wide = self.file.address_nbytes
        block = self._blocks.get(address)
        if block is None:
            nbytes = 9 + wide + self.offset_nbytes + rows * self.width * wide
            block = self._blocks[address] = self.file.checked(address, nbytes, b"FHIB\0")
        block.at = 5 + wide + self.offset_nbytes + (row * self.width + column) * wide
        child = block.address()
        if size <= self.largest:
            return self._block(child, size), inside
        below = size.bit_length() - first_bits
        return self._below(child, below, inside, depth + 1)

    def _block(self, address: int | None, nbytes: int) -> Cursor:
        found = self._blocks.get(address)
        if found is None:
            found = self._blocks[address] = self.file.signed(address, nbytes, b"FHDB\0")
            if self.checksums:
                at = 5 + self.file.address_nbytes + self.offset_nbytes
                data = found.data
                cleared = data[:at] + bytes(4) + data[at + 4 :]
                self.file.check(found, cleared, data[at : at + 4])
        return found
