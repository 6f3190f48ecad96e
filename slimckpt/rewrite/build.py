"""Building a store in a work directory, and checking every byte of it before it is published."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from slimckpt import effects
from slimckpt.analysis.dropping import dropped_tensors
from slimckpt.errors import UnfaithfulSourceError
from slimckpt.model import Span, Stat, show_path
from slimckpt.progress import Progress
from slimckpt.rewrite.access import Access, Guard, protect
from slimckpt.rewrite.plan import MAX_LINKS, PlannedPart
from slimckpt.sources.digest import UNIT, Digests, digest_of, run_units, units_of
from slimckpt.sources.positioned import open_for_reading
from slimckpt.store.container import Link
from slimckpt.store.index import DROPPED, IN_SKELETON, STORED, FileIndex, Places
from slimckpt.store.manifest import Container, FileEntry, IndexPlace, Part, Place
from slimckpt.store.writer import (
    Body,
    CopyUnit,
    Draft,
    copy_unit,
    links_of,
    sync_file,
    write_manifests,
)

if TYPE_CHECKING:
    from slimckpt.rewrite.slim import Prepared


def build(prepared: Prepared, work: bytes, executor: Executor, progress: Progress) -> None:
    """Write the whole store into ``work``; every container and whole file is read back."""
    _Builder(prepared, work, executor, progress).run()


class _Builder:
    def __init__(
        self, prepared: Prepared, work: bytes, executor: Executor, progress: Progress
    ) -> None:
        self.bodies, self.digests = prepared.bodies, prepared.digests
        self.sharing, self.plan = prepared.sharing, prepared.plan
        self.tree, self.wholes = prepared.tree, prepared.wholes
        self.work, self.executor, self.progress = work, executor, progress
        self.files = self.bodies.catalog.files
        n_classes = int(self.sharing.class_of.max(initial=-1)) + 1
        self.class_container = np.full(n_classes, -1, np.int64)
        self.class_offset = np.zeros(n_classes, np.int64)
        for class_, container in self.plan.container_of.items():
            self.class_container[class_] = container
        self.small_skeletons: dict[int, tuple[int, int]] = {}
        self.drafts: list[Draft] = []
        self.linked = {number for part in self.plan.parts for number, _, _ in part.links}
        self.index_data: dict[int, bytes] = {}
        self.index_at = {n: at for c in self.plan.containers for at, n in enumerate(c.indexes)}
        self.dropped = dropped_tensors(self.bodies, self.sharing)
        self._tensors = self.bodies.catalog.table.tensors_of_payloads()

    def run(self) -> None:
        self._directories()
        self._lay_out()
        self._copy()
        drafted = [self._part(planned) for planned in self.plan.parts]
        containers = [
            draft.finish([self.index_data[n] for n in planned.indexes])
            for draft, planned in zip(self.drafts, self.plan.containers, strict=True)
        ]
        for part, numbers in drafted:
            part.containers = [containers[number] for number in numbers]
        self._check(containers)
        self._protect()
        self._write_manifests([part for part, _ in drafted])

    def _directories(self) -> None:
        names = [c.name for c in self.plan.containers] + list(self.plan.whole.values())
        for directory in sorted({os.path.dirname(name) for name in names}):
            effects.make_directories(os.path.join(self.work, directory))

    def _lay_out(self) -> None:
        for number, planned in enumerate(self.plan.containers):
            draft = Draft(
                os.path.join(self.work, planned.name),
                planned.name,
                [self._body(body) for body in planned.bodies],
                [self.plan.index_nbytes[n] for n in planned.indexes],
            )
            self.drafts.append(draft)
            links: list[Link] = []
            for file in planned.indexes:
                if file not in self.plan.whole:
                    links += self._links(file, number)
            draft.lay_out(links)
            for body, offset in zip(planned.bodies, draft.body_offsets, strict=True):
                if self.bodies.candidate[body]:
                    self.class_offset[self.sharing.class_of[body]] = offset
                else:
                    self.small_skeletons[body] = (number, offset)

    def _body(self, body: int) -> Body:
        found = Body(
            int(self.bodies.nbytes[body]),
            self.digests.digests[body].tobytes(),
            self.digests.blocks_of(body),
        )
        if body < self.bodies.n_payloads:
            self._type(found, body)
        return found

    def _type(self, found: Body, payload: int) -> None:
        starts, rows = self._tensors
        found.show_as(self.bodies.catalog.table, rows[starts[payload] : starts[payload + 1]])

    def _links(self, file: int, container: int) -> list[Link]:
        rows = self.bodies.catalog.payloads(file)
        depth = self.plan.containers[container].name.count(b"/")
        targets: list[tuple[str, bytes | None] | None] = []
        for body in range(rows.start, rows.stop):
            where = int(self.class_container[self.sharing.class_of[body]])
            if not self.bodies.apart[body] or where < 0:
                targets.append(None)
                continue
            other = None if where == container else self.plan.containers[where].name
            relative = None if other is None else b"../" * depth + other
            targets.append((self.digests.digests[body].tobytes().hex(), relative))
        return links_of(self.bodies.catalog.table_of(file), targets, MAX_LINKS)

    def _copy(self) -> None:
        total = sum(b.nbytes for d in self.drafts for b in d.bodies)
        total += sum(int(self.bodies.sizes[n]) for n in self.plan.whole)
        self.progress.start("copying", total)
        for unit, _ in run_units(self.executor, copy_unit, self._copy_units()):
            self.progress.advance(unit.nbytes)

    def _copy_units(self) -> Iterator[CopyUnit]:
        for draft, planned in zip(self.drafts, self.plan.containers, strict=True):
            items: list[tuple[int, int, int]] = []
            filled, last = 0, -1
            for body, offset in zip(planned.bodies, draft.body_offsets, strict=True):
                file = int(self.bodies.file[body])
                if items and (file != last or filled >= UNIT or len(items) >= 4096):
                    yield self._copy_unit(last, draft.path, items, filled)
                    items, filled = [], 0
                last = file
                at = offset
                for start, nbytes in self.bodies.spans(body):
                    for cut in range(0, nbytes, UNIT):
                        take = min(UNIT, nbytes - cut)
                        if filled + take > UNIT and items:
                            yield self._copy_unit(file, draft.path, items, filled)
                            items, filled = [], 0
                        items.append((start + cut, at, take))
                        at, filled = at + take, filled + take
            if items:
                yield self._copy_unit(last, draft.path, items, filled)
        for number, name in self.plan.whole.items():
            yield from self._copy_whole(number, os.path.join(self.work, name))

    def _copy_unit(
        self, file: int, target: bytes, items: list[tuple[int, int, int]], nbytes: int
    ) -> CopyUnit:
        label = self.files[file].label
        return CopyUnit(self.bodies.path(file), label, target, tuple(items), nbytes)

    def _copy_whole(self, number: int, target: bytes) -> Iterator[CopyUnit]:
        size = int(self.bodies.sizes[number])
        fd = effects.create_file(target)
        try:
            source = open_for_reading(self.bodies.path(number), self.files[number].label)
            try:
                if effects.clone(source, fd, target):
                    return
            finally:
                os.close(source)
            effects.allocate(fd, size, target)
        finally:
            os.close(fd)
        for at in range(0, size, UNIT):
            take = min(UNIT, size - at)
            yield self._copy_unit(number, target, [(at, at, take)], take)

    def _part(self, planned: PlannedPart) -> tuple[Part, list[int]]:
        """A part's entries, and the numbers of the containers that they use, in its order."""
        local: dict[int, int] = {}
        if planned.links or not self.linked.isdisjoint(planned.files):
            local = {container: place for place, container in enumerate(self._common())}

        def number_of(container: int) -> int:
            return local.setdefault(container, len(local))

        part = Part(planned.run, planned.step, others=planned.others)
        for number in planned.files:
            entry = FileEntry(self.files[number], self._skeleton(number, number_of))
            self._note_dropped(entry, number)
            if number in self.plan.index_container:
                entry.index = self._index(number, number_of)
            part.files.append(entry)
        for number, path, role in planned.links:
            file = replace(self.files[number], path=path, role=role, links=())
            entry = FileEntry(file, self._skeleton(number, number_of), None, "link")
            entry.body = self.files[number].path
            self._note_dropped(entry, number)
            if number in self.plan.index_container:
                entry.index = self._index(number, number_of)
            part.files.append(entry)
        return part, list(local)

    def _note_dropped(self, entry: FileEntry, number: int) -> None:
        catalog = self.bodies.catalog
        first, last = np.searchsorted(self.dropped, catalog.tensor_start[number : number + 2])
        entry.dropped = tuple(map(catalog.table.path, self.dropped[first:last].tolist()))
        rows = catalog.payloads(number)
        entry.dropped_nbytes = int(self.bodies.nbytes[rows][self.sharing.dropped[rows]].sum())

    def _common(self) -> list[int]:
        """Containers of files that several parts list: numbered alike in each, since the file has
        one index."""
        used = {self.plan.index_container[n] for n in self.linked if n in self.plan.index_container}
        for number in self.linked - self.plan.whole.keys():
            rows = self.bodies.catalog.payloads(number)
            skeleton = self.bodies.skeleton(number)
            classes = self.sharing.class_of[[*range(rows.start, rows.stop), skeleton]]
            used.update(self.class_container[classes].tolist())
            if skeleton in self.small_skeletons:
                used.add(self.small_skeletons[skeleton][0])
        return sorted(used - {-1})

    def _skeleton(self, number: int, number_of: Callable[[int], int]) -> Place:
        if number in self.plan.whole:
            return Place(
                "whole",
                int(self.bodies.sizes[number]),
                self.wholes.digests[number].tobytes().hex(),
                name=self.plan.whole[number],
                mtime=self.files[number].stat.mtime,
                blocks=self.wholes.blocks_of(number),
            )
        body = self.bodies.skeleton(number)
        digest = self.digests.digests[body].tobytes().hex()
        nbytes = int(self.bodies.nbytes[body])
        if nbytes == 0:
            return Place("fill", 0, digest)
        if body in self.small_skeletons:
            container, offset = self.small_skeletons[body]
        else:
            class_ = self.sharing.class_of[body]
            container, offset = int(self.class_container[class_]), int(self.class_offset[class_])
        return Place("stored", nbytes, digest, number_of(container), offset)

    def _index(self, number: int, number_of: Callable[[int], int]) -> IndexPlace:
        rows = self.bodies.catalog.payloads(number)
        table = self.bodies.catalog.table_of(number)
        places = Places.none(table.n_payloads)
        places.digest = self.digests.digests[rows]
        if number not in self.plan.whole:
            dropped = self.sharing.dropped[rows]
            apart = self.bodies.apart[rows] & ~dropped
            classes = self.sharing.class_of[rows]
            used = self.class_container[classes]
            places.kind = np.where(apart, STORED, IN_SKELETON).astype(np.uint8)
            places.kind[dropped] = DROPPED
            places.offset = np.where(apart, self.class_offset[classes], 0)
            for container in np.unique(used[apart]).tolist():
                places.container[apart & (used == container)] = number_of(container)
        data = FileIndex(table, places).pack()
        self.index_data[number] = data
        home = self.plan.index_container[number]
        offset = self.drafts[home].index_offsets[self.index_at[number]]
        return IndexPlace(number_of(home), offset, len(data), digest_of(data).hex())

    def _check(self, containers: Sequence[Container]) -> None:
        """Read back from the disk all that was written, and compare it with what was meant."""
        indexes = [[self.index_data[n] for n in p.indexes] for p in self.plan.containers]
        check_containers(self.drafts, containers, indexes, self.executor, self.progress)
        wholes = [
            Written(
                os.path.join(self.work, name),
                self.files[number].path,
                int(self.bodies.sizes[number]),
                self.wholes.digests[number].tobytes(),
            )
            for number, name in self.plan.whole.items()
        ]
        check_wholes(wholes, self.executor, self.progress)

    def _protect(self) -> None:
        guard = Guard(self.tree.directories)
        for draft, planned in zip(self.drafts, self.plan.containers, strict=True):
            protect(draft.path, planned.access)
        for number, name in self.plan.whole.items():
            file, path = self.files[number], os.path.join(self.work, name)
            mode = guard.mode(file.path, file.stat)
            protect(path, Access(mode, file.stat.uid, file.stat.gid))
            effects.change_mtime(path, file.stat.mtime)

    def _write_manifests(self, parts: Sequence[Part]) -> None:
        root = next(stat for path, stat in self.tree.directories if path == b"")
        totals = {
            "files": len(self.files),
            "source_nbytes": int(self.bodies.sizes.sum()),
            "rewritten_files": int(self.sharing.rewritten.sum()),
            "whole_files": len(self.plan.whole),
            "dropped_tensors": sum(
                len(e.dropped) for p in parts for e in p.files if e.origin == "file"
            ),
        }
        readable = readable_mode(root)
        write_manifests(self.work, parts, totals, readable)
        protect_directories(self.work, root, readable)


