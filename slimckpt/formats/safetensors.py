"""safetensors: eight bytes of header length, a JSON header, and the tensors without gaps.

The rules are those of the reference reader (safetensors 0.8, ``tensor.rs``): a header of at most
100,000,000 bytes, no holes, no overlap, the buffer covered to its last byte. A dtype that reader
does not know is kept as ``opaque:...``, so that files of a newer writer are deduplicated too.

MindSpore (2.10, ``serialization.py``) writes safetensors with two marks of its own in
``__metadata__``: ``"<tensor>": "Int4"`` for ``qint4x2``, and ``crc_num``.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from slimckpt.dtypes import BY_NAME, OPAQUE
from slimckpt.errors import DamagedFileError
from slimckpt.formats.base import DCP, Format
from slimckpt.formats.collector import uncollected
from slimckpt.model import TableBuilder
from slimckpt.sources.positioned import ByteSource

MAX_HEADER = 100_000_000
SHARDING = "DCP_SHARDING_INFO"
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_BITS = {name: row.bits for name, row in BY_NAME.items() if name not in ("C128", "I4X2")}
_INT_DTYPES = ("U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64")
_MAX_UNKNOWN_DTYPES = 1000
_FACT_ENTRIES, _FACT_CHARS = 64, 8192
_BLOCK = 4 * 1024 * 1024
_MOST = 2**53
"""No plain number of elements or bytes reaches it, so that products with a width fit 64 bits."""
_MOST_DIMS = 64


_DIGITS = bytes(ord("0") if chr(code) in "0123456789" else code for code in range(256))


class _Entry(NamedTuple):
    name: str
    dtype: str
    shape: list[int]
    start: int
    end: int


class _Entries(NamedTuple):
    """Entries as columns, in file order."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[list[int]]
    starts: Sequence[int]
    ends: Sequence[int]


class _Header(NamedTuple):
    """The offsets of ``entries`` are counted from ``data``."""

    metadata: dict[str, str]
    entries: _Entries
    data: int


class Safetensors(Format):
    """Hugging Face's safetensors."""

    name = "safetensors"

    def matches(self, head: bytes, size: int) -> bool:
        if len(head) < 10 or head[8] != ord("{"):
            return False
        (length,) = struct.unpack_from("<Q", head)
        following = head[9 : 8 + min(length, MAX_HEADER)].lstrip(b" \t\n\r")[:1]
        return 2 <= length <= MAX_HEADER and following in (b'"', b"}")

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        with uncollected():
            metadata, entries, data = _read_header(source)
        dtypes = entries.dtypes
        if "Int4" in metadata.values():
            pairs = zip(entries.names, dtypes, strict=True)
            dtypes = [_dtype(name, dtype, metadata) for name, dtype in pairs]
        places = zip(entries.starts, entries.ends, strict=True)
        spans = [(data + start, end - start) for start, end in places]
        table.plain(entries.names, dtypes, entries.shapes, spans)
        return _facts(metadata)

    def check(self, source: ByteSource) -> str | None:
        try:
            metadata, entries, data = _read_header(source)
        except DamagedFileError as error:
            return str(error)
        stated = metadata.get("crc_num")
        if stated is None or metadata.get("format") != "ms":
            return None
        found = _mindspore_crcs(source, entries, data)
        if stated in map(str, found):
            return None
        return (
            f"{source.label}: its crc_num is {stated[:20]!r}, but its tensors have CRC32"
            f" {found[0]}; the file was damaged before it was slimmed, or changed by a program"
            " that keeps an old crc_num"
        )


def _read_header(source: ByteSource) -> _Header:
    def damaged(why: str) -> DamagedFileError:
        return DamagedFileError(f"{source.label}: {why}")

    if source.size < 8:
        raise damaged(f"expected 8 bytes of header length, found {source.size} bytes")
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > MAX_HEADER:
        raise damaged(f"expected a header of at most {MAX_HEADER} bytes, found {length}")
    if 8 + length > source.size:
        raise damaged(
            f"expected a header of {length} bytes, but the file has {source.size}; it looks"
            " truncated"
        )
    raw = source.read(8, length)
    if raw[:1] != b"{":
        raise damaged(f"expected a header that starts with '{{', found {raw[:1]!r}")
    try:
        header = _load(raw)
    except (ValueError, RecursionError) as error:
        # RecursionError has no text worth showing.
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise damaged(f"the header is not what safetensors allows: {why}") from None
    metadata = header.pop(_METADATA, None)
    if metadata is None:
        metadata = {}
    if type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
        raise damaged("expected strings in __metadata__, found something else")
    data = 8 + length
    plain = _plain_entries(header, source.size - data)
    if plain is not None:
        return _Header(metadata, plain, data)
    entries = []
    for name, entry in header.items():
        try:
            entries.append(_entry(name, entry))
        except ValueError as error:
            raise damaged(f"tensor {_show(name)}: {error}") from None
    entries.sort(key=lambda entry: entry[3:])
    _refuse_gaps(source, entries, data)
    columns = zip(*entries, strict=True) if entries else ([],) * len(_Entry._fields)
    return _Header(metadata, _Entries(*map(list, columns)), data)


