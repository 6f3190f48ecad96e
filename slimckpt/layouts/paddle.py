"""The layout that Paddle's ``dist.save_state_dict`` records in ``N.metadata``, of 2.6 to 3.3.

A chunk is found by file and key: a file has one of each. Paddle never compares what it replicates,
nor what a file holds with what the metadata says; here both are compared. 2.6 names one file for a
tensor that all ranks have whole: the others are replicas too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from slimckpt.errors import CheckFailedError, UnknownTensorError, UsageError
from slimckpt.formats.paddle_metadata import (
    PADDLE,
    LocalChunk,
    PaddleMetadata,
    StoredChunk,
    read_paddle_metadata,
)
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Box, Layout, Piece, Shape, Shard, TensorLayout
from slimckpt.model import encode_path

_LISTED = 5


def paddle_layout(files: Sequence[File]) -> Layout | None:
    """The layout of a step that Paddle saved; ``None`` where it did not.

    Raises
    ------
    UsageError
        Several saves lie in one directory.
    DamagedFileError
        The metadata is damaged.
    """
    described = [
        file
        for file in files
        if file.path.endswith(b".metadata")
        and file.holding.file.understood
        and file.holding.file.facts.get("describes") == PADDLE
    ]
    if not described:
        return None
    if len(described) > 1:
        names = ", ".join(ascii(encode_path(file.path)) for file in described[:_LISTED])
        raise UsageError(f"there are {len(described)} saves of Paddle: {names}; keep one of them")
    (found,) = described
    with found.holding.source() as source:
        metadata = read_paddle_metadata(source)
    directory = os.path.dirname(found.path)
    beside = {
        os.path.basename(encode_path(file.path)): file
        for file in files
        if os.path.dirname(file.path) == directory and file is not found
    }
    return Layout(_Recorded(metadata, beside, found.holding.label), (), encode_path(found.path))


class _Recorded(Mapping[str, TensorLayout]):
    """Tensors as the metadata has them, with what the files beside it hold."""

    def __init__(self, metadata: PaddleMetadata, files: Mapping[str, File], label: str) -> None:
        self._tensors, self._files, self._label = metadata.tensors, files, label
        self._stored: dict[str, list[StoredChunk]] = {}
        for chunk in metadata.stored:
            self._stored.setdefault(chunk.key, []).append(chunk)
        self._held: dict[str, dict[str, str]] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> TensorLayout:
        chunks = self._tensors.get(name)
        if not chunks:
            near = ", ".join(list(self._tensors)[:_LISTED])
            raise UnknownTensorError(
                f"no tensor {name!a} in the metadata; it names {len(self)}, such as {near}"
            )
        shape = chunks[0].whole or tuple(
            max(offset + size for offset, size in zip(offsets, sizes, strict=True))
            for offsets, sizes in zip(
                zip(*(chunk.offsets for chunk in chunks), strict=True),
                zip(*(chunk.sizes for chunk in chunks), strict=True),
                strict=True,
            )
        )
        sizes = {(chunk.offsets, chunk.flat): chunk.sizes for chunk in chunks}
        shards = []
        for stored in self._stored.get(name, ()):
            if (stored.offsets, stored.flat) not in sizes:
                raise CheckFailedError(
                    f"{self._label}: tensor {name!a}, chunk at {list(stored.offsets)}: it says in"
                    f" which file the chunk is ({stored.file}), and has no such chunk"
                )
            shards.append(self._shard(stored, sizes[stored.offsets, stored.flat]))
        shards += self._replicas(name, chunks, {shard.holder for shard in shards})
        return TensorLayout(self._dtype(name, shards), shape, tuple(shards))

    def _shard(self, stored: StoredChunk, sizes: Shape) -> Shard:
        file = self._files.get(stored.file)
        if file is None:
            raise CheckFailedError(
                f"{self._label}: tensor {stored.key!a}, chunk at {list(stored.offsets)}: its file"
                f" {stored.file} is not there"
            )
        path, box = encode_path(file.path), Box(stored.offsets, sizes)
        if stored.flat is None:
            return Shard(path, sizes, (Piece(box, (0,) * len(sizes)),))
        start, stop = stored.flat
        return Shard(path, (max(stop - start, 0),), (Piece(box, 0, stored.flat),))

    def _replicas(
        self, name: str, chunks: list[LocalChunk], known: set[int | str]
    ) -> Iterator[Shard]:
        """Other files that have the key of a tensor whose only chunk is all of it."""
        if len(chunks) > 1 or chunks[0].flat is not None or any(chunks[0].offsets):
            return
        sizes = chunks[0].sizes
        for file in self._files.values():
            path = encode_path(file.path)
            if path not in known and name in self._holds(file):
                yield Shard(path, sizes, (Piece(Box(chunks[0].offsets, sizes), (0,) * len(sizes)),))

    def _dtype(self, name: str, shards: list[Shard]) -> str:
        """As the first file has it: 2.6 does not record it, and Paddle's names are not ours."""
        for file in self._files.values():
            if shards and encode_path(file.path) == shards[0].holder:
                found = self._holds(file).get(name)
                if found is not None:
                    return found
        raise CheckFailedError(f"{self._label}: tensor {name!a} is in no file")

    def _holds(self, file: File) -> dict[str, str]:
        """The dtype of each key of a file."""
        path = encode_path(file.path)
        if path not in self._held:
            held: dict[str, str] = {}
            if file.holding.file.understood:
                table = file.holding.table
                held = {key: table.dtype(row) for row, key in enumerate(table.names())}
            self._held[path] = held
        return self._held[path]
