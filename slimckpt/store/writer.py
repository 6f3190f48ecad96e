"""Writing containers, manifests and the way out of a slim checkpoint, into a work directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
from blake3 import blake3

from slimckpt import effects
from slimckpt.model import HOME_PAYLOAD, ROOT_COPY, ROOT_MANIFEST, Span, Table, gaps, show_path
from slimckpt.sources.digest import (
    BLOCK,
    NEAR,
    Hashed,
    digest_of,
    digest_of_blocks,
    hash_unit,
    reusable_buffer,
    units_of,
)
from slimckpt.sources.positioned import Window, open_for_reading, read_spans_into
from slimckpt.store.container import Dataset, Layout, Link, lay_out
from slimckpt.store.index import Contents
from slimckpt.store.manifest import Container, Part, PartName, Root

MAX_LINK_NAME = 1000
_SAFE = "".join(chr(c) for c in range(33, 127) if chr(c) not in "/%")

README = """A slim checkpoint: the original files, with what they have in common stored once.
Get the originals back with Python 3.8 or newer and nothing else: python3 restore.py OUT
slimckpt reads it directly: slimckpt ls . ; slimckpt restore . OUT ; slimckpt verify .
"""


@dataclass(slots=True)
class Body:
    """Something to be stored in a container: its digest names the dataset."""

    nbytes: int
    digest: bytes
    blocks: bytes = b""
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    big_endian: bool = False

    def show_as(self, table: Table, rows: Iterable[int]) -> None:
        """Take dtype and shape of the first of some tensors that covers all of it in C order."""
        for row in rows:
            tensor = table.tensor(int(row))
            if tensor.nbytes == self.nbytes and tensor.strides is None and tensor.encoding == "raw":
                self.dtype, self.shape = tensor.dtype, tensor.shape
                self.big_endian = tensor.big_endian
                return


@dataclass(slots=True)
class Draft:
    """A container being written: its bodies, then its indexes, then its table of contents."""

    path: bytes
    name: bytes
    bodies: list[Body]
    index_nbytes: list[int]
    layout: Layout = field(default_factory=Layout)
    structure: str = ""

    @property
    def body_offsets(self) -> list[int]:
        return self.layout.offsets[: len(self.bodies)]

    @property
    def index_offsets(self) -> list[int]:
        return self.layout.offsets[len(self.bodies) : -1]

    @property
    def _contents_nbytes(self) -> int:
        return len(self._contents([b""] * len(self.index_nbytes)))

    def lay_out(self, links: Iterable[Link]) -> None:
        """Create the file and its structure, and reserve its space."""
        datasets = [
            Dataset("payloads", b.digest.hex(), b.nbytes, b.dtype, b.shape, b.big_endian)
            for b in self.bodies
        ]
        datasets += [Dataset("index", str(i), n) for i, n in enumerate(self.index_nbytes)]
        datasets.append(Dataset("index", "contents", self._contents_nbytes))
        fd = effects.create_file(self.path)
        try:
            self.layout = lay_out(fd, self.path, datasets, links)
            effects.allocate(fd, self.layout.nbytes, self.path)
        finally:
            os.close(fd)
        self.structure = self.structure_digest()

    def finish(self, indexes: Sequence[bytes]) -> Container:
        """Write indexes and table of contents; what the manifest says of the container."""
        contents = self._contents(indexes)
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for offset, data in zip(
                self.layout.offsets[len(self.bodies) :], [*indexes, contents], strict=True
            ):
                effects.write_at(fd, data, offset, self.path)
        finally:
            os.close(fd)
        return Container(
            self.name,
            self.layout.nbytes,
            self.structure,
            self.layout.offsets[-1],
            len(contents),
            digest_of(contents).hex(),
        )

    def holds(self, indexes: Sequence[bytes]) -> bool:
        """Whether the file has these indexes and their table of contents, read back."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return all(
                os.pread(fd, len(data), offset) == data
                for offset, data in zip(
                    self.layout.offsets[len(self.bodies) :],
                    [*indexes, self._contents(indexes)],
                    strict=True,
                )
            )
        finally:
            os.close(fd)

    def _contents(self, indexes: Sequence[bytes]) -> bytes:
        offsets = self.layout.offsets[:-1] or [0] * (len(self.bodies) + len(self.index_nbytes))
        digests = [b.digest for b in self.bodies]
        blocks = [b.blocks for b in self.bodies]
        for data, nbytes in zip(indexes, self.index_nbytes, strict=True):
            digests.append(digest_of(data) if data else bytes(32))
            blocks.append(_blocks_of(data, nbytes))
        return Contents.of(
            offsets,
            [b.nbytes for b in self.bodies] + self.index_nbytes,
            np.frombuffer(b"".join(digests), np.uint8),
            blocks,
        ).pack()

    def structure_digest(self) -> str:
        """Digest of every byte that is neither body nor index nor table of contents."""
        return structure_digest(self.path, self.name, self._ranges(), self.layout.nbytes)

    def _ranges(self) -> list[Span]:
        lengths = [b.nbytes for b in self.bodies] + self.index_nbytes + [self._contents_nbytes]
        return [Span(o, n) for o, n in zip(self.layout.offsets, lengths, strict=True)]


