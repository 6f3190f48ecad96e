"""``N.metadata`` of Paddle's ``dist.save_state_dict``: which chunks there are of each tensor.

As Paddle 2.6 to 3.3 writes it (``distributed/checkpoint/metadata.py``, from 3.2 on
``distributed/flex_checkpoint/dcp/metadata.py``): a plain pickle. 2.6 has no dtypes, and whole
shapes are only there from 3.2 on. Nothing in it says where in a file a chunk lies: the file is a
dict with one chunk for each key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from slimckpt.errors import DamagedFileError
from slimckpt.formats.numpy_arrays import is_shape
from slimckpt.formats.pickles import Call, fields_of, pairs_of, read_pickle
from slimckpt.sources.positioned import ByteSource

PADDLE = "paddle.distributed"
_MODULES = (f"{PADDLE}.checkpoint.metadata", f"{PADDLE}.flex_checkpoint.dcp.metadata")
_CLASSES = tuple(f"{module}.Metadata" for module in _MODULES)

Shape = tuple[int, ...]


class LocalChunk(NamedTuple):
    """A chunk. ``dtype`` is Paddle's name (``float8_e4m3fn``), ``None`` where none is recorded."""

    offsets: Shape
    sizes: Shape
    dtype: str | None


def is_paddle_metadata(root: Any) -> bool:
    """Whether a pickle's object is Paddle's metadata."""
    return type(root) is Call and root.is_a(*_CLASSES)


def read_paddle_metadata(source: ByteSource) -> dict[str, list[LocalChunk]]:
    """The chunks of each tensor by its key.

    Raises
    ------
    DamagedFileError, NotUnderstoodError
        It is no such metadata.
    """
    root, _ = read_pickle(source, 0, source.size)
    if not is_paddle_metadata(root):
        raise DamagedFileError(
            f"{source.label}: expected the metadata of Paddle's save_state_dict, found another"
            " object"
        )
    found: dict[str, list[LocalChunk]] = {}
    for key, chunks in pairs_of(fields_of(root).get("state_dict_metadata")):
        if type(key) is str and type(chunks) is list:
            found[key] = [
                chunk for node in chunks if (chunk := _chunk(fields_of(node))) is not None
            ]
    return found


def _chunk(fields: dict[str, Any]) -> LocalChunk | None:
    offsets, sizes, dtype = map(fields.get, ("global_offset", "local_shape", "dtype"))
    if offsets is None or sizes is None or not (is_shape(offsets) and is_shape(sizes)):
        return None
    return LocalChunk(offsets, sizes, dtype if type(dtype) is str else None)