def check_containers(
    drafts: Sequence[Draft],
    containers: Sequence[Container],
    indexes: Sequence[Sequence[bytes]],
    executor: Executor,
    progress: Progress,
) -> None:
    """Read containers back from the disk, and compare them with what was meant.

    Raises
    ------
    UnfaithfulSourceError
        They differ.
    """
    for _ in run_units(executor, sync_file, [draft.path for draft in drafts]):
        pass
    progress.start("checking", sum(container.nbytes for container in containers))
    for draft, container, data in zip(drafts, containers, indexes, strict=True):
        stored = Digests([body.nbytes for body in draft.bodies])
        spans = [
            (row, (Span(offset, body.nbytes),))
            for row, (body, offset) in enumerate(zip(draft.bodies, draft.body_offsets, strict=True))
        ]
        units = units_of(draft.path, show_path(draft.name), spans)
        stored.fill(executor, units, progress.advance)
        wanted = b"".join(body.digest for body in draft.bodies)
        if stored.digests.tobytes() != wanted or not stored.known.all():
            raise _differs(draft.name)
        if draft.structure_digest() != container.structure or not draft.holds(data):
            raise _differs(draft.name)


class Written(NamedTuple):
    """A file of the store that was kept whole: where it was written, what it is, what it must
    hold."""

    path: bytes
    name: bytes
    nbytes: int
    digest: bytes


