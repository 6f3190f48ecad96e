"""Files that were planned, written beside a destination and published as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from slimckpt import effects
from slimckpt.convert.blueprint import Blueprint, write
from slimckpt.errors import NoSpaceError
from slimckpt.model import Stat, show_path
from slimckpt.progress import Progress
from slimckpt.rewrite.access import Access, protect
from slimckpt.rewrite.workplace import publish, workplace
from slimckpt.sources.threads import default_jobs


class Planned(NamedTuple):
    """A file: its path in the destination, its bytes, and who may read it."""

    path: bytes
    blueprint: Blueprint
    access: Access


def require_room(nbytes: int, target: bytes) -> None:
    """The file system of a destination has room for so many bytes, or :class:`NoSpaceError`."""
    parent = os.path.dirname(target)
    free = os.statvfs(parent)
    if nbytes > free.f_bavail * free.f_frsize:
        raise NoSpaceError(
            f"{show_path(target)} would have {nbytes} bytes, its file system has"
            f" {free.f_bavail * free.f_frsize} free; nothing was written"
        )


def write_all(
    planned: Sequence[Planned],
    target: bytes,
    source: bytes,
    jobs: int | None,
    progress: Progress,
    unload: Callable[[], object] = lambda: None,
) -> None:
    """Write new files into a directory beside the destination, and publish it; what ``source``, a
    directory, lets be seen, and no more, may be seen of it."""
    status = os.lstat(source)
    root = Stat(status.st_mode & 0o7777, status.st_mtime_ns, status.st_uid, status.st_gid)
    with ThreadPoolExecutor(jobs or default_jobs()) as executor, workplace(target) as work:
        progress.start("writing", sum(one.blueprint.nbytes for one in planned))
        try:
            for one in planned:
                path = os.path.join(work, one.path)
                effects.make_directories(os.path.dirname(path))
                write(path, one.blueprint, executor, progress, unload)
                protect(path, one.access)
        finally:
            progress.finish()
        for directory in effects.directories_in(work):
            effects.sync_directory(directory)
        for directory in effects.directories_in(work):
            protect(directory, Access((root.mode & 0o2777) | 0o700, root.uid, root.gid))
        publish(work, target, synced=True)
