"""How a payload's stored bytes become the stream that tensors view: one decoder an encoding.

An encoding is a name, or ``name:parameters``. A decoder takes the stored bytes, the parameters
and the lengths of the spans that were joined, and returns the decoded stream, in memory of its own
unless nothing had to be decoded. What it allocates is bounded by what the parameters declare and
by what the stored bytes can decode to.

``deflate:N`` is a raw deflate stream (RFC 1951) of N decoded bytes.

``latin-1-as-utf-8:N`` is text in UTF-8 whose N characters are the bytes (pickles of protocol 2).

``conj:N`` and ``neg:N`` are numbers that torch marked as conjugated or negated instead of writing
them so: the sign is flipped of every second component, or of every one, of N bytes each.

``hdf5-chunks:{...}`` are chunks of an HDF5 dataset, one span each, in C order of their grid:
``shape`` and ``chunk`` in elements of ``itemsize`` bytes; ``filters`` as ``[number, values...]`` in
the order in which they were applied; ``stored`` as ``[first, count]`` runs of the chunks that there
are, where some are missing; ``fill`` (hex, one element; zeros by default) for the others; ``masks``
as ``[span, mask]``, where bit n of a mask says that filter n was skipped.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.model import RAW, Bytes

Decoder = Callable[[Bytes, str, Sequence[int]], Bytes]

_MOST_DEFLATED = 1032
"""Bytes that one byte of deflate can become (zlib's technical notes)."""


def decoder(encoding: str) -> Callable[[Bytes, Sequence[int]], Bytes]:
    """The function that decodes ``encoding``: from stored bytes and lengths of their spans.

    It raises :class:`DamagedFileError` where the bytes are not what they should be, and
    :class:`NotUnderstoodError` where they were made in a way that is not known; neither names the
    file.

    Raises
    ------
    NotUnderstoodError
        The encoding is unknown; the message names it.
    """
    name, _, parameters = encoding.partition(":")
    found = DECODERS.get(name)
    if found is None:
        raise NotUnderstoodError(
            f"its bytes are encoded in a way ({encoding!a}) that this slimckpt does not know;"
            " a newer one may"
        )
    return lambda stored, lengths: found(stored, parameters, lengths)


def _raw(stored: Bytes, parameters: str, lengths: Sequence[int]) -> Bytes:
    return stored


def _deflate(stored: Bytes, parameters: str, lengths: Sequence[int]) -> Bytes:
    return _inflate(stored, int(parameters), -zlib.MAX_WBITS)


def _latin_1(stored: Bytes, parameters: str, lengths: Sequence[int]) -> Bytes:
    try:
        found = stored.tobytes().decode("utf-8").encode("latin-1")
    except UnicodeError as error:
        raise DamagedFileError(f"its bytes, which are text, are damaged: {error}") from None
    if len(found) != int(parameters):
        raise DamagedFileError(f"its text has {len(found)} characters, expected {parameters}")
    return np.frombuffer(found, np.uint8)


def _conjugated(stored: Bytes, parameters: str, lengths: Sequence[int]) -> Bytes:
    return _flipped(stored, int(parameters), 2)


def _negated(stored: Bytes, parameters: str, lengths: Sequence[int]) -> Bytes:
    return _flipped(stored, int(parameters), 1)


def _flipped(stored: Bytes, nbytes: int, every: int) -> Bytes:
    """A copy with the sign bit of each ``every``-th number flipped; little endian."""
    found: Bytes = stored.copy()
    found[every * nbytes - 1 :: every * nbytes] ^= 0x80
    return found


def _inflate(stored: Bytes, nbytes: int, wbits: int) -> Bytes:
    """Exactly ``nbytes`` bytes of a stream that ends with ``stored``."""
    if nbytes > _MOST_DEFLATED * len(stored):
        raise DamagedFileError(f"{len(stored)} deflated bytes cannot become {nbytes}")
    stream = zlib.decompressobj(wbits)
    try:
        found = stream.decompress(stored.data, nbytes + 1)
        # All bytes may be there before the end of the stream and its checksum were read.
        found += stream.decompress(stream.unconsumed_tail, 1)
    except zlib.error as error:
        raise DamagedFileError(f"its deflated bytes are damaged: {error}") from None
    if len(found) != nbytes or not stream.eof or stream.unused_data:
        raise DamagedFileError(f"its deflated bytes do not end after {nbytes} bytes")
    return np.frombuffer(found, np.uint8)


def _hdf5_chunks(stored: Bytes, parameters: str, lengths: Sequence[int]) -> Bytes:
    told: dict[str, Any] = json.loads(parameters)
    shape, chunk, itemsize = told["shape"], told["chunk"], told["itemsize"]
    filters, masks = told.get("filters", []), dict(told.get("masks", []))
    grid = [-(-dim // step) for dim, step in zip(shape, chunk, strict=True)]
    whole = math.prod(chunk) * itemsize
    runs = told.get("stored", [[0, math.prod(grid)]])
    if sum(count for _, count in runs) != len(lengths):
        raise DamagedFileError(f"it has {len(lengths)} stored chunks, expected those of {runs}")
    element = np.frombuffer(bytes.fromhex(told.get("fill", "00" * itemsize)), np.uint8)
    if "stored" in told and element.any():
        found = np.empty((*shape, itemsize), np.uint8)
        found[...] = element
    else:
        found = np.zeros((*shape, itemsize), np.uint8)
    at = 0
    numbers = (number for first, count in runs for number in range(first, first + count))
    for span, (number, nbytes) in enumerate(zip(numbers, lengths, strict=True)):
        body = _unfiltered(stored[at : at + nbytes], filters, masks.get(span, 0), whole)
        at += nbytes
        place = np.unravel_index(number, grid)
        starts = [int(i) * step for i, step in zip(place, chunk, strict=True)]
        box = tuple(
            slice(start, min(start + step, dim))
            for start, step, dim in zip(starts, chunk, shape, strict=True)
        )
        inside = tuple(slice(0, cut.stop - cut.start) for cut in box)
        found[box] = body.reshape(*chunk, itemsize)[inside]
    return found.reshape(-1)


def _unfiltered(body: Bytes, filters: list[list[int]], mask: int, nbytes: int) -> Bytes:
    """A chunk of ``nbytes`` bytes before filters were applied to it."""
    applied = [(n, *v) for i, (n, *v) in enumerate(filters) if not mask >> i & 1]
    sums = sum(4 for number, *_ in applied if number == _FLETCHER32)
    for number, *values in reversed(applied):
        if number == _FLETCHER32:
            body, sums = _checked(body), sums - 4
        elif number == _SHUFFLE:
            body = _unshuffled(body, values[0] if values else 1)
        elif number == _GZIP:
            # What lies under it may have checksums at its end.
            body = _inflate(body, nbytes + sums, zlib.MAX_WBITS)
        elif number == _LZF:
            body = _unlzf(body, nbytes + sums)
        else:
            name = _OTHERS.get(number, "an unknown one")
            raise NotUnderstoodError(
                f"its chunks went through filter {number} ({name}), which slimckpt does not undo"
            )
    if len(body) != nbytes:
        raise DamagedFileError(f"a chunk has {len(body)} bytes, expected {nbytes}")
    return body


_GZIP, _SHUFFLE, _FLETCHER32, _LZF = 1, 2, 3, 32000
_OTHERS = {
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32026: "blosc2",
}


def _unshuffled(body: Bytes, itemsize: int) -> Bytes:
    """Byte n of all elements together becomes elements again; a rest stays behind them."""
    count = len(body) // max(itemsize, 1)
    if itemsize < 2 or count < 2:
        return body
    end = count * itemsize
    found = np.empty_like(body)
    found[:end] = body[:end].reshape(itemsize, count).T.reshape(-1)
    found[end:] = body[end:]
    return found


def _checked(body: Bytes) -> Bytes:
    """What four bytes of Fletcher's checksum guard (``H5checksum.c``)."""
    if len(body) < 4:
        raise DamagedFileError("a chunk is too short for its checksum")
    body, told = body[:-4], int.from_bytes(body[-4:].tobytes(), "little")
    right = fletcher32(body)
    # libhdf5 before 1.6.3 stored the bytes of both halves swapped (``H5Zfletcher32.c``).
    swapped = (right & 0x00FF00FF) << 8 | (right & 0xFF00FF00) >> 8
    if told not in (right, swapped):
        raise DamagedFileError(f"the checksum of a chunk is {told:08x}, expected {right:08x}")
    return body


def fletcher32(body: Bytes) -> int:
    """Fletcher's checksum over 16-bit words, high byte first, modulo 65535."""
    words = body[: len(body) // 2 * 2].view(">u2")
    first = second = 0
    # Blocks in which the sums of sums stay below 2^64; sums of 0 and of 65535 are told apart.
    for at in range(0, len(words), 65536):
        block = words[at : at + 65536].astype(np.uint64)
        weights = np.arange(len(block), 0, -1, dtype=np.uint64)
        second = _fold(second + len(block) * first + int(block @ weights))
        first = _fold(first + int(block.sum()))
    if len(body) % 2:
        first = _fold(first + (int(body[-1]) << 8))
        second = _fold(second + first)
    return second << 16 | first


def _fold(value: int) -> int:
    """Modulo 65535, but 65535 for its multiples that are not 0: carries added back in."""
    return (value - 1) % 65535 + 1 if value else 0


def _unlzf(body: Bytes, nbytes: int) -> Bytes:
    """LibLZF's format, as h5py's filter stores it (``lzf_d.c``)."""
    data, found, i = body.tobytes(), bytearray(), 0
    try:
        while i < len(data):
            control = data[i]
            i += 1
            if control < 32:
                if i + control + 1 > len(data):
                    break
                found += data[i : i + control + 1]
                i += control + 1
            else:
                count = control >> 5
                if count == 7:
                    count += data[i]
                    i += 1
                back = ((control & 31) << 8 | data[i]) + 1
                i += 1
                start, count = len(found) - back, count + 2
                if start < 0:
                    break
                run = found[start : start + count]
                found += (run * -(-count // back))[:count] if back < count else run
            if len(found) > nbytes:
                break
    except IndexError:
        i = -1
    if i != len(data) or len(found) != nbytes:
        raise DamagedFileError(f"its LZF bytes do not become {nbytes} bytes")
    return np.frombuffer(bytes(found), np.uint8)


DECODERS: dict[str, Decoder] = {
    RAW: _raw,
    "deflate": _deflate,
    "latin-1-as-utf-8": _latin_1,
    "conj": _conjugated,
    "neg": _negated,
    "hdf5-chunks": _hdf5_chunks,
}
