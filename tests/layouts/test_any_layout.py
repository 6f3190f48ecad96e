"""Whatever the layout: resharding there and back gives the same bytes, and no lie is believed."""

import math
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from any_layout import BITS, Ranks, Wholes, elements, layouts, scatter, wholes, write
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import slimckpt
from slimckpt.errors import CheckFailedError
from slimckpt.layouts.layout import Box, Layout, Shard, TensorLayout
from slimckpt.views import Resharded


def read(resharded: Resharded) -> Ranks:
    return {
        rank: {
            name: (view.info(name)[0], array.view(BITS[view.info(name)[0]]))
            for name, array in view.items()
        }
        for rank, view in resharded.items()
    }


def streamed(resharded: Resharded, nbytes: int) -> Ranks:
    """The same, stretch by stretch."""
    found: Ranks = {}
    for rank, view in resharded.items():
        found[rank] = {}
        for name in view:
            dtype, shape = view.info(name)
            parts = list(view.stretches(name, nbytes))
            assert all(part.ndim == 1 and 0 < part.nbytes <= max(nbytes, 8) for part in parts)
            joined = np.concatenate(
                [np.empty(0, BITS[dtype]), *(p.view(BITS[dtype]) for p in parts)]
            )
            found[rank][name] = dtype, joined.reshape(shape)
    return found


def equal(found: Ranks, expected: Ranks) -> None:
    assert set(found) == set(expected)
    for rank, tensors in expected.items():
        assert set(found[rank]) == set(tensors)
        for name, (dtype, bits) in tensors.items():
            assert found[rank][name][0] == dtype
            assert found[rank][name][1].shape == bits.shape, (rank, name)
            assert found[rank][name][1].tobytes() == bits.tobytes(), (rank, name)


@settings(max_examples=150)
@given(st.data())
def test_there_and_back_gives_the_same_bytes(data: Any) -> None:
    whole = data.draw(wholes())
    one, other = data.draw(layouts(whole)), data.draw(layouts(whole))
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        write(first, scatter(whole, one))
        with slimckpt.open(first) as ckpt:
            for name, (_, bits) in whole.items():
                found = np.asarray(ckpt.tensor(name, layout=one))
                assert found.shape == bits.shape and found.tobytes() == bits.tobytes()
            there = read(ckpt.reshard(other, layout=one))
            equal(there, scatter(whole, other))
            equal(streamed(ckpt.reshard(other, layout=one), data.draw(st.integers(0, 99))), there)
        write(second, there)
        with slimckpt.open(second) as ckpt:
            equal(read(ckpt.reshard(one, layout=other)), scatter(whole, one))


@settings(max_examples=100)
@given(st.data())
def test_any_part_of_a_whole_tensor_is_read_right(data: Any) -> None:
    whole = data.draw(wholes())
    layout = data.draw(layouts(whole))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), scatter(whole, layout))
        with slimckpt.open(folder) as ckpt:
            for name, (dtype, bits) in whole.items():
                key = tuple(data.draw(st.slices(dim)) for dim in bits.shape)
                found = ckpt.tensor(name, layout=layout)[key]
                assert found.shape == bits[key].shape
                assert np.asarray(found).view(BITS[dtype]).tobytes() == bits[key].tobytes()


@st.composite
def falsified(draw: st.DrawFn, layout: Layout) -> tuple[str, Layout]:
    """One claim of a layout changed; the name of the tensor it is about."""
    name = draw(st.sampled_from(sorted(layout.tensors)))
    tensor = layout.tensors[name]
    number = draw(st.integers(0, len(tensor.shards) - 1))
    shard = tensor.shards[number]
    what = draw(
        st.sampled_from(["box", "at", "flat", "holder", "local shape", "whole", "dtype", "gone"])
    )
    step = draw(st.sampled_from([-1, 1]))
    if what == "whole":
        assume(tensor.shape)
        dim = draw(st.integers(0, len(tensor.shape) - 1))
        shape = moved(tensor.shape, dim, step)
        # Of tensors without elements no shape can be disproved.
        assume(math.prod(tensor.shape) or math.prod(shape))
        tensor = replace(tensor, shape=shape)
    elif what == "dtype":
        tensor = replace(tensor, dtype="U8" if tensor.dtype != "U8" else "I8")
    elif what == "gone":
        tensor = with_shard(tensor, number, None)
    elif what == "holder":
        rank = draw(st.sampled_from(layout.ranks))
        tensor = with_shard(tensor, number, replace(shard, holder=rank))
    elif what == "local shape":
        assume(shard.shape)
        dim = draw(st.integers(0, len(shard.shape) - 1))
        tensor = with_shard(tensor, number, replace(shard, shape=moved(shard.shape, dim, step)))
    else:
        assume(shard.pieces)
        place = draw(st.integers(0, len(shard.pieces) - 1))
        piece = shard.pieces[place]
        if what == "box":
            field = draw(st.integers(0, 1))
            assume(piece.box.offsets)
            dim = draw(st.integers(0, len(piece.box.offsets) - 1))
            sides = list(piece.box)
            sides[field] = moved(sides[field], dim, step)
            piece = piece._replace(box=Box(*sides))
        elif what == "flat":
            assume(piece.flat is not None)
            start, stop = piece.flat
            piece = piece._replace(
                flat=draw(st.sampled_from([(start + step, stop), (start, stop + step)]))
            )
        elif isinstance(piece.at, int):
            piece = piece._replace(at=piece.at + step)
        else:
            assume(piece.at)
            piece = piece._replace(
                at=moved(piece.at, draw(st.integers(0, len(piece.at) - 1)), step)
            )
        pieces = (*shard.pieces[:place], piece, *shard.pieces[place + 1 :])
        tensor = with_shard(tensor, number, replace(shard, pieces=pieces))
    tensors = {**layout.tensors, name: tensor}
    return name, Layout(tensors, layout.ranks, "a falsified layout")


