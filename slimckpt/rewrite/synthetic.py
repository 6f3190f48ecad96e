"""Writing a slim checkpoint of tensors that lie in no file: what resharding makes.

Each tensor is a payload of its own in C order; equal ones are stored once. An entry's file is what
its payloads would be end to end, so that everything that reads stores reads this one too; there is
nothing to restore.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slimckpt import effects
from slimckpt.dtypes import BY_NAME
from slimckpt.errors import UnfaithfulSourceError
from slimckpt.model import (
    FLOOR,
    SYNTHETIC,
    Condition,
    Role,
    SourceFile,
    Stat,
    Table,
    TableBuilder,
)
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.access import Access, protect
from slimckpt.rewrite.build import check_containers, protect_directories, readable_mode
from slimckpt.rewrite.naming import Names
from slimckpt.rewrite.plan import MAX_LINKS
from slimckpt.rewrite.replica_sets import Use, shared_containers
from slimckpt.rewrite.workplace import check_destination, publish, require_room, workplace
from slimckpt.sources.digest import digest_of, digest_of_chunks
from slimckpt.sources.threads import default_jobs
from slimckpt.store.container import Link
from slimckpt.store.index import STORED, FileIndex, Places
from slimckpt.store.manifest import FileEntry, IndexPlace, OtherEntry, Part, Place
from slimckpt.store.writer import Body, Draft, links_of, write_manifests


@dataclass(frozen=True, slots=True)
class SyntheticTensor:
    """A tensor to be stored.

    Attributes
    ----------
    name, dtype, shape, big_endian
        As of :class:`~slimckpt.model.Tensor`.
    nbytes
        Of its elements.
    content
        Tensors of equal ``content`` have equal bytes: they are read once.
    chunks
        Gives its bytes in C order, as contiguous buffers, the same ones each time; from any thread.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: Hashable
    chunks: Callable[[], Iterable[Any]]
    big_endian: bool = False


@dataclass(frozen=True, slots=True)
class SyntheticFile:
    """An entry: the tensors of one rank; or, with ``content``, a text that concerns all."""

    path: bytes
    role: Role
    tensors: Sequence[SyntheticTensor]
    content: bytes | None = None


@dataclass(slots=True)
class SyntheticResult:
    """What was written, or would be. Sizes in bytes; ``tensor_nbytes`` counts each copy."""

    files: int
    tensors: int
    tensor_nbytes: int
    store_nbytes: int
    dry_run: bool


class _Content(NamedTuple):
    nbytes: int
    digest: bytes
    blocks: bytes


