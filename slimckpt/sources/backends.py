"""Where arrays get their memory: files mapped, or read.

A backend hands out bytes of files as numpy arrays, read-only or private and writable. It never
changes a file.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import sys
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np

from slimckpt.errors import ClosedError, DamagedFileError, SlimckptError, UsageError
from slimckpt.model import Bytes, Span, show_path
from slimckpt.sources.digest import reusable_buffer
from slimckpt.sources.files import Files
from slimckpt.sources.positioned import read_spans_into
from slimckpt.sources.threads import READERS, copiers, share_out

log = logging.getLogger(__name__)

BackendName = Literal["mmap", "pread"]

MAP_PRIVATE_FROM = 1024 * 1024
"""Private memory of fewer bytes is a plain copy: a process has only so many mappings (65,530)."""
WARM = 4 * 1024 * 1024
"""Pages are brought into the page cache by reads of at most this many bytes."""
_DETOUR = 1024 * 1024
_WORTH = 64 * 1024
_rooms: list[Bytes] = []
"""Buffers that no thread uses now: as many as ever were used at once."""
_MAP_NORESERVE = 0x4000  # Linux; the mmap module has it from Python 3.13 on
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class Backend(ABC):
    """Bytes of files as arrays.

    Parameters
    ----------
    damaged
        The error to raise for a file that is not what it is expected to be.
    files
        How files are opened.
    """

    def __init__(
        self, damaged: type[SlimckptError] = DamagedFileError, files: Files | None = None
    ) -> None:
        self.damaged = damaged
        self.files = files or Files()
        self.closed = False

    @abstractmethod
    def view(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        """Read-only bytes of the file ``path``, which must have ``expected_size`` bytes.

        Raises
        ------
        ClosedError
            The backend was closed.
        SlimckptError
            Of the class ``damaged``: the file is not there, has another length, or the range is
            not inside it.
        """

    @abstractmethod
    def private(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        """The same bytes in writable memory that belongs to the caller alone."""

    def mapped(self, path: bytes, expected_size: int) -> Bytes | None:
        """All bytes of a file, read-only, where that costs nothing before they are touched."""
        return None

    def mapped_private(self, path: bytes, expected_size: int) -> Bytes | None:
        """All bytes of a file, writable and the caller's alone, where only pages that are written
        to cost memory."""
        return None

    def read_into(self, path: bytes, offset: int, memory: Bytes, expected_size: int) -> None:
        """Fill ``memory`` with the bytes at ``offset``, by several threads where it is large.

        Errors are those of :meth:`view`.
        """
        self._check(path, offset, len(memory), expected_size)
        if not len(memory):
            return
        with self.opened(path, expected_size) as fd:

            def read(at: int) -> None:
                part = memory[at : at + WARM]
                _read_block(fd, offset + at, part, show_path(path))

            blocks = range(0, len(memory), WARM)
            readers = READERS if self.files.far(path) else copiers()
            share_out(read, blocks, min(readers, len(blocks)))

    def warm(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> None:
        """Read at most :data:`WARM` bytes into the page cache, and nowhere else.

        Errors are those of :meth:`view`.
        """
        self._check(path, offset, nbytes, expected_size)
        with self.opened(path, expected_size) as fd:
            span = Span(offset, nbytes)
            read_spans_into(fd, [span], reusable_buffer(nbytes), show_path(path))

    def unload(self) -> None:
        """Let go of the pages of files that were touched, not of the files: pages that are touched
        again come back from the page cache. For who reads all of a large file once."""
        return

    def close(self) -> None:
        """Let go of all files. Arrays handed out stay valid."""
        self.closed = True
        self.files.close()

    def require_open(self) -> None:
        if self.closed:
            raise ClosedError("the checkpoint was closed; open it again")

    def _check(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> None:
        self.require_open()
        if offset < 0 or nbytes < 0 or offset + nbytes > expected_size:
            raise self.damaged(
                f"{show_path(path)}: bytes {offset} to {offset + nbytes} are asked for, expected"
                f" to be among {expected_size}"
            )

    @contextmanager
    def opened(self, path: bytes, expected_size: int) -> Iterator[int]:
        """A descriptor of the file, its length checked."""
        try:
            fd = self.files.open(path, expected_size)
        except OSError as error:
            if isinstance(error, SlimckptError):
                raise
            raise self.damaged(f"{show_path(path)}: {error.strerror}") from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise self.damaged(f"{show_path(path)}: expected a regular file")
            self._check_size(path, found.st_size, expected_size)
            yield fd
        finally:
            os.close(fd)

    def _check_size(self, path: bytes, found: int, expected: int) -> None:
        if found != expected:
            looks = "looks truncated" if found < expected else "was changed"
            raise self.damaged(
                f"{show_path(path)} {looks}: expected {expected} bytes, found {found}"
            )

    def _read(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        memory = np.empty(nbytes, np.uint8)
        self.read_into(path, offset, memory, expected_size)
        return memory


class PreadBackend(Backend):
    """Reads what is asked for into fresh memory. Keeps no file open."""

    def view(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        memory = self.private(path, offset, nbytes, expected_size)
        memory.flags.writeable = False
        return memory

    def private(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        self._check(path, offset, nbytes, expected_size)
        return self._read(path, offset, nbytes, expected_size)


class MmapBackend(Backend):
    """Maps each file once and hands out views of the mapping.

    Where a file system refuses mappings, its files are read instead.

    Notes
    -----
    Safe to use from several threads. Arrays keep the mapping alive, and before Python 3.13 a
    descriptor with it. A file that is truncated while it is mapped kills the process that reads
    behind its end, as with any mapping.
    """

    def __init__(
        self, damaged: type[SlimckptError] = DamagedFileError, files: Files | None = None
    ) -> None:
        super().__init__(damaged, files)
        self._lock = threading.Lock()
        self._files: dict[bytes, Bytes | None] = {}
        self._maps: list[mmap.mmap] = []
        self._warm: set[tuple[bytes, int]] = set()
        self._told = False

    def view(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        self._check(path, offset, nbytes, expected_size)
        if not nbytes:
            return _frozen(np.empty(0, np.uint8))
        mapped = self._whole(path, expected_size)
        if mapped is None:
            return _frozen(self._read(path, offset, nbytes, expected_size))
        self._bring_in(path, offset, nbytes, expected_size)
        return mapped[offset : offset + nbytes]

    def mapped(self, path: bytes, expected_size: int) -> Bytes | None:
        """All bytes of a file, unless it is on a network: there ranges are brought in first."""
        self.require_open()
        found = self._whole(path, expected_size)
        return None if self.files.far(path) else found

    def private(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        self._check(path, offset, nbytes, expected_size)
        if nbytes < MAP_PRIVATE_FROM:
            return self._read(path, offset, nbytes, expected_size)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        pages = self._private_pages(path, start, offset + nbytes - start, expected_size)
        if pages is None:
            return self._read(path, offset, nbytes, expected_size)
        self._bring_in(path, offset, nbytes, expected_size)
        return np.frombuffer(pages, np.uint8, nbytes, offset - start)

    def mapped_private(self, path: bytes, expected_size: int) -> Bytes | None:
        self.require_open()
        if not expected_size:
            return None
        pages = self._private_pages(path, 0, expected_size, expected_size)
        if pages is None or self.files.far(path):
            return None
        return np.frombuffer(pages, np.uint8)

    def _private_pages(
        self, path: bytes, start: int, nbytes: int, expected_size: int
    ) -> mmap.mmap | None:
        with self.opened(path, expected_size) as fd:
            try:
                return _mmap(fd, nbytes, mmap.ACCESS_COPY, start)
            except (OSError, ValueError) as error:
                self._tell(path, error)
                return None

    def close(self) -> None:
        super().close()
        with self._lock:
            self._files.clear()
            self._maps.clear()

    def unload(self) -> None:
        with self._lock:
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)

    def _whole(self, path: bytes, expected_size: int) -> Bytes | None:
        with self._lock:
            if path not in self._files:
                self._files[path] = self._map(path, expected_size)
            mapped = self._files[path]
        if mapped is not None:
            self._check_size(path, len(mapped), expected_size)
        return mapped

    def _map(self, path: bytes, expected_size: int) -> Bytes | None:
        with self.opened(path, expected_size) as fd:
            try:
                mapped = _mmap(fd, expected_size, mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                self._tell(path, error)
                return None
        self._maps.append(mapped)
        return np.frombuffer(mapped, np.uint8)

    def _tell(self, path: bytes, error: Exception) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "%s cannot be mapped (%s); reading it instead, which shares no memory between"
                " processes",
                show_path(path),
                error,
            )

    def warm(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> None:
        if not self.files.far(path):
            return super().warm(path, offset, nbytes, expected_size)
        self._check(path, offset, nbytes, expected_size)
        self._bring_in(path, offset, nbytes, expected_size)

    def _bring_in(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> None:
        """Read the blocks around a range once, so that faults on its pages need no network."""
        blocks = range(offset // WARM, -(-(offset + nbytes) // WARM))
        if not self.files.far(path):
            return
        cold = [block for block in blocks if (path, block) not in self._warm]
        if not cold:
            return
        with self.opened(path, expected_size) as fd:

            def read(block: int) -> None:
                os.preadv(fd, [reusable_buffer(WARM)], block * WARM)
                self._warm.add((path, block))

            share_out(read, cold, min(READERS, len(cold)))


class CopyOnWrite:
    """Private memory of parts of files, no byte of it handed out twice.

    Each file is mapped once, and parts are views of that. A part that overlaps one that was handed
    out gets memory of its own.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._files: dict[bytes, tuple[Bytes | None, list[int], list[int]]] = {}

    def take(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        """Writable bytes of a file; errors are those of :meth:`Backend.private`."""
        if offset >= 0 and nbytes > 0 and offset + nbytes <= expected_size:
            with self._lock:
                if path not in self._files:
                    mapped = self._backend.mapped_private(path, expected_size)
                    self._files[path] = (mapped, [], [])
                mapped, starts, ends = self._files[path]
                at = bisect_right(starts, offset)
                free = (at == 0 or ends[at - 1] <= offset) and (
                    at == len(starts) or offset + nbytes <= starts[at]
                )
                if mapped is not None and len(mapped) == expected_size and free:
                    starts.insert(at, offset)
                    ends.insert(at, offset + nbytes)
                    return mapped[offset : offset + nbytes]
        return self._backend.private(path, offset, nbytes, expected_size)


def make_backend(
    name: BackendName | None,
    damaged: type[SlimckptError] = DamagedFileError,
    files: Files | None = None,
) -> Backend:
    """The backend of that name; by default the one that maps."""
    if name in (None, "mmap"):
        return MmapBackend(damaged, files)
    if name == "pread":
        return PreadBackend(damaged, files)
    raise UsageError(f"there is no backend {name!r}; there are 'mmap' and 'pread'")


def _mmap(fd: int, nbytes: int, access: int, offset: int = 0) -> mmap.mmap:
    kept: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
    try:
        if access == mmap.ACCESS_COPY:
            # Without room set aside for pages that are never written to: a file may be larger
            # than the memory.
            kept |= {"flags": mmap.MAP_PRIVATE | _MAP_NORESERVE, "prot": _READ_AND_WRITE}
            return mmap.mmap(fd, nbytes, offset=offset, **kept)
        return mmap.mmap(fd, nbytes, access=access, offset=offset, **kept)
    except ValueError as error:
        # The file shrank since its length was checked.
        raise OSError(errno.EINVAL, str(error)) from None


def _read_block(fd: int, offset: int, memory: Bytes, label: str) -> None:
    """Fill ``memory``, by way of a buffer that stays in the processor's cache where the kernel
    would copy slowly.

    Notes
    -----
    Kernels copy by ``rep movsb``, which runs at a quarter of its speed where the destination lies
    1 to 31 bytes after the source, modulo 4,096 (measured on AMD EPYC; the detour has the full
    speed). And that is the common case: the page cache has what is at the start of a page at the
    start of a page, as payloads are in containers, and large arrays begin 16 bytes after one.
    """
    if len(memory) < _WORTH or not 0 < (memory.ctypes.data - offset) % 4096 < 32:
        read_spans_into(fd, [Span(offset, len(memory))], memory.data, label)
        return
    try:
        room = _rooms.pop()
    except IndexError:
        room = np.empty(_DETOUR + 4096, np.uint8)
    shift = (offset + 2048 - room.ctypes.data) % 4096  # far from both
    for at in range(0, len(memory), _DETOUR):
        part = memory[at : at + _DETOUR]
        buffer = room[shift : shift + len(part)]
        read_spans_into(fd, [Span(offset + at, len(part))], buffer.data, label)
        part[...] = buffer
    _rooms.append(room)


def _frozen(memory: Bytes) -> Bytes:
    memory.flags.writeable = False
    return memory
