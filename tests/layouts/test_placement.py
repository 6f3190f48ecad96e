"""Split rules and placements: what ranks get of a tensor, against slices made by hand."""

from typing import Any

import numpy as np
import pytest

from slimckpt.errors import CheckFailedError, UsageError
from slimckpt.layouts.layout import Shard
from slimckpt.layouts.placement import Inference, Placement, Rules
from slimckpt.layouts.slicing import local_of
from slimckpt.layouts.splits import Split, sizes_of

# torch.chunk (torch 2.13), numpy.array_split (numpy 2.4)
SIZES = [
    ("ceil", 13, 4, [4, 4, 4, 1]),
    ("ceil", 13, 3, [5, 5, 3]),
    ("ceil", 13, 2, [7, 6]),
    ("ceil", 5, 4, [2, 2, 1, 0]),
    ("ceil", 2, 4, [1, 1, 0, 0]),
    ("ceil", 0, 3, [0, 0, 0]),
    ("balanced", 13, 4, [4, 3, 3, 3]),
    ("balanced", 5, 4, [2, 1, 1, 1]),
    ("balanced", 2, 4, [1, 1, 0, 0]),
    ("even", 12, 4, [3, 3, 3, 3]),
    ((4, 12, 16, 8), 40, 4, [4, 12, 16, 8]),
]


@pytest.mark.parametrize(("how", "length", "parts", "sizes"), SIZES)
def test_an_axis_is_split_by_the_rule(how: Any, length: int, parts: int, sizes: list[int]) -> None:
    assert sizes_of(how, length, parts) == sizes


