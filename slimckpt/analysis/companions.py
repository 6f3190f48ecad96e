"""What a file's name, and another file of the same directory, say of its tensors.

The array of a ``.npy`` file has no name in it: it gets the file's. The items of torch's ``.distcp``
files have none of their own: the ``.metadata`` beside them has them. Paddle writes float8 as int8:
the ``N.metadata`` beside its ``R_N.distcp`` says which it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from slimckpt.errors import SlimckptError
from slimckpt.formats import Found
from slimckpt.formats.dcp_metadata import METADATA, Item, read_metadata
from slimckpt.formats.paddle_metadata import read_paddle_metadata
from slimckpt.sources.positioned import ByteSource, FileSource

_DISTCP = re.compile(rb"(?:__)?[0-9]{1,9}_([0-9]{1,9})\.distcp")
_NUMBER = re.compile(r"\[([0-9]{1,9})\]")
_FLOAT8 = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def completed(found: Found, path: bytes) -> Found:
    """A file's tensors with the names and dtypes that ``path``, and the metadata beside the file
    there, give them.

    Where there is none, or it does not describe this file, they stay as they are.
    """
    directory, name = os.path.split(path)
    if found.format == "npy" and found.table.n_tensors == 1:
        stem = os.path.splitext(name)[0].decode("utf-8", "backslashreplace")
        return found._replace(table=found.table.renamed([stem]))
    match = _DISTCP.fullmatch(name)
    if match is None:
        return found
    if found.format == "torch":
        items = _read(os.path.join(directory, METADATA.encode()), _items) or {}
        return _named(found, items.get(name.decode(), []))
    if found.format == "pickle":
        metadata = os.path.join(directory, match[1] + METADATA.encode())
        return _typed(found, _read(metadata, _float8) or {})
    return found


def _named(found: Found, items: list[Item]) -> Found:
    table = found.table
    if not items or len(items) != found.facts.get("items", 1):
        return found
    names = []
    for row in range(table.n_tensors):
        name, number = table.name(row), _NUMBER.match(table.path(row))
        at = int(number[1]) if number and len(items) > 1 else 0
        rest = name.partition(".")[2] if len(items) > 1 else name
        names.append(f"{items[at].name}.{rest}" if rest else items[at].name)
    return found._replace(table=table.renamed(names))


def _typed(found: Found, dtypes: dict[str, str]) -> Found:
    table = found.table
    rows = [
        (row, dtypes[name])
        for row, name in enumerate(table.names())
        if name in dtypes and table.dtype(row) == "I8"
    ]
    return found._replace(table=table.retyped(rows)) if rows else found


def _items(source: ByteSource) -> dict[str, list[Item]]:
    """Items by file; of files that they fill to the last byte."""
    found: dict[str, list[Item]] = {}
    for item in read_metadata(source).items:
        found.setdefault(item.file, []).append(item)
    for file, items in list(found.items()):
        ends = [item.at + item.nbytes for item in items]
        if [item.at for item in items] != [0, *ends[:-1]]:
            del found[file]
    return found


def _float8(source: ByteSource) -> dict[str, str]:
    return {
        key: _FLOAT8[chunk.dtype]
        for key, chunks in read_paddle_metadata(source).tensors.items()
        for chunk in chunks[:1]
        if chunk.dtype in _FLOAT8
    }


def _read(path: bytes, read: Callable[[ByteSource], Any]) -> Any:
    """What ``read`` makes of a file; ``None`` where there is none, or it cannot."""
    try:
        status = os.stat(path, follow_symlinks=False)
        return _kept(path, status.st_mtime_ns, status.st_size, read)
    except (OSError, SlimckptError):
        return None


@lru_cache(maxsize=16)
def _kept(path: bytes, mtime: int, size: int, read: Callable[[ByteSource], Any]) -> Any:
    with FileSource(path) as source:
        return read(source)
