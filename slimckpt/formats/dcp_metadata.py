"""``.metadata`` of torch.distributed.checkpoint, Megatron's torch_dist included: which tensors
there are, in which chunks, and where in the ``.distcp`` files each lies.

As torch 2.13 writes it (``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``): a
plain pickle of ``Metadata``, whose ``state_dict_metadata`` gives each tensor's shape and chunks,
and whose ``storage_data`` gives file, offset and length of each item. The path of the save that
stands in it is ignored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from slimckpt.errors import DamagedFileError
from slimckpt.formats.base import DCP
from slimckpt.formats.numpy_arrays import is_shape
from slimckpt.formats.pickles import Call, Global, fields_of, pairs_of, read_pickle
from slimckpt.formats.torch_tensors import plain, spelled
from slimckpt.sources.positioned import ByteSource

METADATA = ".metadata"
_METADATA = f"{DCP}.metadata.Metadata"

Shape = tuple[int, ...]


class Item(NamedTuple):
    """Something stored in a ``.distcp`` file: a chunk of a tensor, or an object.

    ``file`` is relative to the directory of the metadata; ``nbytes`` at ``at`` are an archive.
    ``offsets`` is ``None`` for an object.
    """

    name: str
    offsets: Shape | None
    file: str
    at: int
    nbytes: int


class Whole(NamedTuple):
    """A tensor: its whole shape, and the sizes of its chunks by their offsets."""

    dtype: str
    shape: Shape
    chunks: dict[Shape, Shape]


class Metadata(NamedTuple):
    """All of it. ``items`` are in the order of the file they are in, then of their place."""

    tensors: dict[str, Whole]
    items: list[Item]


def is_metadata(root: Any) -> bool:
    """Whether a pickle's object is the metadata of torch.distributed.checkpoint."""
    return type(root) is Call and root.is_a(_METADATA)


def read_metadata(source: ByteSource) -> Metadata:
    """Read it.

    Raises
    ------
    DamagedFileError, NotUnderstoodError
        It is no such metadata, or breaks its rules.
    """
    root, _ = read_pickle(source, 0, source.size)
    if not is_metadata(root):
        raise DamagedFileError(
            f"{source.label}: expected the metadata of torch.distributed.checkpoint, found another"
            " object"
        )
    fields = fields_of(root)
    tensors = {}
    for name, entry in pairs_of(fields.get("state_dict_metadata")):
        if type(name) is str and (whole := _whole(entry)) is not None:
            tensors[name] = whole
    items = [item for pair in pairs_of(fields.get("storage_data")) if (item := _item(*pair))]
    items.sort(key=lambda item: (item.file, item.at))
    return Metadata(tensors, items)


def _whole(entry: Any) -> Whole | None:
    fields = fields_of(entry)
    properties = fields.get("properties")
    state = properties.state if type(properties) is Call else None
    first = state[0] if type(state) is tuple and state else fields_of(properties).get("dtype")
    shape = _shape(fields.get("size"))
    chunks = fields.get("chunks")
    if shape is None or type(chunks) is not list or type(first) is not Global:
        return None
    found = {}
    for chunk in map(fields_of, chunks):
        offsets, sizes = _shape(chunk.get("offsets")), _shape(chunk.get("sizes"))
        if offsets is None or sizes is None:
            return None
        found[offsets] = sizes
    return Whole(spelled(first), shape, found)


def _item(index: Any, info: Any) -> Item | None:
    key, place = fields_of(index), fields_of(info)
    name, file = key.get("fqn"), place.get("relative_path")
    at, nbytes = place.get("offset"), place.get("length")
    if type(name) is not str or type(file) is not str or type(at) is not int:
        return None
    if type(nbytes) is not int or at < 0 or nbytes < 0 or "/" in file or file in ("", ".", ".."):
        return None
    return Item(name, _shape(key.get("offset")), file, at, nbytes)


def _shape(value: Any) -> Shape | None:
    """A ``torch.Size``, a tuple or a list of sizes."""
    value = plain(value)
    return value if is_shape(value) else None
