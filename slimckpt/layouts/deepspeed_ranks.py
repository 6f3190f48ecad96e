"""How DeepSpeed's ZeRO lays the same state on another number of data-parallel ranks.

As DeepSpeed 0.19.8 does when it loads a universal checkpoint: measured on real reloads at 2 and 3
ranks of what 4 had saved. Padding is zero here; there it is uninitialised under stage 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from slimckpt.layouts.layout import Piece, Shard, TensorLayout, whole_box

_Placed = Iterator[tuple[str, TensorLayout]]
CUT = "optimizer_state_dict.single_partition_of_fp32_groups."
"""Local tensors whose padding is not stored."""


def spread_groups(tensors: Mapping[str, TensorLayout], n_ranks: int) -> _Placed:
    """Stages 1 and 2: groups end to end, padded to a multiple of twice the ranks."""
    ends: dict[str, int] = {}
    for _, tensor, local in _flat_ones(tensors):
        ends[local] = ends.get(local, 0) + math.prod(tensor.shape)
    starts = dict.fromkeys(ends, 0)
    for name, tensor, local in _flat_ones(tensors):
        start = starts[local]
        stop = starts[local] = start + math.prod(tensor.shape)
        total = ends[local]
        each = -(-total // (2 * n_ranks)) * 2
        shards = []
        for rank in range(n_ranks):
            low, high = max(start, rank * each), min(stop, (rank + 1) * each)
            # The master's padding is cut off, that of moments is not.
            length = min(each, max(total - rank * each, 0)) if local.startswith(CUT) else each
            span = (low - start, high - start)
            box = whole_box(tensor.shape)
            pieces = (Piece(box, low - rank * each, span),) if low < high else ()
            shards.append(Shard(rank, (length,), pieces, local))
        yield name, TensorLayout(tensor.dtype, tensor.shape, tuple(shards))


def spread_params(tensors: Mapping[str, TensorLayout], n_ranks: int) -> _Placed:
    """Stage 3: an equal part of each parameter, end to end in the group it was in."""
    parts = [(*f, -(-math.prod(f[1].shape) // n_ranks)) for f in _flat_ones(tensors)]
    lengths: dict[str, int] = {}
    for _, _, local, each in parts:
        lengths[local] = lengths.get(local, 0) + each
    taken = dict.fromkeys(lengths, 0)
    for name, tensor, local, each in parts:
        numel, at = math.prod(tensor.shape), taken[local]
        taken[local] += each
        shards = []
        for rank in range(n_ranks):
            span = min(rank * each, numel), min((rank + 1) * each, numel)
            piece = Piece(whole_box(tensor.shape), at, span)
            shards.append(Shard(rank, (lengths[local],), (piece,), local))
        yield name, TensorLayout(tensor.dtype, tensor.shape, tuple(shards))


def _flat_ones(tensors: Mapping[str, TensorLayout]) -> Iterator[tuple[str, TensorLayout, str]]:
    """Tensors that are parts of local ones, with the names of those, in order."""
    for name, tensor in tensors.items():
        first = tensor.shards[0]
        if first.name and any(piece.flat for piece in first.pieces):
            yield name, tensor, first.name
