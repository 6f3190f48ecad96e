"""The files behind a checkpoint: those of a directory, or those that a store describes.

Both give the same :class:`Member` objects; what reads tensors does not know which it has.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slimckpt.analysis.roles import role_of, step_key
from slimckpt.analysis.scan import ScanUnit, fill_in, scan_unit, source_files
from slimckpt.analysis.tree import walk
from slimckpt.errors import (
    DamagedFileError,
    NotUnderstoodError,
    RefusedFileError,
    SlimckptError,
    StoreDamagedError,
    UsageError,
)
from slimckpt.model import Ints, Role, SourceFile, Span, StepLabel, Table, encode_path, show_path
from slimckpt.sources.backends import Backend
from slimckpt.sources.digest import BLOCK, digest_of_chunks, reusable_buffer
from slimckpt.sources.positioned import (
    ByteSource,
    FileSource,
    read_spans_into,
)
from slimckpt.store.index import IN_SKELETON, STORED, FileIndex
from slimckpt.store.manifest import FileEntry, Part
from slimckpt.store.reader import NOWHERE, Store, damage
from slimckpt.store.spliced import SplicedSource

_SKELETON = -1


class Group(NamedTuple):
    """A step of a run; ``step`` is ``None`` for what belongs to no step."""

    run: str
    step: StepLabel | None


class Stretch(NamedTuple):
    """``nbytes`` at ``offset`` of the file ``path``, which has ``size`` bytes in all.

    Where ``path`` is ``None`` every byte is ``offset``.
    """

    path: bytes | None
    offset: int
    nbytes: int
    size: int


class Places(NamedTuple):
    """For each payload the number of a file, -1 where it is in several pieces or in none, and the
    offset there; ``files`` are paths and sizes."""

    files: list[tuple[bytes, int]]
    file: Ints
    offset: Ints


class Holding(ABC):
    """One source file and what it holds."""

    damaged: type[SlimckptError]

    def __init__(self, file: SourceFile) -> None:
        self._file = file

    @property
    def size(self) -> int:
        return self._file.size

    @property
    def label(self) -> str:
        return self._file.label

    @property
    @abstractmethod
    def file(self) -> SourceFile:
        """The file, its condition known."""

    @property
    @abstractmethod
    def table(self) -> Table:
        """Its tensors; only of a file that is understood.

        Raises
        ------
        StoreDamagedError
            Its index, or the file kept whole, is not what the store says.
        """

    @abstractmethod
    def source(self) -> AbstractContextManager[ByteSource]:
        """The bytes of the file, to be read by position."""

    @abstractmethod
    def stretches(self, payload: int) -> list[Stretch]:
        """Where the bytes of a payload are, in stream order; only of one that is sound, where that
        is checked."""

    def located(self, payload: int) -> list[Stretch]:
        """The same, of any payload."""
        return self.stretches(payload)

    @abstractmethod
    def places(self) -> Places:
        """Where all payloads are, of those that lie in one piece."""

    def dropped(self) -> list[int]:
        """Rows of tensors that were left out when it was slimmed."""
        return []

    @abstractmethod
    def digest(self, payload: int) -> bytes | None:
        """The digest of a payload, where one is known."""

    def require(self) -> Table:
        """Its tensors, or the error that says why they cannot be read."""
        file = self.file
        if file.understood:
            return self.table
        raise self.refusal()

    def refusal(self) -> SlimckptError:
        """Why the tensors of a file that is not understood cannot be read."""
        file = self.file
        kinds: dict[str, type[SlimckptError]] = {
            "damaged": DamagedFileError,
            "refused": RefusedFileError,
        }
        return kinds.get(file.condition, NotUnderstoodError)(problem_of(file))


class Member(NamedTuple):
    """A path of the tree, its role, and the file it names; hard links are several members."""

    path: bytes
    role: Role
    holding: Holding

    @property
    def group(self) -> Group:
        return Group(self.role.run, self.role.step)


class Provider(ABC):
    """All files of a checkpoint, read as late as can be."""

    damaged: type[SlimckptError]
    path: bytes

    def check_by(self, backend: Backend) -> None:
        """Compare bytes with their digests before they are used, from now on, read by ``backend``.

        Raises
        ------
        UsageError
            There are no digests.
        """
        raise UsageError(
            f"{show_path(self.path)} is no slim checkpoint: there are no digests to check its bytes"
            " against"
        )

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells this checkpoint from others, and a slim one from its next version."""

    @abstractmethod
    def groups(self) -> list[Group]:
        """Every step of every run, sorted."""

    @abstractmethod
    def listed(self, group: Group) -> dict[bytes, Member]:
        """What is listed with a group: its members, and other names of their bodies."""

    @abstractmethod
    def links(self) -> dict[bytes, bytes]:
        """Where each symbolic link points to."""

    def members(self, group: Group) -> list[Member]:
        """The files of a group, in byte order of their paths."""
        return [member for member in self.listed(group).values() if member.group == group]


