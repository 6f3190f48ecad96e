"""Digests of runs of bytes, samples of them, and the work units that compute both.

A digest is BLAKE3 up to one block of 4 MiB. Above, it is BLAKE3 in derive-key mode over the
length (u64, little endian) and the BLAKE3 of each block; the key keeps it apart from the digest
of a payload that happens to hold those very bytes.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3

from slimckpt.model import Span
from slimckpt.sources.positioned import Window, cut, open_for_reading, read_spans_into

BLOCK = 4 * 1024 * 1024
CONTEXT = "slimckpt block tree"
DIGEST = 32
SAMPLE = 256
"""Bytes read at the start, in the middle and at the end of a payload to sample it."""
NEAR = 64 * 1024
"""Payloads up to this many bytes are read together with what follows them."""
UNIT = 64 * 1024 * 1024
"""Bytes of work in one unit."""


def digest_of_blocks(nbytes: int, blocks: bytes) -> bytes:
    """The digest of ``nbytes`` bytes whose block digests, 32 bytes each, are ``blocks``."""
    if nbytes <= BLOCK:
        return blocks
    return blake3(struct.pack("<Q", nbytes) + blocks, derive_key_context=CONTEXT).digest()


def digest_of(data: Any) -> bytes:
    """The digest of bytes in memory."""
    view = memoryview(data).cast("B")
    blocks = b"".join(
        blake3(view[at : at + BLOCK]).digest() for at in range(0, max(len(view), 1), BLOCK)
    )
    return digest_of_blocks(len(view), blocks)


def digest_of_chunks(chunks: Iterable[Any]) -> tuple[int, bytes, bytes]:
    """Length, digest and block digests (as :meth:`Digests.blocks_of` has them) of bytes that come
    in pieces, each a contiguous buffer."""
    nbytes, filled, blocks, hasher = 0, 0, [], blake3()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view:
            part = view[: BLOCK - filled]
            hasher.update(part)
            view, filled, nbytes = view[len(part) :], filled + len(part), nbytes + len(part)
            if filled == BLOCK:
                blocks.append(hasher.digest())
                filled, hasher = 0, blake3()
    if filled or not blocks:
        blocks.append(hasher.digest())
    joined = b"".join(blocks)
    return nbytes, digest_of_blocks(nbytes, joined), joined if nbytes > BLOCK else b""


class Piece(NamedTuple):
    """Part of one body to hash: whole blocks of it, or all of it. ``row`` is the caller's."""

    row: int
    first_block: int
    spans: tuple[Span, ...]


class Unit(NamedTuple):
    """Pieces of one file: plain and picklable, so that any executor can run it."""

    path: bytes
    label: str
    pieces: tuple[Piece, ...]
    nbytes: int


class Hashed(NamedTuple):
    """Block digests of one piece, joined."""

    row: int
    first_block: int
    blocks: bytes


_buffers = threading.local()


def reusable_buffer(nbytes: int = BLOCK) -> memoryview:
    """This thread's own buffer, kept between units."""
    if not hasattr(_buffers, "block"):
        _buffers.block = memoryview(bytearray(BLOCK))
    view: memoryview = _buffers.block
    return view[:nbytes]


def hash_unit(unit: Unit) -> list[Hashed]:
    """Hash the pieces of one unit."""
    buffer = reusable_buffer()
    found = []
    fd = open_for_reading(unit.path, unit.label)
    try:
        window = Window(fd)
        for row, first, spans in unit.pieces:
            if len(spans) == 1 and spans[0].nbytes <= NEAR:
                found.append(Hashed(row, first, blake3(window.read(spans[0], unit.label)).digest()))
                continue
            total = sum(span.nbytes for span in spans)
            blocks = []
            for at in range(0, max(total, 1), BLOCK):
                part = spans if total <= BLOCK else cut(spans, at, BLOCK)
                got = read_spans_into(fd, part, buffer, unit.label)
                blocks.append(blake3(buffer[:got]).digest())
            found.append(Hashed(row, first, b"".join(blocks)))
    finally:
        os.close(fd)
    return found


