"""What a file will be, decided before a byte of it is written; and writing it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slimckpt import effects
from slimckpt.convert.entries import Entry
from slimckpt.progress import Progress
from slimckpt.sources.digest import UNIT, run_units

_SMALL = 64 * 1024
_TOGETHER = 1024 * 1024
"""Neighbours of fewer bytes than the one are written together, up to the other."""

Literals = list[tuple[int, bytes]]
"""Bytes that are known, and where they go."""


class Body(NamedTuple):
    """Bytes ``start`` to ``stop`` of the elements of an entry, at ``at`` of the file; ``seed`` is
    the CRC32 of what its own goes on from."""

    at: int
    entry: Entry
    start: int
    stop: int
    seed: int


@dataclass(slots=True)
class Blueprint:
    """All bytes of a file: known ones, and where elements go. What neither names is zero.

    ``late`` give further known bytes, from the CRC32 of each body.
    """

    nbytes: int = 0
    literals: Literals = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    late: list[Callable[[Sequence[int]], Literals]] = field(default_factory=list)

    def put(self, data: bytes) -> None:
        """Known bytes, behind all that there are."""
        if self.literals and self.nbytes == self.literals[-1][0] + len(self.literals[-1][1]):
            at, before = self.literals.pop()
            self.literals.append((at, before + data))
        else:
            self.literals.append((self.nbytes, data))
        self.nbytes += len(data)

    def put_body(
        self, entry: Entry, start: int = 0, stop: int | None = None, seed: int = 0
    ) -> None:
        """Elements of an entry, behind all that there are."""
        stop = entry.nbytes if stop is None else stop
        self.bodies.append(Body(self.nbytes, entry, start, stop, seed))
        self.nbytes += stop - start

    def align(self, alignment: int) -> None:
        self.nbytes += -self.nbytes % alignment


_Part = tuple[int, Body | tuple[int, bytes]]


class _Unit(NamedTuple):
    """Neighbours in an open file, to be written at once, or a large body or a part of one.

    Each has its number among the bodies; -1 where it is known bytes.
    """

    fd: int
    path: bytes
    parts: tuple[_Part, ...]
    nbytes: int
    summed: bool
    unload: Callable[[], object]


def write(
    path: bytes,
    blueprint: Blueprint,
    executor: Executor,
    progress: Progress,
    unload: Callable[[], object] = lambda: None,
) -> None:
    """Write a new file, and make it durable.

    ``unload`` is called when elements of some MiB were written: what they were read from is not
    needed any more.

    Notes
    -----
    Every thread of the executor holds some MiB at a time.
    """
    fd = effects.create_file(path, 0o666)
    try:
        effects.allocate(fd, blueprint.nbytes, path)
        sums = [body.seed for body in blueprint.bodies]
        for unit, found in run_units(executor, _write, _units(blueprint, fd, path, unload)):
            for number, crc in found:
                sums[number] = crc
            progress.advance(unit.nbytes)
        for late in blueprint.late:
            for at, data in late(sums):
                effects.write_at(fd, data, at, path)
        effects.sync(fd, path)
    finally:
        os.close(fd)


def _units(
    blueprint: Blueprint, fd: int, path: bytes, unload: Callable[[], object]
) -> Iterator[_Unit]:
    summed = bool(blueprint.late)
    parts: list[_Part] = [(-1, literal) for literal in blueprint.literals]
    parts.extend(enumerate(blueprint.bodies))
    parts.sort(key=lambda part: part[1][0])
    some: list[_Part] = []
    nbytes = 0
    for number, part in parts:
        size = _nbytes(part)
        large = isinstance(part, Body) and size >= _SMALL
        if some and (large or part[0] + size - some[0][1][0] > _TOGETHER):
            yield _Unit(fd, path, tuple(some), nbytes, summed, unload)
            some, nbytes = [], 0
        if not large:
            some.append((number, part))
            nbytes += size
            continue
        assert isinstance(part, Body)
        # A checksum goes through all of a body in order.
        step = size if summed or not part.entry.divisible else UNIT
        for low in range(part.start, part.stop, step):
            at, high = part.at + low - part.start, min(low + step, part.stop)
            cut = part._replace(at=at, start=low, stop=high)
            yield _Unit(fd, path, ((number, cut),), high - low, summed, unload)
    if some:
        yield _Unit(fd, path, tuple(some), nbytes, summed, unload)


def _nbytes(part: Body | tuple[int, bytes]) -> int:
    return part.stop - part.start if isinstance(part, Body) else len(part[1])


def _write(unit: _Unit) -> list[tuple[int, int]]:
    """Write some neighbours; the CRC32 of the bodies among them, where it is wanted."""
    low, high = unit.parts[0][1][0], unit.parts[-1][1][0] + _nbytes(unit.parts[-1][1])
    buffer = bytearray(high - low) if len(unit.parts) > 1 else None
    sums = []
    for number, part in unit.parts:
        at, crc = part[0], 0
        if isinstance(part, Body):
            pieces: Iterable[Any] = part.entry.read(part.start, part.stop)
            crc = part.seed
        else:
            pieces = [part[1]]
        for data in pieces:
            if buffer is None:
                effects.write_at(unit.fd, data, at, unit.path)
                if len(data) >= _TOGETHER:
                    unit.unload()
            else:
                buffer[at - low : at - low + len(data)] = memoryview(data)
            at += len(data)
            if unit.summed and number >= 0:
                crc = zlib.crc32(data, crc)
        if number >= 0:
            sums.append((number, crc))
    if buffer is not None:
        effects.write_at(unit.fd, buffer, low, unit.path)
        if len(buffer) >= _TOGETHER // 2:
            unit.unload()
    return sums
