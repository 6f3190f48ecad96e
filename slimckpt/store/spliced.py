"""A source file as a store holds it, read by position without restoring it."""

from __future__ import annotations

import os
from bisect import bisect_right
from types import TracebackType

from slimckpt.errors import DamagedFileError, DroppedTensorError, StoreDamagedError
from slimckpt.model import Span
from slimckpt.store.index import FileIndex
from slimckpt.store.manifest import FileEntry, Part
from slimckpt.store.reader import NOWHERE, Run, Store


class SplicedSource:
    """The bytes of one source file, gathered from the containers that hold them."""

    def __init__(self, store: Store, part: Part, entry: FileEntry, index: FileIndex | None) -> None:
        self.label = entry.file.label
        self.size = entry.file.size
        self._store = store
        self._runs = store.runs(part, entry, index)
        self._starts = [run.at for run in self._runs]
        self._fds: dict[bytes, int] = {}

    def __enter__(self) -> SplicedSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    @property
    def present(self) -> list[Span]:
        """What can be read: all of the file, but for tensors that were dropped."""
        return [Span(run.at, run.nbytes) for run in self._runs if not _left_out(run)]

    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes at ``offset`` of the source file.

        Raises
        ------
        DroppedTensorError
            Some of them were dropped.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DamagedFileError(
                f"{self.label}: bytes {offset} to {offset + nbytes} are asked for, but the file"
                f" has {self.size}; it looks truncated"
            )
        found = bytearray()
        at = bisect_right(self._starts, offset) - 1
        while len(found) < nbytes:
            run = self._runs[at]
            skip = offset + len(found) - run.at
            take = min(run.nbytes - skip, nbytes - len(found))
            if _left_out(run):
                raise DroppedTensorError(
                    f"{self.label}: bytes {run.at} to {run.at + run.nbytes} belong to a tensor that"
                    " was left out when it was slimmed (--drop)"
                )
            if run.name is None:
                found += bytes([run.offset]) * take
            else:
                found += self._pread(run.name, run.offset + skip, take)
            at += 1
        return bytes(found)

    def _pread(self, name: bytes, offset: int, nbytes: int) -> bytes:
        if name not in self._fds:
            self._fds[name] = self._store.open_file(name)
        data = bytearray()
        while len(data) < nbytes:
            more = os.pread(self._fds[name], nbytes - len(data), offset + len(data))
            if not more:
                raise StoreDamagedError(
                    f"{self._store.label(name)}: ends at byte {offset + len(data)}, expected"
                    f" {offset + nbytes} at least; it was cut"
                )
            data += more
        return bytes(data)


def _left_out(run: Run) -> bool:
    return run.name is None and run.offset == NOWHERE