def sample_unit(unit: Unit) -> list[Hashed]:
    """Digest the length and three samples of each piece; of short ones, all bytes."""
    buffer = reusable_buffer(3 * SAMPLE)
    found = []
    fd = open_for_reading(unit.path, unit.label)
    try:
        for row, first, spans in unit.pieces:
            total = sum(span.nbytes for span in spans)
            picked: Sequence[Span] = spans
            if total > 3 * SAMPLE:
                starts = (0, (total - SAMPLE) // 2, total - SAMPLE)
                picked = [span for at in starts for span in cut(spans, at, SAMPLE)]
            got = read_spans_into(fd, picked, buffer, unit.label)
            digest = blake3(struct.pack("<Q", total) + buffer[:got]).digest()
            found.append(Hashed(row, first, digest))
    finally:
        os.close(fd)
    return found


def units_of(
    path: bytes, label: str, rows: Iterable[tuple[int, tuple[Span, ...]]], unit: int = UNIT
) -> Iterator[Unit]:
    """Cut the bodies of one file into units of about ``unit`` bytes; ``unit=0`` cuts none."""
    pieces: list[Piece] = []
    filled = 0
    for row, spans in rows:
        total = spans[0].nbytes if len(spans) == 1 else sum(span.nbytes for span in spans)
        if 0 < total <= unit:
            pieces.append(Piece(row, 0, spans))
            filled += total
            if filled >= unit or len(pieces) >= 4096:
                yield Unit(path, label, tuple(pieces), filled)
                pieces, filled = [], 0
            continue
        step = unit if unit and total > unit else max(total, 1)
        for at in range(0, max(total, 1), step):
            part = spans if step >= total else tuple(cut(spans, at, step))
            pieces.append(Piece(row, at // BLOCK, part))
            filled += sum(span.nbytes for span in part)
            if (unit and filled >= unit) or len(pieces) >= 4096:
                yield Unit(path, label, tuple(pieces), filled)
                pieces, filled = [], 0
    if pieces:
        yield Unit(path, label, tuple(pieces), filled)


_U = TypeVar("_U")
_R = TypeVar("_R")


def run_units(
    executor: Executor,
    work: Callable[[_U], _R],
    units: Iterable[_U],
    ahead: int = 64,
) -> Iterator[tuple[_U, _R]]:
    """Run ``work`` on every unit, in any order, with at most ``ahead`` of them waiting.

    The first error cancels what has not started and is raised.
    """
    running: dict[Future[_R], _U] = {}
    queue = iter(units)
    try:
        while True:
            for unit in queue:
                running[executor.submit(work, unit)] = unit
                if len(running) >= ahead:
                    break
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
    finally:
        for future in running:
            future.cancel()
        wait(running)


class Digests:
    """The digests of many bodies: filled by units in any order, then complete.

    ``rows`` is how many bodies there are. Block digests are kept for bodies of more than a block.
    """

    def __init__(self, nbytes: Sequence[int] | Any) -> None:
        import numpy as np

        self.nbytes = nbytes
        self.digests = np.zeros((len(nbytes), DIGEST), np.uint8)
        self.known = np.zeros(len(nbytes), np.bool_)
        self.blocks: dict[int, bytes] = {}
        self._partial: dict[int, dict[int, bytes]] = {}

    def add(self, hashed: Iterable[Hashed]) -> None:
        import numpy as np

        for row, first, blocks in hashed:
            total = int(self.nbytes[row])
            if total > BLOCK:
                parts = self._partial.setdefault(row, {})
                parts[first] = blocks
                if sum(map(len, parts.values())) < DIGEST * -(-total // BLOCK):
                    continue
                blocks = b"".join(parts[at] for at in sorted(self._partial.pop(row)))
                self.blocks[row] = blocks
            self.digests[row] = np.frombuffer(digest_of_blocks(total, blocks), np.uint8)
            self.known[row] = True

    def fill(
        self,
        executor: Executor,
        units: Iterable[Unit],
        progress: Callable[[int], None] | None = None,
        work: Callable[[Unit], list[Hashed]] = hash_unit,
    ) -> None:
        """Run ``work`` on every unit and add what it finds; ``progress`` is told bytes done."""
        for unit, hashed in run_units(executor, work, units):
            self.add(hashed)
            if progress:
                progress(unit.nbytes)

    def blocks_of(self, row: int) -> bytes:
        """Block digests of a body of more than one block; nothing for a shorter one."""
        return self.blocks.get(row, b"")
