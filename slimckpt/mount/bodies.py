"""The files of a mount that are open, and reading them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from slimckpt.errors import SlimckptError
from slimckpt.store.manifest import FileEntry, Part
from slimckpt.store.reader import Store
from slimckpt.store.spliced import SplicedSource

log = logging.getLogger(__name__)

_IDLE = 64
"""Files that nobody has open any more, kept because finding where 20,000 tensors lie takes 0.2 s
and loaders open a file again and again."""


class Bodies:
    """The bytes of the files chosen, by row; all methods may be called from any thread.

    What cannot be read is an ``OSError`` with ``EIO``, and a line in the log that says why, once.
    """

    def __init__(self, store: Store, files: Sequence[tuple[Part, FileEntry, list[bytes]]]) -> None:
        self._store, self._files = store, files
        self._lock = threading.Lock()
        self._open: dict[int, SplicedSource] = {}
        self._users: dict[int, int] = {}
        self._idle: dict[int, SplicedSource] = {}
        self._said: set[str] = set()

    def whole(self, body: int) -> bool:
        """Whether all bytes of a file are there: no tensor of it was dropped."""
        return not self._files[body][1].dropped

    def open(self, body: int) -> None:
        """Make a file ready to be read, until :meth:`release` was called as often as this."""
        with self._explained(), self._lock:
            if body not in self._open:
                idle = body in self._idle
                self._open[body] = self._idle.pop(body) if idle else self._source(body)
            self._users[body] = self._users.get(body, 0) + 1

    def read_into(self, body: int, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` with what an open file has at ``offset``; how many bytes it has there."""
        source = self._open[body]
        room = buffer[: max(source.size - offset, 0)]
        if room:
            with self._explained():
                source.read_into(offset, room)
        return len(room)

    def release(self, body: int) -> None:
        with self._lock:
            self._users[body] -= 1
            if not self._users[body]:
                self._idle[body] = self._open.pop(body)
            while len(self._idle) > _IDLE:
                self._idle.pop(next(iter(self._idle))).close()

    def _source(self, body: int) -> SplicedSource:
        part, entry, _ = self._files[body]
        return SplicedSource(self._store, part, entry, self._store.index(part, entry))

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (SlimckptError, OSError) as error:
            if str(error) not in self._said:
                self._said.add(str(error))
                log.error("slimckpt mount: %s. Who reads it gets an input/output error", error)
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