def structure_digest(path: bytes, name: bytes, ranges: Sequence[Span], nbytes: int) -> str:
    """Digest of the bytes of a container outside ``ranges``, in file order."""
    rest = tuple(gaps(np.array(ranges, np.int64).reshape(-1, 2), nbytes))
    blocks = b""
    for unit in units_of(path, os.fsdecode(name), [(0, rest)], unit=0):
        blocks = b"".join(found.blocks for found in hash_unit(unit))
    return digest_of_blocks(sum(s.nbytes for s in rest), blocks).hex()


def _blocks_of(data: bytes, nbytes: int) -> bytes:
    if nbytes <= BLOCK:
        return b""
    data = data or bytes(nbytes)
    return b"".join(blake3(data[at : at + BLOCK]).digest() for at in range(0, nbytes, BLOCK))


def links_of(
    table: Table, targets: Sequence[tuple[str, bytes | None] | None], most: int
) -> list[Link]:
    """Links for people: one for each tensor that covers a whole payload stored apart.

    ``targets`` has, for each payload, the dataset's digest and the other container's relative
    path (``None`` for this one), or ``None`` where it is in the skeleton.
    """
    links: list[Link] = []
    taken: set[str] = set()
    for row in range(table.n_tensors):
        if len(links) >= most:
            break
        if table.columns["home"][row] != HOME_PAYLOAD:
            continue
        payload = int(table.columns["home_row"][row])
        target = targets[payload]
        if target is None or table.columns["nbytes"][row] != table.payload_nbytes[payload]:
            continue
        name = quote(table.name(row), safe=_SAFE)
        if name.strip(".") == "":
            name = name.replace(".", "%2E")
        if not name or name in taken or len(name) > MAX_LINK_NAME:
            continue
        taken.add(name)
        links.append(Link(name, f"payloads/{target[0]}", target[1]))
    return links


class CopyUnit(NamedTuple):
    """Ranges to copy from one file to another: plain and picklable.

    ``items`` are (source offset, target offset, nbytes).
    """

    source: bytes
    label: str
    target: bytes
    items: tuple[tuple[int, int, int], ...]
    nbytes: int


