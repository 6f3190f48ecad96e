"""The work directory beside a destination: made, locked, removed, or published by rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from slimckpt import effects
from slimckpt.errors import DestinationError, StoppedError, UsageError
from slimckpt.model import show_path

SUFFIX = b".slimckpt-part"
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
    if os.path.lexists(destination):
        raise DestinationError(
            f"{show_path(destination)} exists; name a directory that does not exist yet"
        )
    for inner, outer in ((destination, source), (source, destination)):
        if inner == outer or inner.startswith(os.path.join(outer, b"")):
            raise DestinationError(
                f"{show_path(inner)} lies inside {show_path(outer)}; name a destination outside"
            )
    return destination


@contextlib.contextmanager
def workplace(destination: bytes) -> Iterator[bytes]:
    """A locked work directory ``DESTINATION.slimckpt-part``; removed unless it was published.

    What a killed run left there is removed first. A full disk ends in :class:`StoppedError`.
    """
    work = destination + SUFFIX
    try:
        effects.make_directory(work, 0o700)
    except FileExistsError:
        _take_over(work)
        effects.make_directory(work, 0o700)
    lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield work
    except OSError as error:
        if error.errno in _FULL:
            raise StoppedError(
                f"{show_path(destination)}: {error.strerror}; nothing was kept of it. Free some"
                " space and run it again"
            ) from error
        raise
    finally:
        os.close(lock)
        if os.path.lexists(work):
            effects.remove_tree(work)


def publish(work: bytes, destination: bytes, *, synced: bool = False) -> None:
    """Make every name in the work directory durable and give it the destination's name."""
    if not synced:
        for directory, _, _ in os.walk(work):
            effects.sync_directory(directory)
    effects.rename_new(work, destination)
    effects.sync_directory(os.path.dirname(destination))


def _take_over(work: bytes) -> None:
    if os.path.islink(work) or not os.path.isdir(work):
        raise DestinationError(f"{show_path(work)} is in the way; remove it and run again")
    lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        effects.remove_tree(work)
    except BlockingIOError:
        raise DestinationError(
            f"{show_path(work)} is in use by another run; wait for it, or name another destination"
        ) from None
    finally:
        os.close(lock)
