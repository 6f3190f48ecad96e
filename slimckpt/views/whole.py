"""Whole tensors of torch.distributed.checkpoint, assembled lazily of the chunks that were saved."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slimckpt.dtypes import numpy_dtype
from slimckpt.errors import CheckFailedError, UnknownTensorError
from slimckpt.formats.base import DCP
from slimckpt.formats.dcp_metadata import METADATA, Item, Metadata, Whole, read_metadata
from slimckpt.formats.safetensors import sharding_of
from slimckpt.model import encode_path
from slimckpt.views.arrays import Array, Arrays, is_readable, tensor_of
from slimckpt.views.providers import Holding, Member

Shape = tuple[int, ...]
_LISTED = 5


class _Chunk(NamedTuple):
    offsets: Shape
    sizes: Shape
    holding: Holding
    row: int


class WholeTensor:
    """One tensor as training knows it, in the shape it has over all ranks.

    Slicing it reads only the chunks that the slice touches: a view of mapped memory where one
    chunk has it all, else a new array. ``numpy.asarray`` gives all of it.

    Attributes
    ----------
    name, dtype : str
        ``dtype`` as safetensors spells it.
    shape : tuple of int
    """

    def __init__(self, name: str, whole: Whole, chunks: list[_Chunk], arrays: Arrays) -> None:
        self.name, self.dtype, self.shape = name, whole.dtype, whole.shape
        self._chunks, self._arrays = chunks, arrays

    def __repr__(self) -> str:
        return f"<WholeTensor {self.name!a} {self.dtype} {list(self.shape)}>"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of shape () has no length")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self._read([(0, dim) for dim in self.shape])
        if dtype is not None and found.dtype != dtype:
            return found.astype(dtype)
        return found.copy() if copy else found

    def __getitem__(self, key: Any) -> Array:
        """Part of the tensor, by integers, slices and ``...``, as numpy has it."""
        keys = _expanded(key, self.shape)
        steps, box = [], []
        for part, dim in zip(keys, self.shape, strict=True):
            low, high, step = _range(part, dim)
            box.append((low, high))
            steps.append(step)
        found: Array = self._read(box)[tuple(steps)]
        return found

    def _read(self, box: list[tuple[int, int]]) -> Array:
        """The elements of a box of the whole tensor."""
        shape = tuple(high - low for low, high in box)
        if 0 in shape:
            return np.empty(shape, numpy_dtype(self.dtype))
        out: Array | None = None
        for offsets, sizes, holding, row in self._chunks:
            inside: list[Any] = []  # slices, and an ellipsis, lest an array of shape () is a number
            outside: list[Any] = []
            for (low, high), offset, size in zip(box, offsets, sizes, strict=True):
                first, last = max(low, offset), min(high, offset + size)
                inside.append(slice(first - offset, last - offset))
                outside.append(slice(first - low, last - low))
            if any(axis.start >= axis.stop for axis in inside):
                continue
            inside.append(Ellipsis)
            part: Array = self._arrays.array(holding, row)[tuple(inside)]
            if part.shape == shape:
                return part
            if out is None:
                out = np.empty(shape, part.dtype)
            out[tuple(outside)] = part
        assert out is not None, "the chunks cover the whole tensor"
        return out


class Wholes(Mapping[str, WholeTensor]):
    """The whole tensors of one saved state, by name."""

    def __init__(self, metadata: Metadata, members: Mapping[str, Member], arrays: Arrays) -> None:
        self._tensors, self._members, self._arrays = metadata.tensors, members, arrays
        self._rows: dict[Holding, dict[str, list[int]]] = {}
        self._items: dict[str, list[Item]] = {}
        for item in metadata.items:
            if item.offsets is not None:
                self._items.setdefault(item.name, []).append(item)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> WholeTensor:
        whole = self._tensors.get(name)
        if whole is None:
            near = ", ".join(list(self._tensors)[:_LISTED])
            raise UnknownTensorError(
                f"no tensor {name!a} in the metadata; it names {len(self)}, such as {near}"
            )
        chunks = [self._chunk(name, whole, item) for item in self._items.get(name, [])]
        _refuse_gaps(name, whole, chunks)
        return WholeTensor(name, whole, chunks, self._arrays)

    def _chunk(self, name: str, whole: Whole, item: Item) -> _Chunk:
        """A chunk, what the file holds compared with what the metadata says."""
        member = self._members.get(item.file)
        assert item.offsets is not None
        sizes = whole.chunks.get(item.offsets)
        if member is None or sizes is None:
            what = f"file {item.file} is not there" if sizes else "the metadata has no such chunk"
            raise CheckFailedError(f"tensor {name!a}, chunk at {list(item.offsets)}: {what}")
        holding = member.holding
        row = self._row_of(holding, name, item, sizes)
        tensor = tensor_of(holding, row)
        if (tensor.dtype, tensor.shape) != (whole.dtype, sizes) or not is_readable(tensor.dtype):
            raise CheckFailedError(
                f"{holding.label}: tensor {name!a}, chunk at {list(item.offsets)}: expected"
                f" {whole.dtype} {list(sizes)}, as its metadata says, found {tensor.dtype}"
                f" {list(tensor.shape)}"
            )
        return _Chunk(item.offsets, sizes, holding, row)

    def _row_of(self, holding: Holding, name: str, item: Item, sizes: Shape) -> int:
        """The tensor of an item: the one of its name whose bytes lie in the item, or, of an empty
        one, which has no bytes, whose shape is right."""
        table = holding.require()
        if holding not in self._rows:
            found = self._rows[holding] = {}
            for row, named in enumerate(table.names()):
                found.setdefault(named, []).append(row)
        for row in self._rows[holding].get(name, ()):
            tensor = table.tensor(row)
            if tensor.payload is None:
                if tensor.shape == sizes and math.prod(sizes) == 0:
                    return row
            elif item.at <= table.spans(tensor.payload)[0].offset < item.at + item.nbytes:
                return row
        raise CheckFailedError(
            f"{holding.label}: tensor {name!a} is not at {item.at}, where its metadata says; the"
            " metadata is of another save"
        )


def wholes_of(members: Sequence[Member], arrays: Arrays) -> Wholes | None:
    """The whole tensors that metadata among ``members`` describes, if there is any: a file of its
    own, or the headers of safetensors files."""
    shards = sharded(members)
    if shards:
        by_path = {encode_path(member.path): member for member in shards}
        return Wholes(_joined(by_path), by_path, arrays)
    found = metadata_among(members)
    if found is None:
        return None
    directory = os.path.dirname(found.path)
    beside = {
        encode_path(os.path.basename(member.path)): member
        for member in members
        if os.path.dirname(member.path) == directory
    }
    with found.holding.source() as source:
        return Wholes(read_metadata(source), beside, arrays)


def metadata_among(members: Sequence[Member]) -> Member | None:
    """The metadata of torch.distributed.checkpoint among some files, where it is a file."""
    for member in members:
        if os.path.basename(member.path) == METADATA.encode():
            file = member.holding.file
            if file.understood and file.facts.get("describes") == DCP:
                return member
    return None


def sharded(members: Sequence[Member]) -> list[Member]:
    """safetensors files whose headers say where their tensors lie in the whole ones."""
    return [
        member
        for member in members
        if member.path.endswith(b".safetensors")
        and member.holding.file.understood
        and member.holding.file.facts.get("describes") == DCP
    ]


def _joined(members: Mapping[str, Member]) -> Metadata:
    """What the headers of all files say together; of replicas the first counts."""
    tensors: dict[str, Whole] = {}
    items: list[Item] = []
    for path, member in members.items():
        with member.holding.source() as source:
            offsets_of = sharding_of(source)
        table = member.holding.require()
        for row in range(table.n_tensors):
            tensor = table.tensor(row)
            offsets = offsets_of.get(tensor.name)
            if offsets is None or len(offsets) != len(tensor.shape):
                raise CheckFailedError(
                    f"{member.holding.label}: its header does not say where {tensor.name!a} lies in"
                    " the whole tensor"
                )
            known = tensors.setdefault(tensor.name, Whole(tensor.dtype, (0,) * len(offsets), {}))
            if offsets in known.chunks or len(known.shape) != len(offsets):
                continue
            known.chunks[offsets] = tensor.shape
            ends = zip(known.shape, offsets, tensor.shape, strict=True)
            whole = tuple(max(end, low + dim) for end, low, dim in ends)
            tensors[tensor.name] = known._replace(shape=whole)
            at = 0 if tensor.payload is None else table.spans(tensor.payload)[0].offset
            items.append(Item(tensor.name, offsets, path, at, max(tensor.nbytes, 1)))
    return Metadata(tensors, items)


def _refuse_gaps(name: str, whole: Whole, chunks: list[_Chunk]) -> None:
    """Every element is in exactly one chunk."""
    total = sum(math.prod(chunk.sizes) for chunk in chunks)
    inside = all(_is_inside(chunk, whole.shape) for chunk in chunks)
    boxes = [chunk for chunk in chunks if inside and 0 not in chunk.sizes]
    form = (len(boxes), len(whole.shape))
    lows = np.array([chunk.offsets for chunk in boxes], np.int64).reshape(form)
    highs = lows + np.array([chunk.sizes for chunk in boxes], np.int64).reshape(form)
    apart = all(
        not ((lows[at] < highs[at + 1 :]) & (lows[at + 1 :] < highs[at])).all(axis=1).any()
        for at in range(len(boxes))
        if whole.shape
    )
    if total != math.prod(whole.shape) or not inside or not apart:
        raise CheckFailedError(
            f"tensor {name!a} of shape {list(whole.shape)}: its {len(chunks)} chunks have {total}"
            f" of {math.prod(whole.shape)} elements{'' if apart else ', and overlap'}; files are"
            " missing, or the metadata is of another save"
        )


def _is_inside(chunk: _Chunk, shape: Shape) -> bool:
    axes = {len(chunk.offsets), len(chunk.sizes), len(shape)}
    return len(axes) == 1 and all(
        offset + size <= dim
        for offset, size, dim in zip(chunk.offsets, chunk.sizes, shape, strict=True)
    )


def _expanded(key: Any, shape: Shape) -> tuple[Any, ...]:
    """One key for each axis."""
    keys = key if type(key) is tuple else (key,)
    if sum(part is Ellipsis for part in keys) > 1:
        raise IndexError("an index can only have one ellipsis")
    if not all(part is Ellipsis or isinstance(part, slice) or _is_index(part) for part in keys):
        raise IndexError("whole tensors are indexed by integers, slices and ...")
    if Ellipsis not in keys:
        keys = (*keys, Ellipsis)
    at = keys.index(Ellipsis)
    missing = len(shape) - (len(keys) - 1)
    if missing < 0:
        raise IndexError(f"too many indices for a tensor of {len(shape)} dimensions")
    return (*keys[:at], *[slice(None)] * missing, *keys[at + 1 :])


def _is_index(part: Any) -> bool:
    return hasattr(part, "__index__") and not isinstance(part, bool | np.ndarray)


def _range(part: Any, dim: int) -> tuple[int, int, Any]:
    """First and last element that are needed of an axis, and the key that is left to apply."""
    if not isinstance(part, slice):
        at = part.__index__()
        if not -dim <= at < dim:
            raise IndexError(f"index {at} is out of bounds for an axis of size {dim}")
        at %= dim
        return at, at + 1, 0
    wanted = range(dim)[part]
    if not wanted:
        return 0, 0, slice(None)
    low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1
    return low, high, slice(None, None, wanted.step)
