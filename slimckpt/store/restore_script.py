#!/usr/bin/env python3
"""Gives back the original files of the slim checkpoint that this script lies in.

Needs Python 3.8 or newer and nothing else. It knows format 0 of slim checkpoints, as the FORMAT.md
of slimckpt describes it, and shares no code with slimckpt.

What it always checks: the root manifest, the manifests of parts and the indexes by their BLAKE3
digests, and the sizes of all files that it reads. The contents themselves it checks with --check.
It builds OUT.restore-part and renames it at the end; after any error there is no OUT.

Exit codes: 0 done, 1 the slim checkpoint is damaged, 2 anything else.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
    # This directory holds the user's files too; one named json.py must not run.
    del sys.path[0]

import argparse
import contextlib
import errno
import fnmatch
import json
import os
import re
import shutil
import signal
import stat
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

VERSION = 0
BLOCK = 4 * 1024 * 1024
MOST_OPEN = 64
SUFFIX = b".restore-part"
SEAL = re.compile(rb'"digest"\s*:\s*"([0-9a-f]{64})"\s*\}\s*\Z')
READ_AS = {
    "|u1": "B",
    "<u2": "H",
    "<u4": "I",
    "<u8": "Q",
    "|i1": "b",
    "<i2": "h",
    "<i4": "i",
    "<i8": "q",
}
IN_SKELETON, STORED, FILL, PARTS = 0, 1, 2, 3
# What a kernel says that cannot copy between these two files, though a program can.
NO_KERNEL_COPY = {
    getattr(errno, name, -1)
    for name in ("EXDEV", "ENOSYS", "EOPNOTSUPP", "ENOTSUP", "EINVAL", "EPERM", "ETXTBSY", "EBADF")
}
NO_LINKS = {errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}
NOT_AS_EXPECTED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


class Stop(Exception):
    """Ends the program with a message. Exit code 2."""

    code = 2


class Damage(Stop):
    """The slim checkpoint is not as it was written. Exit code 1."""

    code = 1


class Dropped(Stop):
    """Tensors of the files were left out when they were slimmed. Exit code 1."""

    code = 1


# BLAKE3, on many chunks at once: word i of all of them is one Python integer, 40 bits a chunk. The
# upper 8 bits of a lane take the carries of all additions of a compression; a rotation is two
# shifts whose masks also drop what came in from neighbours.

LANE = 5
LANES = 1024
CHUNK = 1024
CHUNK_START, CHUNK_END, PARENT, ROOT, KEY_CONTEXT, KEY_MATERIAL = 1, 2, 4, 8, 32, 64
IV = struct.unpack(
    ">8I", bytes.fromhex("6A09E667BB67AE853C6EF372A54FF53A510E527F9B05688C1F83D9AB5BE0CD19")
)
COLUMNS_AND_DIAGONALS = tuple(
    tuple(4 * row + (row * turn + i) % 4 for row in range(4)) for turn in (0, 1) for i in range(4)
)


def _schedule() -> list[tuple[int, ...]]:
    """All quarter rounds: four words of the state, two words of the message."""
    order = list(range(16))
    found: list[tuple[int, ...]] = []
    for _ in range(7):
        for i, quarter in enumerate(COLUMNS_AND_DIAGONALS):
            found.append((*quarter, order[2 * i], order[2 * i + 1]))
        order = [order[i] for i in (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)]
    return found


SCHEDULE = _schedule()


class Lanes:
    """The constants for compressing ``count`` blocks at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ones = int.from_bytes(b"\1\0\0\0\0" * count, "little")
        self.masks = tuple(
            self.ones * mask
            for bits in (16, 12, 8, 7)
            for mask in ((1 << (32 - bits)) - 1, ((1 << bits) - 1) << (32 - bits))
        )

    def words(self, data: bytes, at: int, stride: int) -> list[int]:
        """The 16 words of the blocks at ``at``, ``at + stride``, …"""
        found = []
        last = stride * (self.count - 1) + 1
        for first in range(at, at + 64, 4):
            packed = bytearray(LANE * self.count)
            for byte in range(4):
                packed[byte::LANE] = data[first + byte : first + byte + last : stride]
            found.append(int.from_bytes(packed, "little"))
        return found

    def compress(
        self, value: list[int], m: list[int], counter: int, nbytes: int, flags: int
    ) -> list[int]:
        ones = self.ones
        low16, high16, low12, high12, low8, high8, low7, high7 = self.masks
        v = value + [ones * word for word in IV[:4]]
        v += [counter, 0, ones * nbytes, ones * flags]
        for i, j, k, n, x, y in SCHEDULE:
            a, b, c, d = v[i], v[j], v[k], v[n]
            a += b + m[x]
            d ^= a
            d = d >> 16 & low16 | d << 16 & high16
            c += d
            b ^= c
            b = b >> 12 & low12 | b << 20 & high12
            a += b + m[y]
            d ^= a
            d = d >> 8 & low8 | d << 24 & high8
            c += d
            b ^= c
            v[i], v[j], v[k], v[n] = a, b >> 7 & low7 | b << 25 & high7, c, d
        words = ones * 0xFFFFFFFF
        return [(v[i] ^ v[i + 8]) & words for i in range(8)]

    def unpack(self, value: list[int]) -> bytes:
        """Chaining values, 32 bytes for each lane."""
        found = bytearray(32 * self.count)
        for i, words in enumerate(value):
            packed = words.to_bytes(LANE * self.count, "little")
            for byte in range(4):
                found[4 * i + byte :: 32] = packed[byte::LANE]
        return bytes(found)