def check_wholes(files: Sequence[Written], executor: Executor, progress: Progress) -> None:
    """Read files that were kept whole back from the disk, and compare them with what was meant.

    Raises
    ------
    UnfaithfulSourceError
        They differ.
    """
    for _ in run_units(executor, sync_file, [file.path for file in files]):
        pass
    kept = Digests([file.nbytes for file in files])
    units = (
        unit
        for row, file in enumerate(files)
        for unit in units_of(file.path, show_path(file.name), [(row, (Span(0, file.nbytes),))])
    )
    kept.fill(executor, units, progress.advance)
    for row, file in enumerate(files):
        if kept.digests[row].tobytes() != file.digest:
            raise _differs(file.name)


def protect_directories(work: bytes, root: Stat, readable: int) -> None:
    """Directories of the store are as open as the source's root, and keep its group; manifests
    have the mode ``readable``."""
    for directory, _, names in os.walk(work):
        protect(directory, Access((root.mode & 0o2777) | 0o700, root.uid, root.gid))
        for name in names:
            if directory == work or directory.endswith(b"/parts"):
                protect(os.path.join(directory, name), Access(readable, root.uid, root.gid))


def readable_mode(root: Stat) -> int:
    """The mode of manifests: who may list the source's root may read them."""
    return 0o600 | (0o040 if root.mode & 0o010 else 0) | (0o004 if root.mode & 0o001 else 0)


def _differs(name: bytes) -> UnfaithfulSourceError:
    return UnfaithfulSourceError(
        f"{show_path(name)}: what was read back is not what was hashed in the source: the source"
        " changed while it was read, or the disk failed; nothing was kept. Run it again"
    )
