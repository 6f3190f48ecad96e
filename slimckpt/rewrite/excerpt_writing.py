"""Writing an excerpt: its bodies are copied, each once, into containers of their own.

They are compared with their digests on the way. The indexes stay as they are, but for the places
in them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import replace

import numpy as np

from slimckpt import effects
from slimckpt.errors import StoreDamagedError
from slimckpt.model import FLOOR, show_path
from slimckpt.progress import Progress
from slimckpt.rewrite.access import Access, Guard, protect
from slimckpt.rewrite.build import (
    Written,
    check_containers,
    check_wholes,
    protect_directories,
    readable_mode,
)
from slimckpt.rewrite.excerpt import Excerpt, Key, Where, key_of, stored_apart
from slimckpt.rewrite.naming import Names
from slimckpt.rewrite.plan import MAX_LINKS
from slimckpt.rewrite.replica_sets import Use, shared_containers
from slimckpt.rewrite.restore import what_is
from slimckpt.sources.digest import BLOCK, DIGEST, UNIT, Digests, digest_of, run_units
from slimckpt.store.container import Link
from slimckpt.store.index import DROPPED, FILL, IN_SKELETON, STORED, FileIndex, Places
from slimckpt.store.manifest import Container, FileEntry, IndexPlace, Part, Place
from slimckpt.store.reader import damage
from slimckpt.store.writer import Body, Draft, Portion, copy_hashing, links_of, write_manifests

_PORTIONS = 4096
_TARGETS = 64
"""The most of one unit of copying: every target is a file that is held open."""


def write_excerpt(excerpt: Excerpt, work: bytes, executor: Executor, progress: Progress) -> None:
    """Write an excerpt into a directory, and read it back.

    Raises
    ------
    StoreDamagedError
        What is to be copied is not what was stored; names the file and the tensor.
    """
    _Writer(excerpt, work, executor, progress).run()


class _Writer:
    def __init__(
        self, excerpt: Excerpt, work: bytes, executor: Executor, progress: Progress
    ) -> None:
        self.excerpt, self.store, self.work = excerpt, excerpt.store, work
        self.executor, self.progress = executor, progress
        self.files, self.contents = excerpt.files, excerpt.contents
        self.drafts: list[Draft] = []
        self.users: list[set[int]] = []
        self.place: dict[Key, tuple[int, int]] = {}
        self.home: dict[int, tuple[int, int]] = {}
        """For each file with an index: the container that has it, and its number there."""
        self.wholes: dict[int, bytes] = {}
        self.indexes: dict[int, bytes] = {}

    def run(self) -> None:
        self._plan()
        for path in sorted({os.path.dirname(draft.path) for draft in self.drafts}):
            effects.make_directories(path)
        self._lay_out()
        self._copy()
        parts = self._parts()
        data = [[b""] * len(draft.index_nbytes) for draft in self.drafts]
        for number, (container, at) in self.home.items():
            data[container][at] = self.indexes[number]
        containers = [d.finish(found) for d, found in zip(self.drafts, data, strict=True)]
        for part, numbers in parts:
            part.containers = [containers[number] for number in numbers]
        self._check(containers, data)
        self._protect()
        self._manifests([part for part, _ in parts])

    def _plan(self) -> None:
        """Decide which container holds what."""
        names = Names()
        roles = [file.entry.file.role for file in self.files]
        uses = {
            key: Use(key.nbytes, content.files)
            for key, content in self.contents.items()
            if len(content.files) > 1 and key.nbytes >= FLOOR
        }
        for title, keys in shared_containers(uses, roles):
            self._open(names.take(f"shared/{title}.h5".encode()))
            for key in keys:
                self._put(key)
        own: dict[int, list[Key]] = {}
        for key, content in self.contents.items():
            if key not in self.place:
                own.setdefault(content.files[0], []).append(key)
        kept: list[int] = []
        for number, file in enumerate(self.files):
            if file.whole:
                self.wholes[number] = names.take(b"whole/" + file.entry.file.path)
                kept += [number] if file.entry.index is not None else []
                continue
            keys = own.get(number, [])
            if keys or file.entry.index is not None:
                self._open(names.take(b"own/" + file.entry.file.path + b".h5"))
                for key in keys:
                    self._put(key)
                self._index_here(number)
        if kept:
            self._open(names.take(b"own/whole-files.h5"))
            for number in kept:
                self._index_here(number)

    def _open(self, name: bytes) -> None:
        self.drafts.append(Draft(os.path.join(self.work, name), name, [], []))
        self.users.append(set())

    def _put(self, key: Key) -> None:
        """Store a body in the draft that was opened last."""
        draft = self.drafts[-1]
        self.place[key] = len(self.drafts) - 1, len(draft.bodies)
        # Its block digests are learned when it is copied; their number must be known before.
        blocks = bytes(DIGEST * -(-key.nbytes // BLOCK)) if key.nbytes > BLOCK else b""
        draft.bodies.append(Body(*key, blocks))
        self.users[-1].update(self.contents[key].files)

    def _index_here(self, number: int) -> None:
        """Make room for the index of a file in the draft that was opened last."""
        index = self._index(number)
        if index is None:
            return
        draft = self.drafts[-1]
        self.home[number] = len(self.drafts) - 1, len(draft.index_nbytes)
        table = index.table
        draft.index_nbytes.append(len(FileIndex(table, Places.none(table.n_payloads)).pack()))
        self.users[-1].add(number)

    def _index(self, number: int) -> FileIndex | None:
        file = self.files[number]
        return self.store.index(file.part, file.source)

    def _lay_out(self) -> None:
        links: list[list[Link]] = [[] for _ in self.drafts]
        for number, (container, _) in self.home.items():
            index = self._index(number)
            if index is not None and number not in self.wholes:
                self._show(number, index)
                links[container] = self._links(index, container)
        for draft, found in zip(self.drafts, links, strict=True):
            draft.lay_out(found)

    def _show(self, number: int, index: FileIndex) -> None:
        """Give payloads the dtype and shape of the tensors on them, as their first file has it."""
        starts, rows = index.table.tensors_of_payloads()
        for row in stored_apart(index):
            key = key_of(index, row)
            content = self.contents[key]
            if content.files[0] == number and content.row == row:
                container, at = self.place[key]
                body = self.drafts[container].bodies[at]
                body.show_as(index.table, rows[starts[row] : starts[row + 1]].tolist())

    def _links(self, index: FileIndex, container: int) -> list[Link]:
        depth = self.drafts[container].name.count(b"/")
        targets: list[tuple[str, bytes | None] | None] = [None] * index.table.n_payloads
        for row in stored_apart(index):
            key = key_of(index, row)
            where = self.place[key][0]
            other = None if where == container else b"../" * depth + self.drafts[where].name
            targets[row] = key.digest.hex(), other
        return links_of(index.table, targets, MAX_LINKS)

    def _copy(self) -> None:
        """Copy all bodies in the order in which they lie, and compare them with their digests."""
        keys = list(self.place)
        numbers = list(self.wholes)
        nbytes = [key.nbytes for key in keys]
        nbytes += [self.files[number].source.file.size for number in numbers]
        self._check_sizes()
        digests = Digests(nbytes)
        self.progress.start("copying", sum(nbytes))
        portions = sorted(self._portions(keys, numbers), key=_order)
        with damage():
            for unit, hashed in run_units(self.executor, copy_hashing, _units(portions)):
                digests.add(hashed)
                self.progress.advance(sum(portion.nbytes for portion in unit))
        for row, key in enumerate(keys):
            if digests.digests[row].tobytes() != key.digest:
                raise self._damaged(key, digests.digests[row].tobytes())
            container, at = self.place[key]
            self.drafts[container].bodies[at].blocks = digests.blocks_of(row)
        for row, number in enumerate(numbers, len(keys)):
            place = self.files[number].source.skeleton
            if nbytes[row] and digests.digests[row].tobytes().hex() != place.digest:
                raise StoreDamagedError(
                    f"{self.files[number].source.file.label}: its content is damaged in the store"
                    f" ({self.store.label(place.name)}); nothing was extracted. `slimckpt verify`"
                    " lists all damage"
                )

    def _check_sizes(self) -> None:
        """Every container that is read must have the length its part says."""
        sizes = {c.name: c.nbytes for part in self.excerpt.parts for c in part.containers}
        used = {name for c in self.contents.values() for name, _, _ in c.pieces if name is not None}
        for name in sorted(used & sizes.keys()):
            self.store.check_size(name, sizes[name])

    def _portions(self, keys: list[Key], numbers: list[int]) -> Iterator[Portion]:
        for row, key in enumerate(keys):
            container, at = self.place[key]
            draft = self.drafts[container]
            pieces = self.contents[key].pieces
            yield from self._cut(row, pieces, key.nbytes, draft.path, draft.body_offsets[at])
        for row, number in enumerate(numbers, len(keys)):
            file, target = self.files[number].source, os.path.join(self.work, self.wholes[number])
            self.store.check_whole(file, file.skeleton)
            effects.make_directories(os.path.dirname(target))
            fd = effects.create_file(target)
            try:
                effects.allocate(fd, file.file.size, target)
            finally:
                os.close(fd)
            pieces = ((file.skeleton.name, 0, file.file.size),)
            yield from self._cut(row, pieces, file.file.size, target, 0)

    def _cut(
        self, row: int, pieces: tuple[Where, ...], nbytes: int, target: bytes, offset: int
    ) -> Iterator[Portion]:
        """Large bodies in one piece are cut, so that all cores have a share of them."""
        found = tuple(
            (None if name is None else self.store.absolute(name), at, length)
            for name, at, length in pieces
        )
        name, start, _ = found[0]
        if len(found) > 1 or name is None:
            yield Portion(row, 0, found, target, offset, nbytes)
            return
        for at in range(0, nbytes, UNIT):
            take = min(UNIT, nbytes - at)
            piece = (name, start + at, take)
            yield Portion(row, at // BLOCK, (piece,), target, offset + at, take)

    def _damaged(self, key: Key, found: bytes) -> StoreDamagedError:
        content = self.contents[key]
        file = self.files[content.files[0]]
        what = "its skeleton" if file.source.index is not None else "its content"
        index = self._index(content.files[0])
        if index is not None and content.row >= 0:
            apart = (~np.isin(index.places.kind, (IN_SKELETON, DROPPED))).nonzero()[0].tolist()
            what = what_is(file.source, index, apart.index(content.row))
        names = sorted({show_path(name) for name, _, _ in content.pieces if name is not None})
        return StoreDamagedError(
            f"{file.source.file.label}: {what} is damaged in the store ({', '.join(names)};"
            f" expected digest {key.digest.hex()}, found {found.hex()}); nothing was extracted."
            " `slimckpt verify` lists all damage"
        )

    def _parts(self) -> list[tuple[Part, list[int]]]:
        """Parts, and the numbers of the containers that each of them lists."""
        entries: dict[int, list[tuple[int, FileEntry]]] = {}
        for number, file in enumerate(self.files):
            for at, entry in [(file.number, file.entry), *file.further]:
                entries.setdefault(at, []).append((number, entry))
        common = self._common()
        found = []
        for at, old in enumerate(self.excerpt.parts):
            part = Part(old.run, old.step, others=self.excerpt.others_of(old))
            local: dict[int, int] = {}
            here = entries.get(at, [])
            if any(self.files[number].several_parts for number, _ in here):
                local = {container: place for place, container in enumerate(common)}

            def number_of(container: int, local: dict[int, int] = local) -> int:
                return local.setdefault(container, len(local))

            for number, entry in here:
                self._settle(number, entry, number_of)
                part.files.append(entry)
            if part.files or part.others:
                found.append((part, list(local)))
        return found

    def _common(self) -> list[int]:
        """Containers of files that several parts list: numbered alike in each, since the file has
        one index."""
        used: set[int] = set()
        for number, file in enumerate(self.files):
            if not file.several_parts:
                continue
            if number in self.home:
                used.add(self.home[number][0])
            if not file.whole:
                index = self._index(number)
                keys = [] if index is None else [key_of(index, row) for row in stored_apart(index)]
                place = file.source.skeleton
                keys += [Key(place.nbytes, bytes.fromhex(place.digest))] if place.nbytes else []
                used.update(self.place[key][0] for key in keys)
        return sorted(used)

    def _settle(self, number: int, entry: FileEntry, number_of: Callable[[int], int]) -> None:
        """Say in an entry where its skeleton and its index are now."""
        old = self.files[number].source.skeleton
        if number in self.wholes:
            entry.skeleton = replace(old, name=self.wholes[number])
        elif old.nbytes:
            container, offset = self._at(Key(old.nbytes, bytes.fromhex(old.digest)))
            entry.skeleton = Place("stored", old.nbytes, old.digest, number_of(container), offset)
        else:
            entry.skeleton = Place("fill", 0, old.digest)
        index = self._index(number)
        if index is None:
            return
        places = Places.none(index.table.n_payloads)
        places.digest = index.places.digest
        if number not in self.wholes:
            places.kind = index.places.kind.copy()
            fill = places.kind == FILL
            places.offset[fill] = index.places.offset[fill]
            empty = ~np.isin(places.kind, (IN_SKELETON, FILL, DROPPED))
            places.kind[empty] = FILL
            for row in stored_apart(index):
                container, offset = self._at(key_of(index, row))
                places.kind[row], places.offset[row] = STORED, offset
                places.container[row] = number_of(container)
        data = FileIndex(index.table, places).pack()
        self.indexes[number] = data
        home, at = self.home[number]
        offset = self.drafts[home].index_offsets[at]
        entry.index = IndexPlace(number_of(home), offset, len(data), digest_of(data).hex())

    def _at(self, key: Key) -> tuple[int, int]:
        container, at = self.place[key]
        return container, self.drafts[container].body_offsets[at]

    def _check(self, containers: list[Container], data: list[list[bytes]]) -> None:
        check_containers(self.drafts, containers, data, self.executor, self.progress)
        wholes = []
        for number, name in self.wholes.items():
            place = self.files[number].source.skeleton
            path, digest = os.path.join(self.work, name), bytes.fromhex(place.digest)
            wholes.append(Written(path, name, place.nbytes, digest))
        check_wholes(wholes, self.executor, self.progress)

    def _protect(self) -> None:
        guard = Guard((other.path, other.stat) for other in self.excerpt.directories)
        stats = [(file.entry.file.path, file.entry.file.stat) for file in self.files]
        for draft, users in zip(self.drafts, self.users, strict=True):
            protect(draft.path, guard.strictest(stats[number] for number in sorted(users)))
        for number, name in self.wholes.items():
            path, stat = stats[number]
            target = os.path.join(self.work, name)
            protect(target, Access(guard.mode(path, stat), stat.uid, stat.gid))
            effects.change_mtime(target, self.files[number].source.skeleton.mtime)

    def _manifests(self, parts: list[Part]) -> None:
        mains = [file.entry for file in self.files]
        totals = {
            "files": len(mains),
            "source_nbytes": sum(e.file.size for e in mains if not e.synthetic),
            "rewritten_files": len(mains) - len(self.wholes),
            "whole_files": len(self.wholes),
            "dropped_tensors": sum(len(e.dropped) for e in mains),
        }
        readable = readable_mode(self.excerpt.root)
        write_manifests(self.work, parts, totals, readable)
        protect_directories(self.work, self.excerpt.root, readable)


def _order(portion: Portion) -> tuple[bytes, int]:
    name, offset, _ = portion.pieces[0]
    return name or b"", offset


def _units(portions: list[Portion]) -> Iterator[list[Portion]]:
    """Neighbours together, about :data:`UNIT` bytes at a time."""
    unit: list[Portion] = []
    filled = 0
    targets: set[bytes] = set()
    for portion in portions:
        if unit and (
            filled + portion.nbytes > UNIT
            or len(unit) >= _PORTIONS
            or len(targets | {portion.target}) > _TARGETS
            or portion.pieces[0][0] != unit[0].pieces[0][0]
        ):
            yield unit
            unit, filled, targets = [], 0, set()
        unit.append(portion)
        targets.add(portion.target)
        filled += portion.nbytes
    if unit:
        yield unit
