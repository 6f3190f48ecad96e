"""``verify STORE``: is every byte there, and is the source still the same?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slimckpt import formats
from slimckpt.analysis.tree import walk
from slimckpt.errors import SlimckptError, StoreDamagedError, UsageError
from slimckpt.model import ROOT_COPY, ROOT_MANIFEST, Span, show_path
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.compare import Comparison
from slimckpt.rewrite.restore import expected, what_is
from slimckpt.sources.digest import Digests, digest_of, run_units, units_of
from slimckpt.sources.threads import default_jobs
from slimckpt.store.index import DROPPED, IN_SKELETON, STORED, Contents, FileIndex
from slimckpt.store.manifest import Container, FileEntry, Part, refuse_synthetic
from slimckpt.store.reader import Store
from slimckpt.store.spliced import SplicedSource
from slimckpt.store.writer import structure_digest


@dataclass(slots=True)
class VerifyResult:
    """What a check found.

    ``safe`` is set by ``against``: whether the source can be deleted. ``inherited`` counts the
    problems that the source had already: checksums of its own that do not match. ``dropped``
    counts the tensors that were left out on request, ``synthetic`` the entries among ``files`` that
    were made by resharding.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    containers: int = 0
    nbytes_read: int = 0
    inherited: int = 0
    dropped: int = 0
    synthetic: int = 0
    quick: bool = False
    safe: bool | None = None

    @property
    def sound(self) -> bool:
        return not self.problems


def verify(
    store: str | bytes | os.PathLike[str],
    *,
    quick: bool = False,
    against: str | bytes | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: Progress = SILENT,
) -> VerifyResult:
    """Check a slim checkpoint.

    Parameters
    ----------
    quick : bool
        Manifests, indexes, structure and sizes only; payloads are not read.
    against : path, optional
        Also compare every file, byte for byte and with its metadata, with this directory.

    Returns
    -------
    VerifyResult
        All problems found, not only the first.

    Raises
    ------
    NoOriginalError
        ``against`` is given, and the store has entries that were made by resharding.
    """
    if quick and against is not None:
        raise UsageError("quick and against contradict each other: against reads every byte")
    result = VerifyResult(quick=quick)
    try:
        opened = Store(os.fsencode(store), trust_times=quick)
    except StoreDamagedError as error:
        result.problems.append(str(error))
        if against is not None:
            result.safe = False
        return result
    if against is not None:
        refuse_synthetic(_entries(opened), f"compare with {show_path(os.fsencode(against))}")
    with ThreadPoolExecutor(jobs or default_jobs()) as executor:
        try:
            _Verifier(opened, result, executor, progress).run()
            if against is not None:
                comparison = Comparison(opened, walk(os.fsencode(against)), executor, progress)
                comparison.run(2 * (jobs or default_jobs()))
                result.problems += comparison.problems
                result.notes += comparison.notes
                result.safe = len(result.problems) == result.inherited
        finally:
            progress.finish()
    return result


def _entries(store: Store) -> Iterator[FileEntry]:
    """Entries of all parts that can be read."""
    for number in range(len(store.root.parts)):
        with contextlib.suppress(SlimckptError):
            yield from store.part(number).files


