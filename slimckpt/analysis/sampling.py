"""Samples of many payloads of one file, with few system calls.

What is sampled and digested is what :func:`~slimckpt.sources.digest.sample_unit` samples; this is
the way for payloads that lie in one piece, which nearly all do.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from blake3 import blake3

from slimckpt.model import Ints, Span
from slimckpt.sources.digest import SAMPLE
from slimckpt.sources.positioned import open_for_reading, read_spans_into

ROWS = 4096
"""Payloads of one unit."""
_AHEAD = 704
"""Bytes read at the end of a payload: with them comes the start of the next, over its header."""


class FlatUnit(NamedTuple):
    """Payloads in one piece, of one file: plain and picklable. ``rows`` is the caller's."""

    path: bytes
    label: str
    rows: Ints
    offsets: Ints
    nbytes: Ints


def sample_flat_unit(unit: FlatUnit) -> bytes:
    """The digests of the samples, joined.

    Raises
    ------
    UnfaithfulSourceError
        The file is shorter than it was.
    """
    found = []
    fd = open_for_reading(unit.path, unit.label)
    # Or the kernel reads ahead, a hundred times what is asked for.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    held, first = b"", 0

    def read(at: int, nbytes: int, ahead: int) -> bytes:
        nonlocal held, first
        if not first <= at <= at + nbytes <= first + len(held):
            first, held = at, os.pread(fd, ahead, at)
            if len(held) < nbytes:
                held = _exactly(fd, at, nbytes, unit.label)
        return held[at - first : at - first + nbytes]

    try:
        for offset, nbytes in zip(unit.offsets.tolist(), unit.nbytes.tolist(), strict=True):
            if nbytes > 3 * SAMPLE:
                data = read(offset, SAMPLE, SAMPLE)
                data += read(offset + (nbytes - SAMPLE) // 2, SAMPLE, SAMPLE)
                data += read(offset + nbytes - SAMPLE, SAMPLE, _AHEAD)
            else:
                data = read(offset, nbytes, max(nbytes, _AHEAD))
            found.append(blake3(struct.pack("<Q", nbytes) + data).digest())
    finally:
        os.close(fd)
    return b"".join(found)


def _exactly(fd: int, at: int, nbytes: int, label: str) -> bytes:
    buffer = memoryview(bytearray(nbytes))
    return bytes(buffer[: read_spans_into(fd, [Span(at, nbytes)], buffer, label)])
