"""Bringing the pages of tensors into the page cache, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from slimckpt.errors import SlimckptError
from slimckpt.sources.backends import WARM, Backend
from slimckpt.sources.threads import READERS, share_out
from slimckpt.views.providers import Stretch

GAP = 128 * 1024
"""Bytes between two tensors that are read with them: one read takes less time than two."""


class Prefetch:
    """Reading ahead, begun by :meth:`TensorView.prefetch` and done by a few threads.

    They end with the process, and when the checkpoint is closed.
    """

    def __init__(
        self, backend: Backend, names: list[str], pieces_of: Callable[[str], list[Stretch]]
    ) -> None:
        self._backend, self._names, self._pieces_of = backend, names, pieces_of
        self._cancelled = False
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, name="slimckpt prefetch", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Prefetch of {len(self._names)} tensors{', done' if self.done else ''}>"

    @property
    def done(self) -> bool:
        """Whether nothing more will be read."""
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Begin no further read. Pages that were brought in stay."""
        self._cancelled = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, ``timeout`` seconds at most; whether it is.

        Raises
        ------
        ClosedError
            The checkpoint was closed before all was read.
        SlimckptError, OSError
            The first that went wrong. What lies in other files was read all the same.
        """
        self._thread.join(timeout)
        if self.done and self._errors:
            raise self._errors[0]
        return self.done

    def _run(self) -> None:
        pieces: list[Stretch] = []
        for name in self._names:
            try:
                pieces += self._pieces_of(name)
            except SlimckptError as error:
                self._errors.append(error)
        broken: set[bytes | None] = set()

        def read(run: Stretch) -> None:
            path, offset, nbytes, size = run
            if self._cancelled or path is None or path in broken:
                return
            try:
                self._backend.warm(path, offset, nbytes, size)
            except Exception as error:  # noqa: BLE001 - raised by wait()
                broken.add(path)
                self._errors.append(error)

        share_out(read, in_blocks(pieces), READERS)


def in_blocks(pieces: Iterable[Stretch]) -> Iterator[Stretch]:
    """Pieces of files in file and offset order, those near each other joined, in reads of at most
    :data:`WARM` bytes that end where a multiple of that lies."""
    at = end = size = 0
    path: bytes | None = None
    kept = (piece for piece in pieces if piece.path is not None)
    for piece in sorted(kept, key=lambda piece: (piece.path or b"", piece.offset)):
        if piece.path != path or piece.offset > end + GAP:
            yield from _cut(path, at, end, size)
            path, at, end, size = piece.path, piece.offset, piece.offset, piece.size
        end = max(end, piece.offset + piece.nbytes)
    yield from _cut(path, at, end, size)


def _cut(path: bytes | None, at: int, end: int, size: int) -> Iterator[Stretch]:
    while at < end:
        stop = min(end, (at // WARM + 1) * WARM)
        yield Stretch(path, at, stop - at, size)
        at = stop
