"""One open file, read by position."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol

from slimckpt.errors import DamagedFileError, UnfaithfulSourceError
from slimckpt.model import Span, show_path

WINDOW = 64 * 1024
_AHEAD = 1024 * 1024


class ByteSource(Protocol):
    """What a format module reads: a file on disk, or one spliced together from a store."""

    label: str
    size: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """All ``nbytes`` bytes at ``offset``, or :class:`~slimckpt.errors.DamagedFileError`."""


class Section:
    """``nbytes`` bytes at ``start`` of another source, as a source of their own."""

    def __init__(self, source: ByteSource, start: int, nbytes: int) -> None:
        self.source, self.start = source, start
        self.label, self.size = source.label, nbytes

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DamagedFileError(
                f"{self.label}: bytes {offset} to {offset + nbytes} are asked for of a part that"
                f" has {self.size}; it looks truncated"
            )
        return self.source.read(self.start + offset, nbytes)


class FileSource:
    """A source file opened for reading: exact reads by position, with a small window.

    Format modules walk headers with :meth:`read`; reads of up to 64 KiB are served from a window
    around them, so that walking twenty thousand small records costs few system calls.

    Parameters
    ----------
    path : bytes
        Opened without following a symbolic link.
    label : str, optional
        What errors call the file.
    """

    def __init__(self, path: bytes, label: str | None = None) -> None:
        self.path = path
        self.label = show_path(path) if label is None else label
        self.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        self.size = os.fstat(self.fd).st_size
        self._window = b""
        self._window_at = 0

    def __enter__(self) -> FileSource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.fd)

    def read(self, offset: int, nbytes: int) -> bytes:
        """``nbytes`` bytes at ``offset``, all of them.

        Raises
        ------
        DamagedFileError
            The range is not inside the file.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DamagedFileError(
                f"{self.label}: bytes {offset} to {offset + nbytes} are asked for, but the file"
                f" has {self.size}; it looks truncated"
            )
        start = offset - self._window_at
        if start < 0 or start + nbytes > len(self._window):
            if nbytes > WINDOW // 2:
                return self._exactly(offset, nbytes)
            # After a far jump, who knows whether more is wanted than a page.
            near = 0 <= start <= len(self._window) + WINDOW // 4
            ahead = WINDOW if near else max(nbytes, 4096)
            self._window = self._exactly(offset, min(ahead, self.size - offset))
            self._window_at, start = offset, 0
        return self._window[start : start + nbytes]

    def _exactly(self, offset: int, nbytes: int) -> bytes:
        data = os.pread(self.fd, nbytes, offset)
        while len(data) < nbytes:
            more = os.pread(self.fd, nbytes - len(data), offset + len(data))
            if not more:
                raise UnfaithfulSourceError(
                    f"{self.label}: the file ended at byte {offset + len(data)} while it was read,"
                    f" where {self.size} bytes were found before; it is being written"
                )
            data += more
        return data


def open_for_reading(path: bytes, label: str) -> int:
    """The descriptor of a regular file; never waits for the other end of a FIFO.

    Raises
    ------
    UnfaithfulSourceError
        The file is gone, cannot be read, or is no regular file any more.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UnfaithfulSourceError(
            f"{label}: {error.strerror}; it was there before, and could be read"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnfaithfulSourceError(f"{label}: it is no regular file any more")
    return fd


def read_spans_into(fd: int, spans: Sequence[Span], buffer: memoryview, label: str) -> int:
    """Fill ``buffer`` with the bytes of ``spans``, one after another.

    Returns
    -------
    int
        Bytes read: the total of the spans, which must fit.

    Raises
    ------
    UnfaithfulSourceError
        The file ends inside a span.
    """
    at = 0
    for offset, nbytes in spans:
        done = 0
        while done < nbytes:
            got = os.preadv(fd, [buffer[at + done : at + nbytes]], offset + done)
            if not got:
                raise UnfaithfulSourceError(
                    f"{label}: the file ends at byte {offset + done}, {nbytes - done} bytes before"
                    " the end of what was found in it; it was cut or is being written"
                )
            done += got
        at += nbytes
    return at


class Window:
    """Short spans of an open file, read a MiB at a time: for many small payloads in a row."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._data = b""
        self._at = 0

    def read(self, span: Span, label: str) -> memoryview:
        """The bytes of a span; valid until the next call."""
        start = span.offset - self._at
        if start < 0 or start + span.nbytes > len(self._data):
            self._data = os.pread(self._fd, max(_AHEAD, span.nbytes), span.offset)
            self._at, start = span.offset, 0
            if len(self._data) < span.nbytes:
                buffer = bytearray(span.nbytes)
                read_spans_into(self._fd, [span], memoryview(buffer), label)
                self._data = bytes(buffer)
        return memoryview(self._data)[start : start + span.nbytes]


def cut(spans: Iterable[Span], start: int, nbytes: int) -> list[Span]:
    """The part of a stream of spans from byte ``start`` of the stream on, ``nbytes`` long."""
    found = []
    for offset, length in spans:
        if nbytes <= 0:
            break
        if start >= length:
            start -= length
            continue
        take = min(length - start, nbytes)
        found.append(Span(offset + start, take))
        nbytes -= take
        start = 0
    return found
