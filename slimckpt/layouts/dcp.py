"""The layout that torch.distributed.checkpoint records: in ``.metadata``, or in the headers of
safetensors files. Megatron's ``torch_dist`` is the same.

What ``.metadata`` says of a tensor is looked at when it is asked for; no other file is read here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from slimckpt.errors import CheckFailedError, NotUnderstoodError, UnknownTensorError
from slimckpt.formats.base import DCP
from slimckpt.formats.dcp_metadata import METADATA, Item, Metadata, Whole, read_metadata
from slimckpt.formats.safetensors import sharding_of
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Box, Layout, Piece, Shard, TensorLayout
from slimckpt.model import Span, encode_path

_LISTED = 5
_BUCKET = re.compile(r"(?:.*\.)?dp_group_idx_\d+\.gbuf_idx_\d+\..*", re.DOTALL)
F = TypeVar("F", bound=File)


def dcp_layout(files: Sequence[File]) -> Layout | None:
    """The layout of a step that torch.distributed.checkpoint saved; ``None`` where it did not.

    Raises
    ------
    DamagedFileError, CheckFailedError
        The record is damaged, or headers do not say where their tensors lie.
    """
    shards = sharded(files)
    if shards:
        return Layout(_Recorded(_joined(shards), ""), (), "the headers of its safetensors files")
    found = metadata_among(files)
    if found is None:
        return None
    with found.holding.source() as source:
        metadata = read_metadata(source)
    directory = encode_path(os.path.dirname(found.path))
    return Layout(_Recorded(metadata, directory), (), encode_path(found.path))


def require_movable(names: Iterable[str], origin: str) -> None:
    """No tensor is of the ranks that saved it, and means nothing to others.

    Raises
    ------
    NotUnderstoodError
        One is a bucket of Megatron's distributed optimizer, saved as ``dp_reshardable``: the
        parameters of one tensor- and pipeline-parallel rank, end to end.
    """
    found = next((name for name in names if _BUCKET.fullmatch(name)), None)
    if found is not None:
        raise NotUnderstoodError(
            f"tensor {found!a} of {origin} is a bucket of Megatron's distributed optimizer, saved"
            " as dp_reshardable: the parameters of the tensor- and pipeline-parallel ranks that"
            " saved it, which other ranks cannot be given; leave such tensors out"
            " (skip=['*.gbuf_idx_*']), or have Megatron save fully_reshardable"
        )


def metadata_among(files: Sequence[F]) -> F | None:
    """The metadata of torch.distributed.checkpoint among some files, where it is a file."""
    for member in files:
        if os.path.basename(member.path) == METADATA.encode():
            file = member.holding.file
            if file.understood and file.facts.get("describes") == DCP:
                return member
    return None


def sharded(files: Sequence[F]) -> list[F]:
    """safetensors files whose headers say where their tensors lie in the whole ones."""
    return [
        member
        for member in files
        if member.path.endswith(b".safetensors")
        and member.holding.file.understood
        and member.holding.file.facts.get("describes") == DCP
    ]


class _Recorded(Mapping[str, TensorLayout]):
    """Tensors as the record has them. Paths in it are relative to ``directory``."""

    def __init__(self, metadata: Metadata, directory: str) -> None:
        self._tensors, self._directory = metadata.tensors, directory
        self._made: dict[str, TensorLayout] = {}
        self._items: dict[str, list[Item]] = {}
        for item in metadata.items:
            if item.offsets is not None:
                self._items.setdefault(item.name, []).append(item)

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> TensorLayout:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> TensorLayout:
        whole = self._tensors.get(name)
        if whole is None:
            near = ", ".join(list(self._tensors)[:_LISTED])
            raise UnknownTensorError(
                f"no tensor {name!a} in the metadata; it names {len(self)}, such as {near}"
            )
        shards = []
        for item in self._items.get(name, ()):
            assert item.offsets is not None
            sizes = whole.chunks.get(item.offsets)
            if sizes is None:
                raise CheckFailedError(
                    f"tensor {name!a}, chunk at {list(item.offsets)}: the metadata has no such"
                    " chunk"
                )
            piece = Piece(Box(item.offsets, sizes), (0,) * len(sizes))
            path = os.path.join(self._directory, item.file)
            shards.append(Shard(path, sizes, (piece,), within=Span(item.at, item.nbytes)))
        return TensorLayout(whole.dtype, whole.shape, tuple(shards))


def _joined(members: Sequence[File]) -> Metadata:
    """What the headers of all files say together; of replicas the first counts."""
    tensors: dict[str, Whole] = {}
    items: list[Item] = []
    for member in members:
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
            path = encode_path(member.path)
            items.append(Item(tensor.name, offsets, path, at, max(tensor.nbytes, 1)))
    return Metadata(tensors, items)
