"""What the messages of a dataset's object header say: shape, type, layout, filters, fill value.

"HDF5 File Format Specification Version 3.0", section IV.A.2; for layouts of version 5, which
libhdf5 2.0 writes, ``H5Olayout.c``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from slimckpt.dtypes import OPAQUE
from slimckpt.formats.hdf5_file import (
    DATASPACE,
    DATATYPE,
    EXTERNAL_FILES,
    FILL,
    FILTERS,
    LAYOUT,
    OLD_FILL,
    Cursor,
    Hdf5File,
    Message,
)

COMPACT, CONTIGUOUS, CHUNKED, VIRTUAL = 0, 1, 2, 3
MAX_RANK = 32
_CLASSES = {
    2: "time",
    3: "string",
    4: "bitfield",
    5: "opaque",
    6: "compound",
    7: "reference",
    8: "enum",
    9: "vlen",
    10: "array",
    11: "complex",
}
_FLOATS = {
    # precision, exponent location and size, mantissa location and size, bias
    (16, 10, 5, 0, 10, 15): "F16",
    (16, 7, 8, 0, 7, 127): "BF16",
    (32, 23, 8, 0, 23, 127): "F32",
    (64, 52, 11, 0, 52, 1023): "F64",
    (8, 2, 5, 0, 2, 15): "F8_E5M2",
}
"""Floats whose every bit pattern means in HDF5 what it means in the dtype; e4m3fn is none, since
HDF5 takes its highest exponent for infinities."""


class Type(NamedTuple):
    """A datatype: our name of it, its byte order, bytes of an element."""

    name: str
    big_endian: bool
    nbytes: int


class Layout(NamedTuple):
    """Where a dataset's bytes are.

    ``data`` are those of a compact one. ``chunk`` is the shape of chunks in elements,
    ``chunk_index`` the kind of their index: 0 is the B-tree of version 1, others as the format
    numbers them. ``single`` is the stored size and filter mask of a single filtered chunk.
    """

    kind: int
    address: int | None = None
    nbytes: int | None = None
    data: Cursor | None = None
    chunk: tuple[int, ...] = ()
    chunk_index: int = 0
    edges_unfiltered: bool = False
    single: tuple[int, int] | None = None


class Dataset(NamedTuple):
    """A dataset. ``shape`` is ``None`` where it has no elements by kind (a null dataspace)."""

    type: Type
    shape: tuple[int, ...] | None
    max_shape: tuple[int | None, ...]
    fill: bytes
    layout: Layout
    filters: list[list[int]]

    @property
    def nbytes(self) -> int:
        return 0 if self.shape is None else math.prod(self.shape) * self.type.nbytes


def read_dataset(file: Hdf5File, messages: list[Message]) -> Dataset:
    """Join the messages of a dataset's header.

    Raises
    ------
    RefusedFileError
        Its bytes lie in other files, or are those of other datasets.
    """
    bodies: dict[int, Cursor] = {}
    for message in messages:
        if bodies.setdefault(message.kind, message.body) is not message.body:
            raise file.damaged(f"its header has two messages of kind {message.kind}")
    if EXTERNAL_FILES in bodies:
        raise file.refused("its bytes lie in other files (external storage)")
    if not {DATASPACE, DATATYPE} <= bodies.keys():
        raise file.damaged("its header says no shape or no type")
    kind = read_type(bodies[DATATYPE])
    shape, most = _shape(bodies[DATASPACE])
    layout = _layout(bodies[LAYOUT], kind)
    if layout.kind == VIRTUAL:
        raise file.refused("its bytes are those of other datasets (a virtual layout)")
    if shape is not None and layout.kind == CHUNKED and len(layout.chunk) != len(shape):
        raise file.damaged(f"its chunks have {len(layout.chunk)} axes, it has {len(shape)}")
    fill = b""
    if FILL in bodies:
        fill = _fill(bodies[FILL])
    elif OLD_FILL in bodies:
        fill = bodies[OLD_FILL].take(bodies[OLD_FILL].number(4))
    if fill and len(fill) != kind.nbytes:
        raise file.damaged(f"its fill value has {len(fill)} bytes, expected {kind.nbytes}")
    filters = _filters(bodies[FILTERS]) if FILTERS in bodies else []
    return Dataset(kind, shape, most, fill or bytes(kind.nbytes), layout, filters)


def read_type(body: Cursor) -> Type:
    """A datatype; one that is no array to us is ``opaque:`` and the name of its class."""
    first, bits, nbytes = body.number(1), body.number(3), body.number(4)
    version, kind = first >> 4, first & 15
    if not 1 <= version <= 5 or not nbytes or kind > 11:
        raise body.file.damaged(f"expected a datatype at {body.offset}")
    name, big_endian = None, False
    if kind == 0:
        big_endian = bool(bits & 1)
        if (body.number(2), body.number(2)) == (0, 8 * nbytes) and nbytes in (1, 2, 4, 8):
            name = f"{'I' if bits & 8 else 'U'}{8 * nbytes}"
        opaque = f"int{8 * nbytes}"
    elif kind == 1:
        big_endian = bool(bits & 1)
        start, precision = body.number(2), body.number(2)
        fields = (precision, *body.take(4), body.number(4))
        # Sign in the highest bit, an implied leading bit, not the byte order of a VAX.
        plain = bits & ~0x0F == (8 * nbytes - 1) << 8 | 0x20
        if plain and (start, precision) == (0, 8 * nbytes):
            name = _FLOATS.get(fields)
        opaque = f"float{8 * nbytes}"
    else:
        opaque = _CLASSES[kind]
        if kind == 8 and nbytes == 1 and bits & 0xFFFF == 2:
            name = _bool(body, version)
        elif kind == 6 and nbytes in (8, 16) and bits & 0xFFFF == 2:
            name, big_endian = _complex(body, version, nbytes)
    return Type(name or OPAQUE + opaque, big_endian and name is not None, nbytes)


def _bool(body: Cursor, version: int) -> str | None:
    """h5py's: an enumeration of one signed byte, ``FALSE`` 0 and ``TRUE`` 1."""
    base = read_type(body)
    members = [body.text(version < 3), body.text(version < 3)]
    plain = base.name in ("I8", "U8") and members == [b"FALSE", b"TRUE"]
    return "BOOL" if plain and body.take(2) == b"\0\1" else None


