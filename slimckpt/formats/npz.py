"""numpy's ``.npz``: a zip archive of ``.npy`` members, stored or deflated."""

from __future__ import annotations

from typing import Any

from slimckpt.dtypes import OPAQUE
from slimckpt.errors import NotUnderstoodError
from slimckpt.formats.base import Format
from slimckpt.formats.npy import MAX_HEADER, read_header
from slimckpt.formats.zips import (
    DEFLATED,
    END,
    STORED,
    Member,
    check_members,
    decoded_head,
    first_name,
    names_inside,
    read_members,
)
from slimckpt.model import RAW, TableBuilder
from slimckpt.sources.positioned import ByteSource

_SUFFIX = ".npy"
_EMPTY_NBYTES = 22


class Npz(Format):
    """What ``numpy.savez`` and ``savez_compressed`` write.

    It is told by its first member that is no directory. An archive without any is what ``savez``
    makes of no arrays.
    """

    name = "npz"

    def matches(self, head: bytes, size: int) -> bool:
        if head.startswith(END):
            return size == _EMPTY_NBYTES and not any(head[4:])
        return first_name(head).endswith(_SUFFIX.encode())

    def found_inside(self, source: ByteSource) -> bool:
        return any(name.endswith(_SUFFIX) for name in names_inside(source)[:1])

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        # A kilobyte of the file may become a megabyte of header.
        room = 16 * (source.size + MAX_HEADER)
        for member in read_members(source):
            if member.name.endswith(_SUFFIX) and member.method in (STORED, DEFLATED):
                room -= _array(source, table, member)
                if room < 0:
                    raise NotUnderstoodError(
                        f"{source.label}: headers of numpy are longer than the file many times over"
                    )
            elif not member.name.endswith("/"):
                add_opaque(table, member, "member")
        return {}

    def check(self, source: ByteSource) -> str | None:
        return check_members(source, read_members(source))


def _array(source: ByteSource, table: TableBuilder, member: Member) -> int:
    """Add the array in a member; bytes of its header."""
    label = f"{source.label}: member {member.name!a}"
    array = read_header(lambda nbytes: decoded_head(source, member, nbytes), label)
    nbytes = array.check(label, member.nbytes - array.header_nbytes)
    where: dict[str, Any] = {}
    if nbytes and member.method == STORED:
        where = {"payload": table.payload([(member.offset + array.header_nbytes, nbytes)])}
    elif nbytes:
        where = {
            "payload": table.payload([(member.offset, member.stored_nbytes)]),
            "encoding": encoding_of(member),
            "offset": array.header_nbytes,
        }
    name = member.name.removesuffix(_SUFFIX)
    array.add(table, name, nbytes, path=member.name, **where)
    return array.header_nbytes


def encoding_of(member: Member) -> str:
    """How the stored bytes of a member become its own; those of other methods stay as they are."""
    return f"deflate:{member.nbytes}" if member.method == DEFLATED else RAW


def add_opaque(table: TableBuilder, member: Member, kind: str) -> None:
    """Add a member that is bytes to us."""
    encoding = encoding_of(member)
    nbytes = member.stored_nbytes if encoding == RAW else member.nbytes
    payload = table.payload([(member.offset, member.stored_nbytes)]) if nbytes else None
    table.tensor(member.name, OPAQUE + kind, (), nbytes, payload=payload, encoding=encoding)
