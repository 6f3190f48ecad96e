"""Any whole tensors, laid out in any way; what ranks then hold, worked out element by element."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors_bytes import safetensors_file

from slimckpt.layouts.layout import Box, Layout, Piece, Shard, TensorLayout
from slimckpt.layouts.placement import Placement
from slimckpt.layouts.splits import Split

BITS = {"F32": np.uint32, "BF16": np.uint16, "I64": np.uint64, "F8_E5M2": np.uint8}

Wholes = dict[str, tuple[str, np.ndarray]]
"""Dtype and bits of each whole tensor: no two elements of a tensor are the same."""
Ranks = dict[int, dict[str, tuple[str, np.ndarray]]]


@st.composite
def wholes(draw: st.DrawFn) -> Wholes:
    found = {}
    for number in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(list(BITS)))
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        start = draw(st.integers(0, 255))  # every NaN of one byte, too
        bits = (np.arange(math.prod(shape)) * 257 + start).astype(BITS[dtype]).reshape(shape)
        found[f"w{number}"] = dtype, bits
    return found


@st.composite
def layouts(draw: st.DrawFn, whole: Wholes) -> Layout:
    """Of the same tensors: boxes of nested and fused splits, runs of them, flat groups, stacks."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    ranks = math.prod(mesh)
    if draw(st.integers(0, 3)) == 0:
        tensors = draw(flat_groups(whole, ranks))
    else:
        tensors = {}
        for name, (dtype, bits) in whole.items():
            shards = draw(placements(mesh, bits.shape)).shards(bits.shape)
            how = draw(st.sampled_from(["as is", "runs", "stacked"]))
            if how == "runs":
                shards = tuple(as_runs(shards))
            elif how == "stacked":
                shards = tuple(stacked(shard, draw(st.integers(1, 2))) for shard in shards)
            tensors[name] = TensorLayout(dtype, bits.shape, shards)
    return Layout(tensors, tuple(range(ranks)), f"a layout of {ranks}")


