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
    """A chunk, or of a chunk that was flattened the elements ``flat``, from one to before another.

    ``dtype`` is Paddle's name (``float8_e4m3fn``), ``None`` where none is recorded; ``whole`` is
    the shape of the whole tensor, where it is recorded.
    """

    offsets: Shape
    sizes: Shape
    dtype: str | None
    whole: Shape | None = None
    flat: tuple[int, int] | None = None


class StoredChunk(NamedTuple):
    """Which file holds a chunk, under the tensor's key: relative to the metadata."""

    key: str
    offsets: Shape
    flat: tuple[int, int] | None
    file: str


def is_paddle_metadata(root: Any) -> bool:
    """Whether a pickle's object is Paddle's metadata."""
    return type(root) is Call and root.is_a(*_CLASSES)


class PaddleMetadata(NamedTuple):
    """The chunks of each tensor by its key, and where chunks are stored."""

    tensors: dict[str, list[LocalChunk]]
    stored: list[StoredChunk]


def read_paddle_metadata(source: ByteSource) -> PaddleMetadata:
    """All of it.

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
    places = pairs_of(fields_of(root).get("storage_metadata"))
    stored = [_stored(fields_of(index), file) for index, file in places]
    return PaddleMetadata(found, [chunk for chunk in stored if chunk is not None])


def _chunk(fields: dict[str, Any]) -> LocalChunk | None:
    offsets, sizes, dtype = map(fields.get, ("global_offset", "local_shape", "dtype"))
    if offsets is None or sizes is None or not (is_shape(offsets) and is_shape(sizes)):
        return None
    whole = fields.get("global_shape")
    return LocalChunk(
        offsets,
        sizes,
        dtype if type(dtype) is str else None,
        whole if whole is not None and is_shape(whole) else None,
        _flat(fields),
    )


def _stored(fields: dict[str, Any], file: Any) -> StoredChunk | None:
    key, offsets = fields.get("tensor_key"), fields.get("global_offset")
    if type(key) is not str or type(file) is not str or offsets is None or not is_shape(offsets):
        return None
    return StoredChunk(key, offsets, _flat(fields), file)


def _flat(fields: dict[str, Any]) -> tuple[int, int] | None:
    span = fields.get("flattened_range")
    if fields.get("is_flattened") is not True or type(span) is not tuple or not is_shape(span):
        return None
    return (span[0], span[1]) if len(span) == 2 else None
