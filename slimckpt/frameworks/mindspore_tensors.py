"""Arrays and entries of files as MindSpore has them, without a copy where that can be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np

from slimckpt.errors import (
    AmbiguousTensorError,
    DamagedFileError,
    DroppedTensorError,
    NotUnderstoodError,
)
from slimckpt.frameworks.origin import Origin
from slimckpt.views.arrays import Array

_LOADED = frozenset(
    [
        *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
        *("F16", "BF16", "F32", "F64", "I4X2"),
    ]
)
"""What MindSpore's own loader takes (2.10: ``tensor_to_ms_type``, ``numpy_dtype``)."""
_SHARED = _LOADED | {"C64", "C128"}
_TEXT = "opaque:str"
_LISTED = 8


def entries(mindspore: Any, origin: Origin, chosen: Callable[[str], bool] | None) -> dict[str, Any]:
    """The entries of a file as MindSpore's loader gives them (2.10, ``serialization.py``): in file
    order; those of safetensors by name, and not told their names."""
    holding, table = origin.holding, origin.holding.table
    named = holding.file.format != "safetensors"
    names = table.names()
    rows = range(len(names)) if named else sorted(range(len(names)), key=names.__getitem__)
    dropped = [names[row] for row in holding.dropped()]
    _refuse_dropped(origin, [name for name in dropped if chosen is None or chosen(name)])
    found: dict[str, Any] = {}
    for name, group in groupby(rows, key=names.__getitem__):
        if chosen is not None and not chosen(name):
            continue
        row, *more = group
        dtype = table.dtype(row)
        if dtype not in _LOADED and dtype != _TEXT:
            raise NotUnderstoodError(
                f"{holding.label}: {name!a} is of type {dtype}, of which no parameter is made"
                " here; choice_func can leave it out"
            )
        if more or (dtype == _TEXT and _pieces(origin, row) > 1):
            raise AmbiguousTensorError(
                f"{holding.label}: several entries in a row are named {name!a}. MindSpore takes"
                " such for pieces of one, which they are not; choice_func can leave them out"
            )
        if dtype == _TEXT:
            found[name] = _text(origin, row)
            continue
        array = origin.arrays.array(holding, row)
        # MindSpore copies a tensor that anything else refers to, or that has keywords beside it.
        found[name] = mindspore.Parameter(
            tensor_of_array(mindspore, array, dtype), name if named else None
        )
    return found


def tensor_of_array(mindspore: Any, array: Array, dtype: str) -> Any:
    """A tensor on the memory of a writable array of our dtype ``dtype``."""
    if dtype == "I4X2":
        return mindspore.Tensor(array.view(np.int8), dtype=mindspore.qint4x2)
    if dtype in _SHARED:
        # MindSpore does not know a dtype that says its byte order.
        native = array.dtype.newbyteorder("=")
        as_it_lies = array.flags.aligned and array.dtype.isnative
        array = array.view(native) if as_it_lies else array.astype(native)
    else:
        array = np.asarray(array, order="C").view(np.uint8)
    return mindspore.Tensor.from_numpy(array)


def _text(origin: Origin, row: int) -> str:
    """A string of ``append_dict``: UTF-32, NUL behind it cut off as numpy does."""
    raw = origin.arrays.raw(origin.holding, row)
    try:
        return raw.decode("utf-32-le", "surrogatepass").rstrip("\0")
    except UnicodeDecodeError as error:
        raise DamagedFileError(
            f"{origin.holding.label}: {origin.holding.table.name(row)!a} is not UTF-32, as strings"
            f" must be: {error.reason}"
        ) from None


def _pieces(origin: Origin, row: int) -> int:
    table = origin.holding.table
    payload = table.tensor(row).payload
    return 0 if payload is None else len(table.spans(payload))


def _refuse_dropped(origin: Origin, names: list[str]) -> None:
    if names:
        listed = ", ".join(map(ascii, names[:_LISTED])) + (", …" if len(names) > _LISTED else "")
        raise DroppedTensorError(
            f"{origin.holding.label}: {len(names)} parameters were left out when it was slimmed"
            f" (--drop): {listed}; choice_func or filter_prefix can do without them"
        )
