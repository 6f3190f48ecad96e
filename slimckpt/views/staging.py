"""Files of a checkpoint brought to storage of the node, once for all its processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator

from blake3 import blake3

from slimckpt import effects
from slimckpt.errors import ClosedError, SlimckptError, UnfaithfulSourceError, UsageError
from slimckpt.model import Span, lies_in, show_path
from slimckpt.sources.digest import BLOCK, reusable_buffer
from slimckpt.sources.files import Files
from slimckpt.sources.positioned import read_spans_into
from slimckpt.sources.threads import READERS, share_out

log = logging.getLogger(__name__)

PREFIX = b"slimckpt-"
PART = b".part"
_OTHERS_WRITE = 0o022


class Stage(Files):
    """Opens copies of files in a directory of the node, made where they are not there yet.

    Parameters
    ----------
    directory
        Of this user alone; made (mode 0700) if it does not exist.
    root
        The checkpoint's directory.
    identity
        What tells the checkpoint from others: copies are found by it, and by the path in the
        checkpoint, size and times of the file.

    Raises
    ------
    UsageError
        The directory is another user's, is a link, can be written to by others, lies in the
        checkpoint, or cannot be made.

    Notes
    -----
    The directory is locked (``flock``) while a file is copied, so that one process does it and the
    others wait; the kernel gives the lock of a process that dies to the next, which begins anew.
    Where a copy cannot be made (no space), the file is used where it is.
    """

    def __init__(self, directory: bytes, root: bytes, identity: str) -> None:
        self._directory, self._root, self._identity = directory, root, identity
        self._names: dict[bytes, bytes] = {}
        self._left: set[bytes] = set()
        self._closed = False
        if lies_in(os.path.realpath(directory), os.path.realpath(root)):
            raise UsageError(
                f"stage {show_path(directory)}: it lies in the checkpoint itself, which is never"
                " written to; name a directory outside"
            )
        os.close(self._open_directory())

    def open(self, path: bytes, expected_size: int) -> int:
        if path in self._names:
            # The file itself is not looked at again: each look may take a trip over the network.
            found = self._staged(self._names[path], expected_size)
            if found is not None:
                return found
        source = super().open(path, expected_size)
        status = os.fstat(source)
        right = stat.S_ISREG(status.st_mode) and status.st_size == expected_size
        if not right or path in self._left:
            return source  # the caller says what is wrong with it
        try:
            name = self._name(path, status)
            found = self._staged(name, expected_size)
            if found is None:
                found = self._bring(source, status, name, show_path(path))
            self._names[path] = name
        except OSError as error:
            if isinstance(error, SlimckptError):
                os.close(source)
                raise
            self._leave(path, error)
            return source
        except BaseException:
            os.close(source)
            raise
        os.close(source)
        return found

    def far(self, path: bytes) -> bool:
        return path in self._left and super().far(path)

    def close(self) -> None:
        self._closed = True

    def _name(self, path: bytes, status: os.stat_result) -> bytes:
        facts = (self._identity, os.path.relpath(path, self._root), *_version(status))
        return PREFIX + blake3(repr(facts).encode()).hexdigest()[:32].encode()

    def _staged(self, name: bytes, nbytes: int) -> int | None:
        """A descriptor of a copy that is there, whole, and this user's."""
        try:
            fd = os.open(
                self._inside(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            )
        except OSError:
            return None
        found = os.fstat(fd)
        ours = found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE
        if ours and stat.S_ISREG(found.st_mode) and found.st_size == nbytes:
            return fd
        os.close(fd)
        return None

    def _bring(self, source: int, status: os.stat_result, name: bytes, label: str) -> int:
        with self._elected():
            found = self._staged(name, status.st_size)  # by another, while this one waited
            return self._copy(source, status, name, label) if found is None else found

    def _copy(self, source: int, status: os.stat_result, name: bytes, label: str) -> int:
        part = self._inside(name + PART)
        copy = effects.create_file(part)

        def move(at: int) -> None:
            if self._closed:
                raise ClosedError(f"the checkpoint was closed while {label} was staged")
            buffer = reusable_buffer(min(BLOCK, status.st_size - at))
            read_spans_into(source, [Span(at, len(buffer))], buffer, label)
            effects.write_at(copy, buffer, at, part)

        try:
            effects.allocate(copy, status.st_size, part)
            share_out(move, range(0, status.st_size, BLOCK), READERS)
            if _version(os.fstat(source)) != _version(status):
                raise UnfaithfulSourceError(f"{label}: it was changed while it was staged")
            effects.sync(copy, part)
            effects.rename_over(part, self._inside(name))
        except BaseException:
            os.close(copy)
            with contextlib.suppress(OSError):
                effects.remove_file(part)
            raise
        return copy

    @contextlib.contextmanager
    def _elected(self) -> Iterator[None]:
        """Be the one process of the node that brings files to this directory."""
        while True:
            lock = self._open_directory()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(lock), os.lstat(self._directory)):
                    break
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)  # of a directory that was removed meanwhile
        try:
            for left in os.listdir(self._directory):
                if left.startswith(PREFIX) and left.endswith(PART):
                    effects.remove_file(self._inside(left))  # by a process that died
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child of a fork may have the descriptor too
            os.close(lock)

    def _open_directory(self) -> int:
        """A descriptor of the stage's directory, which nobody else can write to."""
        where = f"stage {show_path(self._directory)}"
        try:
            with contextlib.suppress(FileExistsError):
                effects.make_directories(self._directory, 0o700)
            fd = os.open(
                self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                problem = "it is no directory, or a symbolic link"
            else:
                problem = str(error.strerror)
            raise UsageError(f"{where}: {problem}; name a directory of your own") from None
        found = os.fstat(fd)
        problem = ""
        if found.st_uid != os.geteuid():
            problem = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
        elif found.st_mode & _OTHERS_WRITE:
            problem = f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
        if problem:
            os.close(fd)
            raise UsageError(
                f"{where}: {problem}, so what is in it cannot be trusted; name a directory that"
                " does not exist yet, or one of mode 0700"
            )
        return fd

    def _leave(self, path: bytes, error: OSError) -> None:
        if not self._left:
            log.warning(
                "%s cannot be brought to the stage %s (%s); it is used where it is, as is what"
                " else does not fit",
                show_path(path),
                show_path(self._directory),
                error.strerror,
            )
        self._left.add(path)

    def _inside(self, name: bytes) -> bytes:
        return os.path.join(self._directory, name)


def _version(status: os.stat_result) -> tuple[int, int, int]:
    """What differs when a file was changed: the inode's own time too, which no program can set."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