def _chunks(data: bytes, first: int, count: int, key: tuple[int, ...], flags: int) -> bytes:
    """Chaining values of ``count`` chunks from number ``first``; a short one comes alone."""
    lanes = Lanes(count)
    data = data[CHUNK * first : CHUNK * (first + count)]
    last = (max(len(data) if count == 1 else CHUNK, 1) - 1) // 64
    tail = len(data) - 64 * last if count == 1 else 64
    data += bytes(64 - tail)
    counter = int.from_bytes(
        b"".join(n.to_bytes(LANE, "little") for n in range(first, first + count)), "little"
    )
    value = [lanes.ones * word for word in key]
    for block in range(last + 1):
        here = flags & ~ROOT | (CHUNK_START if block == 0 else 0)
        if block == last:
            here |= CHUNK_END | flags & ROOT
        words = lanes.words(data, 64 * block, CHUNK)
        value = lanes.compress(value, words, counter, tail if block == last else 64, here)
    return lanes.unpack(value)


def blake3(data: bytes, key: tuple[int, ...] = IV, flags: int = 0) -> bytes:
    """BLAKE3-256 of bytes in memory."""
    if len(data) <= CHUNK:
        return _chunks(data, 0, 1, key, flags | ROOT)
    full = len(data) // CHUNK
    values = b"".join(
        _chunks(data, first, min(LANES, full - first), key, flags)
        for first in range(0, full, LANES)
    )
    if len(data) % CHUNK:
        values += _chunks(data, full, 1, key, flags)
    while len(values) > 32:
        nodes = len(values) // 32
        parents = []
        for first in range(0, nodes // 2, LANES):
            lanes = Lanes(min(LANES, nodes // 2 - first))
            words = lanes.words(values, 64 * first, 64)
            start = [lanes.ones * word for word in key]
            here = flags | PARENT | (ROOT if nodes == 2 else 0)
            parents.append(lanes.unpack(lanes.compress(start, words, 0, 64, here)))
        values = b"".join(parents) + (values[-32:] if nodes % 2 else b"")
    return values


def blake3_derive(context: bytes, data: bytes) -> bytes:
    """BLAKE3-256 in derive-key mode."""
    key = struct.unpack("<8I", blake3(context, IV, KEY_CONTEXT))
    return blake3(data, key, KEY_MATERIAL)


def digest_of(stream: Iterable[bytes]) -> bytes:
    """The digest of a body, as FORMAT.md defines it."""
    blocks, nbytes, waiting = [], 0, bytearray()
    for data in stream:
        nbytes += len(data)
        waiting += data
        while len(waiting) > BLOCK:
            blocks.append(blake3(bytes(waiting[:BLOCK])))
            del waiting[:BLOCK]
    blocks.append(blake3(bytes(waiting)))
    if len(blocks) == 1:
        return blocks[0]
    return blake3_derive(b"slimckpt block tree", struct.pack("<Q", nbytes) + b"".join(blocks))


class Meta(NamedTuple):
    mode: int
    mtime: int
    uid: int
    gid: int


class Container(NamedTuple):
    """A file of the store, and how long it must be."""

    name: bytes
    nbytes: int


class Piece(NamedTuple):
    """Bytes of a container; without one, every byte is ``offset``."""

    container: Container | None
    offset: int
    nbytes: int


class Run(NamedTuple):
    """Where ``nbytes`` bytes at ``at`` of a source file come from."""

    at: int
    container: Container | None
    offset: int
    nbytes: int


class Body(NamedTuple):
    """A payload (its row) or a skeleton (-1), and the digest it must have."""

    row: int
    pieces: tuple[Piece, ...]
    digest: bytes


class Index(NamedTuple):
    container: Container
    offset: int
    nbytes: int
    digest: bytes


class File(NamedTuple):
    """A chosen source file. ``names`` are the paths to restore, further ones as hard links."""

    path: bytes
    names: tuple[bytes, ...]
    nbytes: int
    meta: Meta
    containers: list[Container]
    skeleton: Body
    skeleton_nbytes: int
    whole_mtime: int | None
    table: Index | None
    unknown: str
    dropped: int


def show(path: bytes) -> str:
    """A path for people: control characters and bytes that are not UTF-8 escaped."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say(text: str) -> None:
    print(f"restore.py: {text}", file=sys.stderr)


def number(raw: Any, key: Any, low: int = 0, high: int = 2**63 - 1) -> int:
    value = raw[key]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} is {value!r}")
    return value


def hex_digest(raw: Any) -> bytes:
    found = bytes.fromhex(raw["digest"])
    if len(found) != 32:
        raise ValueError(f"digest of {len(found)} bytes")
    return found


def raw_path(text: str) -> bytes:
    found = text.encode("utf-8", "surrogateescape")
    if b"\0" in found:
        raise ValueError(f"path with a NUL: {show(found)}")
    return found


def safe_path(text: str) -> bytes:
    """A path as bytes, refused where it could leave its directory."""
    found = raw_path(text)
    if any(part in (b"", b".", b"..") for part in found.split(b"/")):
        raise ValueError(f"unsafe path '{show(found)}'")
    return found


def meta_of(raw: Any) -> Meta:
    owner = (number(raw, name, high=2**32 - 2) for name in ("uid", "gid"))
    return Meta(number(raw, "mode", high=0o7777), number(raw, "mtime", -(2**70), 2**70), *owner)


def manifest(data: bytes, label: str, kind: str) -> Any:
    """The JSON of a manifest of a version that this script knows."""
    try:
        raw = json.loads(data)
        if raw["format"] != kind:
            raise ValueError(f"format is {raw['format']!r}, expected {kind!r}")
        version, requires = raw["version"], [str(name) for name in raw["requires"]]
    except (*NOT_AS_EXPECTED, RecursionError) as error:
        raise Damage(f"{label}: not a {kind} manifest: {error!r}") from None
    if type(version) is not int or version != VERSION or requires:
        needs = "it needs " + ", ".join(requires) if requires else f"its version is {version!r}"
        raise Stop(
            f"{label}: {needs}; this script knows version {VERSION}. Use the restore.py that lies"
            " in the slim checkpoint, or a newer slimckpt"
        )
    return raw


class Columns:
    """The columns of an index, read when asked for."""

    def __init__(self, data: bytes) -> None:
        magic, length = struct.unpack_from("<8sI", data)
        if magic != b"SLIMCOL\0" or 12 + length > len(data):
            raise ValueError("these bytes are not packed columns")
        self._data = data
        self._start = -(-(12 + length) // 8) * 8
        self._columns = json.loads(data[12 : 12 + length])["columns"]

    def __getitem__(self, name: str) -> array[int]:
        place = self._columns[name]
        offset, count = number(place, 0), number(place, 2)
        column = array(READ_AS[place[1]])
        start = self._start + offset
        end = start + column.itemsize * count
        if end > len(self._data):
            raise ValueError(f"column {name} lies outside the index")
        column.frombytes(self._data[start:end])
        if sys.byteorder == "big":
            column.byteswap()
        return column

    def tensors(self, payload: int) -> str:
        """The tensors of a payload, for people."""
        homes, rows, ends = self["home"], self["home_row"], self["name_end"]
        names = self["names"].tobytes()
        found = [
            show(names[ends[i - 1] if i else 0 : ends[i]])
            for i, row in enumerate(rows)
            if row == payload and homes[i] == 1
        ]
        return "tensor " + ", ".join(found[:3]) if found else f"payload {payload}"


class Store:
    """A slim checkpoint: its files, opened as they are needed."""

    def __init__(self, path: bytes) -> None:
        self.path = path
        self._open: dict[bytes, int] = {}

    def label(self, name: bytes) -> str:
        return show(os.path.join(self.path, name))

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, name: bytes) -> int:
        if name not in self._open:
            if len(self._open) >= MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            try:
                fd = os.open(os.path.join(self.path, name), os.O_RDONLY | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError):
                raise Damage(f"{self.label(name)} is missing") from None
            self._open[name] = fd
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Damage(f"{self.label(name)} is not a regular file")
        return self._open[name]

    def status(self, name: bytes) -> os.stat_result:
        return os.fstat(self._descriptor(name))

    def open(self, container: Container) -> int:
        """A descriptor of a container of the right size."""
        fd = self._descriptor(container.name)
        found = os.fstat(fd).st_size
        if found != container.nbytes:
            raise Damage(
                f"{self.label(container.name)}: expected {container.nbytes} bytes, found {found}"
            )
        return fd

    def read(
        self, container: Container, offset: int, nbytes: int, sized: bool = True
    ) -> Iterator[bytes]:
        """Bytes of a container, a block at a time; all that follow where ``nbytes`` is -1.

        ``sized`` is whether it must have the size that it should have.
        """
        if nbytes < 0:
            nbytes = container.nbytes - offset
        while nbytes:
            try:
                fd = self.open(container) if sized else self._descriptor(container.name)
                data = os.pread(fd, min(nbytes, BLOCK), offset)
            except OSError as error:
                raise self.unreadable(container, error) from None
            if not data:
                raise Damage(f"{self.label(container.name)} ends at {offset}")
            yield data
            offset, nbytes = offset + len(data), nbytes - len(data)

    def unreadable(self, container: Container, error: OSError) -> Stop:
        kind = Damage if error.errno == errno.EIO else Stop
        return kind(f"{self.label(container.name)}: {error.strerror}")

    def body(self, body: Body) -> Iterator[bytes]:
        for container, offset, nbytes in body.pieces:
            if container is not None:
                yield from self.read(container, offset, nbytes)
            else:
                for at in range(0, nbytes, BLOCK):
                    yield bytes([offset]) * min(BLOCK, nbytes - at)

    def small_file(self, name: bytes) -> bytes:
        return b"".join(self.read(Container(name, self.status(name).st_size), 0, -1))

    def root(self) -> Any:
        """The root manifest, or its second copy."""
        names = (b"slimckpt.json", b"slimckpt.json.2")
        if not any(os.path.lexists(os.path.join(self.path, name)) for name in names):
            raise Stop(f"{show(self.path)} is not a slim checkpoint: it has no slimckpt.json")
        problems: list[str] = []
        for name in names:
            try:
                data = self.small_file(name)
            except Damage as error:
                problems.append(str(error))
                continue
            seal = SEAL.search(data)
            if seal is None:
                problems.append(f"{self.label(name)} does not end with its digest")
                continue
            expected = seal.group(1).decode()
            start, end = seal.span(1)
            found = blake3(data[:start] + b"0" * 64 + data[end:]).hex()
            if found == expected:
                if problems:
                    say(f"{problems[0]}; its second copy is used")
                return manifest(data, self.label(name), "slimckpt")
            problems.append(f"{self.label(name)}: expected digest {expected}, found {found}")
        raise Damage("; ".join(problems))

    def part(self, named: Any) -> Any:
        """A part that the root manifest names."""
        name = safe_path(named["name"])
        data = self.small_file(name)
        if len(data) != number(named, "nbytes"):
            raise Damage(f"{self.label(name)}: expected {named['nbytes']} bytes, found {len(data)}")
        expected, found = hex_digest(named), digest_of([data])
        if found != expected:
            raise Damage(
                f"{self.label(name)}: expected digest {expected.hex()}, found {found.hex()}"
            )
        return manifest(data, self.label(name), "slimckpt-part")


def container_of(containers: list[Container], at: int) -> Container:
    if not 0 <= at < len(containers):
        raise ValueError(f"container {at} of {len(containers)}")
    return containers[at]


def piece_of(containers: list[Container], at: int, offset: int, nbytes: int) -> Piece:
    container = container_of(containers, at)
    if offset < 0 or nbytes < 0 or offset + nbytes > container.nbytes:
        raise ValueError(
            f"bytes {offset} to {offset + nbytes} of {show(container.name)}, which has"
            f" {container.nbytes}"
        )
    return Piece(container, offset, nbytes)


def fill_of(byte: int, nbytes: int) -> Piece:
    if not 0 <= byte <= 255:
        raise ValueError(f"fill of {byte}")
    return Piece(None, byte, nbytes)


def file_of(raw: Any, containers: list[Container], names: tuple[bytes, ...]) -> File:
    place = raw["skeleton"]
    nbytes, kind = number(place, "nbytes"), place["kind"]
    pieces: list[Piece] = []
    mtime, unknown = None, ""
    if kind == "stored":
        at = number(place, "container")
        pieces = [piece_of(containers, at, number(place, "offset"), nbytes)]
    elif kind == "fill":
        # An empty skeleton may leave its byte out: there is none.
        pieces = [fill_of(number(place, "byte"), nbytes)] if nbytes else []
    elif kind == "parts":
        for part in place["parts"]:
            pieces.append(piece_of(containers, *(number(part, i) for i in range(3))))
    elif kind == "whole":
        mtime = number(place, "mtime", -(2**70), 2**70)
        pieces = [Piece(Container(safe_path(place["name"]), nbytes), 0, nbytes)]
    else:
        unknown = repr(kind)
    index = raw.get("index")
    return File(
        safe_path(raw["path"]),
        names,
        number(raw, "nbytes"),
        meta_of(raw),
        containers,
        Body(-1, tuple(pieces), hex_digest(place)),
        nbytes,
        mtime,
        Index(
            container_of(containers, number(index, "container")),
            number(index, "offset"),
            number(index, "nbytes"),
            hex_digest(index),
        )
        if index and mtime is None
        else None,
        unknown,
        len(raw["dropped"]["tensors"]) if "dropped" in raw else 0,
    )


class Wanted:
    """What the command line selects."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps: list[str] = options.step
        self.ranks: list[int] = options.rank
        self.globs = [os.fsencode(g).decode("utf-8", "surrogateescape") for g in options.file]
        self.run: str | None = options.run
        self.everything = not (self.steps or self.ranks or self.globs or self.run is not None)
        self.matched: set[str] = set()

    def part(self, run: str, step: Any) -> bool:
        if step is None:
            return True
        return (self.run is None or run == self.run) and (not self.steps or str(step) in self.steps)

    def rank(self, rank: int | None) -> bool:
        return not self.ranks or rank is None or rank in self.ranks

    def path(self, path: bytes) -> bool:
        if not self.globs:
            return True
        text = path.decode("utf-8", "surrogateescape")
        found = [glob for glob in self.globs if fnmatch.fnmatchcase(text, glob)]
        self.matched.update(found)
        return bool(found)


class Tree:
    """What is to be restored."""

    def __init__(self) -> None:
        self.files: list[File] = []
        self.symlinks: dict[bytes, tuple[bytes, Meta]] = {}
        self.directories: dict[bytes, Meta | None] = {}


class Chooser:
    """Reads all parts and keeps what is wanted."""

    def __init__(self, store: Store, wanted: Wanted) -> None:
        self.store, self.wanted = store, wanted
        self.tree = Tree()
        self._directories: dict[bytes, Meta] = {}
        self._wanted_directories: list[bytes] = []
        self._occupied: set[bytes] = set()
        self._ranks: set[int] = set()
        self._linked: set[bytes] = set()
        self._synthetic: list[bytes] = []
        self._bodies: dict[bytes, list[File]] = {}

    def choose(self) -> Tree:
        root = self.store.root()
        label = self.store.label(b"slimckpt.json")
        try:
            parts = [(p, p["run"], p["step"]) for p in root["parts"]]
            self._refuse_unknown(parts)
            for named, run, step in parts:
                self._part(named, self.wanted.part(run, step))
        except NOT_AS_EXPECTED as error:
            raise Damage(f"{label}: not a root manifest: {error!r}") from None
        self._join_links()
        for rank in self.wanted.ranks:
            if rank not in self._ranks:
                known = ", ".join(map(str, sorted(self._ranks))) or "none"
                raise Stop(f"no rank {rank} in what is selected; there are {known}")
        self._refuse_synthetic()
        self._pick_directories()
        for glob in self.wanted.globs:
            if glob not in self.wanted.matched:
                shown = show(glob.encode("utf-8", "surrogateescape"))
                raise Stop(f"--file {shown} matches nothing; '*' also matches '/'")
        if not (
            self.wanted.everything
            or self.tree.files
            or self.tree.symlinks
            or self._wanted_directories
        ):
            raise Stop("nothing is selected")
        self._refuse_conflicts()
        return self.tree

    def _refuse_unknown(self, parts: list[tuple[Any, str, Any]]) -> None:
        steps = [str(step) for _, _, step in parts if step is not None]
        for wanted in self.wanted.steps:
            if wanted not in steps:
                raise Stop(f"no step {wanted}; there are {', '.join(steps) or 'none'}")
        runs = sorted({run for _, run, _ in parts})
        if self.wanted.run is not None and self.wanted.run not in runs:
            shown = ", ".join(f"'{show(raw_path(run))}'" for run in runs)
            raise Stop(f"no run '{self.wanted.run}'; there are {shown or 'none'}")
        if not (self.wanted.everything or any(self.wanted.part(r, s) for _, r, s in parts)):
            raise Stop("nothing is selected")

    def _refuse_synthetic(self) -> None:
        if self._synthetic:
            shown = ", ".join(map(show, self._synthetic[:3]))
            more = f" and {len(self._synthetic) - 3} more" if len(self._synthetic) > 3 else ""
            raise Stop(
                f"{shown}{more}: made by resharding, there is no original file; slimckpt reads the"
                " tensors, and `slimckpt export` writes files of them"
            )

    def _part(self, named: Any, chosen: bool) -> None:
        try:
            raw = self.store.part(named)
        except Damage as error:
            if chosen:
                raise
            say(f"{error}. It is not selected; what only it says of directories is not used")
            return
        try:
            containers = [
                Container(safe_path(c["name"]), number(c, "nbytes")) for c in raw["containers"]
            ]
            for container in containers:
                if container.name.startswith(b"whole/"):
                    raise ValueError(f"container in whole/: {show(container.name)}")
            for entry in raw["entries"]:
                self._entry(entry, containers, chosen)
        except NOT_AS_EXPECTED as error:
            name = self.store.label(raw_path(named["name"]))
            raise Damage(f"{name}: not a part: {error!r}") from None

    def _entry(self, raw: Any, containers: list[Container], chosen: bool) -> None:
        kind = raw["kind"]
        if kind == "directory":
            path = b"" if raw["path"] == "" else safe_path(raw["path"])
            self._directories[path] = meta_of(raw)
            if chosen:
                self._wanted_directories.append(path)
            return
        path = safe_path(raw["path"])
        self._occupied.add(os.path.dirname(path))
        if kind == "symlink":
            if chosen and self.wanted.path(path):
                if path in self.tree.symlinks:
                    raise ValueError(f"{show(path)} is listed twice")
                self.tree.symlinks[path] = (raw_path(raw["target"]), meta_of(raw))
        elif kind == "file":
            names = [path] + [safe_path(link) for link in raw["links"]]
            if raw["origin"] == "link":
                self._linked.add(path)
            self._occupied.update(map(os.path.dirname, names))
            if not chosen:
                return
            if raw["origin"] == "synthetic":
                if raw["rank"] is not None:
                    self._ranks.add(number(raw, "rank"))
                if self.wanted.rank(raw["rank"]) and self.wanted.path(path):
                    self._synthetic.append(path)
                return
            if raw["origin"] not in ("file", "link"):
                raise ValueError(f"{show(path)} is of unknown origin {raw['origin']!r}")
            body = safe_path(raw["body"]) if raw["origin"] == "link" else path
            rank = raw["rank"]
            if rank is not None:
                self._ranks.add(number(raw, "rank"))
            if self.wanted.rank(rank):
                names = [name for name in names if self.wanted.path(name)]
                if names:
                    file = file_of(raw, containers, tuple(names))
                    self._bodies.setdefault(body, []).append(file)
        else:
            raise ValueError(f"{show(path)} is of unknown kind {kind!r}")

    def _join_links(self) -> None:
        """One file for each body: of its names, those whose own entry was chosen."""
        for files in self._bodies.values():
            names: list[bytes] = []
            for file in files:
                names += [n for n in file.names if n == file.path or n not in self._linked]
            if names:
                self.tree.files.append(files[0]._replace(names=tuple(sorted(names))))

    def _pick_directories(self) -> None:
        tree, wanted = self.tree, self.wanted
        occupied = set(above(self._occupied | self._directories.keys()))
        occupied.update(self._occupied)
        if wanted.everything:
            picked = self._wanted_directories
        else:
            picked = [
                path
                for path in self._wanted_directories
                if path and path not in occupied and wanted.path(path)
            ]
        self._wanted_directories = picked
        paths = [name for file in tree.files for name in file.names]
        for path in [b"", *picked, *above([*paths, *tree.symlinks, *picked])]:
            tree.directories[path] = self._directories.get(path)

    def _refuse_conflicts(self) -> None:
        """No path twice, and none below a file or a symbolic link."""
        taken = set(self.tree.symlinks)
        for file in self.tree.files:
            for name in file.names:
                if name in taken:
                    raise Damage(f"{show(name)} is listed twice")
                taken.add(name)
        for path in self.tree.directories:
            if path in taken:
                raise Damage(f"{show(path)} is listed both as a directory and as something else")


def above(paths: Iterable[bytes]) -> Iterator[bytes]:
    """The directories that the paths lie in, each once."""
    seen = set()
    for path in paths:
        while path:
            path = os.path.dirname(path)
            if path in seen:
                break
            seen.add(path)
            yield path


class UnknownPlace(Exception):
    """A file is stored in a way that came after this script."""


def layout(store: Store, file: File, verify: bool) -> tuple[list[Run], list[Body]]:
    """Where all bytes of a source file are, in order, and the bodies that they come from.

    ``verify`` is whether to check the digest of its index.
    """
    if file.unknown:
        raise UnknownPlace(file.unknown)
    runs: list[Run] = []
    bodies = [file.skeleton]
    try:
        if file.table is not None:
            columns = Columns(index_bytes(store, file, file.table, verify))
            for body, spans in payloads(columns, file.containers):
                runs += align(spans, body.pieces)
                bodies.append(body)
        runs.sort(key=lambda run: run.at)
        rest, at = [], 0
        for run in runs:
            if run.at < at or run.at + run.nbytes > file.nbytes:
                raise ValueError("spans of payloads overlap or lie outside the file")
            if run.at > at:
                rest.append((at, run.at - at))
            at = run.at + run.nbytes
        if at < file.nbytes:
            rest.append((at, file.nbytes - at))
        if sum(piece.nbytes for piece in file.skeleton.pieces) != file.skeleton_nbytes:
            raise ValueError("the parts of the skeleton are not as long as the skeleton")
        runs += align(rest, file.skeleton.pieces)
    except (*NOT_AS_EXPECTED, struct.error, RecursionError) as error:
        raise Damage(f"{show(file.path)}: what is stored of it does not fit: {error!r}") from None
    runs.sort(key=lambda run: run.at)
    for run in runs:
        if run.container is not None:
            store.open(run.container)
    return runs, bodies


def index_bytes(store: Store, file: File, index: Index, verify: bool) -> bytes:
    # Its digest tells more than the size of the container does.
    data = b"".join(store.read(index.container, index.offset, index.nbytes, sized=False))
    if verify:
        found = digest_of([data])
        if found != index.digest:
            raise Damage(
                f"{store.label(index.container.name)}: the index of {show(file.path)} is damaged:"
                f" expected digest {index.digest.hex()}, found {found.hex()}"
            )
    return data


def payloads(
    columns: Columns, containers: list[Container]
) -> Iterator[tuple[Body, list[tuple[int, int]]]]:
    """The payloads that are stored apart, and their spans."""
    ends, offsets, lengths = columns["span_end"], columns["span_offset"], columns["span_nbytes"]
    sizes, digests = columns["payload_nbytes"], columns["digest"].tobytes()
    kinds, numbers = columns["place_kind"], columns["place_container"]
    places, part_ends = columns["place_offset"], columns["part_end"]
    columns_of_parts = (columns[f"part_{name}"] for name in ("container", "offset", "nbytes"))
    parts = list(zip(*columns_of_parts))  # noqa: B905 - strict came with 3.10
    rows = len(ends)
    if not rows == len(sizes) == len(kinds) == len(numbers) == len(places) == len(digests) // 32:
        raise ValueError("columns of payloads are not equally long")
    if len(offsets) != len(lengths):
        raise ValueError("columns of spans are not equally long")
    unknown = sorted(set(kinds) - {IN_SKELETON, STORED, FILL, PARTS})
    if unknown:
        raise UnknownPlace(str(unknown[0]))
    start = 0
    for row, end in enumerate(ends):
        if not start <= end <= len(offsets):
            raise ValueError(f"payload {row} ends at span {end} of {len(offsets)}")
        kind, place, nbytes = kinds[row], places[row], sizes[row]
        if kind != IN_SKELETON:
            spans = list(zip(offsets[start:end], lengths[start:end]))  # noqa: B905
            if any(offset < 0 or length < 0 for offset, length in spans):
                raise ValueError(f"payload {row} has a negative span")
            if kind == STORED:
                pieces = [piece_of(containers, numbers[row], place, nbytes)]
            elif kind == FILL:
                pieces = [fill_of(place, nbytes)]
            else:
                if not 0 <= place < len(part_ends):
                    raise ValueError(f"parts {place} of {len(part_ends)}")
                first, last = part_ends[place - 1] if place else 0, part_ends[place]
                if not 0 <= first <= last <= len(parts):
                    raise ValueError(f"parts {first} to {last} of {len(parts)}")
                pieces = [piece_of(containers, *part) for part in parts[first:last]]
            if sum(piece.nbytes for piece in pieces) != nbytes:
                raise ValueError(f"the parts of payload {row} do not have {nbytes} bytes")
            yield Body(row, tuple(pieces), digests[32 * row : 32 * row + 32]), spans
        start = end


def align(spans: Iterable[tuple[int, int]], pieces: Iterable[Piece]) -> list[Run]:
    """Pair a stream cut in spans of the source file with the same stream cut in pieces."""
    found: list[Run] = []
    queue = [piece for piece in pieces if piece.nbytes]
    queue.reverse()
    for at, wanted in spans:
        while wanted:
            if not queue:
                raise ValueError("fewer bytes are stored than the file has")
            container, offset, nbytes = queue.pop()
            take = min(wanted, nbytes)
            found.append(Run(at, container, offset, take))
            if take < nbytes:
                rest = offset if container is None else offset + take
                queue.append(Piece(container, rest, nbytes - take))
            at, wanted = at + take, wanted - take
    if queue:
        raise ValueError("more bytes are stored than the file has")
    return found


class Restorer:
    """Writes a tree into a work directory."""

    def __init__(self, store: Store, tree: Tree, check: bool) -> None:
        self.store, self.tree, self.check = store, tree, check
        self.work = b""
        self.nbytes = sum(file.nbytes for file in tree.files)
        self._unchecked: set[tuple[tuple[Piece, ...], bytes]] = set()
        self._changed: list[bytes] = []
        self._copied_links = self._lost_modes = 0
        self._kernel_copy: Callable[..., int] | None = getattr(os, "copy_file_range", None)
        self._written, self._shown = 0, 0.0

    def examine(self) -> None:
        """Check all that can be checked without reading contents, before anything is written."""
        unknown = []
        to_check = 0
        for file in self.tree.files:
            try:
                _, bodies = layout(self.store, file, verify=True)
            except UnknownPlace as error:
                unknown.append(f"{show(file.path)} (kind {error})")
                continue
            if file.whole_mtime is not None:
                (piece,) = file.skeleton.pieces
                assert piece.container is not None
                found = self.store.status(piece.container.name)
                if found.st_mtime_ns != file.whole_mtime:
                    self._changed.append(piece.container.name)
                self.store.open(piece.container)
            if self.check:
                for body in bodies:
                    if (body.pieces, body.digest) not in self._unchecked:
                        self._unchecked.add((body.pieces, body.digest))
                        to_check += sum(piece.nbytes for piece in body.pieces)
        if unknown:
            raise Damage(
                "stored in a way that this script does not know, a newer slimckpt wrote them: "
                + "; ".join(unknown)
            )
        if self.check:
            say(estimate(to_check, len(self._unchecked)))
        elif self._changed:
            say(
                f"{len(self._changed)} files kept whole have another modification time than"
                f" recorded ({self.store.label(self._changed[0])}, say): they were copied without"
                " their times, or changed since; --check tells"
            )

    def write(self, work: bytes) -> None:
        """Write all into a new, empty directory."""
        self.work = work
        directories = sorted(self.tree.directories)
        for path in directories:
            if path:
                os.mkdir(os.path.join(self.work, path), 0o700)
        for file in self.tree.files:
            self._file(file)
        self._progress(0, done=True)
        for path, (target, meta) in self.tree.symlinks.items():
            here = os.path.join(self.work, path)
            os.symlink(target, here)
            own(here, meta, follow_symlinks=False)
            os.utime(here, ns=(meta.mtime, meta.mtime), follow_symlinks=False)
        umask = os.umask(0o077)
        os.umask(umask)
        for path in reversed(directories):
            fd = os.open(os.path.join(self.work, path) if path else self.work, os.O_RDONLY)
            try:
                known = self.tree.directories[path]
                if known is None:
                    os.chmod(fd, 0o777 & ~umask)
                else:
                    self._give_back(fd, known)
                os.fsync(fd)
            finally:
                os.close(fd)
        if self._copied_links:
            say(f"{self._copied_links} hard links could not be made here and are copies")
        if self._lost_modes:
            say(f"{self._lost_modes} files or directories could not be given their mode here")

    def _file(self, file: File) -> None:
        runs, bodies = layout(self.store, file, verify=False)
        if self.check:
            for body in bodies:
                self._check(file, body)
        first = os.path.join(self.work, file.names[0])
        self._write(file, runs, first)
        for name in file.names[1:]:
            here = os.path.join(self.work, name)
            try:
                os.link(first, here)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                self._copied_links += 1
                self._write(file, runs, here)

    def _check(self, file: File, body: Body) -> None:
        key = (body.pieces, body.digest)
        if key not in self._unchecked:
            return
        self._unchecked.discard(key)
        found = digest_of(self.store.body(body))
        if found == body.digest:
            return
        what = "skeleton" if file.table else "content"
        if body.row >= 0 and file.table is not None:
            columns = Columns(index_bytes(self.store, file, file.table, verify=False))
            what = columns.tensors(body.row)
        places = ", ".join(
            f"{self.store.label(piece.container.name)} at {piece.offset}"
            for piece in body.pieces
            if piece.container is not None
        )
        raise Damage(
            f"{show(file.path)}: {what} is damaged ({places or 'a fill'}): expected digest"
            f" {body.digest.hex()}, found {found.hex()}"
        )

    def _write(self, file: File, runs: list[Run], path: bytes) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(fd, file.nbytes)
            for at, container, offset, nbytes in runs:
                if container is not None:
                    self._copy(container, offset, fd, at, nbytes)
                elif offset:
                    for start in range(0, nbytes, BLOCK):
                        data = bytes([offset]) * min(BLOCK, nbytes - start)
                        write_all(fd, data, at + start)
                        self._progress(len(data))
                else:
                    self._progress(nbytes)
            self._give_back(fd, file.meta)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _copy(self, container: Container, offset: int, target: int, at: int, nbytes: int) -> None:
        while self._kernel_copy is not None and nbytes:
            source = self.store.open(container)
            try:
                done = self._kernel_copy(source, target, min(nbytes, 16 * BLOCK), offset, at)
            except OSError as error:
                if error.errno == errno.EIO:
                    raise self.store.unreadable(container, error) from None
                if error.errno not in NO_KERNEL_COPY:
                    raise
                self._kernel_copy = None
                break
            if done == 0:
                break
            offset, at, nbytes = offset + done, at + done, nbytes - done
            self._progress(done)
        for data in self.store.read(container, offset, nbytes):
            write_all(target, data, at)
            at += len(data)
            self._progress(len(data))

    def _give_back(self, fd: int, meta: Meta) -> None:
        own(fd, meta)
        try:
            # After the owner, because a new owner takes setuid and setgid away.
            os.chmod(fd, meta.mode)
        except PermissionError:
            self._lost_modes += 1
        os.utime(fd, ns=(meta.mtime, meta.mtime))

    def _progress(self, nbytes: int, done: bool = False) -> None:
        self._written += nbytes
        if not sys.stderr.isatty():
            return
        now = time.monotonic()
        if now - self._shown > 0.2 or done:
            self._shown = now
            text = f"{size(self._written)} of {size(self.nbytes)}"
            print(f"\r{'' if done else text:40}\r", end="", file=sys.stderr, flush=True)


def write_all(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done


def own(place: Any, meta: Meta, **how: bool) -> None:
    """Give back owner and group where permitted; who is not root may still set the group."""
    for uid, gid in ((meta.uid, meta.gid), (-1, meta.gid)):
        try:
            os.chown(place, uid, gid, **how)
            return
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.EINVAL):
                raise


def size(nbytes: int) -> str:
    amount, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB"]
    while amount >= 1000 and len(units) > 1:
        amount /= 1000
        units.pop(0)
    return f"{nbytes} bytes" if units[0] == "bytes" else f"{amount:.1f} {units[0]}"


def estimate(nbytes: int, bodies: int) -> str:
    """How long checking takes, by trying a little of it."""
    start = time.perf_counter()
    blake3(bytes(CHUNK))
    middle = time.perf_counter()
    blake3(bytes(CHUNK * LANES))
    rate = CHUNK * LANES / (time.perf_counter() - middle)
    seconds = nbytes / rate + bodies * (middle - start)
    duration = f"{seconds / 60:.0f} min" if seconds > 120 else f"{seconds:.0f} s"
    return (
        f"checking contents in plain Python is slow: {size(nbytes)} in {bodies} bodies take about"
        f" {duration} here (an estimate); `slimckpt verify` is faster"
    )


def destination(out: bytes, store: bytes) -> bytes:
    """Where to restore: a path that does not exist, outside the store."""
    out = os.path.abspath(out)
    parent = os.path.realpath(os.path.dirname(out))
    if not os.path.isdir(parent):
        raise Stop(f"{show(parent)} does not exist; make it first")
    out = os.path.join(parent, os.path.basename(out))
    for inner, outer in ((out, store), (store, out)):
        if inner == outer or inner.startswith(os.path.join(outer, b"")):
            raise Stop(f"{show(inner)} lies inside {show(outer)}; name an OUT outside")
    if os.path.lexists(out):
        raise Stop(f"{show(out)} exists; name an OUT that does not exist yet")
    return out


@contextlib.contextmanager
def workplace(out: bytes) -> Iterator[bytes]:
    """``OUT.restore-part``, which is gone afterwards unless it got another name."""
    work = out + SUFFIX
    try:
        os.mkdir(work, 0o700)
    except FileExistsError:
        raise Stop(
            f"{show(work)} is in the way: a restore is running, or was killed; remove it and run"
            " again"
        ) from None
    try:
        yield work
    finally:
        if os.path.lexists(work):
            remove(work)


def remove(work: bytes) -> None:
    """Remove a directory, also where directories in it may not be written to."""
    os.chmod(work, 0o700)
    for directory, names, _ in os.walk(work):
        for name in names:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(work)


def publish(work: bytes, out: bytes) -> None:
    if os.path.lexists(out):
        raise Stop(f"{show(out)} was made meanwhile; name another OUT")
    fd = os.open(os.path.dirname(out), os.O_RDONLY)
    try:
        os.rename(work, out)
        os.fsync(fd)
    except BaseException:
        if not os.path.lexists(work):
            os.rename(out, work)
        raise
    finally:
        os.close(fd)


def restore(options: argparse.Namespace) -> tuple[list[str], int]:
    """Restore; what there is to say of it, and the exit code."""
    store = Store(os.path.realpath(os.fsencode(options.store)))
    if not os.path.isdir(store.path):
        raise Stop(f"{show(store.path)} is not a directory")
    try:
        out = destination(os.fsencode(options.out), store.path)
        tree = Chooser(store, Wanted(options)).choose()
        lost = [file for file in tree.files if file.dropped]
        tree.files = [file for file in tree.files if not file.dropped]
        if lost and not tree.files:
            raise Dropped(f"all {len(lost)} files selected have lost tensors to --drop")
        restorer = Restorer(store, tree, options.check)
        restorer.examine()
        with workplace(out) as work:
            restorer.write(work)
            publish(work, out)
    finally:
        store.close()
    said = [f"restored {len(tree.files)} files, {size(restorer.nbytes)}, to {show(out)}"]
    if not options.check:
        said += [
            "Their contents were NOT checked, only manifests, indexes and sizes; --check does."
        ]
    elif tree.files:
        said += ["Their contents were checked: all have the digests that were recorded."]
    else:
        said += ["There were no contents to check."]
    for file in lost:
        say(f"not restored: {show(file.path)} lost {file.dropped} tensors to --drop")
    return said, Dropped.code if lost else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="restore.py",
        description="Restore the original files of this slim checkpoint, or some of them.",
        epilog="Files without a step, and those of a step without a rank, belong to every"
        " selection. Exit codes: 0 done, 1 the slim checkpoint is damaged or files lost tensors to"
        " --drop, 2 anything else.",
    )
    found.add_argument("out", metavar="OUT", help="directory to make; must not exist")
    here = os.path.dirname(os.path.abspath(__file__))
    found.add_argument("--store", default=here, metavar="DIR", help="the slim checkpoint")
    found.add_argument("--step", action="append", default=[], metavar="S", help="of step S")
    found.add_argument(
        "--rank", action="append", default=[], type=int, metavar="R", help="of rank R"
    )
    found.add_argument("--run", metavar="PREFIX", help="of the run in directory PREFIX")
    found.add_argument(
        "--file",
        action="append",
        default=[],
        metavar="GLOB",
        help="whose original path matches; '*' also matches '/'",
    )
    found.add_argument("--check", action="store_true", help="check all contents (slow)")
    return found


def _stop(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the command line; the exit code."""
    for stream in (sys.stdout, sys.stderr):
        # Paths are of any bytes, terminals are not.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    options = parser().parse_args()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, _stop)
    try:
        said, code = restore(options)
    except Damage as error:
        say(f"{error}. Nothing was restored; --file, --step or --rank may select what is sound")
        return Damage.code
    except Stop as error:
        say(f"{error}. Nothing was restored")
        return error.code
    except OSError as error:
        name = error.filename
        where = f"{show(os.fsencode(name))}: " if isinstance(name, (str, bytes)) else ""
        say(f"{where}{error.strerror or error}. Nothing was restored")
        return Stop.code
    except KeyboardInterrupt:
        say("stopped. Nothing was restored")
        return Stop.code
    try:
        print("\n".join(said), flush=True)
    except OSError as error:
        say(f"{error.strerror}, while saying so: {said[0]}")
    return code


if __name__ == "__main__":
    sys.exit(main())