@pytest.mark.parametrize(
    ("how", "match"),
    [("even", r"13 does not divide by 4"), ((4, 4, 4), "make up 13"), ("odd", "no split rule")],
)
def test_what_cannot_be_split_is_an_error_that_says_so(how: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        sizes_of(how, 13, 4)


class OneRule(Rules):
    origin = "rules.toml"

    def __init__(self, placement: Placement) -> None:
        self.n_ranks = int(np.prod(placement.mesh))
        self._placement = placement

    def placements(self, name: str) -> tuple[Placement, ...]:
        return (self._placement,)


def ranks_of(whole: np.ndarray, placement: Placement) -> list[np.ndarray]:
    """What each rank has; its whole shape is inferred back from that."""
    shards = placement.shards(whole.shape)
    found = [local_of(whole, shard, whole.dtype) for shard in shards]
    held = {shard.holder: ("F32", array.shape) for shard, array in zip(shards, found, strict=True)}
    inferred = Inference(OneRule(placement)).tensor("w", held)
    assert inferred is not None
    assert inferred.shape == whole.shape and inferred.shards == shards
    return found


def grid(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and (one == other).all()


def test_ranks_vary_fastest_along_the_last_axis_of_the_mesh() -> None:
    whole = grid(4, 6)
    found = ranks_of(whole, Placement((2, 3), (Split(1, (1,)),)))
    same(found, [whole[:, 2 * tp : 2 * tp + 2] for dp in range(2) for tp in range(3)])
    found = ranks_of(whole, Placement((2, 3), (Split(0, (0,)), Split(1, (1,)))))
    same(found, [whole[2 * a : 2 * a + 2, 2 * b : 2 * b + 2] for a in range(2) for b in range(3)])


def test_the_first_of_nested_axes_is_the_most_significant() -> None:
    whole = grid(12)
    found = ranks_of(whole, Placement((2, 3), (Split(0, (1, 0)),)))
    same(found, [whole[4 * tp + 2 * dp :][:2] for dp in range(2) for tp in range(3)])
    found = ranks_of(whole, Placement((2, 3), (Split(0, (0, 1)),)))
    same(found, [whole[6 * dp + 2 * tp :][:2] for dp in range(2) for tp in range(3)])


def test_nested_axes_split_the_parts_of_the_first_as_dtensor_does() -> None:
    # 13 over 2: 7 and 6; 7 over 2: 4 and 3
    found = ranks_of(grid(13), Placement((2, 2), (Split(0, (0, 1), "ceil"),)))
    assert [len(part) for part in found] == [4, 3, 3, 3]


def test_sections_are_split_each_by_itself() -> None:
    gate, up = grid(8, 3), 100 + grid(8, 3)
    found = ranks_of(
        np.concatenate([gate, up]), Placement((4,), (Split(0, (0,), sections=(1, 1)),))
    )
    same(
        found, [np.concatenate([gate[2 * r : 2 * r + 2], up[2 * r : 2 * r + 2]]) for r in range(4)]
    )


def test_uneven_sections_are_split_each_by_itself() -> None:
    gate, up = grid(5), 100 + grid(5)
    placement = Placement((3,), (Split(0, (0,), "ceil", sections=(1, 1)),))
    found = ranks_of(np.concatenate([gate, up]), placement)
    same(found, [np.r_[gate[:2], up[:2]], np.r_[gate[2:4], up[2:4]], np.r_[gate[4:], up[4:]]])


def test_grouped_qkv_is_interleaved_by_group() -> None:
    # 4 groups of 3 query heads, one key and one value head, heads of 2 rows: as Megatron has it.
    q, k, v = grid(4, 6, 5), 1000 + grid(4, 2, 5), 2000 + grid(4, 2, 5)
    whole = np.concatenate([part.reshape(-1, 5) for part in (q, k, v)])
    placement = Placement((2,), (Split(0, (0,), sections=(3, 1, 1), groups=4),))
    ranks = [
        np.concatenate([part[g] for g in (2 * rank, 2 * rank + 1) for part in (q, k, v)])
        for rank in range(2)
    ]
    same(ranks_of(whole, placement), ranks)


def test_a_later_split_of_an_axis_splits_what_the_rank_has() -> None:
    gate, up = grid(4), 100 + grid(4)
    splits = (Split(0, (0,), sections=(1, 1)), Split(0, (1,)))
    found = ranks_of(np.concatenate([gate, up]), Placement((2, 2), splits))
    same(found, [gate[:2], up[:2], gate[2:], up[2:]])


def test_ranks_may_take_fewer_parts_in_turn() -> None:
    found = ranks_of(grid(4), Placement((6,), (Split(0, (0,), parts=2),)))
    same(found, [grid(4)[:2], grid(4)[2:]] * 3)


def test_empty_parts_and_tensors_without_axes_are_legal() -> None:
    found = ranks_of(grid(2, 3), Placement((4,), (Split(0, (0,), "ceil"),)))
    assert [len(part) for part in found] == [1, 1, 0, 0]
    same(ranks_of(np.array(3), Placement((2,))), [np.array(3)] * 2)
    same(ranks_of(grid(0, 4), Placement((2,), (Split(1, (0,)),))), [grid(0, 2)] * 2)


def test_a_tensor_may_be_on_part_of_the_mesh() -> None:
    placement = Placement((2, 2), (Split(0, (1,)),), only=((0, 1),))
    assert [shard.holder for shard in placement.shards((4,))] == [2, 3]
    stage = Placement((2,), (Split(0, (0,)),), first=6)
    assert [shard.holder for shard in stage.shards((4,))] == [6, 7]


INFERENCE = {
    "replicas of two shapes": ({0: (4,), 1: (4,), 2: (3,), 3: (4,)}, r"rank 0 and F32 \[3\] on"),
    "a part is nowhere": ({0: (4,), 2: (4,)}, r"2 parts.*ranks 0,2.*hold 1"),
    "parts are not as the rule says": ({0: (2,), 1: (4,), 2: (2,), 3: (4,)}, r"expected.*\[3\]"),
    "another number of axes": ({0: (4,), 1: (4, 1), 2: (4,), 3: (4,)}, r"\[4, 1\] on rank 1"),
    "a rank that has nothing by the rule": (dict.fromkeys(range(5), (4,)), r"rank 4"),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_shapes_that_the_rules_do_not_explain_are_refused(name: str) -> None:
    shapes, match = INFERENCE[name]
    rules = OneRule(Placement((2, 2), (Split(0, (1,), "ceil"),)))
    with pytest.raises(CheckFailedError, match=match) as caught:
        Inference(rules).tensor("w", {rank: ("F32", shape) for rank, shape in shapes.items()})
    assert "'w'" in str(caught.value) and "rules.toml" in str(caught.value)


def test_dtypes_that_differ_are_refused() -> None:
    rules = OneRule(Placement((2,)))
    with pytest.raises(CheckFailedError, match=r"F32 \[4\] on rank 0 and BF16 \[4\] on rank 1"):
        Inference(rules).tensor("w", {0: ("F32", (4,)), 1: ("BF16", (4,))})


def test_a_tensor_that_cannot_be_placed_is_an_error_that_names_it() -> None:
    rules = OneRule(Placement((3,), (Split(0, (0,)),)))
    with pytest.raises(
        UsageError, match=r"'w' of shape \[4\].*rules\.toml.*4 does not divide by 3"
    ):
        rules.place({"w": ("F32", (4,))})


def test_tensors_that_lie_alike_share_their_shards() -> None:
    layout = OneRule(Placement((4,), (Split(0, (0,)),))).place(
        {f"w{n}": ("F32", (8, 2)) for n in range(3)}
    )
    assert len({id(tensor.shards) for tensor in layout.tensors.values()}) == 1
    assert isinstance(layout.tensors["w0"].shards[0], Shard) and layout.ranks == (0, 1, 2, 3)
