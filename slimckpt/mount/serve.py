"""The life of a mount: from the checks before it to the signal, or the ``umount``, that ends it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from slimckpt.model import StepLabel
from slimckpt.mount.bodies import Bodies
from slimckpt.mount.place import attach, check_mountpoint, detach, widen_readahead
from slimckpt.mount.session import Session
from slimckpt.mount.tree import tree_of
from slimckpt.rewrite.select import Chosen, Selection, choose
from slimckpt.signals import on_stop
from slimckpt.store.reader import Store

_STOPPED, _UNMOUNTED = "stopped", "unmounted"
_THREADS = 8
_PATIENCE = 2.0
"""Seconds in which the kernel should have ended the connection. Where this user may not force that,
it lives while files are open, but not longer than the process."""


def stop_where_stdin_ends() -> None:
    """Have this process stopped, as by SIGTERM, once nobody holds the other end of stdin."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def serve(
    store: str | bytes | os.PathLike[str],
    mountpoint: str | bytes | os.PathLike[str],
    *,
    steps: Sequence[StepLabel] = (),
    ranks: Sequence[int] = (),
    files: Sequence[str] = (),
    run: str | None = None,
    allow_other: bool = False,
    on_mounted: Callable[[Chosen], None],
) -> None:
    """Mount a slim checkpoint, or a selection of its files, until a signal or an unmount.

    Takes over the signals of the process, so it is for a process of its own:
    :func:`slimckpt.mount.mounted` starts one.

    Parameters
    ----------
    steps, ranks, files, run
        As :func:`slimckpt.restore` has them.
    allow_other : bool
        Let other users read too what modes and owners of the originals permit.
    on_mounted : callable
        Called with what is mounted once it can be read.

    Raises
    ------
    NoOriginalError
        The selection has entries that were made by resharding.
    MountError
        It cannot be mounted there, or FUSE is not to be had; says what is needed.
    """
    opened = Store(os.fsencode(store))
    chosen = choose(opened, Selection(tuple(steps), tuple(ranks), tuple(files), run), "mount")
    nodes, bodies = tree_of(chosen), Bodies(opened, chosen.files)
    place = check_mountpoint(os.fsencode(mountpoint), opened.path)
    _allow_many_files()
    # A handler may interrupt this very queue: SimpleQueue is made for that, Event is not.
    ends: SimpleQueue[str | BaseException] = SimpleQueue()
    on_stop(lambda *_: ends.put(_STOPPED))
    device = attach(place, allow_other=allow_other)
    session = Session(device, nodes, bodies)

    def answer() -> None:
        _yield_to_readers()
        try:
            session.serve()
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            ends.put(error)
        else:
            ends.put(_UNMOUNTED)

    threads = [threading.Thread(target=answer, daemon=True) for _ in range(_THREADS)]
    end: str | BaseException = _STOPPED
    try:
        for thread in threads:
            thread.start()
        widen_readahead(place)
        on_mounted(chosen)
        end = ends.get()
        if isinstance(end, BaseException):
            raise end
    finally:
        if end != _UNMOUNTED:  # else something else may be mounted there by now
            detach(place)
        deadline = time.monotonic() + _PATIENCE
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))


def _yield_to_readers() -> None:
    """Let this thread take no core from who reads, as a thread that was waiting otherwise may."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _allow_many_files() -> None:
    """Every container of which something was read is held open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
