"""HDF5: every path to a dataset is a tensor, its stored bytes are a payload.

A contiguous dataset is one span. A chunked one is a span for each stored chunk, in C order of
their grid; a filtered chunk is its stored bytes, which :mod:`slimckpt.encodings` decodes. Paths
that lead to one dataset, by hard or soft links, are tensors on one payload. External links and
storage and virtual layouts lead out of the file: it is refused as a whole, and they are not
opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from slimckpt.dtypes import OPAQUE
from slimckpt.errors import DamagedFileError
from slimckpt.formats.base import Format
from slimckpt.formats.hdf5_chunks import Chunk, grid_of, read_chunks
from slimckpt.formats.hdf5_file import (
    LAYOUT,
    LINK_INFO,
    SIGNATURE,
    SYMBOL_TABLE,
    Hdf5File,
    signature_at,
)
from slimckpt.formats.hdf5_links import HARD, SOFT, Link, read_links
from slimckpt.formats.hdf5_messages import CHUNKED, COMPACT, Dataset, read_dataset
from slimckpt.model import RAW, TableBuilder
from slimckpt.sources.positioned import ByteSource

_MAX_DEPTH = 1000
_MAX_PATHS, _MAX_PATHS_EACH = 100_000, 4
_MAX_STEPS, _MAX_STEPS_EACH = 1_000_000, 64
_MAX_NAMES, _MAX_NAMES_EACH = 16 * 1024 * 1024, 4096
"""Links may name the same groups again and again: paths, names in soft links, and bytes of paths
are bounded, each by a number and so many more for each object (group or dataset) of the file."""
_MAX_HOPS = 16
"""Soft links on soft links; libhdf5's own limit."""


class Hdf5(Format):
    """Keras' ``.weights.h5``, MATLAB's ``.mat`` 7.3, whatever h5py wrote."""

    name = "hdf5"

    def matches(self, head: bytes, size: int) -> bool:
        for at in (0, 512, 1024, 2048):
            if head[at : at + 8] == SIGNATURE:
                return _is_superblock(head[at : at + 16])
        return False

    def found_inside(self, source: ByteSource) -> bool:
        """Behind a user block of 4096, 8192... bytes."""
        try:
            at = signature_at(source, 0, source.size)
        except DamagedFileError:
            return False
        return _is_superblock(source.read(at, min(16, source.size - at)))

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        return locate_hdf5(source, table, 0, source.size)


def _is_superblock(head: bytes) -> bool:
    """Whether what a signature starts says sizes that there are."""
    sizes = head[13:15] if head[8:9] in (b"\0", b"\1") else head[9:11]
    return len(sizes) == 2 and set(sizes) <= {2, 4, 8}


def locate_hdf5(
    source: ByteSource, table: TableBuilder, start: int, stop: int, prefix: str = ""
) -> dict[str, Any]:
    """Add the datasets of the HDF5 file that lies at ``start`` to ``stop`` of ``source``.

    ``prefix`` comes before their names. Returns facts: ``superblock`` (its version),
    ``user_block`` and ``trailing`` (bytes before and behind it), ``dangling_links``.
    """
    file = Hdf5File(source, start, stop)
    walk = _Walk(file)
    tensors: dict[int, dict[str, Any]] = {}
    for path, address, dataset in walk.datasets():
        file.subject = "dataset", path
        if address not in tensors:
            tensors[address] = _tensor(file, table, dataset)
        table.tensor(prefix + path.decode("utf-8", "backslashreplace"), **tensors[address])
    facts = {
        "superblock": file.version,
        "user_block": file.user_block,
        "trailing": file.trailing,
        "dangling_links": walk.dangling,
    }
    return {name: value for name, value in facts.items() if value or name == "superblock"}


class _Group(NamedTuple):
    address: int
    links: dict[bytes, Link]