@st.composite
def placements(draw: st.DrawFn, mesh: tuple[int, ...], shape: tuple[int, ...]) -> Placement:
    free = draw(st.permutations(range(len(mesh))))
    splits = []
    left = list(shape)
    for axes in (free[:1], free[1:]):
        if not shape or not axes or draw(st.booleans()):
            continue
        dim = draw(st.integers(0, len(shape) - 1))
        if any(split.dim == dim for split in splits):
            splits.append(Split(dim, tuple(axes), "ceil"))
            continue
        length, parts = left[dim], math.prod(mesh[axis] for axis in axes)
        how: Any = draw(
            st.sampled_from(["ceil", "balanced", "even", "sizes", "sections", "groups"])
        )
        sections = draw(
            st.sampled_from([s for s in ((1, 1), (2, 1), (1,)) if length % sum(s) == 0])
        )
        split = Split(dim, tuple(axes), "ceil")
        if how == "sizes":
            cuts = sorted(
                draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1))
            )
            sizes = [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
            split = replace(split, how=tuple(sizes))
        elif how == "even" and length % parts == 0:
            split = replace(split, how="even")
        elif how == "balanced":
            split = replace(split, how="balanced")
        elif how == "sections":
            split = replace(split, sections=sections)
        elif how == "groups":
            groups = math.gcd(*(length // sum(sections) * part for part in sections))
            if groups:
                split = replace(split, sections=sections, groups=groups)
        splits.append(split)
    return Placement(mesh, tuple(splits))


def as_runs(shards: tuple[Shard, ...]) -> list[Shard]:
    """Of replicas of one box each has a run of its elements, as Paddle's ``flattened_range``."""
    same: dict[Any, list[int]] = {}
    for number, shard in enumerate(shards):
        same.setdefault(shard.pieces, []).append(number)
    found = list(shards)
    for pieces, numbers in same.items():
        if len(pieces) != 1:
            continue
        size = math.prod(pieces[0].box.lengths)
        cuts = [size * n // len(numbers) for n in range(len(numbers) + 1)]
        for number, start, stop in zip(numbers, cuts, cuts[1:], strict=False):
            piece = pieces[0]._replace(at=0, flat=(start, stop))
            found[number] = replace(found[number], shape=(stop - start,), pieces=(piece,))
    return found


def stacked(shard: Shard, depth: int) -> Shard:
    """The local tensor is the last of a stack; what is above it is padding."""
    pieces = tuple(piece._replace(at=(depth - 1, *piece.at)) for piece in shard.pieces)
    return replace(shard, shape=(depth, *shard.shape), pieces=pieces)


@st.composite
def flat_groups(draw: st.DrawFn, whole: Wholes, ranks: int) -> dict[str, TensorLayout]:
    """All tensors of a dtype one behind the other in a flat group, of which each rank has a run;
    between the tensors and at the end of a run there is padding (ZeRO)."""
    runs: dict[int, dict[str, list[tuple[str, int, int, int]]]] = {r: {} for r in range(ranks)}
    length: dict[tuple[int, str], int] = {}
    for name, (dtype, bits) in whole.items():
        cuts = sorted(
            draw(st.lists(st.integers(0, bits.size), min_size=ranks - 1, max_size=ranks - 1))
        )
        for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, bits.size], strict=True)):
            at = length.get((rank, dtype), 0) + draw(st.integers(0, 2))
            runs[rank].setdefault(dtype, []).append((name, start, stop, at))
            length[rank, dtype] = at + stop - start + draw(st.integers(0, 2))
    tensors = {}
    for name, (dtype, bits) in whole.items():
        box = Box((0,) * bits.ndim, bits.shape)
        shards = [
            Shard(rank, (length[rank, dtype],), (Piece(box, at, (start, stop)),), f"flat.{dtype}")
            for rank in range(ranks)
            for other, start, stop, at in runs[rank][dtype]
            if other == name
        ]
        tensors[name] = TensorLayout(dtype, bits.shape, tuple(shards))
    return tensors


def elements(piece: Piece, shape: tuple[int, ...], local: tuple[int, ...]) -> tuple[Any, Any]:
    """Numbers of the elements of a piece: in the whole tensor, and in the local one."""
    spans = tuple(slice(a, a + n) for a, n in zip(*piece.box, strict=True))
    mine = np.arange(math.prod(shape)).reshape(shape)[spans].reshape(-1)
    if piece.flat is not None:
        mine = mine[slice(*piece.flat)]
    if isinstance(piece.at, int):
        return mine, np.arange(piece.at, piece.at + len(mine))
    extra = len(piece.at) - len(piece.box.lengths)
    lengths = (1,) * extra + piece.box.lengths
    spans = tuple(slice(a, a + n) for a, n in zip(piece.at, lengths, strict=True))
    return mine, np.arange(math.prod(local)).reshape(local)[spans].reshape(-1)


def scatter(whole: Wholes, layout: Layout) -> Ranks:
    """What each rank holds; padding is zero."""
    ranks: Ranks = {rank: {} for rank in layout.ranks}
    for name, tensor in layout.tensors.items():
        dtype, bits = whole[name]
        for shard in tensor.shards:
            held = ranks[shard.holder]
            empty = dtype, np.zeros(shard.shape, BITS[dtype])
            local = held.setdefault(shard.name or name, empty)[1]
            for piece in shard.pieces:
                mine, there = elements(piece, bits.shape, shard.shape)
                local.reshape(-1)[there] = bits.reshape(-1)[mine]
    return ranks


def write(place: Path, ranks: Ranks) -> None:
    for rank, tensors in ranks.items():
        path = place / f"rank_{rank}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(
            safetensors_file(
                [(name, dtype, a.shape, a.tobytes()) for name, (dtype, a) in tensors.items()]
            )
        )
