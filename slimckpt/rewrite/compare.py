"""Comparing a slim checkpoint with a directory: could the directory be restored from it?"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from slimckpt.analysis.tree import Tree
from slimckpt.errors import DamagedFileError, SlimckptError
from slimckpt.model import Span, Stat, show_path
from slimckpt.progress import Progress
from slimckpt.sources.digest import UNIT, Digests, run_units, units_of
from slimckpt.sources.positioned import FileSource, read_spans_into
from slimckpt.store.index import DROPPED
from slimckpt.store.manifest import FileEntry, Part
from slimckpt.store.reader import Store
from slimckpt.store.spliced import SplicedSource

_STRETCH = UNIT // 4
_BLOCK = 1024 * 1024
_buffers = threading.local()


class Comparison:
    """What would be restored, beside a source tree.

    ``problems`` are the differences, in whole sentences.
    """

    def __init__(
        self,
        store: Store,
        source: Tree,
        executor: Executor,
        progress: Progress,
    ) -> None:
        self.store, self.source = store, source
        self.executor, self.progress = executor, progress
        self.problems: list[str] = []
        self.notes: list[str] = []

    def run(self, ahead: int) -> None:
        """Compare everything, with at most ``ahead`` stretches of files waiting."""
        parts = []
        for number in range(len(self.store.root.parts)):
            try:
                parts.append(self.store.part(number))
            except SlimckptError:
                continue  # reported already
        files = {f.path: f for f in self.source.files}
        stored = {e.file.path: (p, e) for p in parts for e in p.files if e.origin == "file"}
        others = {o.path: o for p in parts for o in p.others}
        links = {link.path: link for link in self.source.symlinks}
        directories = dict(self.source.directories)
        here = _kinds(files, links, directories)
        there = _kinds(
            stored,
            (path for path, other in others.items() if other.target is not None),
            (path for path, other in others.items() if other.target is None),
        )
        self._missing(here.keys() - there, "is in the source but not in the store")
        self._missing(there.keys() - here, "is in the store but not in the source")
        for path in sorted(here.keys() & there):
            if here[path] != there[path]:
                self.problems.append(
                    f"{show_path(path)}: {here[path]} in the source, {there[path]} in the store"
                )
        for path, other in others.items():
            stat = directories.get(path) if other.target is None else None
            if other.target is not None and path in links:
                stat = links[path].stat
                if links[path].target != other.target:
                    self.problems.append(f"{show_path(path)}: points elsewhere")
            if stat is not None:
                self._same_stat(path, stat, other.stat, link=other.target is not None)
        both = [path for path in stored if path in files]
        self.progress.start("comparing", sum(files[path].size for path in both))
        for path in both:
            entry = stored[path][1]
            self._same_stat(path, files[path].stat, entry.file.stat, link=False)
            if files[path].links != entry.file.links:
                self.problems.append(f"{show_path(path)}: its hard links differ")
        pairs = [(path, *stored[path]) for path in both]
        alike = []
        for stretch, difference in run_units(
            self.executor, _compare, self._stretches(pairs), ahead
        ):
            self.progress.advance(stretch.nbytes)
            pair = stretch.pair
            pair.differences += [difference] if difference else []
            pair.left -= 1
            if pair.left:
                continue
            pair.close()
            if pair.differences:
                self.problems.append(min(pair.differences)[1])
            elif pair.entry.dropped:
                alike.append((pair.source.path, pair.part, pair.entry))
        for path, part, entry in alike:
            with self._reported(entry):
                self._compare_dropped(path, part, entry)
        if self.source.xattrs:
            self.notes.append(
                f"{len(self.source.xattrs)} entries of the source have extended attributes or ACLs,"
                " which are not kept"
            )

    def _missing(self, paths: set[bytes], what: str) -> None:
        self.problems += [f"{show_path(path) or '.'} {what}" for path in sorted(paths)]

    def _same_stat(self, path: bytes, source: Stat, stored: Stat, link: bool) -> None:
        for name in ("mtime", "uid", "gid") if link else ("mode", "mtime", "uid", "gid"):
            now, then = getattr(source, name), getattr(stored, name)
            if now != then:
                shown = (f"{now:04o}", f"{then:04o}") if name == "mode" else (now, then)
                self.problems.append(
                    f"{show_path(path) or '.'}: {name} is {shown[0]} in the source, {shown[1]} in"
                    " the store"
                )

    @contextlib.contextmanager
    def _reported(self, entry: FileEntry) -> Iterator[None]:
        """What cannot be read is a problem of its own."""
        try:
            yield
        except SlimckptError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.problems.append(f"{entry.file.label}: {error.strerror}")

    def _stretches(self, pairs: Iterable[tuple[bytes, Part, FileEntry]]) -> Iterator[_Stretch]:
        """All that can be compared byte for byte; one stretch at least of each file."""
        for path, part, entry in pairs:
            with self._reported(entry):
                pair = _Pair(self.store, part, entry, self.source.absolute(path))
                cuts = [
                    (at, min(_STRETCH, start + nbytes - at))
                    for start, nbytes in pair.stored.present
                    for at in range(start, start + nbytes, _STRETCH)
                ]
                pair.left = max(len(cuts), 1)
                for start, nbytes in cuts or [(0, 0)]:
                    yield _Stretch(pair, start, nbytes)

    def _compare_dropped(self, path: bytes, part: Part, entry: FileEntry) -> None:
        """Whether the source's dropped tensors are those that were dropped, by their digests."""
        index = self.store.index(part, entry)
        assert index is not None
        rows = np.flatnonzero(index.places.kind == DROPPED)
        digests = Digests(index.table.payload_nbytes)
        spans = ((row, index.table.spans(row)) for row in rows.tolist())
        units = units_of(path, entry.file.label, spans)
        digests.fill(self.executor, units, self.progress.advance)
        if (digests.digests[rows] != index.places.digest[rows]).any():
            self.problems.append(
                f"{entry.file.label}: a tensor that was dropped is another one in the source"
            )


