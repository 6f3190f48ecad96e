"""The work directory beside a destination: made, locked, removed, or published by rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from slimckpt import effects
from slimckpt.errors import DestinationError, NoSpaceError, SlimckptError, StoppedError, UsageError
from slimckpt.model import lies_in, show_path
from slimckpt.signals import done, held

SUFFIX = b".slimckpt-part"
NAME_MAX = 255
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_destination(destination: bytes, source: bytes) -> bytes:
    """The destination as an absolute path: new, beside nothing of the source.

    Raises
    ------
    DestinationError
        It exists, or lies inside the source, or the source inside it.
    UsageError
        The directory it would lie in does not exist.
    """
    destination = os.path.abspath(destination)
    parent = os.path.realpath(os.path.dirname(destination))
    if not os.path.isdir(parent):
        raise UsageError(f"{show_path(parent)} does not exist; make it first")
    destination = os.path.join(parent, os.path.basename(destination))
    source = os.path.realpath(source)
    longest = NAME_MAX - len(SUFFIX)
    if len(os.path.basename(destination)) > longest:
        raise UsageError(
            f"{show_path(destination)}: the last name has {len(os.path.basename(destination))}"
            f" bytes; at most {longest} leave room for the work directory beside it"
        )
    if os.path.lexists(destination):
        raise DestinationError(
            f"{show_path(destination)} exists; name a directory that does not exist yet"
        )
    for inner, outer in ((destination, source), (source, destination)):
        if lies_in(inner, outer):
            raise DestinationError(
                f"{show_path(inner)} lies inside {show_path(outer)}; name a destination outside"
            )
    return destination


def require_room(nbytes: int, destination: bytes) -> None:
    """There must be space for ``nbytes`` bytes where a destination will lie, or it is a
    :class:`NoSpaceError`."""
    free = os.statvfs(os.path.dirname(destination))
    if nbytes > free.f_bavail * free.f_frsize:
        raise NoSpaceError(
            f"{show_path(destination)} would have {nbytes} bytes at least, its file system has"
            f" {free.f_bavail * free.f_frsize} free; nothing was written"
        )


@contextlib.contextmanager
def workplace(destination: bytes) -> Iterator[bytes]:
    """A locked work directory ``DESTINATION.slimckpt-part``; removed unless it was published.

    What a killed run left there is removed first. A full disk ends in :class:`StoppedError`.
    """
    work = destination + SUFFIX
    lock = -1
    try:
        try:
            with held():
                lock = _make(work)
            yield work
        finally:
            with held():
                _leave(lock, work)
    except OSError as error:
        if error.errno in _FULL:
            raise StoppedError(
                f"{show_path(destination)}: {error.strerror}; nothing was kept of it. Free some"
                " space and run it again"
            ) from error
        raise


def publish(work: bytes, destination: bytes, *, synced: bool = False) -> None:
    """Make every name in the work directory durable and give it the destination's name."""
    if not synced:
        for directory in effects.directories_in(work):
            effects.sync_directory(directory)
    with held():
        effects.rename_new(work, destination)
        done()
    try:
        effects.sync_directory(os.path.dirname(destination))
    except OSError as error:
        raise SlimckptError(
            f"{show_path(destination)} is complete, but its name could not be made durable:"
            f" {error.strerror}; check it with `slimckpt verify`"
        ) from error


def _make(work: bytes) -> int:
    """Make and lock a work directory, instead of one that a killed run left."""
    try:
        effects.make_directory(work, 0o700)
    except FileExistsError:
        if os.path.islink(work) or not os.path.isdir(work):
            raise DestinationError(
                f"{show_path(work)} is in the way; remove it and run again"
            ) from None
        lock = _lock(work)
        try:
            effects.remove_tree(work)
        finally:
            os.close(lock)
        effects.make_directory(work, 0o700)
    effects.change_mode(work, 0o700)  # whatever the umask
    return _lock(work)


def _leave(lock: int, work: bytes) -> None:
    """Remove the work directory that was locked, if one was and it was not published."""
    if lock < 0:
        return
    try:
        if _is(lock, work):
            effects.remove_tree(work)
    finally:
        os.close(lock)


def _is(lock: int, work: bytes) -> bool:
    """Whether the directory that is locked still has this name: not published, nor another's."""
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(work))
    except FileNotFoundError:
        return False


def _lock(work: bytes) -> int:
    """A descriptor that holds the lock of a work directory, or :class:`DestinationError`."""
    lock = -1
    try:
        lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        if lock >= 0:
            os.close(lock)
        raise DestinationError(
            f"{show_path(work)} is in use by another run; wait for it, or name another destination"
        ) from None
    return lock
