"""The files of a mount that are open, and where their bytes are."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from slimckpt.errors import SlimckptError, StoreDamagedError
from slimckpt.sources.backends import MmapBackend
from slimckpt.store.manifest import FileEntry, Part
from slimckpt.store.reader import Store
from slimckpt.store.spliced import SplicedSource

log = logging.getLogger(__name__)

_IDLE = 64
"""Files that nobody has open any more, kept because finding where 20,000 tensors lie takes 0.2 s
and loaders open a file again and again."""
_MOST_PIECES = 1000
"""Of one read; Linux takes 1,024 buffers in one message."""


class Bodies:
    """The bytes of the files chosen, by row; all methods may be called from any thread.

    What cannot be read is an ``OSError`` with ``EIO``, and a line in the log that says why, once.
    """

    def __init__(self, store: Store, files: Sequence[tuple[Part, FileEntry, list[bytes]]]) -> None:
        self._store, self._files = store, files
        self._backend = MmapBackend(StoreDamagedError)
        self._sizes = {c.name: c.nbytes for part, *_ in files for c in part.containers}
        self._sizes |= {
            entry.skeleton.name: entry.skeleton.nbytes
            for _, entry, _ in files
            if entry.skeleton.kind == "whole"
        }
        self._mapped: dict[bytes, memoryview | None] = {}
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

    def release(self, body: int) -> None:
        with self._lock:
            self._users[body] -= 1
            if not self._users[body]:
                self._idle[body] = self._open.pop(body)
            while len(self._idle) > _IDLE:
                self._idle.pop(next(iter(self._idle))).close()

    def buffers(self, body: int, offset: int, nbytes: int) -> list[Any]:
        """What an open file has at ``offset``, up to ``nbytes`` bytes, as buffers in order.

        Notes
        -----
        They are mapped: to touch them here would kill the process if a container was truncated
        meanwhile. The kernel may, and gets an error instead, which :meth:`explain` explains.
        """
        source = self._open[body]
        nbytes = min(nbytes, source.size - offset)
        if nbytes <= 0:
            return []
        with self._explained():
            pieces = source.pieces(offset, nbytes)
            if len(pieces) > _MOST_PIECES:
                return [self._read(source, offset, nbytes)]
            return [self._buffer(*piece) for piece in pieces]

    def explain(self, body: int, offset: int, nbytes: int) -> None:
        """Say in the log why the buffers of a range could not be read."""
        source = self._open[body]
        with contextlib.suppress(OSError), self._explained():
            self._read(source, offset, min(nbytes, source.size - offset))

    def _source(self, body: int) -> SplicedSource:
        part, entry, _ = self._files[body]
        return SplicedSource(self._store, part, entry, self._store.index(part, entry))

    def _read(self, source: SplicedSource, offset: int, nbytes: int) -> bytearray:
        found = bytearray(nbytes)
        source.read_into(offset, memoryview(found))
        return found

    def _buffer(self, name: bytes | None, offset: int, nbytes: int) -> Any:
        if name is None:
            return bytes([offset]) * nbytes
        if name not in self._mapped:
            whole = self._backend.mapped(self._store.absolute(name), self._sizes[name])
            self._mapped[name] = None if whole is None else whole.data
        mapped = self._mapped[name]
        if mapped is None:
            return self._backend.view(self._store.absolute(name), offset, nbytes, self._sizes[name])
        return mapped[offset : offset + nbytes]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (SlimckptError, OSError) as error:
            if str(error) not in self._said:
                self._said.add(str(error))
                log.error("slimckpt mount: %s. Who reads it gets an input/output error", error)
            raise OSError(errno.EIO, os.strerror(errno.EIO)) from error