class _Walk:
    """All paths from the root to datasets, in order of their names."""

    def __init__(self, file: Hdf5File) -> None:
        self.file = file
        self.dangling = 0
        self._objects: dict[int, _Group | Dataset | None] = {}
        self._soft: dict[tuple[int, bytes], int | None] = {}
        self._paths = self._steps = self._names = 0

    def datasets(self) -> Iterator[tuple[bytes, int, Dataset]]:
        """Path, address of the object header and dataset of each path."""
        file = self.file
        root = self._object(file.root, b"/")
        if not isinstance(root, _Group):
            raise file.damaged("expected a group as its root")
        above = {root.address}
        todo = [(root, b"", iter(sorted(root.links)))]
        while todo:
            group, prefix, rest = todo[-1]
            name = next(rest, None)
            if name is None:
                above.discard(group.address)
                todo.pop()
                continue
            path = prefix + name
            self._bound(path)
            address = self._target(group, name, path)
            found = None if address is None else self._object(address, path)
            if address is None:
                self.dangling += 1
            elif isinstance(found, Dataset):
                yield path, address, found
            elif found is not None and address not in above:
                above.add(address)
                todo.append((found, path + b"/", iter(sorted(found.links))))
            if len(todo) > _MAX_DEPTH:
                raise file.unknown(f"its groups are more than {_MAX_DEPTH} deep")

    def _bound(self, path: bytes) -> None:
        """Count one more path."""
        self.file.subject = None
        self._paths += 1
        self._names += len(path)
        objects = len(self._objects)
        paths = _MAX_PATHS + _MAX_PATHS_EACH * objects
        names = _MAX_NAMES + _MAX_NAMES_EACH * objects
        if self._paths > paths or self._names > names:
            raise self.file.unknown(
                f"links lead to {objects} objects by more than {paths} paths, or ones of more than"
                f" {names} bytes"
            )

    def _object(self, address: int | None, path: bytes) -> _Group | Dataset | None:
        """The group or dataset at ``address``; ``None`` for anything else (a named type)."""
        file = self.file
        file.subject = "object", path
        if address is None:
            raise file.damaged("has no address")
        if address not in self._objects:
            messages = file.messages(address)
            kinds = {kind for kind, _ in messages}
            found: _Group | Dataset | None = None
            if kinds & {LINK_INFO, SYMBOL_TABLE}:
                found = _Group(address, read_links(file, messages))
            elif LAYOUT in kinds:
                found = read_dataset(file, messages)
            self._objects[address] = found
        file.subject = None
        return self._objects[address]

    def _target(self, group: _Group, name: bytes, path: bytes) -> int | None:
        """The address that a name in a group leads to; soft links are followed once."""
        link = group.links[name]
        if link.kind == HARD:
            return self._follow(group, link, path, 0)
        key = group.address, name
        if key not in self._soft:
            self._soft[key] = self._follow(group, link, path, 0)
        return self._soft[key]

    def _follow(self, group: _Group, link: Link, path: bytes, hops: int) -> int | None:
        """The address a link leads to; ``None`` where a soft one leads nowhere."""
        self.file.subject = "link", path
        if link.kind == HARD:
            if link.address is None:
                raise self.file.damaged("leads nowhere")
            return link.address
        if link.kind != SOFT:
            raise self.file.refused("leads to another file (an external link), never followed")
        if hops == _MAX_HOPS:
            return None
        at = self.file.root if link.target.startswith(b"/") else group.address
        parts = link.target.rstrip(b"\0").split(b"/")
        self._steps += len(parts)
        if self._steps > _MAX_STEPS + _MAX_STEPS_EACH * len(self._objects):
            raise self.file.unknown(f"its soft links have more than {_MAX_STEPS} names in them")
        for part in parts:
            if part in (b"", b"."):
                continue
            found = self._object(at, path)
            if not isinstance(found, _Group) or part not in found.links:
                return None
            at = self._follow(found, found.links[part], path, hops + 1)
            if at is None:
                return None
        return at


def _tensor(file: Hdf5File, table: TableBuilder, dataset: Dataset) -> dict[str, Any]:
    """What the table is told of a dataset, its payload added."""
    kind, layout, nbytes = dataset.type, dataset.layout, dataset.nbytes
    if dataset.shape is None:
        return {"dtype": OPAQUE + "null", "shape": (), "nbytes": 0}
    found: dict[str, Any] = {
        "dtype": kind.name,
        "shape": dataset.shape,
        "nbytes": nbytes,
        "big_endian": kind.big_endian,
    }
    if not nbytes:
        return found
    if layout.kind == CHUNKED:
        chunks = read_chunks(file, dataset)
        if chunks:
            found["payload"] = table.payload((c.offset, c.nbytes) for c in chunks)
            found["encoding"] = _encoding(dataset, chunks)
            return found
    elif layout.data is not None or layout.address is not None:
        stored = layout.nbytes if layout.data is None else layout.data.left
        if stored not in (None, nbytes):
            raise file.damaged(f"it takes {nbytes} bytes, but {stored} are stored")
        if layout.kind == COMPACT:
            assert layout.data is not None
            # Inside its object header, whose checksum covers it: it never leaves the skeleton.
            found["payload"] = table.payload([(layout.data.offset, nbytes)], pinned=True)
        else:
            found["payload"] = table.payload([(file.place(layout.address, nbytes), nbytes)])
        return found
    return {**found, "fill": dataset.fill}


def _encoding(dataset: Dataset, chunks: list[Chunk]) -> str:
    """How the stored chunks become the dataset: see ``encodings.py``."""
    shape, chunk = dataset.shape or (), dataset.layout.chunk
    grid = grid_of(shape, chunk)
    complete = len(chunks) == math.prod(grid)
    if complete and not dataset.filters and _follow_each_other(shape, chunk):
        return RAW
    told: dict[str, Any] = {"shape": shape, "chunk": chunk, "itemsize": dataset.type.nbytes}
    if dataset.filters:
        told["filters"] = dataset.filters
    if any(dataset.fill) and not complete:
        told["fill"] = dataset.fill.hex()
    if not complete:
        runs: list[list[int]] = []
        for c in chunks:
            if runs and c.number == sum(runs[-1]):
                runs[-1][1] += 1
            else:
                runs.append([c.number, 1])
        told["stored"] = runs
    if dataset.filters and any(c.mask for c in chunks):
        told["masks"] = [[i, c.mask] for i, c in enumerate(chunks) if c.mask]
    return "hdf5-chunks:" + json.dumps(told, separators=(",", ":"))


def _follow_each_other(shape: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Whether the elements of chunks, one after another, are those of the dataset in C order."""
    axis = 0
    while axis < len(shape) and chunk[axis] == 1:
        axis += 1
    if chunk[axis + 1 :] != shape[axis + 1 :]:
        return False
    # A last chunk that reaches beyond the dataset has only what is not asked for at its end.
    return axis == len(shape) or shape[axis] % chunk[axis] == 0 or math.prod(shape[:axis]) == 1
