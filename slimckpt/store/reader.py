"""Opening a slim checkpoint: manifests, indexes, and where every byte of a file lies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from slimckpt.errors import (
    NotAStoreError,
    SlimckptError,
    StoreDamagedError,
    UnfaithfulSourceError,
)
from slimckpt.model import ROOT_COPY, ROOT_MANIFEST, Span, show_path
from slimckpt.sources.digest import digest_of
from slimckpt.sources.positioned import open_for_reading
from slimckpt.store.index import FILLED, LEFT_OUT, SKELETON, STORED, Contents, FileIndex, Piece
from slimckpt.store.manifest import Container, FileEntry, Part, Place, Root


@contextlib.contextmanager
def damage() -> Iterator[None]:
    """What would be an unfaithful source elsewhere is damage where a store is read."""
    try:
        yield
    except UnfaithfulSourceError as error:
        raise StoreDamagedError(f"{error}; the store is damaged") from None


NOWHERE = -1


class Run(NamedTuple):
    """Bytes of the store that are bytes of a source file: ``nbytes`` at ``offset`` of ``name``.

    ``name`` is ``None`` where every byte is ``offset``, or where the bytes were left out and are
    nowhere: ``offset`` is then :data:`NOWHERE`. ``at`` is the place in the source file.
    """

    at: int
    name: bytes | None
    offset: int
    nbytes: int


class Store:
    """A slim checkpoint, opened: the root manifest, and parts as they are asked for.

    With ``trust_times=False`` a file kept whole may have another mtime (a copy of the store that
    did not keep times): for callers that check its bytes.
    """

    def __init__(self, path: bytes, *, trust_times: bool = True) -> None:
        self.path = os.path.abspath(path)
        self._trust_times = trust_times
        self.problems: list[str] = []
        self.root = self._read_root()
        self._parts: dict[int, Part] = {}

    def absolute(self, name: bytes) -> bytes:
        return os.path.join(self.path, name)

    def label(self, name: bytes) -> str:
        return show_path(self.absolute(name))

    def part(self, number: int) -> Part:
        """Part ``number``, its digest checked."""
        if number not in self._parts:
            named = self.root.parts[number]
            name = named.name.encode()
            data = self.read_file(name)
            if len(data) != named.nbytes or digest_of(data).hex() != named.digest:
                raise StoreDamagedError(
                    f"{self.label(name)}: {len(data)} bytes that are not the {named.nbytes} the"
                    " root manifest names; the part is damaged"
                )
            self._parts[number] = Part.unpack(data, self.label(name))
        return self._parts[number]

    def parts(self) -> Iterator[Part]:
        for number in range(len(self.root.parts)):
            yield self.part(number)

    def read_file(self, name: bytes) -> bytes:
        fd = self.open_file(name)
        try:
            return b"".join(iter(lambda: os.read(fd, 2**20), b""))
        except OSError as error:
            raise StoreDamagedError(f"{self.label(name)}: {error.strerror}") from None
        finally:
            os.close(fd)

    def open_file(self, name: bytes) -> int:
        """The descriptor of a file of the store, which must be a regular one."""
        with damage():
            return open_for_reading(self.absolute(name), self.label(name))

    def check_size(self, name: bytes, nbytes: int) -> None:
        """A container must be a regular file of the length the manifest says."""
        fd = self.open_file(name)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size != nbytes:
            raise StoreDamagedError(
                f"{self.label(name)}: {size} bytes, expected {nbytes}; it looks"
                f" {'truncated' if size < nbytes else 'changed'}"
            )

    def read_range(self, name: bytes, offset: int, nbytes: int) -> bytes:
        """Bytes of a file of the store; fewer where it ends."""
        fd = self.open_file(name)
        try:
            return os.pread(fd, nbytes, offset)
        except OSError as error:
            raise StoreDamagedError(f"{self.label(name)}: {error.strerror}") from None
        finally:
            os.close(fd)

    def index(self, part: Part, entry: FileEntry) -> FileIndex | None:
        """The index of a file, its digest checked; ``None`` where it has none."""
        place = entry.index
        if place is None:
            return None
        container = self.container(part, place.container, entry)
        data = self.read_range(container.name, place.offset, place.nbytes)
        if digest_of(data).hex() != place.digest:
            raise StoreDamagedError(
                f"{self.label(container.name)}: the index of {entry.file.label} is damaged"
            )
        return FileIndex.unpack(data, entry.file.label)

    def contents(self, container: Container) -> Contents:
        """The table of contents of a container, its digest checked."""
        data = self.read_range(container.name, container.contents_offset, container.contents_nbytes)
        if digest_of(data).hex() != container.contents_digest:
            raise StoreDamagedError(
                f"{self.label(container.name)}: its table of contents is damaged"
            )
        return Contents.unpack(data, self.label(container.name))

    def container(self, part: Part, number: int, entry: FileEntry) -> Container:
        if not 0 <= number < len(part.containers):
            raise StoreDamagedError(
                f"{entry.file.label}: lies in container {number}, the part has"
                f" {len(part.containers)}"
            )
        return part.containers[number]

    def pieces(
        self, part: Part, entry: FileEntry, index: FileIndex, payload: int
    ) -> list[tuple[bytes | None, int, int]]:
        """Where a payload is: ``(file of the store, offset, nbytes)``, as in a :class:`Run`."""
        found: list[tuple[bytes | None, int, int]] = []
        for piece in index.pieces(payload, entry.file.label):
            if piece.container == SKELETON:
                found += self._cut_skeleton(part, entry, piece)
            else:
                found.append(self._locate(part, entry, piece))
        return found

    def runs(self, part: Part, entry: FileEntry, index: FileIndex | None) -> list[Run]:
        """All bytes of a source file, in file order: the splice that restores it.

        Raises
        ------
        StoreDamagedError
            The spans and the skeleton do not make up the file's length.
        """
        size = entry.file.size
        runs: list[Run] = []
        if index is not None:
            runs, others = _in_one_piece(part, index)
            for row in others:
                pieces = index.pieces(row, entry.file.label)
                if pieces and pieces[0].container != SKELETON:
                    located = [self._locate(part, entry, piece) for piece in pieces]
                    runs += _align(index.table.spans(row), located)
        spans = index.skeleton_spans(size) if index else [Span(0, size)] if size else []
        rest = self.skeleton_places(part, entry)
        runs += _align(spans, rest)
        runs.sort(key=itemgetter(0))
        at = 0
        for run in runs:
            if run.at != at:
                break
            at += run.nbytes
        if at != size or sum(n for _, _, n in rest) != sum(s.nbytes for s in spans):
            raise StoreDamagedError(
                f"{entry.file.label}: what is stored of it does not make up its {size} bytes"
            )
        return runs

    def skeleton_places(self, part: Part, entry: FileEntry) -> list[tuple[bytes | None, int, int]]:
        """Where the skeleton of a file is, in stream order, as in a :class:`Run`."""
        place = entry.skeleton
        if place.nbytes == 0:
            return []
        if place.kind == "stored":
            pieces = [Piece(place.container, place.offset, place.nbytes)]
        elif place.kind == "fill":
            pieces = [Piece(FILLED, place.byte, place.nbytes)]
        elif place.kind == "parts":
            pieces = [Piece(*p) for p in place.parts]
        elif place.kind == "whole":
            self.check_whole(entry, place)
            return [(place.name, 0, place.nbytes)]
        else:
            raise StoreDamagedError(
                f"{entry.file.label}: stored in a way ({place.kind}) that this slimckpt does not"
                " know; a newer one wrote it"
            )
        return [self._locate(part, entry, piece) for piece in pieces]

    def check_whole(self, entry: FileEntry, place: Place) -> None:
        """A file kept whole must be as it was when it was slimmed."""
        self.check_size(place.name, place.nbytes)
        found = os.stat(self.absolute(place.name), follow_symlinks=False)
        if self._trust_times and found.st_mtime_ns != place.mtime:
            raise StoreDamagedError(
                f"{self.label(place.name)}: modified at {found.st_mtime_ns} ns, expected"
                f" {place.mtime} ns: {entry.file.label} was changed after it was slimmed, or the"
                " store was copied without times. `slimckpt restore` checks its bytes instead"
            )

    def _locate(self, part: Part, entry: FileEntry, piece: Piece) -> tuple[bytes | None, int, int]:
        if piece.container == FILLED:
            if not 0 <= piece.offset <= 255:
                raise StoreDamagedError(
                    f"{entry.file.label}: {piece.offset} is no byte to fill with"
                )
            return None, piece.offset, piece.nbytes
        if piece.container == LEFT_OUT:
            return None, NOWHERE, piece.nbytes
        container = self.container(part, piece.container, entry)
        if piece.offset < 0 or piece.offset + piece.nbytes > container.nbytes:
            raise StoreDamagedError(
                f"{entry.file.label}: bytes {piece.offset} to {piece.offset + piece.nbytes} of"
                f" {show_path(container.name)}, which has {container.nbytes}"
            )
        return container.name, piece.offset, piece.nbytes

    def _cut_skeleton(
        self, part: Part, entry: FileEntry, piece: Piece
    ) -> list[tuple[bytes | None, int, int]]:
        found = []
        start, wanted = piece.offset, piece.nbytes
        for name, offset, nbytes in self.skeleton_places(part, entry):
            if start >= nbytes:
                start -= nbytes
                continue
            take = min(nbytes - start, wanted)
            found.append((name, offset if name is None else offset + start, take))
            wanted, start = wanted - take, 0
            if not wanted:
                return found
        raise StoreDamagedError(f"{entry.file.label}: its skeleton is shorter than its index says")

    def _read_root(self) -> Root:
        failures: list[SlimckptError] = []
        for name in (ROOT_MANIFEST, ROOT_COPY):
            try:
                root = Root.unpack(self.read_file(name), self.label(name))
            except SlimckptError as error:
                failures.append(error)
                continue
            self.problems += [str(failure) for failure in failures]
            return root
        if not any(os.path.lexists(self.absolute(name)) for name in (ROOT_MANIFEST, ROOT_COPY)):
            raise NotAStoreError(
                f"{show_path(self.path)} is not a slim checkpoint: it has no slimckpt.json"
            )
        raise failures[0]


def _in_one_piece(part: Part, index: FileIndex) -> tuple[list[Run], list[int]]:
    """The runs of payloads that are one span and stored as one piece, as nearly all are, and the
    rows of all others; what is said to lie where nothing can is one of these."""
    places, columns = index.places, index.table.columns
    sizes = np.array([container.nbytes for container in part.containers] or [0])
    ends, nbytes = columns["span_end"], columns["payload_nbytes"]
    known = places.container < len(part.containers)
    room = sizes[np.where(known, places.container, 0)]
    simple = known & (places.kind == STORED) & (np.diff(ends, prepend=0) == 1) & (nbytes > 0)
    simple &= (places.offset >= 0) & (places.offset <= room - nbytes)
    simple[simple] = columns["span_nbytes"][ends[simple] - 1] == nbytes[simple]
    names = [container.name for container in part.containers]
    runs = map(
        Run,
        columns["span_offset"][ends[simple] - 1].tolist(),
        [names[number] for number in places.container[simple].tolist()],
        places.offset[simple].tolist(),
        nbytes[simple].tolist(),
    )
    return list(runs), np.flatnonzero(~simple).tolist()


def _align(
    spans: list[Span] | tuple[Span, ...], places: list[tuple[bytes | None, int, int]]
) -> list[Run]:
    """Pair a stream cut in spans with the same stream cut in places."""
    found = []
    queue = list(reversed(places))
    for offset, left in spans:
        while left and queue:
            name, at, nbytes = queue.pop()
            take = min(left, nbytes)
            found.append(Run(offset, name, at, take))
            if take < nbytes:
                queue.append((name, at if name is None else at + take, nbytes - take))
            offset, left = offset + take, left - take
    return found
