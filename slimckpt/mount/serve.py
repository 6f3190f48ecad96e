"""The life of a mount: from the checks before it to the signal, or the ``umount``, that ends it."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from slimckpt.errors import MountError
from slimckpt.model import StepLabel, show_path
from slimckpt.mount.bodies import Bodies
from slimckpt.mount.place import check_mountpoint, load_fuse, unmount, widen_readahead
from slimckpt.mount.tree import Tree
from slimckpt.rewrite.select import Chosen, Selection, choose
from slimckpt.signals import on_stop
from slimckpt.store.reader import Store

_STARTED, _STOP, _ENDED = "started", "stop", "ended"
_PATIENCE = 2.0
"""Seconds in which libfuse should notice that it was unmounted. When this user may not break the
connection it does not while files are open; the end of the process breaks it."""


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
    MountError
        It cannot be mounted there, or FUSE is not to be had; says how to get it.
    """
    opened = Store(os.fsencode(store))
    chosen = choose(opened, Selection(tuple(steps), tuple(ranks), tuple(files), run))
    tree, bodies = Tree(chosen), Bodies(opened, chosen.files)
    place = check_mountpoint(os.fsencode(mountpoint), opened.path)
    fuse = load_fuse()
    _allow_many_files()
    # A handler may interrupt this very queue: SimpleQueue is made for that, Event is not.
    events: SimpleQueue[str | BaseException] = SimpleQueue()

    def session() -> None:
        try:
            start = lambda: events.put(_STARTED)  # noqa: E731
            fuse.run(tree, bodies, place, start, allow_other=allow_other)
        except BaseException as error:  # noqa: BLE001 - raised again below
            events.put(error)
        else:
            events.put(_ENDED)

    on_stop(lambda *_: events.put(_STOP))
    thread = threading.Thread(target=session, daemon=True)
    thread.start()
    started = stop = False
    try:
        while not (started and stop):
            event = events.get()
            if event == _ENDED:
                return
            if isinstance(event, RuntimeError) and not started:
                raise MountError(_refusal(place)) from None
            if isinstance(event, BaseException):
                raise event
            if event == _STOP:
                stop = True
            else:
                started = True
                widen_readahead(place)
                on_mounted(chosen)
    finally:
        if thread.is_alive() and started:
            unmount(place)
            thread.join(_PATIENCE)


def _refusal(place: bytes) -> str:
    return (
        f"{show_path(place)}: could not be mounted; libfuse says why above. Mounting needs root or"
        " the program fusermount3 (Debian: apt-get install fuse3), in a container also"
        " --device /dev/fuse --cap-add SYS_ADMIN"
    )


def _allow_many_files() -> None:
    """Every open file of the mount holds a descriptor of each container that it lies in."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
