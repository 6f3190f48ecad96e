"""``restore STORE DST``: the originals, byte for byte, checked before they get their name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from slimckpt import effects
from slimckpt.errors import DroppedTensorError, StoreDamagedError
from slimckpt.model import Span, Stat, StepLabel, show_path
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.select import Chosen, Selection, choose
from slimckpt.rewrite.workplace import check_destination, publish, workplace
from slimckpt.sources.digest import BLOCK, UNIT, Digests, Unit, hash_unit, run_units, units_of
from slimckpt.sources.threads import default_jobs
from slimckpt.store.index import DROPPED, IN_SKELETON, FileIndex
from slimckpt.store.manifest import FileEntry, Part
from slimckpt.store.reader import Store, damage
from slimckpt.store.writer import CopyUnit, copy_unit

_SYNCS = 2
"""Files that are forced to disk at a time."""
_CHECKED_AT_ONCE = 4 * BLOCK
"""Bytes of one unit of checking: few, so that no core is left with much when the others end."""


@dataclass(slots=True)
class RestoreResult:
    """What was restored. Sizes in bytes.

    ``not_restored`` are the chosen files that lost tensors to ``--drop``: path, how many tensors,
    their bytes.
    """

    files: int
    nbytes: int
    not_restored: list[tuple[str, int, int]] = field(default_factory=list)


def restore(
    store: str | bytes | os.PathLike[str],
    destination: str | bytes | os.PathLike[str],
    *,
    steps: Sequence[StepLabel] = (),
    ranks: Sequence[int] = (),
    files: Sequence[str] = (),
    run: str | None = None,
    jobs: int | None = None,
    progress: Progress = SILENT,
) -> RestoreResult:
    """Write the original tree, or a selection of it, to a path that does not exist yet.

    Files of which tensors were dropped cannot be given back; the others are, and the result names
    those.

    Parameters
    ----------
    steps, ranks : sequences
        Restore the files of these, those of the step that belong to no rank, and those that
        belong to no step.
    files : sequence of str
        Globs on original paths (``*`` crosses ``/``); combined with steps and ranks, all must
        hold.

    Raises
    ------
    StoreDamagedError
        What was restored is not what was stored; names the file and the tensor. Nothing is left
        at ``destination``; ``files`` can select the rest.
    UsageError
        The selection matches nothing.
    NoOriginalError
        The selection has entries that were made by resharding; nothing is written.
    DroppedTensorError
        Every file selected has lost tensors; nothing is written.
    """
    opened = Store(os.fsencode(store), trust_times=False)
    target = check_destination(os.fsencode(destination), opened.path)
    chosen = choose(opened, Selection(tuple(steps), tuple(ranks), tuple(files), run), "restore")
    lost = [entry for _, entry, _ in chosen.files if entry.dropped]
    chosen.files = [row for row in chosen.files if not row[1].dropped]
    if lost and not chosen.files:
        raise DroppedTensorError(
            f"nothing to restore: all {len(lost)} files selected have lost tensors to --drop"
            f" (first: {lost[0].file.label}, {len(lost[0].dropped)} tensors); `slimckpt ls` shows"
            " which, and slimckpt.open reads all others"
        )
    with ThreadPoolExecutor(jobs or default_jobs()) as executor, workplace(target) as work:
        try:
            _Restorer(opened, chosen, work, executor, progress).run()
        finally:
            progress.finish()
        for directory in effects.directories_in(work):
            effects.sync_directory(directory)
        for entry in reversed(chosen.directories):
            _give_back(os.path.join(work, entry.path) if entry.path else work, entry.stat)
        publish(work, target, synced=True)
    return RestoreResult(
        len(chosen.files),
        sum(entry.file.size for _, entry, _ in chosen.files),
        [(e.file.label, len(e.dropped), e.dropped_nbytes) for e in lost],
    )


@dataclass(slots=True)
class _Promised:
    """A file that is being checked: the digests of its bodies that the store promises, and those
    found so far."""

    part: Part
    entry: FileEntry
    digests: list[bytes]
    found: Digests


class _Restorer:
    def __init__(
        self,
        store: Store,
        chosen: Chosen,
        work: bytes,
        executor: Executor,
        progress: Progress,
    ) -> None:
        self.store, self.chosen, self.work = store, chosen, work
        self.executor, self.progress = executor, progress

    def run(self) -> None:
        for directory in self.chosen.directories:
            if directory.path:
                effects.make_directories(self._path(directory.path), 0o700)
        total = sum(entry.file.size for _, entry, _ in self.chosen.files)
        self.progress.start("restoring", total)
        with damage():
            for unit, _ in run_units(self.executor, copy_unit, self._copies()):
                self.progress.advance(unit.nbytes)
        self.progress.start("checking", total)
        paths = [self._path(names[0]) for _, _, names in self.chosen.files]
        with ThreadPoolExecutor(_SYNCS) as waiting:  # for the disk, while all cores hash
            synced = [waiting.submit(_sync, path) for path in paths]
            try:
                self._check()
                for future in synced:
                    future.result()
            finally:
                waiting.shutdown(cancel_futures=True)
        for _, entry, names in self.chosen.files:
            _give_back(self._path(names[0]), entry.file.stat)
            for name in names[1:]:
                effects.link(self._path(names[0]), self._path(name))
        for link in self.chosen.symlinks:
            assert link.target is not None
            effects.symlink(link.target, self._path(link.path))
            effects.change_owner(self._path(link.path), link.stat.uid, link.stat.gid)
            effects.change_mtime(self._path(link.path), link.stat.mtime)

    def _path(self, path: bytes) -> bytes:
        return os.path.join(self.work, path)

    def _copies(self) -> Iterator[CopyUnit]:
        checked: set[bytes] = set()
        for part, entry, names in self.chosen.files:
            target = self._path(names[0])
            runs = self.store.runs(part, entry, self.store.index(part, entry))
            sizes = {container.name: container.nbytes for container in part.containers}
            for used in {run.name for run in runs if run.name is not None} - checked:
                if used in sizes:
                    self.store.check_size(used, sizes[used])
                checked.add(used)
            fd = effects.create_file(target)
            try:
                effects.allocate(fd, entry.file.size, target)
                by_source: dict[bytes, list[tuple[int, int, int]]] = {}
                for at, name, offset, nbytes in runs:
                    for cut in range(0, nbytes, UNIT):
                        take = min(UNIT, nbytes - cut)
                        if name is None:
                            effects.write_at(fd, bytes([offset]) * take, at + cut, target)
                        else:
                            by_source.setdefault(name, []).append((offset + cut, at + cut, take))
            finally:
                os.close(fd)
            for name, items in by_source.items():
                yield from self._units(name, target, items)

    def _units(
        self, name: bytes, target: bytes, items: list[tuple[int, int, int]]
    ) -> Iterator[CopyUnit]:
        some: list[tuple[int, int, int]] = []
        filled = 0
        for item in [*items, None]:
            if some and (item is None or filled + item[2] > UNIT or len(some) >= 4096):
                yield CopyUnit(
                    self.store.absolute(name), self.store.label(name), target, tuple(some), filled
                )
                some, filled = [], 0
            if item is not None:
                some.append(item)
                filled += item[2]

    def _check(self) -> None:
        """Read the restored files back and compare them with what the store promises."""
        open_files: dict[bytes, _Promised] = {}
        for unit, hashed in run_units(self.executor, hash_unit, self._to_check(open_files)):
            self.progress.advance(unit.nbytes)
            file = open_files[unit.path]
            file.found.add(hashed)
            if file.found.known.all():
                del open_files[unit.path]
                self._compare(file)

    def _to_check(self, open_files: dict[bytes, _Promised]) -> Iterator[Unit]:
        """Units over all bytes of all files; those begun are put into ``open_files``."""
        for part, entry, names in self.chosen.files:
            path = self._path(names[0])
            wanted = expected(entry, self.store.index(part, entry))
            found = Digests([sum(s.nbytes for s in spans) for spans, _ in wanted])
            open_files[path] = _Promised(part, entry, [digest for _, digest in wanted], found)
            rows = ((row, spans) for row, (spans, _) in enumerate(wanted))
            yield from units_of(path, entry.file.label, rows, _CHECKED_AT_ONCE)

    def _compare(self, file: _Promised) -> None:
        for row, wanted in enumerate(file.digests):
            found = file.found.digests[row].tobytes()
            if found != wanted:
                index = self.store.index(file.part, file.entry)
                raise StoreDamagedError(
                    f"{file.entry.file.label}: {what_is(file.entry, index, row)} is damaged in the"
                    f" store (expected digest {wanted.hex()}, found {found.hex()}); nothing was"
                    " restored. `slimckpt verify` lists all damage; --file restores the other"
                    " files"
                )


def expected(entry: FileEntry, index: FileIndex | None) -> list[tuple[tuple[Span, ...], bytes]]:
    """Spans of a source file, all of its bytes that are stored, with the digest of each: payloads
    stored apart in row order, then the skeleton."""
    found: list[tuple[tuple[Span, ...], bytes]] = []
    if index is not None:
        for row in range(index.table.n_payloads):
            if index.places.kind[row] not in (IN_SKELETON, DROPPED):
                found.append((index.table.spans(row), index.places.digest[row].tobytes()))
        skeleton = tuple(index.skeleton_spans(entry.file.size))
    else:
        skeleton = (Span(0, entry.file.size),)
    found.append((skeleton, bytes.fromhex(entry.skeleton.digest)))
    return found


def what_is(entry: FileEntry, index: FileIndex | None, row: int) -> str:
    """The name of row ``row`` of :func:`expected`, for people."""
    if index is None:
        return "its content"
    apart = (~np.isin(index.places.kind, (IN_SKELETON, DROPPED))).nonzero()[0].tolist()
    if row >= len(apart):
        return "its skeleton"
    starts, rows = index.table.tensors_of_payloads()
    names = [index.table.name(t) for t in rows[starts[apart[row]] : starts[apart[row] + 1]]]
    return "tensor " + ", ".join(show_path(n.encode()) for n in names[:3]) if names else "a payload"


def _sync(path: bytes) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        effects.sync(fd, path)
    finally:
        os.close(fd)


def _give_back(path: bytes, stat: Stat) -> None:
    effects.change_owner(path, stat.uid, stat.gid)
    with contextlib.suppress(PermissionError):
        effects.change_mode(path, stat.mode)
    effects.change_mtime(path, stat.mtime)
