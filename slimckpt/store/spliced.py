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
        self._containers = part.containers
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
        self.close()

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    @property
    def present(self) -> list[Span]:
        """What can be read: all of the file, but for tensors that were dropped."""
        found: list[Span] = []
        for run in self._runs:
            if _left_out(run):
                continue
            if found and found[-1].offset + found[-1].nbytes == run.at:
                offset, nbytes = found.pop()
                found.append(Span(offset, nbytes + run.nbytes))
            else:
                found.append(Span(run.at, run.nbytes))
        return found

    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes at ``offset`` of the source file.

        Raises
        ------
        DroppedTensorError
            Some of them were dropped.
        """
        pieces = self.pieces(offset, nbytes)
        found = bytearray(nbytes)
        self._gather(pieces, memoryview(found))
        return bytes(found)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``, as :meth:`read` would; from any thread."""
        self._gather(self.pieces(offset, len(buffer)), buffer)

    def pieces(self, offset: int, nbytes: int) -> list[tuple[bytes | None, int, int]]:
        """Where bytes of the source file are: ``(file of the store, offset, nbytes)`` as in a
        :class:`~slimckpt.store.reader.Run`.

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
        found: list[tuple[bytes | None, int, int]] = []
        at = bisect_right(self._starts, offset) - 1
        while nbytes:
            run = self._runs[at]
            skip = offset - run.at
            take = min(run.nbytes - skip, nbytes)
            if _left_out(run):
                raise DroppedTensorError(
                    f"{self.label}: bytes {run.at} to {run.at + run.nbytes} belong to a tensor that"
                    " was left out when it was slimmed (--drop)"
                )
            found.append((run.name, run.offset + (0 if run.name is None else skip), take))
            offset, nbytes, at = offset + take, nbytes - take, at + 1
        return found

    def _gather(self, pieces: list[tuple[bytes | None, int, int]], buffer: memoryview) -> None:
        filled = 0
        for name, offset, nbytes in pieces:
            room = buffer[filled : filled + nbytes]
            filled += nbytes
            if name is None:
                room[:] = bytes([offset]) * nbytes
                continue
            while room:
                got = os.preadv(self._fd(name), [room], offset)
                if not got:
                    raise StoreDamagedError(
                        f"{self._store.label(name)}: ends at byte {offset}, expected"
                        f" {offset + len(room)} at least; it was cut"
                    )
                room, offset = room[got:], offset + got

    def _fd(self, name: bytes) -> int:
        if name not in self._fds:
            for container in self._containers:
                if container.name == name:
                    self._store.check_size(name, container.nbytes)
            fd = self._store.open_file(name)
            if self._fds.setdefault(name, fd) != fd:  # another thread was faster
                os.close(fd)
        return self._fds[name]


def _left_out(run: Run) -> bool:
    return run.name is None and run.offset == NOWHERE