def moved(numbers: tuple[int, ...], at: int, step: int) -> tuple[int, ...]:
    return (*numbers[:at], numbers[at] + step, *numbers[at + 1 :])


def with_shard(tensor: TensorLayout, number: int, shard: Shard | None) -> TensorLayout:
    rest = [] if shard is None else [shard]
    shards = (*tensor.shards[:number], *rest, *tensor.shards[number + 1 :])
    return replace(tensor, shards=shards)


def is_true(whole: Wholes, ranks: Ranks, name: str, tensor: TensorLayout) -> bool:
    """Whether all that is claimed of a tensor holds, element by element."""
    dtype, bits = whole[name]
    if (tensor.dtype, tensor.shape) != (dtype, bits.shape):
        return False
    held = np.zeros(bits.size, bool)
    for shard in tensor.shards:
        found = ranks[shard.holder].get(shard.name or name)
        if found is None or found[1].shape != shard.shape or found[0] != dtype:
            return False
        for piece in shard.pieces:
            if min((*piece.box.offsets, *piece.box.lengths, 0)) < 0:
                return False
            ends = [a + n for a, n in zip(*piece.box, strict=True)]
            at = (piece.at,) if isinstance(piece.at, int) else piece.at
            inside = all(end <= dim for end, dim in zip(ends, bits.shape, strict=True))
            size = math.prod(piece.box.lengths)
            flat = piece.flat or (0, size)
            if not inside or not 0 <= flat[0] <= flat[1] <= size:
                return False
            if flat[0] == flat[1]:
                continue  # of no elements anything is true
            if min(at, default=0) < 0:
                return False
            mine, there = elements(piece, bits.shape, shard.shape)
            local = found[1].reshape(-1)
            if len(mine) != len(there) or any(there >= local.size):
                return False
            if (bits.reshape(-1)[mine] != local[there]).any():
                return False
            held[mine] = True
    return bool(held.all())


def on_trust(true: TensorLayout, false: TensorLayout) -> bool:
    """Whether a claim is about elements of local tensors that are none of this tensor: padding, or
    other tensors of a flat group. What is where in such is taken on trust."""
    used: dict[Any, set[Any]] = {}
    for tensor in (true, false):
        for shard in tensor.shards:
            known = used.setdefault((shard.holder, shard.name), set())
            for piece in shard.pieces:
                if isinstance(piece.at, int):
                    start, stop = piece.flat or (0, math.prod(piece.box.lengths))
                    there: Any = range(piece.at, piece.at + stop - start)
                else:
                    lengths = (1,) * (len(piece.at) - len(piece.box.lengths)) + piece.box.lengths
                    spans = map(range, piece.at, map(sum, zip(piece.at, lengths, strict=True)))
                    there = product(*spans)
                if tensor is true:
                    known.update(there)
                elif not known.issuperset(there):
                    return True
    return False


@settings(max_examples=400)
@given(st.data())
def test_a_layout_with_one_claim_falsified_is_refused(data: Any) -> None:
    whole = data.draw(wholes())
    layout = data.draw(layouts(whole))
    name, false = data.draw(falsified(layout))
    ranks = scatter(whole, layout)
    assume(not is_true(whole, ranks, name, false.tensors[name]))
    if false.tensors[name].shape == layout.tensors[name].shape:
        assume(not on_trust(layout.tensors[name], false.tensors[name]))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), ranks)
        with slimckpt.open(folder) as ckpt:
            try:
                found = np.asarray(ckpt.tensor(name, layout=false))
            except CheckFailedError as error:
                assert repr(name) in str(error)
            else:
                raise AssertionError(f"{false.tensors[name]} is believed: {found}")
