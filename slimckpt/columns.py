"""Named arrays as one run of bytes, read in place.

Eight bytes of magic, the length of the header (u32, little endian), a JSON header
``{"columns": {name: [offset, dtype, count]}, ...}``, zero bytes up to a multiple of 8, then the
columns, little endian, each at a multiple of 8. Offsets count from the first column. Readers ignore
columns and header keys they do not know.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"SLIMCOL\x00"
_PREFIX = struct.Struct("<8sI")
_SPELLING = re.compile(r"\|[biu]1|<[iuf][248]")


def pack(columns: Mapping[str, npt.NDArray[Any]], header: Mapping[str, Any]) -> bytes:
    """Columns (one-dimensional) and further header keys, as bytes.

    The length depends on the columns' dtypes and counts and on ``header`` only, never on values.
    """
    places: dict[str, list[Any]] = {}
    at = 0
    for name, column in columns.items():
        places[name] = [at, column.dtype.newbyteorder("<").str, len(column)]
        at += -(-column.nbytes // 8) * 8
    text = json.dumps({**header, "columns": places}, separators=(",", ":")).encode()
    start = -(-(_PREFIX.size + len(text)) // 8) * 8
    out = bytearray(start + at)
    _PREFIX.pack_into(out, 0, MAGIC, len(text))
    out[_PREFIX.size : _PREFIX.size + len(text)] = text
    for name, column in columns.items():
        offset = start + places[name][0]
        data = np.ascontiguousarray(column, column.dtype.newbyteorder("<")).tobytes()
        out[offset : offset + len(data)] = data
    return bytes(out)


def unpack(data: Any) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """The columns, as views of ``data``, and the header.

    Raises
    ------
    ValueError
        These are not packed columns, or a column lies outside them.
    """
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise ValueError(f"{len(view)} bytes are too few for packed columns")
    magic, length = _PREFIX.unpack_from(view)
    if magic != MAGIC or _PREFIX.size + length > len(view):
        raise ValueError("these bytes are not packed columns")
    header = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + length]))
    start = -(-(_PREFIX.size + length) // 8) * 8
    columns: dict[str, npt.NDArray[Any]] = {}
    for name, (offset, spelling, count) in header.pop("columns").items():
        if not _SPELLING.fullmatch(spelling):
            raise ValueError(f"column {name} is of an unknown type, {spelling}")
        dtype = np.dtype(spelling)
        if min(offset, count) < 0 or start + offset + dtype.itemsize * count > len(view):
            raise ValueError(f"column {name} lies outside the {len(view)} bytes given")
        columns[name] = np.frombuffer(view, dtype, count, start + offset)
    return columns, header