class _Verifier:
    def __init__(
        self, store: Store, result: VerifyResult, executor: Executor, progress: Progress
    ) -> None:
        self.store, self.result = store, result
        self.executor, self.progress = executor, progress
        self.contents: dict[bytes, Contents] = {}
        self.other_times = 0
        self.with_checksums: list[tuple[Part, FileEntry]] = []

    def run(self) -> None:
        self.result.problems += self.store.problems
        self._extras()
        parts = list(self._parts())
        containers: dict[bytes, Container] = {}
        for part in parts:
            for container in part.containers:
                if containers.setdefault(container.name, container) != container:
                    self._problem(f"{self.store.label(container.name)}: parts disagree about it")
        self._strays(parts, containers)
        total = sum(c.nbytes for c in containers.values())
        self.progress.start("verifying", total)
        for container in containers.values():
            self._guarded(self._container, container)
        self.result.containers = len(containers)
        for part in parts:
            for entry in part.files:
                self.result.files += entry.origin == "file" or entry.synthetic
                self.result.synthetic += entry.synthetic
                self.result.dropped += len(entry.dropped) if entry.origin == "file" else 0
                self._guarded(self._entry, part, entry)
        self._checksums()
        if self.result.synthetic:
            self.result.notes.append(
                f"{self.result.synthetic} entries were made by resharding: there are no original"
                " files to restore; `slimckpt export` writes files of them"
            )
        if self.result.dropped:
            self.result.notes.append(
                f"{self.result.dropped} tensors were left out when it was slimmed (--drop): they"
                " are nowhere in the store, and files that had them cannot be restored"
            )
        if self.other_times:
            self.result.notes.append(
                f"{self.other_times} files kept whole have another modification time than when"
                " they were slimmed: the store was copied without times (`cp -a` keeps them)."
                " Restoring gives the right ones; reading their tensors in place is refused"
            )

    def _read(self, nbytes: int) -> None:
        self.result.nbytes_read += nbytes
        self.progress.advance(nbytes)

    def _problem(self, text: str) -> None:
        self.result.problems.append(text)

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except SlimckptError as error:
            self._problem(str(error))
        except OSError as error:
            self._problem(f"{show_path(os.fsencode(error.filename or ''))}: {error.strerror}")

    def _parts(self) -> Iterator[Part]:
        for number in range(len(self.store.root.parts)):
            try:
                yield self.store.part(number)
            except SlimckptError as error:
                self._problem(str(error))

    def _extras(self) -> None:
        copy = self.store.label(ROOT_COPY)
        try:
            manifest, found = map(self.store.read_file, (ROOT_MANIFEST, ROOT_COPY))
        except StoreDamagedError as error:
            if str(error) not in self.store.problems:
                self._problem(str(error))
        else:
            if manifest != found and not self.store.problems:
                self._problem(f"{copy}: not the same as slimckpt.json")
        for name, extra in self.store.root.extras.items():
            try:
                data = self.store.read_file(name.encode())
            except StoreDamagedError as error:
                self._problem(str(error))
                continue
            if digest_of(data).hex() != extra["digest"]:
                self._problem(f"{self.store.label(name.encode())}: changed since it was written")

    def _strays(self, parts: list[Part], containers: dict[bytes, Container]) -> None:
        known = {ROOT_MANIFEST, ROOT_COPY, *containers}
        known |= {name.encode() for name in self.store.root.extras}
        known |= {part.name.encode() for part in self.store.root.parts}
        known |= {e.skeleton.name for p in parts for e in p.files if e.skeleton.kind == "whole"}
        strays = []
        for directory, _, names in os.walk(self.store.path):
            inner = os.path.relpath(directory, self.store.path)
            for name in names:
                path = name if inner == b"." else os.path.join(inner, name)
                if path not in known:
                    strays.append(path)
        if strays:
            self.result.notes.append(
                f"{len(strays)} files in the store belong to nothing (first:"
                f" {show_path(min(strays))})"
            )

    def _container(self, container: Container) -> None:
        path, label = self.store.absolute(container.name), self.store.label(container.name)
        self.store.check_size(container.name, container.nbytes)
        contents = self.store.contents(container)
        self.contents[container.name] = contents
        spans = list(map(Span, contents.offset.tolist(), contents.nbytes.tolist()))
        table = Span(container.contents_offset, container.contents_nbytes)
        found = structure_digest(path, container.name, [*spans, table], container.nbytes)
        if found != container.structure:
            self._problem(f"{label}: its HDF5 structure is damaged")
        if self.result.quick:
            return
        digests = Digests(contents.nbytes)
        rows = [(row, (span,)) for row, span in enumerate(spans)]
        digests.fill(self.executor, units_of(path, label, rows), self._read)
        for row in np.flatnonzero((digests.digests != contents.digest).any(axis=1)).tolist():
            self._problem(
                f"{label}: {spans[row].nbytes} bytes at {spans[row].offset} are damaged (expected"
                f" digest {contents.digest[row].tobytes().hex()}, found"
                f" {digests.digests[row].tobytes().hex()})"
            )

    def _entry(self, part: Part, entry: FileEntry) -> None:
        index = self.store.index(part, entry)
        lost = [] if index is None else index.dropped_tensors()
        if index and sorted(map(index.table.path, lost)) != sorted(entry.dropped):
            self._problem(
                f"{entry.file.label}: its index says that {len(lost)} tensors were dropped, its"
                f" entry that {len(entry.dropped)} were"
            )
        runs = self.store.runs(part, entry, index)  # proves that the pieces make up the file
        self._promises(part, entry, index)
        if self.result.quick:
            return
        if entry.skeleton.kind == "whole":
            name = self.store.absolute(entry.skeleton.name)
            digests = Digests([entry.file.size])
            units = units_of(name, entry.file.label, [(0, (Span(0, entry.file.size),))])
            digests.fill(self.executor, units, self._read)
            if os.lstat(name).st_mtime_ns != entry.skeleton.mtime:
                self.other_times += 1
            if digests.digests[0].tobytes().hex() != entry.skeleton.digest:
                self._problem(f"{self.store.label(entry.skeleton.name)}: its bytes are damaged")
        if entry.file.understood and runs and not entry.dropped:
            self.with_checksums.append((part, entry))

    def _checksums(self) -> None:
        """Check files against checksums of their own, many at a time."""
        checked = run_units(self.executor, self._own_checksum, self.with_checksums)
        found = {entry.file.path: problem for (_, entry), problem in checked if problem}
        for _, (text, inherited) in sorted(found.items()):
            self.result.inherited += inherited
            self._problem(text)

    def _own_checksum(self, one: tuple[Part, FileEntry]) -> tuple[str, bool] | None:
        """What is wrong with a file, and whether it was so before it was slimmed."""
        part, entry = one
        try:
            with SplicedSource(self.store, part, entry, self.store.index(part, entry)) as source:
                wrong = formats.check(entry.file.format, source)
        except SlimckptError as error:
            return str(error), False
        except OSError as error:
            return f"{entry.file.label}: {error.strerror}", False
        # The copy is exact, but of a file that was broken already.
        return (wrong, True) if wrong else None

    def _promises(self, part: Part, entry: FileEntry, index: FileIndex | None) -> None:
        """What an entry says lies in a container is what the container says it has."""
        wanted: list[tuple[int, int, int, bytes]] = []
        place = entry.skeleton
        if place.kind == "stored":
            digest = bytes.fromhex(place.digest)
            wanted.append((place.container, place.offset, place.nbytes, digest))
        if index is not None:
            places = index.places
            for row in np.flatnonzero(places.kind == STORED).tolist():
                wanted.append(
                    (
                        int(places.container[row]),
                        int(places.offset[row]),
                        int(index.table.payload_nbytes[row]),
                        places.digest[row].tobytes(),
                    )
                )
        others = (
            index is not None
            and not np.isin(index.places.kind, (STORED, IN_SKELETON, DROPPED)).all()
        )
        stored = {
            name: self._by_offset(name) for name in {part.containers[w[0]].name for w in wanted}
        }
        for container, offset, nbytes, digest in wanted:
            name = part.containers[container].name
            if name in self.contents and stored[name].get(offset) != (nbytes, digest):
                self._problem(
                    f"{entry.file.label}: {nbytes} bytes at {offset} of {show_path(name)} are not"
                    " listed there with the digest its index names"
                )
        if (others or place.kind in ("parts", "fill")) and not self.result.quick:
            self._spliced(part, entry, index)

    def _by_offset(self, name: bytes) -> dict[int, tuple[int, bytes]]:
        contents = self.contents.get(name)
        if contents is None:
            return {}
        digests = [row.tobytes() for row in contents.digest]
        pairs = zip(contents.nbytes.tolist(), digests, strict=True)
        return dict(zip(contents.offset.tolist(), pairs, strict=True))

    def _spliced(self, part: Part, entry: FileEntry, index: FileIndex | None) -> None:
        """Hash what no table of contents lists: fills and payloads in parts."""
        with SplicedSource(self.store, part, entry, index) as source:
            for row, (spans, digest) in enumerate(expected(entry, index)):
                data = b"".join(source.read(*span) for span in spans)
                if digest_of(data) != digest:
                    self._problem(f"{entry.file.label}: {what_is(entry, index, row)} is damaged")


def sentence(result: VerifyResult, against: str) -> str:
    """Whether the source can be deleted, in one sentence."""
    if result.safe and result.dropped:
        return (
            f"{against} is safe to delete if its {result.dropped} dropped tensors may go: every"
            " other byte of it is in the store."
        )
    if result.safe:
        return f"{against} is safe to delete: every file of it is in the store, byte for byte."
    count = len(result.problems)
    return f"{against} is NOT safe to delete: {count} problem{'s' * (count != 1)} (see above)."
