"""Python's search for cycles, stopped while millions of objects are made that are no garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_uncollected = [0, False]


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's search for cycles stands still: it takes a third of the time where millions of
    objects are made of which none is garbage. For all threads; it goes on after the last of them.
    """
    with _lock:
        if not _uncollected[0]:
            _uncollected[1] = gc.isenabled()
            gc.disable()
        _uncollected[0] += 1
    try:
        yield
    finally:
        with _lock:
            _uncollected[0] -= 1
            if not _uncollected[0] and _uncollected[1]:
                gc.enable()