def _complex(body: Cursor, version: int, nbytes: int) -> tuple[str | None, bool]:
    """h5py's: a compound of two floats ``r`` and ``i``."""
    parts = []
    for _ in range(2):
        name = body.text(version < 3)
        offset = body.number(1 if version > 2 else 4)
        if version == 1 and any(body.take(28)):
            return None, False
        parts.append((name, offset, read_type(body)))
    kind = parts[0][2]
    if kind.name != f"F{4 * nbytes}" or parts != [(b"r", 0, kind), (b"i", nbytes // 2, kind)]:
        return None, False
    return f"C{8 * nbytes}", kind.big_endian


def _shape(body: Cursor) -> tuple[tuple[int, ...] | None, tuple[int | None, ...]]:
    version, rank, flags, kind = body.take(4)
    if version == 1:
        body.take(4)
        kind = 1 if rank else 0
    if version not in (1, 2) or rank > MAX_RANK or kind > 2 or (kind != 1 and rank):
        raise body.file.damaged("its shape is not one of HDF5")
    if kind == 2:
        return None, ()
    shape = tuple(body.length() for _ in range(rank))
    if math.prod(shape) >= 2**63:
        raise body.file.damaged(f"its shape {list(shape)} overflows 64 bits")
    if not flags & 1:
        return shape, shape
    unlimited = (1 << 8 * body.file.length_nbytes) - 1
    most = [body.length() for _ in range(rank)]
    if any(m < n for m, n in zip(most, shape, strict=True)):
        raise body.file.damaged(f"its shape {list(shape)} is beyond its largest, {most}")
    return shape, tuple(None if m == unlimited else m for m in most)


def _fill(body: Cursor) -> bytes:
    version = body.number(1)
    if version == 3:
        defined = body.number(1) & 0x20
    elif version in (1, 2):
        defined = body.take(3)[2]
    else:
        raise body.file.damaged(f"a fill value of version {version}")
    if not defined:
        return b""
    nbytes = body.number(4)
    return body.take(nbytes) if nbytes else b""


def _layout(body: Cursor, kind: Type) -> Layout:
    version = body.number(1)
    if version in (1, 2):
        return _first_layout(body, kind)
    if version not in (3, 4, 5):
        raise body.file.unknown(f"a layout of version {version}, known are 1 to 5")
    which = body.number(1)
    if which == COMPACT:
        return _compact(body, body.number(2))
    if which == CONTIGUOUS:
        return Layout(CONTIGUOUS, body.address(), body.length())
    if which == VIRTUAL:
        return Layout(VIRTUAL)
    if which != CHUNKED:
        raise body.file.damaged(f"expected a kind of layout from 0 to 3, found {which}")
    if version == 3:
        rank, address = body.number(1), body.address()
        return Layout(CHUNKED, address, chunk=_chunk(body, kind, rank, 4))
    flags, rank, width = body.take(3)
    chunk = _chunk(body, kind, rank, width)
    index = body.number(1)
    if not 1 <= index <= 5:
        raise body.file.unknown(f"an index of chunks of kind {index}, known are 1 to 5")
    single = (body.length(), body.number(4)) if index == 1 and flags & 2 else None
    # How an index was created, which its own header says again.
    body.take((0, 0, 0, 1, 5, 6)[index])
    address = body.address()
    return Layout(
        CHUNKED,
        address,
        chunk=chunk,
        chunk_index=index,
        edges_unfiltered=bool(flags & 1),
        single=single,
    )


def _first_layout(body: Cursor, kind: Type) -> Layout:
    rank, which = body.number(1), body.number(1)
    body.take(5)
    if which == CHUNKED:
        address = body.address()
        return Layout(CHUNKED, address, chunk=_chunk(body, kind, rank, 4))
    address = body.address() if which == CONTIGUOUS else None
    body.take(4 * rank)
    if which == CONTIGUOUS:
        return Layout(CONTIGUOUS, address)
    if which != COMPACT:
        raise body.file.damaged(f"expected a kind of layout from 0 to 2, found {which}")
    return _compact(body, body.number(4))


def _compact(body: Cursor, nbytes: int) -> Layout:
    offset = body.offset + body.at
    return Layout(COMPACT, data=Cursor(body.file, body.take(nbytes), offset))


def _chunk(body: Cursor, kind: Type, rank: int, width: int) -> tuple[int, ...]:
    """The shape of chunks; the file adds the size of an element to it."""
    if not 2 <= rank <= MAX_RANK + 1 or not 1 <= width <= 8:
        raise body.file.damaged(f"expected chunks of 1 to {MAX_RANK} axes, found {rank - 1}")
    *chunk, nbytes = (body.number(width) for _ in range(rank))
    if nbytes != kind.nbytes or not all(chunk) or math.prod(chunk) * nbytes >= 2**63:
        raise body.file.damaged(f"its chunks of shape {chunk} by {nbytes} bytes cannot be")
    return tuple(chunk)


def _filters(body: Cursor) -> list[list[int]]:
    """Filters in the order in which they were applied: number and client values."""
    version, count = body.number(1), body.number(1)
    if version not in (1, 2) or count > 32:
        raise body.file.damaged(f"expected up to 32 filters, found {count} of version {version}")
    if version == 1:
        body.take(6)
    found = []
    for _ in range(count):
        number = body.number(2)
        name = body.number(2) if version == 1 or number >= 256 else 0
        body.take(2)
        values = body.number(2)
        body.take(-(-name // 8) * 8 if version == 1 else name)
        found.append([number, *(body.number(4) for _ in range(values))])
        if version == 1 and values % 2:
            body.take(4)
    return found