class _Pair:
    """One file as it is stored and as it is in the source, open while stretches are compared.

    ``left`` is how many stretches are not done; ``differences`` are those found: where, and what
    to say.
    """

    def __init__(self, store: Store, part: Part, entry: FileEntry, path: bytes) -> None:
        self.part, self.entry = part, entry
        self.left = 0
        self.differences: list[tuple[int, str]] = []
        self.stored = SplicedSource(store, part, entry, store.index(part, entry))
        self.source = FileSource(path, entry.file.label)
        if self.source.size != self.stored.size:
            self.close()
            raise DamagedFileError(
                f"{entry.file.label}: {self.source.size} bytes in the source, {self.stored.size}"
                " in the store"
            )

    def close(self) -> None:
        self.stored.close()
        os.close(self.source.fd)


class _Stretch(NamedTuple):
    """``nbytes`` bytes from ``start`` on of both files of a pair."""

    pair: _Pair
    start: int
    nbytes: int


def _compare(stretch: _Stretch) -> tuple[int, str] | None:
    """The first difference in a stretch: where it is, and what to say of it."""
    pair, start, nbytes = stretch
    label = pair.entry.file.label
    if pair.differences and min(pair.differences)[0] < start:
        return None  # one is told of each file, the first
    if not hasattr(_buffers, "both"):
        _buffers.both = bytearray(_BLOCK), bytearray(_BLOCK)
    here, there = _buffers.both
    at = start
    try:
        for at in range(start, start + nbytes, _BLOCK):
            take = min(_BLOCK, start + nbytes - at)
            read_spans_into(pair.source.fd, [Span(at, take)], memoryview(here), label)
            pair.stored.read_into(at, memoryview(there)[:take])
            # Never memoryviews: those are compared number by number.
            if here[:take] != there[:take] if take < _BLOCK else here != there:
                return at, f"{label}: differs between bytes {at} and {at + take}"
    except SlimckptError as error:
        return at, str(error)
    except OSError as error:
        return at, f"{label}: {error.strerror}"
    return None


def _kinds(
    files: Iterable[bytes], links: Iterable[bytes], directories: Iterable[bytes]
) -> dict[bytes, str]:
    return {
        **dict.fromkeys(files, "a file"),
        **dict.fromkeys(links, "a symbolic link"),
        **dict.fromkeys(directories, "a directory"),
    }
