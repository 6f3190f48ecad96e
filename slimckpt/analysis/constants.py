"""Tensors all of whose elements are equal: zeros of a fresh optimizer, ones of an unused norm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from functools import lru_cache

import numpy as np
from blake3 import blake3

from slimckpt.analysis.sharing import Bodies, Mask
from slimckpt.dtypes import BY_NAME
from slimckpt.model import FLOOR, RAW, Ints
from slimckpt.sources.digest import (
    BLOCK,
    SAMPLE,
    Digests,
    Unit,
    digest_of_blocks,
    run_units,
    units_of,
)
from slimckpt.sources.positioned import cut, open_for_reading, read_spans_into

PERIOD = 16
"""Bytes that hold a whole number of elements of every dtype."""

Patterns = list[tuple[int, bytes]]


def constant_classes(
    bodies: Bodies, class_of: Ints, digests: Digests | None, executor: Executor
) -> Mask:
    """For each class, whether it is a payload of one element over and over.

    Parameters
    ----------
    digests
        Digests over all bytes prove it, for a constant's digest is known without reading it. With
        ``None`` three samples must say so: all constants are found, and maybe more.

    Notes
    -----
    One payload of a class is looked at, of at least :data:`~slimckpt.model.FLOOR` bytes.
    """
    found = np.zeros(int(class_of.max(initial=-1)) + 1, np.bool_)
    widths = _element_bytes(bodies)
    _, rows = np.unique(class_of[: bodies.n_payloads], return_index=True)
    rows = rows[(widths[rows] > 0) & (bodies.nbytes[rows] >= FLOOR)]
    for _, patterns in run_units(executor, pattern_unit, _units(bodies, np.sort(rows))):
        for row, pattern in patterns:
            if pattern[widths[row] :] != pattern[: -widths[row]]:
                continue
            nbytes = int(bodies.nbytes[row])
            if digests is None or digests.digests[row].tobytes() == _digest(pattern, nbytes):
                found[class_of[row]] = True
    return found


def pattern_unit(unit: Unit) -> Patterns:
    """Row and first bytes of the pieces whose samples repeat them with a period of 16 bytes."""
    found = []
    buffer = memoryview(bytearray(SAMPLE))
    fd = open_for_reading(unit.path, unit.label)
    try:
        for row, _, spans in unit.pieces:
            total = sum(span.nbytes for span in spans)
            pattern = b""
            for at in (0, (total - SAMPLE) // 2, total - SAMPLE):
                got = read_spans_into(fd, list(cut(spans, at, SAMPLE)), buffer, unit.label)
                pattern = pattern or bytes(buffer[:PERIOD])
                phase = at % PERIOD
                if buffer[:got] != (pattern * (SAMPLE // PERIOD + 1))[phase : phase + got]:
                    break
            else:
                found.append((row, pattern))
    finally:
        os.close(fd)
    return found


def _units(bodies: Bodies, rows: Ints) -> Iterator[Unit]:
    files, starts = np.unique(bodies.file[rows], return_index=True)
    ends = [*starts[1:].tolist(), len(rows)]
    for file, first, last in zip(files.tolist(), starts.tolist(), ends[: len(files)], strict=True):
        pairs = [(row, bodies.spans(row)) for row in rows[first:last].tolist()]
        label = bodies.catalog.files[file].label
        yield from units_of(bodies.path(file), label, pairs, unit=0)


def _element_bytes(bodies: Bodies) -> Ints:
    """Bytes of an element of the first tensor on each payload; 0 where its bytes are encoded."""
    table = bodies.catalog.table
    bits = [BY_NAME[name].bits if name in BY_NAME else 0 for name in table.dtypes]
    raw = np.array([encoding == RAW for encoding in table.encodings], np.bool_)
    starts, rows = table.tensors_of_payloads()
    viewed = np.flatnonzero(starts[1:] > starts[:-1])
    first = rows[starts[viewed]]
    found = np.zeros(bodies.n_payloads, np.int64)
    width = np.maximum(np.array(bits, np.int64) // 8, 1)[table.columns["dtype"][first]]
    known = np.array(bits, np.int64)[table.columns["dtype"][first]] > 0
    found[viewed] = np.where(known & raw[table.columns["encoding"][first]], width, 0)
    return found


@lru_cache(maxsize=1 << 10)
def _digest(pattern: bytes, nbytes: int) -> bytes:
    """The digest of ``nbytes`` bytes that repeat ``pattern``."""
    whole, rest = divmod(nbytes, BLOCK)
    block = blake3(pattern * (BLOCK // PERIOD)).digest() if whole else b""
    tail = (pattern * (rest // PERIOD + 1))[:rest]
    blocks = block * whole + (blake3(tail).digest() if rest else b"")
    return digest_of_blocks(nbytes, blocks)