def _dtype(name: str, dtype: str, metadata: dict[str, str]) -> str:
    return "I4X2" if dtype == "I8" and metadata.get(name) == "Int4" else dtype


def _load(raw: bytes) -> Any:
    """The header as JSON, without any key there twice.

    Looking at every object for keys that are there twice takes longer than all the rest. But
    without escapes every string has two quotes, so that a key too many shows in their number.
    """
    if b"\\" not in raw and not _has_odd_numbers(raw):
        header = json.loads(raw.decode(), parse_float=_no_number, parse_constant=_no_number)
        metadata = header.get(_METADATA)
        entries = len(header) - (metadata is not None)
        strings = 5 * entries
        if type(metadata) is dict:
            strings += 1 + 2 * len(metadata)
        if raw.count(b'"') == 2 * strings:
            return header
    return json.loads(
        raw.decode(),
        object_pairs_hook=_object,
        parse_int=_non_negative,
        parse_float=_no_number,
        parse_constant=_no_number,
    )


def _has_odd_numbers(raw: bytes) -> bool:
    """Whether a number is negative, or longer than 64 bits can be; or a name has such a part."""
    if b"0" * 21 in raw.translate(_DIGITS):
        return True
    return b"-" in raw and any(bytes([before]) + b"-" in raw for before in b"[,: \t\n\r")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{_show(name)} is there twice")
            seen.add(name)
    for name, value in pairs:
        name.encode()  # an escaped lone surrogate is a UnicodeEncodeError, thus a ValueError
        if type(value) is str:
            value.encode()
    return found


