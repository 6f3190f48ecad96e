"""Zip archives laid out as torch lays them out, before their members are written.

Members are stored, each begins at a multiple of 64 bytes of the archive, and CRC32 and sizes stand
behind it (``caffe2/serialize/inline_container.cc`` of torch 2.13; APPNOTE.TXT 6.3.10). Zip64 where
a number needs it, and always at the end.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from slimckpt.convert.blueprint import Blueprint, Literals
from slimckpt.convert.entries import Entry
from slimckpt.formats.zips import END, LOCAL

ALIGNMENT = 64
_PADDING = 0x4246
"""The extra field that torch pads with."""
_FLAGS = 0x0808
"""Names are UTF-8; CRC32 and sizes come behind the bytes."""
_MOST = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")


class _Member(NamedTuple):
    """A member in the layout. ``header`` counts from the start of the archive, ``descriptor`` from
    that of the file; ``crc`` where it is known, else the number of the body."""

    name: bytes
    header: int
    nbytes: int
    descriptor: int
    crc: int | None
    body: int


class Archive:
    """An archive that is put behind what a file has already."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint, self._start = blueprint, blueprint.nbytes
        self._members: list[_Member] = []

    def put(self, name: str, content: bytes | Entry, head: bytes = b"") -> None:
        """A member of known bytes, or of the elements of an entry behind a ``head``."""
        blueprint = self._blueprint
        raw, header = name.encode(), blueprint.nbytes - self._start
        nbytes = len(head) + (len(content) if isinstance(content, bytes) else content.nbytes)
        wide = _wide(nbytes, nbytes) if nbytes >= _MOST else b""
        padding = -(header + _LOCAL.size + len(raw) + len(wide) + 4) % ALIGNMENT
        extra = wide + struct.pack("<2H", _PADDING, padding) + b"Z" * padding
        fields = (LOCAL, 45, _FLAGS, 0, 0, 0, 0, 0, 0, len(raw), len(extra))
        blueprint.put(_LOCAL.pack(*fields) + raw + extra + head)
        if isinstance(content, bytes):
            blueprint.put(content)
        else:
            blueprint.put_body(content, seed=zlib.crc32(head))
        crc = zlib.crc32(head + content) if isinstance(content, bytes) else None
        body = len(blueprint.bodies) - 1
        self._members.append(_Member(raw, header, nbytes, blueprint.nbytes, crc, body))
        blueprint.nbytes += 24 if wide else 16

    def close(self) -> None:
        """The directory, behind all members. Checksums come late, when the bodies are written."""
        at, blueprint = self._blueprint.nbytes, self._blueprint

        def late(sums: Sequence[int]) -> Literals:
            crcs = [sums[m.body] if m.crc is None else m.crc for m in self._members]
            found = [
                (member.descriptor, _descriptor(member, crc))
                for member, crc in zip(self._members, crcs, strict=True)
            ]
            return [*found, (at, self._directory(at, crcs))]

        blueprint.nbytes += len(self._directory(at, [0] * len(self._members)))
        blueprint.late.append(late)

    def _directory(self, at: int, crcs: Sequence[int]) -> bytes:
        out = bytearray()
        for member, crc in zip(self._members, crcs, strict=True):
            size = min(member.nbytes, _MOST)
            header = min(member.header, _MOST)
            large = [member.nbytes] * 2 if size == _MOST else []
            extra = _wide(*large, *([member.header] if header == _MOST else []))
            fields = (45, 45, _FLAGS, 0, 0, 0, crc, size, size, len(member.name), len(extra))
            out += _CENTRAL.pack(b"PK\1\2", *fields, 0, 0, 0, 0, header) + member.name + extra
        start, nbytes, count = at - self._start, len(out), len(self._members)
        end = start + nbytes
        out += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, start)
        out += struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        few, short, near = min(count, 0xFFFF), min(nbytes, _MOST), min(start, _MOST)
        out += struct.pack("<4s4H2IH", END, 0, 0, few, few, short, near, 0)
        return bytes(out)


def _wide(*values: int) -> bytes:
    """The zip64 field; nothing where no number needs it."""
    body = struct.pack(f"<{len(values)}Q", *values)
    return struct.pack("<2H", 1, len(body)) + body if values else b""


def _descriptor(member: _Member, crc: int) -> bytes:
    sizes = "2Q" if member.nbytes >= _MOST else "2I"
    return b"PK\7\x08" + struct.pack(f"<I{sizes}", crc, member.nbytes, member.nbytes)
