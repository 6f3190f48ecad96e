"""The layout that resharding records in the slim checkpoint it writes, so that it can be read
whole, and resharded again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from slimckpt.errors import DamagedFileError
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Box, Layout, Piece, Shape, Shard, TensorLayout
from slimckpt.model import SYNTHETIC

NAME = b"layout.json"
"""Of the entry, beside the directories of the ranks."""
SCHEMA = "slimckpt.layout/1"
T = TypeVar("T")


def pack(layout: Layout, names: Iterable[str]) -> bytes:
    """What ranks hold of some tensors, as JSON.

    Tensors that share their shards refer to them by number. Files that hold something are left
    out: the layout is one of ranks.
    """
    numbers: dict[int, int] = {}
    shards: list[Any] = []
    tensors: dict[str, Any] = {}
    for name in names:
        tensor = layout.tensors[name]
        number = numbers.setdefault(id(tensor.shards), len(shards))
        if number == len(shards):
            held = [s for s in tensor.shards if isinstance(s.holder, int)]
            shards.append([[s.holder, s.shape, s.name, s.pieces] for s in held])
        tensors[name] = tensor.dtype, tensor.shape, number
    weights = {name: found for name, found in layout.weights.items() if found[0] in tensors}
    found = {
        "schema": SCHEMA,
        "origin": layout.origin,
        "ranks": layout.ranks,
        "tensors": tensors,
        "shards": shards,
        "weights": weights,
    }
    return json.dumps(found, separators=(",", ":")).encode()


def unpack(data: bytes, label: str) -> Layout:
    """What :func:`pack` made.

    Raises
    ------
    DamagedFileError
        It is something else.
    """
    try:
        found = json.loads(data)
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']!a}")
        shards = [tuple(map(_shard, held)) for held in found["shards"]]
        tensors = {
            name: TensorLayout(_is(str, dtype), _shape(shape), shards[_number(number)])
            for name, (dtype, shape, number) in found["tensors"].items()
        }
        weights = {
            name: (_is(str, whole), _is(str, dtype))
            for name, (whole, dtype) in found["weights"].items()
        }
        ranks, origin = _shape(found["ranks"]), f"{label} ({found['origin']})"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedFileError(f"{label}: expected a layout, {SCHEMA}: {error}") from None
    return Layout(tensors, ranks, origin, weights)


def stored_layout(files: Sequence[File]) -> Layout | None:
    """The layout of a step that resharding wrote; ``None`` where it did not."""
    for file in files:
        if os.path.basename(file.path) == NAME and file.holding.file.format == SYNTHETIC:
            with file.holding.source() as source:
                return unpack(source.read(0, source.size), file.holding.label)
    return None


def _shard(found: Any) -> Shard:
    holder, shape, name, pieces = found
    named = None if name is None else _is(str, name)
    return Shard(_number(holder), _shape(shape), tuple(map(_piece, pieces)), named)


def _piece(found: Any) -> Piece:
    (offsets, lengths), at, flat = found
    start = _shape(at) if isinstance(at, list) else _number(at)
    run: tuple[int, int] | None = None
    if flat is not None:
        first, last = flat
        run = _number(first), _number(last)
    return Piece(Box(_shape(offsets), _shape(lengths)), start, run)


def _shape(found: Any) -> Shape:
    numbers: list[Any] = _is(list, found)
    return tuple(map(_number, numbers))


def _number(found: Any) -> int:
    if isinstance(found, bool) or _is(int, found) < 0:
        raise ValueError(f"{found!a} is no number of elements, ranks or entries")
    return int(found)


def _is(kind: type[T], found: Any) -> T:
    if not isinstance(found, kind):
        raise ValueError(f"{found!a:.40} is no {kind.__name__}")
    return found
