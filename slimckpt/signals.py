"""The signals that stop a command, and what a command that was stopped says."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from slimckpt.errors import StoppedError

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = "slimckpt: stopped; nothing was kept. Run it again"
_SOON = 0.01
"""Seconds after which a signal that could not be heeded comes again."""
_done = False


class Stop(BaseException):
    """A signal came. It comes again if this is lost before somebody took it: Python and C drop
    what is raised in finalizers and callbacks. Not a KeyboardInterrupt: one that passes through
    the ``exec`` of an import makes Python end by the signal, whoever caught it."""

    taken = False

    def __del__(self) -> None:
        if not self.taken:
            signal.setitimer(signal.ITIMER_REAL, _SOON)


def on_stop(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Call ``handler`` when a signal asks to stop, except for signals that are ignored (nohup)."""
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def exit_at_once(*_: Any) -> None:
    """Stop where nothing was begun yet, and no exception can be trusted to arrive."""
    if _done:
        return
    print(STOPPED, file=sys.stderr, flush=True)
    os._exit(StoppedError.exit_code)


@contextlib.contextmanager
def raising_on_stop(before: str) -> Iterator[None]:
    """Raise :class:`Stop` in the main thread at the first signal, and heed no other after it.

    Whoever catches it sets ``taken``. Never raised while something is imported: what is half
    imported would wrap it, print it or swallow it. What the package ``before`` imports is
    imported before anything is begun, so the process ends there; anything else is waited for.
    Not raised either once :func:`done` was called.
    """
    global _done
    heard = signal.SIGTERM

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if _done:
            return
        heard = signal.Signals(number)
        importer = _importer(frame)
        if importer is None:
            on_stop(_in_peace)
            raise Stop
        if importer.startswith(before):
            exit_at_once()
        signal.setitimer(signal.ITIMER_REAL, _SOON)

    def come_again(*_: Any) -> None:
        if signal.getsignal(heard) is _in_peace:
            on_stop(stop)
        signal.raise_signal(heard)

    _done = False
    handlers = {number: signal.getsignal(number) for number in (*STOPPING, signal.SIGALRM)}
    signal.signal(signal.SIGALRM, come_again)
    on_stop(stop)
    try:
        yield
    finally:
        done()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            if handler is not None:  # of C
                signal.signal(number, handler)


def done() -> None:
    """What the command is for is done: it ends as it would without a signal that comes now."""
    global _done
    _done = True


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Whatever handlers do about signals that come meanwhile, they do it after this."""
    if threading.current_thread() is not threading.main_thread():  # no handler runs here
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in STOPPING}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _importer(frame: FrameType | None) -> str | None:
    """The module that began the outermost import under way, if one is."""
    found, importing = None, False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("importlib"):
            found, importing = name if importing else found, False
        elif frame.f_code.co_filename.startswith("<frozen importlib"):
            importing = True
        frame = frame.f_back
    return found


def _in_peace(*_: Any) -> None:
    """What was begun is cleaned up: a second signal changes nothing."""
