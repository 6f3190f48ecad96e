"""Some entries of a slim checkpoint, to be written as one that stands alone, and what they need.

Nothing is decoded; :mod:`~slimckpt.rewrite.excerpt_writing` copies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from slimckpt.model import StepLabel
from slimckpt.rewrite.select import Selection, linked_paths, select
from slimckpt.store.index import DROPPED, FILL, IN_SKELETON, FileIndex
from slimckpt.store.manifest import FileEntry, OtherEntry, Part
from slimckpt.store.reader import Store

Where = tuple[bytes | None, int, int]
"""``(file of the store, offset, nbytes)``, as in a :class:`~slimckpt.store.reader.Run`."""


class Key(NamedTuple):
    """What makes two bodies equal."""

    nbytes: int
    digest: bytes


@dataclass(slots=True)
class _Content:
    """A body to be copied: where it is, which files have it, and the first of these with the row
    of its payload (-1: its skeleton)."""

    pieces: tuple[Where, ...]
    row: int
    files: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _File:
    """An original file, or another entry, with all its names that are wanted.

    ``entry`` is as it will be, but for places; ``further`` are those of names with a part of their
    own. ``part`` and ``source`` are where its body is described.
    """

    part: Part
    source: FileEntry
    entry: FileEntry
    number: int
    further: list[tuple[int, FileEntry]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.source.skeleton.kind == "whole"

    @property
    def several_parts(self) -> bool:
        return any(number != self.number for number, _ in self.further)


class Excerpt:
    """Some entries of a store, and what they need. Making it writes nothing.

    Raises
    ------
    UsageError, UnsupportedStoreError, StoreDamagedError
        As of :func:`~slimckpt.rewrite.select.select`, and of reading indexes.
    """

    def __init__(self, store: Store, selection: Selection) -> None:
        self.store = store
        self.parts = list(store.parts())
        chosen = select(store, selection)
        self.directories: list[OtherEntry] = chosen.directories
        self._others = {other.path for other in [*chosen.directories, *chosen.symlinks]}
        self.root = next(other.stat for other in self.directories if other.path == b"")
        self.files = _files(self.parts, selection)
        self.contents: dict[Key, _Content] = {}
        for number, file in enumerate(self.files):
            if not file.whole:
                self._gather(number, file)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is copied, each once."""
        whole = sum(file.source.file.size for file in self.files if file.whole)
        return whole + sum(key.nbytes for key in self.contents)

    @property
    def ranks(self) -> list[int]:
        entries = [e for file in self.files for e in (file.entry, *(e for _, e in file.further))]
        return sorted({e.file.role.rank for e in entries if e.file.role.rank is not None})

    @property
    def steps(self) -> list[StepLabel]:
        numbers = {n for file in self.files for n in (file.number, *(n for n, _ in file.further))}
        labels = [self.parts[number].step for number in sorted(numbers)]
        return [label for label in dict.fromkeys(labels) if label is not None]

    def others_of(self, part: Part) -> list[OtherEntry]:
        return [other for other in part.others if other.path in self._others]

    def _gather(self, number: int, file: _File) -> None:
        index = self.store.index(file.part, file.source)
        self.store.runs(file.part, file.source, index)  # proves that all pieces are known and fit
        if index is not None:
            for row in stored_apart(index):
                key = key_of(index, row)
                if key not in self.contents:
                    found = self.store.pieces(file.part, file.source, index, row)
                    self.contents[key] = _Content(tuple(found), row)
                self._use(key, number)
        place = file.source.skeleton
        if place.nbytes:
            key = Key(place.nbytes, bytes.fromhex(place.digest))
            if key not in self.contents:
                found = self.store.skeleton_places(file.part, file.source)
                self.contents[key] = _Content(tuple(found), -1)
            self._use(key, number)

    def _use(self, key: Key, number: int) -> None:
        files = self.contents[key].files
        if not files or files[-1] != number:
            files.append(number)


def _files(parts: list[Part], selection: Selection) -> list[_File]:
    """The files that are wanted, each with its names."""
    elsewhere = linked_paths(parts)
    bodies: dict[bytes, list[tuple[int, FileEntry, list[bytes]]]] = {}
    for number, part in enumerate(parts):
        if selection.in_part(part):
            for entry in part.files:
                names = selection.names(entry, elsewhere)
                if names:
                    body = entry.file.path if entry.body is None else entry.body
                    bodies.setdefault(body, []).append((number, entry, names))
    found = []
    for listed in bodies.values():
        # Where the entry of the body itself is not wanted, the first further name takes its place.
        listed.sort(key=lambda one: (one[1].origin == "link", one[1].file.path))
        number, source, _ = listed[0]
        names = sorted({name for _, _, names in listed for name in names} - {source.file.path})
        main = replace(
            source,
            file=replace(source.file, links=tuple(names)),
            origin="file" if source.origin == "link" else source.origin,
            body=None,
        )
        further = [(other, replace(entry, body=source.file.path)) for other, entry, _ in listed[1:]]
        found.append(_File(parts[number], source, main, number, further))
    return found


def stored_apart(index: FileIndex) -> list[int]:
    """Payloads that are stored apart and have bytes of their own."""
    kinds = index.places.kind
    taken = ~np.isin(kinds, (IN_SKELETON, FILL, DROPPED)) & (index.table.payload_nbytes > 0)
    found: list[int] = np.flatnonzero(taken).tolist()
    return found


def key_of(index: FileIndex, row: int) -> Key:
    return Key(int(index.table.payload_nbytes[row]), index.places.digest[row].tobytes())