def _non_negative(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 20:
        raise ValueError(f"expected sizes from 0 to 2^64, found {digits[:24]}")
    return int(digits)


def _no_number(text: str) -> Any:
    raise ValueError(f"expected whole numbers, found {text[:24]}")


_FIELDS_OF = itemgetter("dtype", "shape", "data_offsets")


def _plain_entries(header: dict[str, Any], nbytes: int) -> _Entries | None:
    """All entries at once where nothing in them is unusual or wrong; ``nbytes`` is what follows the
    header. All others are for :func:`_entry`."""
    try:
        if set(map(type, header.values())) != {dict} or set(map(len, header.values())) != {3}:
            return None
        dtypes, shapes, offsets = zip(*map(_FIELDS_OF, header.values()), strict=True)
        if {*map(type, shapes), *map(type, offsets)} != {list}:
            return None
        if set(map(len, offsets)) != {2} or max(map(len, shapes)) > _MOST_DIMS:
            return None
        dims, ends = list(chain.from_iterable(shapes)), list(chain.from_iterable(offsets))
        if {*map(type, dims), *map(type, ends)} != {int} or min(dims, default=1) <= 0:
            return None
        bits = np.array([_BITS[dtype] for dtype in dtypes], np.int64)
        counts = np.array(list(map(math.prod, shapes)), np.int64)
        places = np.array(ends, np.int64).reshape(-1, 2)
    except (KeyError, TypeError, OverflowError):
        return None
    if nbytes >= _MOST or counts.max() >= _MOST or places.min() < 0:
        return None
    order = np.argsort(places[:, 0], kind="stable")
    bounds = np.append(0, places[order, 1])
    if bounds[-1] != nbytes or (places[order, 0] != bounds[:-1]).any():
        return None
    if (counts * bits != (places[:, 1] - places[:, 0]) * 8).any():
        return None
    found = [list(header), dtypes, shapes, *places.T.tolist()]
    if (np.diff(order) < 0).any():
        found = [[column[row] for row in order.tolist()] for column in found]
    return _Entries(*found)


def _entry(name: str, entry: Any) -> _Entry:
    """Check one entry by itself; what is wrong with it is a ``ValueError``."""
    if type(entry) is not dict or entry.keys() != _FIELDS:
        found = (
            ", ".join(sorted(map(_show, entry))) if type(entry) is dict else type(entry).__name__
        )
        raise ValueError(f"expected exactly dtype, shape and data_offsets, found {found[:200]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or not dtype:
        raise ValueError("expected the name of a dtype")
    if type(shape) is not list or not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape):
        raise ValueError("expected a shape of whole numbers below 2^63")
    if type(offsets) is not list or [type(at) for at in offsets] != [int, int]:
        raise ValueError("expected two whole numbers as data_offsets")
    start, end = offsets
    if start < 0:
        raise ValueError(f"expected data_offsets from 0 on, found {start}")
    if end < start:
        raise ValueError(f"its data_offsets end before they start: {start}, {end}")
    bits = _BITS.get(dtype)
    if bits is None:
        return _Entry(name, OPAQUE + dtype, shape, start, end)
    count = 1
    for dim in shape:
        count *= dim
        if count * bits >= 2**64:
            raise ValueError(f"its shape {_show_shape(shape)} overflows 64 bits")
    if count * bits % 8:
        raise ValueError(f"{dtype} {_show_shape(shape)} does not end on a byte")
    if count * bits // 8 != end - start:
        raise ValueError(
            f"{dtype} {_show_shape(shape)} takes {count * bits // 8} bytes, found {end - start}"
        )
    return _Entry(name, dtype, shape, start, end)


def _refuse_gaps(source: ByteSource, entries: list[_Entry], data: int) -> None:
    at = 0
    for name, _, _, start, end in entries:
        if start != at:
            why = "leaves a hole" if start > at else "overlaps another tensor"
            raise DamagedFileError(
                f"{source.label}: tensor {_show(name)} {why}: expected it at {at} of the data,"
                f" found {start}"
            )
        at = end
    if data + at != source.size:
        why = "it looks truncated" if data + at > source.size else "bytes follow its last tensor"
        raise DamagedFileError(
            f"{source.label}: expected {data + at} bytes, found {source.size}; {why}"
        )
    unknown = {entry.dtype for entry in entries if entry.dtype.startswith(OPAQUE)}
    if len(unknown) > _MAX_UNKNOWN_DTYPES:
        raise DamagedFileError(
            f"{source.label}: {len(unknown)} unknown dtypes, expected at most {_MAX_UNKNOWN_DTYPES}"
        )


def sharding_of(source: ByteSource) -> dict[str, tuple[int, ...]]:
    """Where in the whole tensor each tensor of a file lies, as its header says.

    torch's ``HuggingFaceStorageWriter`` (2.13) writes it: ``{name: {"saved_offsets": [...]}}``.

    Raises
    ------
    DamagedFileError
        The header does not say so.
    """
    found: dict[str, tuple[int, ...]] = {}
    try:
        for name, entry in json.loads(_read_header(source).metadata[SHARDING]).items():
            found[name] = tuple(map(int, entry["saved_offsets"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedFileError(
            f"{source.label}: its header does not say where its tensors lie in the whole ones:"
            f" {type(error).__name__} in {SHARDING}"
        ) from None
    return found


def _facts(metadata: dict[str, str]) -> dict[str, Any]:
    kept: dict[str, str] = {}
    room = _FACT_CHARS
    for name, text in metadata.items():
        room -= len(name) + len(text)
        if room < 0 or len(kept) == _FACT_ENTRIES:
            break
        kept[name] = text
    facts: dict[str, Any] = {"metadata": kept} if metadata else {}
    if SHARDING in metadata:
        facts["describes"] = DCP
    if len(kept) < len(metadata):
        facts["metadata_left_out"] = len(metadata) - len(kept)
    return facts


def _mindspore_crcs(source: ByteSource, entries: _Entries, data: int) -> tuple[int, int]:
    """CRC32 over names and bytes in the order of names: of the bytes, and as MindSpore has it.

    MindSpore (2.10) writes the CRC32 of ``bytes(array)``. That is the array's bytes, except for an
    integer of shape ``()``: numpy offers it as an index, and Python makes that many zero bytes.
    """
    plain = quirky = 0
    for name, dtype, shape, start, end in sorted(zip(*entries, strict=True)):
        plain = zlib.crc32(name.encode(), plain)
        quirky = zlib.crc32(name.encode(), quirky)
        if dtype in _INT_DTYPES and not shape:
            raw = source.read(data + start, end - start)
            plain = zlib.crc32(raw, plain)
            count = int.from_bytes(raw, "little", signed=dtype[0] == "I")
            quirky = _crc32_of_zeros(max(count, 0), quirky)
            continue
        for at in range(start, end, _BLOCK):
            block = source.read(data + at, min(_BLOCK, end - at))
            same = plain == quirky
            plain = zlib.crc32(block, plain)
            quirky = plain if same else zlib.crc32(block, quirky)
    return plain, quirky


def _crc32_of_zeros(count: int, crc: int) -> int:
    """``zlib.crc32(bytes(count), crc)`` without the bytes: 10^12 of them are a token counter.

    A zero byte multiplies the register by x^8, modulo CRC32's polynomial.
    """
    power, factor = 1 << 31, 1 << 23
    while count:
        if count & 1:
            power = _multiply(power, factor)
        factor = _multiply(factor, factor)
        count >>= 1
    return _multiply(crc ^ 0xFFFFFFFF, power) ^ 0xFFFFFFFF


def _multiply(left: int, right: int) -> int:
    """Product of two polynomials modulo CRC32's, coefficients from the highest bit down."""
    product = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            product ^= right
        right = right >> 1 ^ (0xEDB88320 if right & 1 else 0)
    return product


def _show(name: str) -> str:
    return ascii(name) if len(name) <= 100 else ascii(name[:100]) + "..."


def _show_shape(shape: list[int]) -> str:
    return str(shape) if len(shape) <= 16 else f"of {len(shape)} dimensions"
