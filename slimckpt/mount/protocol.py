"""What the kernel and a file system in user space tell each other, as bytes.

From ``include/uapi/linux/fuse.h``, protocol 7.28 (Linux 4.20) and newer: every message is a header
and one of these structures, in the byte order of the machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple

from slimckpt.mount.tree import Node

LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 5, 14, 15, 17, 18
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 36, 38, 42
UNANSWERED = (FORGET, BATCH_FORGET, INTERRUPT)

LARGEST_REQUEST = 8192
"""Bytes that the kernel must be given room for, where it writes at most a page."""
LARGEST_READ = 1 << 20
"""Bytes that the kernel may ask for at once; it has its own limit, by default the same."""
NAME_MAX = 255

_MAJOR, _MINOR = 7, 38
_PAGE = 4096
_FOREVER = 10**9
"""Seconds for which the kernel may believe what it was told: a store never changes."""

_ASYNC_READ, _PARALLEL_DIROPS, _MAX_PAGES, _CACHE_SYMLINKS = 1 << 0, 1 << 18, 1 << 22, 1 << 23
_INIT_EXT, _DIRECT_IO_ALLOW_MMAP = 1 << 30, 1 << 36
_WANTED = _ASYNC_READ | _PARALLEL_DIROPS | _MAX_PAGES | _CACHE_SYMLINKS
_WANTED |= _INIT_EXT | _DIRECT_IO_ALLOW_MMAP
_DIRECT_IO, _KEEP_CACHE, _CACHE_DIR, _NOFLUSH = 1 << 0, 1 << 1, 1 << 3, 1 << 5
"""Of an open file."""

_REQUEST = Struct("=IIQQIIIHH")
_REPLY = Struct("=IiQ")
_INIT_IN = Struct("=IIII")
_MORE_FLAGS = Struct("=16xI")
_INIT_OUT = Struct("=IIIIHHIIHHIIH22x")
_ATTR = Struct("=QQQqqqIIIIIIIIII")
_ATTR_OUT = Struct("=QII")
_ENTRY = Struct("=QQQQII")
_OPEN_OUT = Struct("=QII")
_READ_IN = Struct("=QQI")
_DIRENT = Struct("=QQII")
_STATFS = Struct("=QQQQQIIII24x")


class Request(NamedTuple):
    """A question of the kernel: what of which node, and what belongs to it."""

    opcode: int
    unique: int
    node: int
    body: memoryview


def request_of(message: memoryview) -> Request:
    _, opcode, unique, node, *_ = _REQUEST.unpack_from(message)
    return Request(opcode, unique, node, message[_REQUEST.size :])


def reply(unique: int, nbytes: int, error: int = 0) -> bytes:
    """The header of an answer that ``nbytes`` follow, or of one that is an error number."""
    return _REPLY.pack(_REPLY.size + nbytes, -error, unique)


def init(body: memoryview) -> bytes:
    """What is agreed on at the start: large reads, several at once, all kept in the page cache."""
    _, minor, readahead, flags = _INIT_IN.unpack_from(body)
    if flags & _INIT_EXT:
        flags |= _MORE_FLAGS.unpack_from(body)[0] << 32
    flags &= _WANTED
    pages = LARGEST_READ // _PAGE
    return _INIT_OUT.pack(
        *(_MAJOR, min(minor, _MINOR), readahead, flags & 0xFFFFFFFF, 0, 0, _PAGE, 1, pages, 0),
        *(flags >> 32, 0, 0),
    )


def attributes(number: int, node: Node) -> bytes:
    return _ATTR_OUT.pack(_FOREVER, 0, 0) + _attributes(number, node)


def entry(number: int, node: Node | None) -> bytes:
    """A name that was looked up; there is none if ``node`` is ``None``."""
    if node is None:
        return _ENTRY.pack(0, 0, _FOREVER, 0, 0, 0) + bytes(_ATTR.size)
    return _ENTRY.pack(number, 0, _FOREVER, _FOREVER, 0, 0) + _attributes(number, node)


def opened(body: int, *, cached: bool) -> bytes:
    """An open file, which reads will name ``body``."""
    flags = _KEEP_CACHE if cached else _DIRECT_IO
    return _OPEN_OUT.pack(body, flags | _NOFLUSH, 0)


def opened_directory() -> bytes:
    return _OPEN_OUT.pack(0, _KEEP_CACHE | _CACHE_DIR, 0)


def read_of(body: memoryview) -> tuple[int, int, int]:
    """The file, offset and number of bytes that a read asks for; of a directory too."""
    file, offset, nbytes = _READ_IN.unpack_from(body)
    return file, offset, nbytes


def released(body: memoryview) -> int:
    """The file that was closed."""
    return int(_READ_IN.unpack_from(body)[0])


def listing(names: Iterable[tuple[bytes, int, int]], offset: int, room: int) -> bytes:
    """Entries of a directory from number ``offset`` on, as many as there is room for.

    ``names`` are a name, the number of its node and the kind of that.
    """
    found = bytearray()
    for at, (name, number, kind) in enumerate(names):
        if at < offset:
            continue
        packed = _DIRENT.pack(number, at + 1, len(name), kind >> 12) + name
        packed += bytes(-len(packed) % 8)
        if len(found) + len(packed) > room:
            break
        found += packed
    return bytes(found)


def statfs(nbytes: int, files: int) -> bytes:
    """A full file system that holds so much."""
    blocks = -(-nbytes // _PAGE)
    return _STATFS.pack(blocks, 0, 0, files, 0, _PAGE, NAME_MAX, _PAGE, 0)


def _attributes(number: int, node: Node) -> bytes:
    seconds, rest = divmod(node.stat.mtime, 10**9)
    return _ATTR.pack(
        *(number, node.nbytes, -(-node.nbytes // 512), seconds, seconds, seconds, rest, rest, rest),
        *(node.mode, node.links, node.stat.uid, node.stat.gid, 0, _PAGE, 0),
    )