def problem_of(file: SourceFile) -> str:
    """Why a file is not understood, in a sentence that names it."""
    problem = file.problem or f"is {file.condition}"
    named = problem.startswith((f"{file.label}:", f"{file.label} is "))
    return problem if named else f"{file.label}: {problem}"


class DirectoryProvider(Provider):
    """The original directory, walked once; files are examined when they are asked for."""

    damaged = DamagedFileError

    def __init__(self, path: bytes) -> None:
        self.path = os.path.abspath(path)
        tree = walk(path, to_copy=False)
        self._groups: dict[Group, dict[bytes, Member]] = {}
        self._links = {link.path: link.target for link in tree.symlinks}
        found = []
        for file, body in zip(source_files(tree), tree.files, strict=True):
            holding = _SourceHolding(file, tree.absolute(file.path), body.in_store)
            found += [Member(file.path, file.role, holding)]
            found += [Member(path, _linked(path, file.role), holding) for path in file.links]
        for member in _sorted(found):
            self._groups.setdefault(member.group, {})[member.path] = member

    @property
    def identity(self) -> str:
        return encode_path(os.path.realpath(self.path))

    def groups(self) -> list[Group]:
        return sorted(self._groups, key=lambda group: (group.run, step_key(group.step)))

    def listed(self, group: Group) -> dict[bytes, Member]:
        return self._groups[group]

    def links(self) -> dict[bytes, bytes]:
        return self._links


class _SourceHolding(Holding):
    damaged = DamagedFileError

    def __init__(self, file: SourceFile, path: bytes, in_store: bool) -> None:
        super().__init__(file)
        self._path = path
        self._unit = ScanUnit(0, ((path, "" if in_store else file.label),))
        self._table: Table | None = None

    @property
    def file(self) -> SourceFile:
        self._examine()
        return self._file

    @property
    def table(self) -> Table:
        return self._examine()

    def _examine(self) -> Table:
        if self._table is None:
            self._table = fill_in(self._file, scan_unit(self._unit)[0])
        return self._table

    def source(self) -> AbstractContextManager[ByteSource]:
        return FileSource(self._path, self.label)

    def stretches(self, payload: int) -> list[Stretch]:
        return [Stretch(self._path, *span, self.size) for span in self.table.spans(payload)]

    def places(self) -> Places:
        return _in_place(self.table, self._path, self.size)

    def digest(self, payload: int) -> bytes | None:
        return None


class StoreProvider(Provider):
    """A slim checkpoint: its root manifest, and parts and indexes as they are asked for."""

    damaged = StoreDamagedError

    def __init__(self, path: bytes) -> None:
        self.path = os.path.abspath(path)
        self._checked_by: Backend | None = None
        self._store = Store(path)
        self._numbers: dict[Group, list[int]] = {}
        for number, part in enumerate(self._store.root.parts):
            self._numbers.setdefault(Group(part.run, part.step), []).append(number)
        self._listed: dict[Group, dict[bytes, Member]] = {}
        self._links: dict[bytes, bytes] | None = None

    @property
    def identity(self) -> str:
        return self._store.root.digest

    def check_by(self, backend: Backend) -> None:
        self._checked_by = backend

    def groups(self) -> list[Group]:
        return sorted(self._numbers, key=lambda group: (group.run, step_key(group.step)))

    def listed(self, group: Group) -> dict[bytes, Member]:
        if group not in self._listed:
            found = []
            for number in self._numbers[group]:
                part = self._store.part(number)
                sizes = {container.name: container.nbytes for container in part.containers}
                for entry in part.files:
                    file = entry.file
                    holding = _StoreHolding(self._store, part, entry, sizes, self._checked_by)
                    found += [Member(file.path, file.role, holding)]
                    found += [Member(p, _linked(p, file.role), holding) for p in file.links]
            self._listed[group] = {member.path: member for member in _sorted(found)}
        return self._listed[group]

    def links(self) -> dict[bytes, bytes]:
        if self._links is None:
            others = (other for part in self._store.parts() for other in part.others)
            self._links = {o.path: o.target for o in others if o.target is not None}
        return self._links


