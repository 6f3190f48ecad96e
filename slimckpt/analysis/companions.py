"""What another file of the same directory says of a file's tensors: their names.

The items of a ``.distcp`` file have no names of their own; the ``.metadata`` beside it has them.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache

from slimckpt.errors import SlimckptError
from slimckpt.formats import Found
from slimckpt.formats.dcp_metadata import METADATA, Item, read_metadata
from slimckpt.sources.positioned import FileSource

_SUFFIX = b".distcp"
_NUMBER = re.compile(r"\[([0-9]{1,9})\]")


def named(found: Found, path: bytes) -> Found:
    """A file's tensors, with the names that the metadata beside the file at ``path`` gives them.

    Where there is none, or it does not describe this file to the byte, they keep their numbers.
    """
    if found.format != "torch" or not path.endswith(_SUFFIX):
        return found
    items = _items(os.path.dirname(path), os.path.basename(path).decode("utf-8", "replace"))
    table = found.table
    if len(items) != found.facts.get("items", 1):
        return found
    names = []
    for row in range(table.n_tensors):
        name, number = table.name(row), _NUMBER.match(table.path(row))
        at = int(number[1]) if number and len(items) > 1 else 0
        rest = name.partition(".")[2] if len(items) > 1 else name
        names.append(f"{items[at].name}.{rest}" if rest else items[at].name)
    return found._replace(table=table.renamed(names))


def _items(directory: bytes, file: str) -> list[Item]:
    path = os.path.join(directory, METADATA.encode())
    try:
        status = os.stat(path, follow_symlinks=False)
        items = _read(path, status.st_mtime_ns, status.st_size)
    except (OSError, SlimckptError):
        return []
    here = [item for item in items if item.file == file]
    starts = [0, *(item.at + item.nbytes for item in here)]
    return here if [item.at for item in here] == starts[:-1] else []


@lru_cache(maxsize=16)
def _read(path: bytes, mtime: int, size: int) -> list[Item]:
    with FileSource(path) as source:
        return read_metadata(source).items
