"""Work on many items by a few threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

READERS = 4
"""Threads that read from a network file system, whatever the cores: they mostly wait."""

_T = TypeVar("_T")


def default_jobs() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def copiers() -> int:
    """Threads that copy within memory, the page cache included.

    More than there are cores slow each other: four on two copied 6 GB/s where two copied 9.
    """
    return min(READERS, default_jobs())


def share_out(work: Callable[[_T], object], items: Iterable[_T], threads: int) -> None:
    """Run ``work`` on every item, begun in their order, by ``threads`` threads with the caller's.

    After an error, which is raised, no further item is begun. The threads are daemons: a process
    that ends does not wait for them.
    """
    queue = iter(items)
    taking = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while True:
                with taking:
                    if errors:
                        return
                    item = next(queue, queue)
                if item is queue:
                    return
                work(item)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors.append(error)

    others: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # no more threads to be had: those there are do it
            for _ in range(threads - 1):
                other = threading.Thread(target=run, daemon=True)
                other.start()
                others.append(other)
        run()
    except BaseException as error:  # noqa: BLE001 - an interrupt; raised below
        errors.append(error)
    # None may go on when this returns: the caller closes the files that they work on.
    while others:
        try:
            others[-1].join()
            others.pop()
        except BaseException as error:  # noqa: BLE001 - an interrupt; raised below
            errors.append(error)
    if errors:
        raise errors[0]
