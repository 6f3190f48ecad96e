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
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from slimckpt.errors import ClosedError, DamagedFileError, SlimckptError, UsageError
from slimckpt.model import Bytes, Span, show_path
from slimckpt.sources.digest import reusable_buffer
from slimckpt.sources.positioned import read_spans_into

log = logging.getLogger(__name__)

BackendName = Literal["mmap", "pread"]

MAP_PRIVATE_FROM = 1024 * 1024
"""Private memory of fewer bytes is a plain copy: a process has only so many mappings (65,530)."""
WARM = 4 * 1024 * 1024
"""On network file systems pages are brought in by reads of this many bytes."""
_MAP_NORESERVE = 0x4000  # Linux; the mmap module has it from Python 3.13 on
_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NETWORK = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "gfs2",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    ]
)


class Backend(ABC):
    """Bytes of files as arrays.

    Parameters
    ----------
    damaged
        The error to raise for a file that is not what it is expected to be.
    """

    def __init__(self, damaged: type[SlimckptError] = DamagedFileError) -> None:
        self.damaged = damaged
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

    def close(self) -> None:
        """Let go of all files. Arrays handed out stay valid."""
        self.closed = True

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
    def _opened(self, path: bytes, expected_size: int) -> Iterator[int]:
        """A descriptor of the file, its length checked."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
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
        if nbytes:
            with self._opened(path, expected_size) as fd:
                read_spans_into(fd, [Span(offset, nbytes)], memory.data, show_path(path))
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

    def __init__(self, damaged: type[SlimckptError] = DamagedFileError) -> None:
        super().__init__(damaged)
        self._lock = threading.Lock()
        self._files: dict[bytes, Bytes | None] = {}
        self._warm: set[tuple[bytes, int]] = set()
        self._told = False

    def view(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        self._check(path, offset, nbytes, expected_size)
        if not nbytes:
            return _frozen(np.empty(0, np.uint8))
        mapped = self._whole(path, expected_size)
        if mapped is None:
            return _frozen(self._read(path, offset, nbytes, expected_size))
        self._bring_in(path, offset, nbytes)
        return mapped[offset : offset + nbytes]

    def mapped(self, path: bytes, expected_size: int) -> Bytes | None:
        """All bytes of a file, unless it is on a network: there ranges are brought in first."""
        self.require_open()
        if on_network(os.path.dirname(path)):
            return None
        return self._whole(path, expected_size)

    def private(self, path: bytes, offset: int, nbytes: int, expected_size: int) -> Bytes:
        self._check(path, offset, nbytes, expected_size)
        if nbytes < MAP_PRIVATE_FROM:
            return self._read(path, offset, nbytes, expected_size)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        pages = self._private_pages(path, start, offset + nbytes - start, expected_size)
        if pages is None:
            return self._read(path, offset, nbytes, expected_size)
        self._bring_in(path, offset, nbytes)
        return np.frombuffer(pages, np.uint8, nbytes, offset - start)

    def mapped_private(self, path: bytes, expected_size: int) -> Bytes | None:
        self.require_open()
        if not expected_size or on_network(os.path.dirname(path)):
            return None
        pages = self._private_pages(path, 0, expected_size, expected_size)
        return None if pages is None else np.frombuffer(pages, np.uint8)

    def _private_pages(
        self, path: bytes, start: int, nbytes: int, expected_size: int
    ) -> mmap.mmap | None:
        with self._opened(path, expected_size) as fd:
            try:
                return _mmap(fd, nbytes, mmap.ACCESS_COPY, start)
            except (OSError, ValueError) as error:
                self._tell(path, error)
                return None

    def close(self) -> None:
        super().close()
        with self._lock:
            self._files.clear()

    def _whole(self, path: bytes, expected_size: int) -> Bytes | None:
        with self._lock:
            if path not in self._files:
                self._files[path] = self._map(path, expected_size)
            mapped = self._files[path]
        if mapped is not None:
            self._check_size(path, len(mapped), expected_size)
        return mapped

    def _map(self, path: bytes, expected_size: int) -> Bytes | None:
        with self._opened(path, expected_size) as fd:
            try:
                mapped = _mmap(fd, expected_size, mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                self._tell(path, error)
                return None
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

    def _bring_in(self, path: bytes, offset: int, nbytes: int) -> None:
        """Read the blocks around a range once, so that faults on its pages need no network."""
        blocks = range(offset // WARM, -(-(offset + nbytes) // WARM))
        if not on_network(os.path.dirname(path)):
            return
        cold = [block for block in blocks if (path, block) not in self._warm]
        if not cold:
            return
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(
                fd, cold[0] * WARM, (cold[-1] + 1 - cold[0]) * WARM, os.POSIX_FADV_WILLNEED
            )
            buffer = reusable_buffer(WARM)
            for block in cold:
                os.preadv(fd, [buffer], block * WARM)
                self._warm.add((path, block))
        finally:
            os.close(fd)


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
    name: BackendName | None, damaged: type[SlimckptError] = DamagedFileError
) -> Backend:
    """The backend of that name; by default the one that maps."""
    if name in (None, "mmap"):
        return MmapBackend(damaged)
    if name == "pread":
        return PreadBackend(damaged)
    raise UsageError(f"there is no backend {name!r}; there are 'mmap' and 'pread'")


@lru_cache(maxsize=1024)
def on_network(directory: bytes) -> bool:
    """Whether a directory lies on a network file system (NFS, SMB, Lustre, FUSE and the like)."""
    try:
        device = os.stat(directory).st_dev
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(kind == number and is_network(name) for kind, name in _mounts())


def is_network(filesystem: str) -> bool:
    """Whether a type of file system, as the kernel names it, reads over a network."""
    return filesystem in _NETWORK or filesystem == "fuse" or filesystem.startswith("fuse.")


def _mounts() -> list[tuple[str, str]]:
    """Device number and type of each mount."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        if right and len(left.split()) > 2:
            found.append((left.split()[2], right.split()[0]))
    return found


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


def _frozen(memory: Bytes) -> Bytes:
    memory.flags.writeable = False
    return memory
