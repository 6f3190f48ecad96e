"""Zip archives as bytes: which members there are, and where their bytes lie.

APPNOTE.TXT 6.3.10 (PKWARE), sections 4.3 and 4.5.3. Every member must be in the central directory
*and* have a local header that agrees with it, members must not overlap, and the archive must begin
and end where the source does: readers that start at different ends would else see different files.
Of zip64 fields only those are believed that a saturated number asks for; torch pads local headers
with more.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from slimckpt.errors import DamagedFileError, NotUnderstoodError, RefusedFileError
from slimckpt.sources.positioned import ByteSource

LOCAL = b"PK\3\4"
END = b"PK\5\6"
STORED, DEFLATED = 0, 8
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MAX_COMMENT = 0xFFFF
_MAX_DIRECTORY = 256 * 1024 * 1024
_ENCRYPTED = 1 << 0 | 1 << 6 | 1 << 13
_SIZES_BEHIND, _UTF8 = 1 << 3, 1 << 11
_SATURATED = 0xFFFFFFFF
_BLOCK = 4 * 1024 * 1024


class Member(NamedTuple):
    """A member; ``offset`` and ``stored_nbytes`` are of its bytes as they lie in the source.

    ``crc`` is the CRC32 of the ``nbytes`` bytes it decodes to; 0 may mean that it is not known,
    as where torch was told to compute none.
    """

    name: str
    method: int
    crc: int
    header: int
    offset: int
    stored_nbytes: int
    nbytes: int


class _Directory(NamedTuple):
    """The central directory: ``offset`` is the one that is stated, ``end`` where it ends."""

    offset: int
    nbytes: int
    entries: int
    end: int


def first_name(head: bytes) -> bytes:
    """The name of the member a file starts with, as far as ``head`` reaches; else nothing."""
    if len(head) < _LOCAL.size or not head.startswith(LOCAL):
        return b""
    return head[_LOCAL.size :][: _LOCAL.unpack_from(head)[9]]


def names_inside(source: ByteSource) -> list[str]:
    """Names of the members of a file that starts as an archive does and is a sound one, without
    directories; else nothing."""
    try:
        if source.read(0, min(len(LOCAL), source.size)) != LOCAL:
            return []
        return [m.name for m in read_members(source) if not m.name.endswith("/")]
    except (DamagedFileError, NotUnderstoodError, RefusedFileError):
        return []


def archive_start(source: ByteSource, end: int) -> int:
    """Where the archive that ends at ``end`` begins: several may follow each other in a file."""
    directory = _find_directory(source, end)
    start = directory.end - directory.nbytes - directory.offset
    if start < 0:
        raise _damaged(source, f"the zip archive that ends at {end} lacks {-start} bytes")
    return start


def read_members(source: ByteSource) -> list[Member]:
    """All members, in the order in which they lie in the source.

    Raises
    ------
    DamagedFileError
        The directory is not there, contradicts itself, the local headers or the source's length.
    RefusedFileError
        A member is encrypted, or the archive is one of several disks.
    """
    start, nbytes, count, end = _find_directory(source, source.size)
    if start + nbytes != end:
        raise _damaged(
            source, f"its directory should end at {end}, but is {nbytes} bytes from {start} on"
        )
    if nbytes > _MAX_DIRECTORY:
        raise NotUnderstoodError(f"{source.label}: its directory has {nbytes} bytes")
    raw, at = source.read(start, nbytes), 0
    found: dict[bytes, Member] = {}
    for _ in range(count):
        if at + _CENTRAL.size > nbytes or raw[at : at + 4] != b"PK\1\2":
            raise _damaged(source, f"expected {count} members, found {len(found)}")
        fields = _CENTRAL.unpack_from(raw, at)
        _, _, _, flags, method, _, _, crc, stored, full = fields[:10]
        n_name, n_extra, n_comment, disk, _, _, header = fields[10:]
        at += _CENTRAL.size
        name, extra = raw[at : at + n_name], raw[at + n_name : at + n_name + n_extra]
        at += n_name + n_extra + n_comment
        if at > nbytes or name in found:
            raise _damaged(source, f"member {name[:100]!a} is there twice, or cut off")
        text = _text(source, name, flags)
        if flags & _ENCRYPTED:
            raise RefusedFileError(f"{source.label}: member {text!a} is encrypted")
        if disk not in (0, 0xFFFF):
            raise RefusedFileError(f"{source.label}: is one of several disks of an archive")
        full, stored, header = _wide(source, name, extra, [full, stored, header])
        if method == STORED and full != stored:
            raise _damaged(source, f"member {name[:100]!a} has {stored} bytes, expected {full}")
        member = Member(text, method, crc, header, 0, stored, full)
        offset = _after_local_header(source, name, flags, member)
        if offset + stored > start:
            raise _damaged(source, f"member {name[:100]!a} reaches into the directory")
        found[name] = member._replace(offset=offset)
    if at != nbytes:
        raise _damaged(source, f"expected {count} members in its directory, found more")
    members = sorted(found.values(), key=lambda member: member.header)
    for one, other in pairwise(members):
        if one.offset + one.stored_nbytes > other.header:
            raise _damaged(source, f"members {one.name!a} and {other.name!a} overlap")
    return members


def decoded_head(source: ByteSource, member: Member, nbytes: int) -> bytes:
    """The first ``nbytes`` bytes of a member, decoded; fewer where it is shorter."""
    if member.method == STORED:
        return source.read(member.offset, min(nbytes, member.nbytes))
    stream, found, at = zlib.decompressobj(-zlib.MAX_WBITS), bytearray(), 0
    try:
        while len(found) < nbytes and at < member.stored_nbytes and not stream.eof:
            take = min(max(nbytes, 4096), member.stored_nbytes - at, _BLOCK)
            some = source.read(member.offset + at, take)
            found += stream.decompress(some, nbytes - len(found))
            at += take
    except zlib.error as error:
        raise _damaged(source, f"member {member.name!a}: {error}") from None
    return bytes(found)


def check_members(source: ByteSource, members: Iterable[Member]) -> str | None:
    """The first member whose bytes are not those of its CRC32, in a sentence; else ``None``."""
    for member in members:
        if member.method not in (STORED, DEFLATED) or (member.crc == 0 and member.nbytes):
            continue
        crc = total = 0
        try:
            for data in _decoded(source, member):
                crc, total = zlib.crc32(data, crc), total + len(data)
                if total > member.nbytes:
                    break
        except zlib.error as error:
            return f"{source.label}: member {member.name!a}: {error}"
        if (crc, total) != (member.crc, member.nbytes):
            return (
                f"{source.label}: member {member.name!a} has CRC32 {crc:08x} over {total} bytes,"
                f" expected {member.crc:08x} over {member.nbytes}; the file was damaged before it"
                " was slimmed"
            )
    return None


def _decoded(source: ByteSource, member: Member) -> Iterator[bytes]:
    """The bytes of a member, some at a time."""
    stream = None if member.method == STORED else zlib.decompressobj(-zlib.MAX_WBITS)
    for at in range(0, member.stored_nbytes, _BLOCK):
        data = source.read(member.offset + at, min(_BLOCK, member.stored_nbytes - at))
        if stream is None:
            yield data
            continue
        # Asked again until nothing comes: what did not fit may be kept inside the stream.
        while data := stream.decompress(data, _BLOCK):
            yield data
            data = stream.unconsumed_tail
        if stream.eof:
            return


def _find_directory(source: ByteSource, end: int) -> _Directory:
    """The directory of the archive that ends at ``end``."""
    # Most have no comment; and behind the last 22 bytes may be those of tensors that were dropped.
    tail_at = max(end - _END.size, 0)
    tail = source.read(tail_at, end - tail_at)
    if not (tail.startswith(END) and tail.endswith(b"\0\0")):
        tail_at = max(tail_at - _MAX_COMMENT, 0)
        tail = source.read(tail_at, end - tail_at)
    at = tail.rfind(END)
    while at >= 0:
        if at + _END.size <= len(tail):
            _, disk, first, here, count, nbytes, start, comment = _END.unpack_from(tail, at)
            if at + _END.size + comment == len(tail):
                break
        at = tail.rfind(END, 0, at)
    else:
        raise _damaged(source, "expected the end of a zip archive, found none; it looks truncated")
    end = tail_at + at
    locator_at = end - _LOCATOR.size
    locator = source.read(locator_at, _LOCATOR.size) if locator_at >= _END_64.size else b""
    if locator.startswith(b"PK\6\7"):
        _, disk_64, _, disks = _LOCATOR.unpack(locator)
        end = locator_at - _END_64.size
        mark, length, _, _, *wide = _END_64.unpack(source.read(end, _END_64.size))
        if mark != b"PK\6\6" or length != _END_64.size - 12:
            raise _damaged(source, f"expected its second end at {end}, found something else")
        if disk_64 or disks > 1:
            raise RefusedFileError(f"{source.label}: is one of several disks of an archive")
        narrow = (disk, first, here, count, nbytes, start)
        most = (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, _SATURATED, _SATURATED)
        if any(a not in (b, m) for a, b, m in zip(narrow, wide, most, strict=True)):
            raise _damaged(source, f"its two ends contradict each other: {narrow}, {wide}")
        disk, first, here, count, nbytes, start = wide
    if disk or first or here != count:
        raise RefusedFileError(f"{source.label}: is one of several disks of an archive")
    if count * _CENTRAL.size > nbytes or nbytes > end:
        raise _damaged(source, f"expected {count} members in a directory of {nbytes} bytes")
    return _Directory(start, nbytes, count, end)


def _wide(source: ByteSource, name: bytes, extra: bytes, values: list[int]) -> list[int]:
    """``values`` with those that are saturated taken from the zip64 field of ``extra``."""
    at = 0
    while _SATURATED in values and at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        at += 4
        if kind == 1:
            body, found = extra[at : at + nbytes], []
            for value in values:
                if value == _SATURATED:
                    if len(body) < 8:
                        raise _damaged(source, f"member {name[:100]!a} does not say its size")
                    value, body = int.from_bytes(body[:8], "little"), body[8:]
                found.append(value)
            return found
        at += nbytes
    return values


def _after_local_header(source: ByteSource, name: bytes, flags: int, member: Member) -> int:
    """Where a member's bytes start, once its local header agrees with the directory."""
    fields = _LOCAL.unpack(source.read(member.header, _LOCAL.size))
    signature, _, own, method, _, _, crc, stored, full, n_name, n_extra = fields
    start = member.header + _LOCAL.size
    rest = source.read(start, n_name + n_extra)
    full, stored = _wide(source, name, rest[n_name:], [full, stored])
    unknown = (0,) if own & _SIZES_BEHIND else ()
    agrees = (
        signature == LOCAL
        and (method, rest[:n_name]) == (member.method, name)
        and not (own ^ flags) & (_ENCRYPTED | _UTF8)
        and crc in (member.crc, *unknown)
        and stored in (member.stored_nbytes, *unknown)
        and full in (member.nbytes, *unknown)
    )
    if not agrees:
        raise _damaged(
            source,
            f"member {name[:100]!a}: its header at {member.header} contradicts the directory",
        )
    return start + len(rest)


def _text(source: ByteSource, name: bytes, flags: int) -> str:
    """A name: UTF-8 where the member says so, else code page 437."""
    try:
        return name.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        raise _damaged(source, f"the name of member {name[:100]!a} is not UTF-8") from None


def _damaged(source: ByteSource, why: str) -> DamagedFileError:
    return DamagedFileError(f"{source.label}: {why}")
