"""Runs of elements as boxes, and coverage: against arrays that count."""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.errors import CheckFailedError
from slimckpt.layouts.boxes import blocks_of, coverage
from slimckpt.layouts.covering import Covering
from slimckpt.layouts.layout import Box, Piece, Shard

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def spans(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, low + length) for low, length in zip(*box, strict=True))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    low = tuple(draw(st.integers(0, dim)) for dim in shape)
    rest = (dim - start for dim, start in zip(shape, low, strict=True))
    return Box(low, tuple(draw(st.integers(0, length)) for length in rest))


@given(st.data(), SHAPES)
def test_a_run_of_elements_is_few_boxes_in_its_own_order(data: Any, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    blocks = blocks_of(Piece(Box((0,) * len(shape), shape), 7, (start, stop)))
    assert len(blocks) <= max(2 * len(shape) - 1, 1)
    numbers = np.arange(size).reshape(shape)
    found = [numbers[spans(box)].reshape(-1) for box, _ in blocks]
    assert [n for run in found for n in run] == list(range(start, stop))
    assert [at for _, at in blocks] == [7 + run[0] - start for run in found]


@given(st.data(), SHAPES)
def test_coverage_is_what_counting_says(data: Any, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    count = np.zeros(shape, int)
    for box in boxes:
        count[spans(box)] += 1
    gap, overlap = coverage(shape, boxes)
    assert (gap is None) == bool((count > 0).all())
    assert (overlap is None) == bool((count < 2).all())
    if gap is not None:
        assert count[spans(gap)].size and (count[spans(gap)] == 0).all()
    if overlap is not None:
        assert count[spans(overlap)].size and (count[spans(overlap)] > 1).all()


def test_thousands_of_boxes_are_proved_to_be_a_partition() -> None:
    boxes = [Box((3 * i, 5 * j), (3, 5)) for i in range(64) for j in range(64)]
    random.Random(1).shuffle(boxes)
    assert coverage((192, 320), boxes) == (None, None)
    gap, _ = coverage((192, 320), boxes[:-1])
    assert gap == boxes[-1]
    assert coverage((192, 320), [*boxes, boxes[7]])[1] == boxes[7]


def shard(rank: int, offsets: tuple[int, ...], lengths: tuple[int, ...], **more: Any) -> Shard:
    at = more.pop("at", (0,) * len(lengths))
    return Shard(rank, more.pop("shape", lengths), (Piece(Box(offsets, lengths), at),), **more)


FAULTS = {
    "a gap": ((4, 2), [shard(0, (0, 0), (2, 2)), shard(1, (3, 0), (1, 2))], r"\[2:3, 0:2\]"),
    "nobody": ((4,), [], r"\[0:4\].*0 of 4"),
    "outside": ((4,), [shard(0, (0,), (4,)), shard(1, (4,), (1,))], r"rank 1.*not inside"),
    "negative": ((4,), [shard(0, (-1,), (5,))], r"rank 0.*not inside"),
    "other axes": ((4,), [shard(0, (0, 0), (4, 1))], r"not inside"),
    "beyond the local tensor": ((4,), [shard(0, (0,), (4,), shape=(3,))], r"does not fit"),
    "behind the local tensor": ((4,), [shard(3, (0,), (4,), shape=(9,), at=6)], r"does not fit"),
    "one element for two": (
        (4,),
        [Shard(2, (2,), (Piece(Box((0,), (2,)), (0,)), Piece(Box((2,), (2,)), (0,))))],
        r"\[0:2\] of what rank 2 has is two parts",
    ),
    "a run longer than its box": (
        (4,),
        [Shard(0, (9,), (Piece(Box((0,), (4,)), 0, (2, 5)),))],
        r"not inside",
    ),
    "a run at offsets": (
        (4,),
        [Shard(0, (9,), (Piece(Box((0,), (4,)), (0,), (0, 4)),))],
        r"not inside",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_layout_that_cannot_be_true_is_refused(name: str) -> None:
    shape, shards, match = FAULTS[name]
    with pytest.raises(CheckFailedError, match=match) as caught:
        Covering(shape, shards).require("w", shape, "x.ckpt")
    assert "tensor 'w' of shape" in str(caught.value) and "x.ckpt" in str(caught.value)


def test_holders_of_a_box_are_listed_the_lowest_rank_first() -> None:
    shards = [shard(rank, (0,), (4,)) for rank in (10, 2, 33)] + [shard(4, (4,), (1,))]
    found = Covering((5,), shards)
    assert found.boxes == [Box((0,), (4,)), Box((4,), (1,))]
    assert [[held.shard.holder for held in row] for row in found.held] == [[2, 10, 33], [4]]
    assert found.overlap is None
    assert found.touching((4,), (5,)) == [1] and found.touching((3,), (5,)) == [0, 1]
