"""A directory of torch.distributed.checkpoint: ``.metadata`` and ``__R_0.distcp`` of each rank.

As torch 2.13 writes it (``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``): a
``.distcp`` file is items end to end, each a file of ``torch.save``, and the metadata says which
tensors there are, of which chunks, and where each lies. A chunk is a box that ranks hold by the
layout of the step; what several have is written once, to the file of the lowest.

The object is a flat dict: what :class:`torch.distributed.checkpoint.DefaultLoadPlanner` makes of
nested ones, too, with names joined by dots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from slimckpt.dtypes import numpy_dtype
from slimckpt.export.blueprint import Blueprint
from slimckpt.export.entries import Entry, WholeEntry, elements_of
from slimckpt.export.pickling import pickled
from slimckpt.export.torch import SPELLED, put_archive, storages_of
from slimckpt.formats.base import DCP
from slimckpt.formats.dcp_metadata import METADATA
from slimckpt.formats.pickles import Call, Global
from slimckpt.layouts.covering import holder_key
from slimckpt.layouts.layout import Box, Holder, Shape, whole_box
from slimckpt.model import Bytes
from slimckpt.views.whole import WholeTensor

_INDEX, _PLACE = "metadata.MetadataIndex", "filesystem._StorageInfo"
_VERSION = "1.0.0"
"""Of the metadata: ``CURRENT_DCP_VERSION``."""


class Chunk(NamedTuple):
    """A box of a tensor, and its elements."""

    box: Box
    entry: Entry


class BoxEntry(Entry):
    """A box of a whole tensor."""

    def __init__(self, name: str, whole: WholeTensor, box: Box) -> None:
        itemsize = numpy_dtype(whole.dtype).itemsize
        super().__init__(name, whole.dtype, box.lengths, box.lengths, itemsize)
        self._whole, self._box = whole, box

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        """As :func:`elements_of` asks for its elements: by slices, and an ellipsis behind them."""
        spans = zip(key, self._box.offsets, strict=False)
        inside = (slice(span.start + low, span.stop + low) for span, low in spans)
        whole_key = (*inside, ...)
        return self._whole[whole_key]

    def read(self, start: int, stop: int) -> Iterator[Bytes]:
        return elements_of(self, self, start, stop)


def chunks_of(name: str, whole: WholeTensor) -> list[tuple[Holder | None, Chunk]]:
    """A whole tensor as ranks (or files) hold it: each box, and the lowest of those that have it.

    Boxes that overlap cannot be chunks: the tensor is then one.
    """
    if whole.is_encoded or not whole.held:
        return [(None, Chunk(whole_box(whole.shape), WholeEntry(name, whole)))]
    return [(holder, Chunk(box, BoxEntry(name, whole, box))) for box, holder in whole.held]


class Item(NamedTuple):
    """Something in a file: a chunk of a tensor, or a text."""

    name: str
    content: Chunk | str


def dcp_files(
    tensors: dict[str, WholeTensor],
    carried: Sequence[Entry] = (),
    texts: dict[str, str] | None = None,
) -> dict[str, Blueprint]:
    """The files of a checkpoint by name.

    Parameters
    ----------
    tensors
        Whole ones, by the names to give them.
    carried
        Tensors outside of any layout; they are written as if the first rank alone had them.
    texts
        As :mod:`torch` would pickle them.
    """
    held = {name: chunks_of(name, whole) for name, whole in tensors.items()}
    holders = {holder for chunks in held.values() for holder, _ in chunks if holder is not None}
    numbers: dict[Holder | None, int] = {
        holder: holder if isinstance(holder, int) else number
        for number, holder in enumerate(sorted(holders, key=holder_key))
    }
    first = min(numbers.values(), default=0)
    numbers[None] = first
    files: dict[int, list[Item]] = {number: [] for number in sorted({first, *numbers.values()})}
    files[first] += [Item(name, text) for name, text in (texts or {}).items()]
    for name, chunks in held.items():
        for holder, chunk in chunks:
            files[numbers[holder]].append(Item(name, chunk))
    files[first] += [Item(e.name, Chunk(whole_box(e.shape), e)) for e in carried]
    return _planned(files)


def _planned(files: dict[int, list[Item]]) -> dict[str, Blueprint]:
    found: dict[str, Blueprint] = {}
    texts: dict[str, Call] = {}
    chunks: dict[str, list[Chunk]] = {}
    storage: dict[Call, Call] = {}
    for number, items in files.items():
        path = f"__{number}_0.distcp"
        blueprint = found[path] = Blueprint()
        for name, content in items:
            at = blueprint.nbytes
            if isinstance(content, str):
                put_archive(blueprint, "archive", content)
                texts[name] = _object("metadata.BytesStorageMetadata")
                index = _object(_INDEX, fqn=name, offset=None, index=None)
            else:
                storages, (view,) = storages_of([content.entry])
                put_archive(blueprint, "archive", view.node(storages), storages)
                known = chunks.setdefault(name, [])
                offset = _size(content.box.offsets)
                index = _object(_INDEX, fqn=name, offset=offset, index=len(known))
                known.append(content)
            length = blueprint.nbytes - at
            storage[index] = _object(_PLACE, relative_path=path, offset=at, length=length)
    state = texts | {name: _tensor(held) for name, held in chunks.items()}
    metadata = _object(
        "metadata.Metadata",
        state_dict_metadata=state,
        planner_data={name: (name,) for name in state},
        storage_data=storage,
        storage_meta=None,
        version=_VERSION,
    )
    found[METADATA] = Blueprint()
    found[METADATA].put(pickled(metadata))
    return found


def _tensor(chunks: Sequence[Chunk]) -> Call:
    """``TensorStorageMetadata`` of a tensor in chunks."""
    ends = zip(*(map(sum, zip(*chunk.box, strict=True)) for chunk in chunks), strict=True)
    properties = _object("metadata.TensorProperties")
    properties.state = (
        Global("torch", SPELLED[chunks[0].entry.dtype]),
        Call(Global("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        Call(Global(f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    return _object(
        "metadata.TensorStorageMetadata",
        properties=properties,
        size=_size(tuple(map(max, ends))),
        chunks=[
            _object(
                "metadata.ChunkStorageMetadata",
                offsets=_size(chunk.box.offsets),
                sizes=_size(chunk.box.lengths),
            )
            for chunk in chunks
        ],
    )


def _object(name: str, **fields: Any) -> Call:
    """An object of a class of torch.distributed.checkpoint, as pickle makes it."""
    module, _, cls = name.rpartition(".")
    found = Call(Global(f"{DCP}.{module}", cls), (), new=True)
    found.state = fields or None
    return found


def _size(shape: Shape) -> Call:
    return Call(Global("torch", "Size"), (shape,))
