"""Zip archives: what members there are and where their bytes lie.

The central directory decides, and every local header must agree with it (APPNOTE 6.3.10). Zip64 is
read with the odd extras that torch leaves in local headers: those are never believed, only their
length is. An archive may be a part of a file (`.distcp` files are archives one after another).
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from slimckpt.errors import DamagedFileError, RefusedFileError
from slimckpt.sources.positioned import ByteSource

STORED, DEFLATED = 0, 8

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 65535
_BLOCK = 4 * 1024 * 1024


class Member(NamedTuple):
    """A member: its stored bytes are ``nbytes`` at ``offset`` of the file.

    ``decoded`` is how many bytes they become. ``crc`` is ``None`` where it is not known: torch
    writes 0 when told not to compute it.
    """

    name: str
    method: int
    offset: int
    nbytes: int
    decoded: int
    crc: int | None
    header: int


class Archive(NamedTuple):
    """The archive that ends at ``end`` and begins at ``start``; members in file order."""

    start: int
    end: int
    members: list[Member]


class _Directory(NamedTuple):
    start: int
    offset: int
    nbytes: int
    entries: int


def read_archive(source: ByteSource, end: int | None = None) -> Archive:
    """The archive that ends at ``end``, by default at the end of the file.

    Raises
    ------
    DamagedFileError
        There is none, or it breaks a rule: a header that does not agree, members that overlap,
        sizes outside the file.
    RefusedFileError
        A member is encrypted, or the archive is one of several disks.
    """
    end = source.size if end is None else end
    directory = _find_directory(source, end)
    members = _members(source, directory)
    members.sort(key=lambda member: member.header)
    last = directory.start
    for member in members:
        if member.header < last:
            raise _damaged(source, f"member {member.name!a} overlaps another")
        last = member.offset + member.nbytes
    if last > directory.offset:
        raise _damaged(source, "a member reaches into the central directory")
    if len({member.name for member in members}) < len(members):
        raise _damaged(source, "two members have one name")
    return Archive(directory.start, end, members)


def wrong_crcs(source: ByteSource, members: list[Member]) -> list[str]:
    """Names of the members whose bytes do not have their CRC32, of those that have one."""
    wrong = []
    for member in members:
        if member.crc is None or member.method not in (STORED, DEFLATED):
            continue
        try:
            if _crc(source, member) != member.crc:
                wrong.append(member.name)
        except zlib.error:
            wrong.append(member.name)
    return wrong


def inflate(source: ByteSource, member: Member, nbytes: int) -> bytes:
    """The first ``nbytes`` decoded bytes of a member, or all where it has fewer.

    Raises
    ------
    DamagedFileError
        Its deflated bytes are no such.
    """
    if member.method == STORED:
        return source.read(member.offset, min(nbytes, member.nbytes))
    stream = zlib.decompressobj(-zlib.MAX_WBITS)
    found, at = b"", 0
    try:
        while len(found) < nbytes and at < member.nbytes and not stream.eof:
            take = min(max(nbytes, 1024), member.nbytes - at, _BLOCK)
            block = source.read(member.offset + at, take)
            at += take
            found += stream.decompress(block, nbytes - len(found))
    except zlib.error as error:
        raise _damaged(source, f"member {member.name!a} is damaged: {error}") from None
    return found


def _damaged(source: ByteSource, why: str) -> DamagedFileError:
    return DamagedFileError(f"{source.label}: {why}")


def _find_directory(source: ByteSource, end: int) -> _Directory:
    tail = source.read(max(0, end - _END.size - _MAX_COMMENT), min(end, _END.size + _MAX_COMMENT))
    at = len(tail) - _END.size
    while at >= 0:
        at = tail.rfind(b"PK\5\6", 0, at + 4)
        if at < 0:
            break
        if at + _END.size <= len(tail):
            *_, comment = _END.unpack_from(tail, at)
            if at + _END.size + comment == len(tail):
                break
        at -= 1
    if at < 0:
        raise _damaged(source, "the end of its zip directory is not there; it looks truncated")
    place = end - len(tail) + at
    _, disk, first, here, entries, nbytes, offset, _ = _END.unpack_from(tail, at)
    if place >= _END64_LOCATOR.size + _END64.size:
        mark, _, _, disks = _END64_LOCATOR.unpack(
            source.read(place - _END64_LOCATOR.size, _END64_LOCATOR.size)
        )
        if mark == b"PK\6\7":
            place -= _END64_LOCATOR.size + _END64.size
            mark, size, _, _, disk, first, here, entries, nbytes, offset = _END64.unpack(
                source.read(place, _END64.size)
            )
            if mark != b"PK\6\6" or size != _END64.size - 12:
                raise _damaged(source, "the end of its zip64 directory is not where it should be")
            if disks > 1:
                raise RefusedFileError(f"{source.label}: a zip archive of {disks} disks")
    if disk or first or here != entries:
        raise RefusedFileError(f"{source.label}: a zip archive of several disks")
    start = place - nbytes - offset
    if start < 0 or entries * _ENTRY.size > nbytes:
        raise _damaged(
            source,
            f"expected a zip directory of {entries} members in {nbytes} bytes at {offset}, found"
            f" its end at {place}",
        )
    return _Directory(start, place - nbytes, nbytes, entries)


def _members(source: ByteSource, directory: _Directory) -> list[Member]:
    data = source.read(directory.offset, directory.nbytes)
    found, at = [], 0
    for _ in range(directory.entries):
        if at + _ENTRY.size > len(data):
            raise _damaged(source, "its zip directory is too short for its members")
        fields = _ENTRY.unpack_from(data, at)
        mark, _, _, flags, method, _, _, crc, nbytes, decoded = fields[:10]
        name_length, extra_length, comment, disk, _, _, header = fields[10:]
        at += _ENTRY.size
        if mark != b"PK\1\2" or at + name_length + extra_length + comment > len(data):
            raise _damaged(source, "its zip directory is damaged")
        raw = data[at : at + name_length]
        extra = data[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment
        name = raw.decode("utf-8", "backslashreplace")
        decoded, nbytes, header = _wide(extra, decoded, nbytes, header)
        if flags & 0x41:
            raise RefusedFileError(f"{source.label}: member {name!a} is encrypted")
        if disk not in (0, 0xFFFF):
            raise RefusedFileError(f"{source.label}: a zip archive of several disks")
        if method == STORED and nbytes != decoded:
            raise _damaged(
                source, f"member {name!a} is stored in {nbytes} bytes, expected {decoded}"
            )
        offset = _data_offset(source, directory.start + header, raw, name, method)
        if offset + nbytes > directory.offset:
            raise _damaged(source, f"member {name!a} reaches behind the members")
        known = None if crc == 0 and decoded else crc
        found.append(Member(name, method, offset, nbytes, decoded, known, directory.start + header))
    if at != len(data):
        raise _damaged(source, f"{len(data) - at} bytes follow the last entry of its zip directory")
    return found


def _wide(extra: bytes, *fields: int) -> tuple[int, int, int]:
    """Decoded size, size and offset, those that are 0xFFFFFFFF taken from the zip64 extra."""
    wide: list[int] = []
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            body = extra[4 : 4 + length]
            wide = list(struct.unpack_from(f"<{min(len(body) // 8, 3)}Q", body))
        extra = extra[4 + length :]
    found = [wide.pop(0) if field == 0xFFFFFFFF and wide else field for field in fields]
    return found[0], found[1], found[2]


def _data_offset(source: ByteSource, header: int, raw: bytes, name: str, method: int) -> int:
    """Where the bytes of a member begin, its local header compared with the directory."""
    local = source.read(header, _LOCAL.size + len(raw))
    mark, _, _, here, *_, name_length, extra_length = _LOCAL.unpack_from(local)
    if mark != b"PK\3\4" or name_length != len(raw) or local[_LOCAL.size :] != raw:
        raise _damaged(source, f"member {name!a} is not where its zip directory says")
    if here != method:
        raise _damaged(source, f"member {name!a} has method {here}, expected {method}")
    return header + _LOCAL.size + int(name_length) + int(extra_length)


def _crc(source: ByteSource, member: Member) -> int:
    stream = zlib.decompressobj(-zlib.MAX_WBITS) if member.method == DEFLATED else None
    crc = done = 0
    for at in range(0, member.nbytes, _BLOCK):
        block = source.read(member.offset + at, min(_BLOCK, member.nbytes - at))
        while stream is not None and block:
            piece = stream.decompress(block, _BLOCK)
            block, done = stream.unconsumed_tail, done + len(piece)
            crc = zlib.crc32(piece, crc)
            if done > member.decoded:
                return -1
        if stream is None:
            crc = zlib.crc32(block, crc)
    return crc