class _StoreHolding(Holding):
    damaged = StoreDamagedError

    def __init__(
        self,
        store: Store,
        part: Part,
        entry: FileEntry,
        sizes: dict[bytes, int],
        checked_by: Backend | None,
    ) -> None:
        super().__init__(entry.file)
        self._store, self._part, self._entry = store, part, entry
        self._sizes = sizes
        self._index: FileIndex | None = None
        self._checked_by = checked_by
        self._sound: set[int] | None = None if checked_by is None else set()

    @property
    def file(self) -> SourceFile:
        return self._file

    @property
    def index(self) -> FileIndex:
        if self._index is None:
            place = self._entry.skeleton
            if place.kind == "whole":
                self._store.check_whole(self._entry, place)
            found = self._store.index(self._part, self._entry)
            if found is None:
                raise StoreDamagedError(f"{self.label}: the store has no index of its tensors")
            self._index = found
        return self._index

    @property
    def table(self) -> Table:
        return self.index.table

    def dropped(self) -> list[int]:
        return self.index.dropped_tensors()

    def source(self) -> AbstractContextManager[ByteSource]:
        if self._sound is not None and _SKELETON not in self._sound:
            stretches = self._stretched(self._store.skeleton_places(self._part, self._entry))
            self._compare("its skeleton", self._entry.skeleton.digest, stretches)
            self._sound.add(_SKELETON)
        index = None if self._entry.index is None else self.index
        return SplicedSource(self._store, self._part, self._entry, index)

    def located(self, payload: int) -> list[Stretch]:
        return self._stretched(self._store.pieces(self._part, self._entry, self.index, payload))

    def _stretched(self, pieces: list[tuple[bytes | None, int, int]]) -> list[Stretch]:
        whole = self._entry.skeleton
        return [
            Stretch(None, offset, nbytes, 0)
            if name is None
            else Stretch(
                self._store.absolute(name), offset, nbytes, self._sizes.get(name, whole.nbytes)
            )
            for name, offset, nbytes in pieces
        ]

    def stretches(self, payload: int) -> list[Stretch]:
        found = self.located(payload)
        if self._sound is not None and payload not in self._sound:
            if not any(stretch.path is None and stretch.offset == NOWHERE for stretch in found):
                digest = self.index.places.digest[payload].tobytes().hex()
                self._compare(f"payload {payload}", digest, found)
            self._sound.add(payload)
        return found

    def _compare(self, what: str, digest: str, stretches: list[Stretch]) -> None:
        assert self._checked_by is not None
        with damage():
            read = _read(stretches, self.label, self._checked_by)
            if digest_of_chunks(read)[1].hex() == digest:
                return
        where = sorted({show_path(s.path) for s in stretches if s.path is not None})
        raise StoreDamagedError(
            f"{self.label}: the {sum(s.nbytes for s in stretches)} bytes of {what} in"
            f" {', '.join(where)} are not those that were stored: their digest is wrong."
            " `slimckpt verify` lists all that is damaged"
        )

    def places(self) -> Places:
        if self._sound is not None:
            # Nothing goes the way that does not ask for stretches.
            nowhere = np.full(self.table.n_payloads, -1, np.int64)
            return Places([], nowhere, nowhere)
        skeleton = self._entry.skeleton
        if skeleton.kind == "whole":
            return _in_place(self.table, self._store.absolute(skeleton.name), skeleton.nbytes)
        files = [(self._store.absolute(c.name), c.nbytes) for c in self._part.containers]
        places = self.index.places
        file = np.where(places.kind == STORED, places.container.astype(np.int64), -1)
        offset = np.where(places.kind == STORED, places.offset, 0)
        if skeleton.kind == "stored":
            inside = (places.kind == IN_SKELETON) & _single(self.table)
            start = self.index.in_skeleton(_first_spans(self.table))
            inside &= start + self.table.payload_nbytes <= skeleton.nbytes
            file[inside], offset[inside] = skeleton.container, skeleton.offset + start[inside]
        sizes = np.array([nbytes for _, nbytes in files], np.int64)
        known = (file >= 0) & (file < len(files))
        end = offset + self.table.payload_nbytes
        known[known] = (offset[known] >= 0) & (end[known] <= sizes[file[known]])
        return Places(files, np.where(known, file, -1), offset)

    def digest(self, payload: int) -> bytes | None:
        found = self.index.places.digest[payload].tobytes()
        return found if any(found) else None


def _read(stretches: list[Stretch], label: str, backend: Backend) -> Iterator[memoryview]:
    """The bytes of some stretches, read as the backend reads, in pieces that are valid until the
    next one."""
    buffer = reusable_buffer()
    for path, offset, nbytes, size in stretches:
        with contextlib.ExitStack() as opened:
            fd = -1 if path is None else opened.enter_context(backend.opened(path, size))
            for at in range(0, nbytes, BLOCK):
                piece = buffer[: min(BLOCK, nbytes - at)]
                if path is None:
                    piece[:] = bytes([offset]) * len(piece)
                else:
                    read_spans_into(fd, [Span(offset + at, len(piece))], piece, label)
                yield piece


def _single(table: Table) -> npt.NDArray[np.bool_]:
    """For each payload, whether it has one span."""
    found: npt.NDArray[np.bool_] = np.diff(table.columns["span_end"], prepend=0) == 1
    return found


def _first_spans(table: Table) -> Ints:
    """Where each payload's first span lies in the file; 0 for one without any."""
    ends = table.columns["span_end"]
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    offsets = np.append(table.columns["span_offset"], 0)
    found: Ints = offsets[np.minimum(starts, len(offsets) - 1)]
    return found


def _in_place(table: Table, path: bytes, size: int) -> Places:
    """Payloads as they lie in the source file."""
    offset = _first_spans(table)
    inside = _single(table) & (offset + table.payload_nbytes <= size)
    return Places([(path, size)], np.where(inside, 0, -1), offset)


def _linked(path: bytes, first: Role) -> Role:
    """The role of a further name of a file whose first name has the role ``first``."""
    role = role_of(path)
    if role.step is None and role.rank is None and not role.coords:
        role.run = first.run
    return role


def _sorted(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: member.path)