def copy_unit(unit: CopyUnit) -> None:
    """Copy the ranges of one unit."""
    source = open_for_reading(unit.source, unit.label)
    try:
        fd = os.open(unit.target, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for source_offset, offset, nbytes in unit.items:
                effects.copy_range(
                    source, source_offset, fd, offset, nbytes, unit.target, unit.label
                )
        finally:
            os.close(fd)
    finally:
        os.close(source)


class Portion(NamedTuple):
    """Whole blocks of a body, or all of it, to be copied and hashed.

    ``pieces`` are (file, offset, nbytes); ``file`` is ``None`` where every byte is ``offset``.
    ``row`` and ``first_block`` are as in :class:`~slimckpt.sources.digest.Piece`.
    """

    row: int
    first_block: int
    pieces: tuple[tuple[bytes | None, int, int], ...]
    target: bytes
    offset: int
    nbytes: int


def copy_hashing(portions: Sequence[Portion]) -> list[Hashed]:
    """Copy some portions, and hash what is copied, reading each byte once."""
    found = []
    with contextlib.ExitStack() as opened:
        sources: dict[bytes, tuple[int, Window]] = {}
        targets: dict[bytes, int] = {}
        for portion in portions:
            for name, _, _ in portion.pieces:
                if name is not None and name not in sources:
                    fd = open_for_reading(name, show_path(name))
                    opened.callback(os.close, fd)
                    sources[name] = fd, Window(fd)
            if portion.target not in targets:
                targets[portion.target] = os.open(portion.target, os.O_WRONLY | os.O_CLOEXEC)
                opened.callback(os.close, targets[portion.target])
            blocks, offset = [], portion.offset
            for data in _blocks_read(portion.pieces, sources):
                blocks.append(blake3(data).digest())
                effects.write_at(targets[portion.target], data, offset, portion.target)
                offset += len(data)
            found.append(Hashed(portion.row, portion.first_block, b"".join(blocks)))
    return found


def _blocks_read(
    pieces: Sequence[tuple[bytes | None, int, int]], sources: dict[bytes, tuple[int, Window]]
) -> Iterator[memoryview]:
    """The bytes of some pieces in blocks, each valid until the next one."""
    name, offset, nbytes = pieces[0]
    if len(pieces) == 1 and name is not None and nbytes <= NEAR:
        yield sources[name][1].read(Span(offset, nbytes), show_path(name))
        return
    buffer, filled = reusable_buffer(), 0
    for name, offset, nbytes in pieces:
        done = 0
        while done < nbytes:
            take = min(nbytes - done, BLOCK - filled)
            room = buffer[filled : filled + take]
            if name is None:
                room[:] = bytes([offset]) * take
            else:
                span = Span(offset + done, take)
                read_spans_into(sources[name][0], [span], room, show_path(name))
            done, filled = done + take, filled + take
            if filled == BLOCK:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def sync_file(path: bytes) -> None:
    """Make a written file durable, and forget its pages, so that checking it asks the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        effects.sync(fd, path)
        effects.forget_pages(fd)
    finally:
        os.close(fd)


def _extras() -> list[tuple[str, bytes]]:
    script = Path(__file__).with_name("restore_script.py").read_bytes()
    return [("restore.py", script), ("README.txt", README.encode())]


def extras_nbytes() -> int:
    """Bytes of what every store holds besides its manifests."""
    return sum(len(data) for _, data in _extras())


def write_manifests(work: bytes, parts: Sequence[Part], totals: dict[str, int], mode: int) -> Root:
    """Write parts, way out and root manifest, all synced."""
    names = []
    effects.make_directories(os.path.join(work, b"parts"))
    for number, part in enumerate(parts):
        name, data = f"parts/{number:04}.json", part.pack()
        effects.write_file(os.path.join(work, name.encode()), data, mode)
        names.append(PartName(name, part.run, part.step, len(data), digest_of(data).hex()))
    extras = {}
    for name, data in _extras():
        effects.write_file(os.path.join(work, name.encode()), data, mode)
        extras[name] = {"nbytes": len(data), "digest": digest_of(data).hex()}
    root = Root(names, totals, extras)
    for manifest in (ROOT_MANIFEST, ROOT_COPY):
        effects.write_file(os.path.join(work, manifest), root.pack(), mode)
    return root