def write_synthetic(
    files: Sequence[SyntheticFile],
    destination: str | bytes | os.PathLike[str],
    source: bytes,
    access: Access,
    mtime: int,
    *,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> SyntheticResult:
    """Write a slim checkpoint of ``files``, all of one run and step.

    Parameters
    ----------
    destination
        A path that does not exist yet.
    source
        What the tensors are read from; the destination may not lie in it.
    access
        Who may read the containers.
    mtime
        Of the entries, in nanoseconds.

    Raises
    ------
    DestinationError, NoSpaceError, StoppedError, UnfaithfulSourceError
        As their names say; there is no destination then.
    """
    target = check_destination(os.fsencode(destination), source)
    root = os.lstat(source)
    owner = Stat(root.st_mode & 0o7777, root.st_mtime_ns, root.st_uid, root.st_gid)
    with ThreadPoolExecutor(jobs or default_jobs()) as executor:
        try:
            writer = _Writer(files, access, owner, mtime, executor, progress)
            writer.hash()
            require_room(writer.unique_nbytes, target)
            if not dry_run:
                with workplace(target) as work:
                    writer.write(work)
                    publish(work, target)
        finally:
            progress.finish()
    tensors = [tensor for file in files for tensor in file.tensors]
    total = sum(tensor.nbytes for tensor in tensors)
    return SyntheticResult(len(files), len(tensors), total, writer.unique_nbytes, dry_run)


class _Writer:
    """Writes one store. ``sources`` gives, for each body of each draft, what it is read from."""

    def __init__(
        self,
        files: Sequence[SyntheticFile],
        access: Access,
        owner: Stat,
        mtime: int,
        executor: Executor,
        progress: Progress,
    ) -> None:
        self.files, self.access, self.owner, self.mtime = files, access, owner, mtime
        self.executor, self.progress = executor, progress
        self.content: dict[Hashable, _Content] = {}
        self.first: dict[_Content, SyntheticTensor] = {}
        self.drafts: list[Draft] = []
        self.sources: list[list[Callable[[], Iterable[Any]]]] = []
        self.place: dict[_Content, tuple[int, int]] = {}

    @property
    def unique_nbytes(self) -> int:
        return sum(content.nbytes for content in set(self.content.values()))

    def hash(self) -> None:
        """Learn the digest of every tensor; equal content is read once."""
        first = {t.content: t for file in self.files for t in file.tensors if t.nbytes}
        self.progress.start("hashing", sum(tensor.nbytes for tensor in first.values()))
        found = self.executor.map(_digest, first.values())
        for tensor, content in zip(first.values(), found, strict=True):
            self.progress.advance(tensor.nbytes)
            self.content[tensor.content] = content

    def write(self, work: bytes) -> None:
        """Write the store into a directory and read it back."""
        names = Names()
        for title, contents in self._shared():
            self._open(work, names.take(f"shared/{title}.h5".encode()))
            for content in contents:
                self._put(self.first[content])
        tables = [_table(file) for file in self.files]
        first_own = len(self.drafts)
        for file, table in zip(self.files, tables, strict=True):
            self._open(work, names.take(b"own/" + file.path + b".h5"))
            if file.content is not None:
                self._put_skeleton(file.content)
                continue
            self.drafts[-1].index_nbytes.append(
                len(FileIndex(table, Places.none(table.n_payloads)).pack())
            )
            for tensor in file.tensors:
                if tensor.nbytes >= FLOOR and self._content(tensor) not in self.place:
                    self._put(tensor)
            small = [tensor for tensor in file.tensors if 0 < tensor.nbytes < FLOOR]
            self._put_skeleton(b"".join(map(_bytes, small)))
        for directory in {os.path.dirname(draft.path) for draft in self.drafts}:
            effects.make_directories(directory)
        for number, draft in enumerate(self.drafts):
            own = number - first_own
            draft.lay_out(self._links(tables[own], own, number) if own >= 0 else [])
        self._copy()
        indexes: list[list[bytes]] = [[] for _ in self.drafts]
        entries = []
        for number, (file, table) in enumerate(zip(self.files, tables, strict=True)):
            if file.content is not None:
                entries.append(self._text(file, first_own + number))
                continue
            entry, data = self._entry(file, table, first_own + number)
            entries.append(entry)
            indexes[first_own + number].append(data)
        containers = [d.finish(data) for d, data in zip(self.drafts, indexes, strict=True)]
        check_containers(self.drafts, containers, indexes, self.executor, self.progress)
        for draft in self.drafts:
            protect(draft.path, self.access)
        role = self.files[0].role
        part = Part(role.run, role.step, containers, entries, [OtherEntry(b"", self.owner)])
        counts = dict.fromkeys(("source_nbytes", "whole_files", "dropped_tensors"), 0)
        totals = {"files": len(entries), "rewritten_files": len(entries), **counts}
        readable = readable_mode(self.owner)
        write_manifests(work, [part], totals, readable)
        protect_directories(work, self.owner, readable)

    def _content(self, tensor: SyntheticTensor) -> _Content:
        return self.content[tensor.content]

    def _shared(self) -> Iterator[tuple[str, list[_Content]]]:
        """What more than one file has, by the title of the container to put it in."""
        users: dict[_Content, dict[int, None]] = {}
        for number, file in enumerate(self.files):
            for tensor in file.tensors:
                if tensor.nbytes >= FLOOR:
                    content = self._content(tensor)
                    users.setdefault(content, {})[number] = None
                    self.first.setdefault(content, tensor)
        uses = {content: Use(content.nbytes, tuple(files)) for content, files in users.items()}
        return shared_containers(uses, [file.role for file in self.files])

    def _open(self, work: bytes, name: bytes) -> None:
        self.drafts.append(Draft(os.path.join(work, name), name, [], []))
        self.sources.append([])

    def _put(self, tensor: SyntheticTensor) -> None:
        """Store a tensor in the draft that was opened last."""
        content = self._content(tensor)
        self.place[content] = len(self.drafts) - 1, len(self.drafts[-1].bodies)
        shown = tensor.dtype if tensor.dtype in BY_NAME else None
        self.drafts[-1].bodies.append(Body(*content, shown, tensor.shape, tensor.big_endian))
        self.sources[-1].append(tensor.chunks)

    def _put_skeleton(self, data: bytes) -> None:
        if data:
            self.drafts[-1].bodies.append(Body(*digest_of_chunks([data])))
            self.sources[-1].append(lambda: [data])

    def _links(self, table: Table, file: int, container: int) -> list[Link]:
        depth = self.drafts[container].name.count(b"/")
        targets: list[tuple[str, bytes | None] | None] = []
        for tensor in self.files[file].tensors:
            if not tensor.nbytes:
                continue
            content = self._content(tensor)
            if content not in self.place or tensor.nbytes < FLOOR:
                targets.append(None)
                continue
            where = self.place[content][0]
            other = None if where == container else b"../" * depth + self.drafts[where].name
            targets.append((content.digest.hex(), other))
        return links_of(table, targets, MAX_LINKS)

    def _copy(self) -> None:
        self.progress.start("writing", sum(b.nbytes for d in self.drafts for b in d.bodies))
        jobs = (
            (draft.path, offset, body, chunks)
            for draft, sources in zip(self.drafts, self.sources, strict=True)
            for offset, body, chunks in zip(draft.body_offsets, draft.bodies, sources, strict=True)
        )
        for nbytes in self.executor.map(_write, jobs):
            self.progress.advance(nbytes)

    def _entry(self, file: SyntheticFile, table: Table, own: int) -> tuple[FileEntry, bytes]:
        places = Places.none(table.n_payloads)
        stored = [tensor for tensor in file.tensors if tensor.nbytes]
        for row, tensor in enumerate(stored):
            content = self._content(tensor)
            places.digest[row] = np.frombuffer(content.digest, np.uint8)
            if tensor.nbytes >= FLOOR:
                container, body = self.place[content]
                places.kind[row], places.container[row] = STORED, container
                places.offset[row] = self.drafts[container].body_offsets[body]
        data = FileIndex(table, places).pack()
        small = sum(tensor.nbytes for tensor in stored if tensor.nbytes < FLOOR)
        offset = self.drafts[own].index_offsets[0]
        index = IndexPlace(own, offset, len(data), digest_of(data).hex())
        found = self._file(file, sum(tensor.nbytes for tensor in stored), "understood")
        return FileEntry(found, self._skeleton(own, small), index, SYNTHETIC), data

    def _text(self, file: SyntheticFile, own: int) -> FileEntry:
        nbytes = len(file.content or b"")
        found = self._file(file, nbytes, "opaque")
        return FileEntry(found, self._skeleton(own, nbytes), None, SYNTHETIC)

    def _file(self, file: SyntheticFile, nbytes: int, condition: Condition) -> SourceFile:
        stat = Stat(self.access.mode, self.mtime, self.owner.uid, self.owner.gid)
        return SourceFile(file.path, nbytes, stat, file.role, SYNTHETIC, condition)

    def _skeleton(self, own: int, nbytes: int) -> Place:
        """Where the last body of a draft is, if that is a skeleton."""
        if not nbytes:
            return Place("fill", 0, digest_of(b"").hex())
        draft = self.drafts[own]
        digest = draft.bodies[-1].digest.hex()
        return Place("stored", nbytes, digest, own, draft.body_offsets[-1])


def _table(file: SyntheticFile) -> Table:
    """The tensors of an entry, their payloads end to end."""
    builder, at = TableBuilder(), 0
    for tensor in file.tensors:
        payload = None
        if tensor.nbytes:
            payload = builder.payload([(at, tensor.nbytes)])
            at += tensor.nbytes
        builder.tensor(
            tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, payload=payload,
            big_endian=tensor.big_endian,
        )  # fmt: skip
    return builder.build()


def _digest(tensor: SyntheticTensor) -> _Content:
    found = _Content(*digest_of_chunks(tensor.chunks()))
    if found.nbytes != tensor.nbytes:
        raise _changed(tensor.name, found.nbytes, tensor.nbytes)
    return found


def _bytes(tensor: SyntheticTensor) -> bytes:
    return b"".join(bytes(memoryview(chunk).cast("B")) for chunk in tensor.chunks())


def _write(job: tuple[bytes, int, Body, Callable[[], Iterable[Any]]]) -> int:
    """Write one body; what was written is compared with its digest when it is read back."""
    path, offset, body, chunks = job
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        end = offset + body.nbytes
        for chunk in chunks():
            view = memoryview(chunk).cast("B")
            if offset + len(view) > end:
                more = offset + len(view) - end
                raise _changed(body.digest.hex(), body.nbytes + more, body.nbytes)
            effects.write_at(fd, view, offset, path)
            offset += len(view)
    finally:
        os.close(fd)
    return body.nbytes


def _changed(name: str, found: int, expected: int) -> UnfaithfulSourceError:
    return UnfaithfulSourceError(
        f"tensor {name!a}: expected {expected} bytes, found {found}; the source changed while it"
        " was read"
    )
