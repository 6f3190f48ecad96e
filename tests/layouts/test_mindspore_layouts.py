"""MindSpore's strategy files and layout tuples, against what MindSpore made by them."""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.errors import (
    CheckFailedError,
    NotUnderstoodError,
    SlimckptError,
    UnknownTensorError,
    UsageError,
)
from slimckpt.formats.mindspore_strategy import ParameterLayout, Strategy, read_groups
from slimckpt.layouts.mindspore import StrategyRules, layout_of_tuple
from slimckpt.layouts.recorded import given
from slimckpt.layouts.slicing import slice_by_tuple
from slimckpt.rewrite.slim import slim

DP8, OPSHARD8 = SAMPLES / "ms_dp8_ckpt", SAMPLES / "ms_opshard8_ckpt"
STRATEGIES = SAMPLES / "ms_strategies"
WHOLE: dict[str, Any] = expected("ms_dp8_ckpt")["full_params"]
OUTSIDE = set(expected("ms_dp8_ckpt")["notes"]["not_in_strategy"])


def sha(array: Any) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


@pytest.fixture(scope="module", params=["directory", "store"])
def dp8(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[slimckpt.Checkpoint]:
    path = DP8
    if request.param == "store":
        path = tmp_path_factory.mktemp("dp8") / "store"
        slim(DP8, path)
    with slimckpt.open(path) as checkpoint:
        yield checkpoint


def test_the_strategy_in_the_tree_gives_the_whole_tensors(dp8: slimckpt.Checkpoint) -> None:
    layout = dp8.layout()
    assert layout.origin == "strategy.ckpt" and layout.ranks == tuple(range(8))
    assert set(layout.tensors) == set(WHOLE) and len(WHOLE) == 45
    for name, truth in WHOLE.items():
        whole = dp8.tensor(name)
        assert list(whole.shape) == truth["shape"] and whole.layout is layout.tensors[name]
        assert sha(whole) == truth["sha256"], name
    with pytest.raises(UnknownTensorError, match=r"each rank has its own.*rank\(r\)\[name\]"):
        dp8.tensor("rng.seed")


def test_eight_ranks_become_the_four_that_mindspore_makes(dp8: slimckpt.Checkpoint) -> None:
    truth = expected("ms_reshard_8to4")["files"]
    resharded = dp8.reshard(SAMPLES / "ms_reshard_8to4" / "strategy.ckpt")
    assert list(resharded) == [0, 1, 2, 3]
    for rank, view in resharded.items():
        params = truth[f"rank_{rank}/net{rank}.ckpt"]["params"]
        assert set(view) == set(params) and len(params) == 58
        assert set(view.carried) == set(params) - set(WHOLE) == OUTSIDE - {"note"}
        assert view.opaque == ("note",)
        for name, param in params.items():
            assert view.info(name)[1] == tuple(param["shape"]) == view[name].shape, (rank, name)
            assert sha(view[name]) == param["sha256"], (rank, name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
def test_any_number_of_ranks_and_back_gives_the_same_bytes(ranks: int, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        f"[mesh]\ntp = {ranks}\n"
        + '[[rule]]\nmatch = ["*.proj", "*.down"]\ndim = 1\naxis = "tp"\nsplit = "ceil"\n'
        + '[[rule]]\nmatch = ["*qkv*", "*.up"]\ndim = 0\naxis = "tp"\nsplit = "ceil"\n'
        + '[[rule]]\nmatch = ["*embedding*", "*.pos.*"]\ndim = 0\naxis = "tp"\nsplit="balanced"\n'
        + "".join(
            f'[[rule]]\nmatch = "{name}"\nper_rank = true\n' for name in sorted(OUTSIDE - {"note"})
        )
    )
    with slimckpt.open(DP8) as ckpt:
        there = ckpt.reshard(rules)
        place = tmp_path / "there"
        for rank, view in there.items():
            tensors = [
                (name, *view.info(name), np.ascontiguousarray(array).tobytes())
                for name, array in view.items()
            ]
            path = place / f"rank_{rank}" / "net.safetensors"
            path.parent.mkdir(parents=True)
            path.write_bytes(safetensors_file(tensors))
        with slimckpt.open(place) as other:
            back = other.reshard(DP8 / "strategy.ckpt", layout=rules)
            assert list(back) == list(range(8))
            for rank, view in back.items():
                own = ckpt.rank(rank)
                for name in WHOLE:
                    assert view[name].dtype == own[name].dtype
                    assert view[name].tobytes() == own[name].tobytes(), (rank, name)
                source = rank if rank < ranks else 0
                assert view["rng.seed"] == ckpt.rank(source)["rng.seed"]


@pytest.mark.parametrize("layout", ["strategy.ckpt", "optimizer_stage.json"])
def test_optimizer_shards_merge_to_the_whole_tensors(layout: str, tmp_path: Path) -> None:
    path = OPSHARD8 / layout
    if not path.exists():
        path = tmp_path / layout
        path.write_text(json_of(OPSHARD8 / "strategy.ckpt"))
    with slimckpt.open(OPSHARD8) as ckpt:
        for name, truth in WHOLE.items():
            whole = ckpt.tensor(name, layout=path)
            assert sha(whole) == truth["sha256"], name


def json_of(path: Path) -> str:
    """A strategy in its JSON form, of what MindSpore's protobuf classes read."""
    import json

    truth = expected("ms_strategies")["files"]["dp2mp4_op_rank0.ckpt"]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == truth["sha256"]
    items = {
        name: {
            **layout,
            "dev_matrix": layout["dev_matrix"][0],
            "tensor_map": layout["tensor_map"][0],
        }
        for name, layout in truth["layouts"].items()
    }
    for item in items.values():
        del item["param_split_shape"], item["indices_offset"]
    return json.dumps({"current_stage": 2, "parallel_layout_item": items})


def test_shards_resharded_to_optimizer_shards_are_those_of_mindspore() -> None:
    truth = expected("ms_opshard8_ckpt")["files"]
    with slimckpt.open(DP8) as ckpt:
        for rank, view in ckpt.reshard(OPSHARD8 / "strategy.ckpt").items():
            params = truth[f"rank_{rank}/net{rank}.ckpt"]["params"]
            for name in WHOLE:
                assert list(view[name].shape) == params[name]["shape"], (rank, name)
                assert sha(view[name]) == params[name]["sha256"], (rank, name)


def test_strategies_that_differ_are_named_and_one_can_be_said() -> None:
    with (
        slimckpt.open(OPSHARD8) as ckpt,
        pytest.raises(UsageError, match=r"src_strategy\.ckpt, strategy\.ckpt.*layout="),
    ):
        ckpt.tensor("head.weight")


def test_of_strategies_that_differ_the_one_for_as_many_ranks_counts() -> None:
    with slimckpt.open(SAMPLES / "ms_reshard_8to4") as ckpt:
        assert ckpt.layout().origin == "strategy.ckpt" and len(ckpt.layout().ranks) == 4
        for name, truth in WHOLE.items():
            assert sha(ckpt.tensor(name)) == truth["sha256"], name


def test_an_uneven_split_merges_right() -> None:
    truth = expected("ms_uneven4_ckpt")["full_params"]["emb"]
    for suffix in ("ckpt", "json"):
        with slimckpt.open(SAMPLES / "ms_uneven4_ckpt") as ckpt:
            whole = ckpt.tensor("emb", layout=SAMPLES / "ms_uneven4_ckpt" / f"strategy.{suffix}")
            assert list(whole.shape) == truth["shape"] and sha(whole) == truth["sha256"]
            assert (whole[3:17] == np.asarray(whole)[3:17]).all()


def test_a_strategy_beside_the_tree_is_found(tmp_path: Path) -> None:
    for rank in range(8):
        shutil.copytree(DP8 / f"rank_{rank}", tmp_path / "output" / "checkpoint" / f"rank_{rank}")
        target = tmp_path / "output" / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(DP8 / "strategy.ckpt", target)
    with slimckpt.open(tmp_path / "output" / "checkpoint") as ckpt:
        assert sha(ckpt.tensor("head.weight")) == WHOLE["head.weight"]["sha256"]
    with slimckpt.open(tmp_path / "output") as ckpt:
        assert sha(ckpt.tensor("head.weight")) == WHOLE["head.weight"]["sha256"]


def test_a_strategy_for_fewer_ranks_is_refused(dp8: slimckpt.Checkpoint) -> None:
    with pytest.raises(CheckFailedError, match=r"dp2mp2.*for 4 ranks.*has 8 \(ranks 0-7\)"):
        dp8.tensor("head.weight", layout=STRATEGIES / "dp2mp2_rank0.ckpt")


def test_a_strategy_of_another_save_is_refused_by_the_bytes(tmp_path: Path) -> None:
    for rank in range(4):
        shutil.copytree(DP8 / f"rank_{rank}", tmp_path / f"rank_{rank}")
    with slimckpt.open(tmp_path) as ckpt:
        layout = STRATEGIES / "dp2mp2_rank0.ckpt"
        with pytest.raises(CheckFailedError) as caught:
            np.asarray(ckpt.tensor("head.weight", layout=layout))
        for said in ("'head.weight'", "rank 0", "rank 2", "[16, 32]", "[32, 32]", "dp2mp2"):
            assert said in str(caught.value)
        with pytest.raises(CheckFailedError):
            ckpt.reshard(STRATEGIES / "dp1mp2_rank0.ckpt", layout=layout)[0]["head.weight"]


def test_drift_is_taken_from_the_lowest_rank_when_asked_and_said(
    dp8: slimckpt.Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = tmp_path / "all.toml"
    rules.write_text("[mesh]\ndp = 8\n")
    with pytest.raises(CheckFailedError, match=r"allow_drift"):
        np.asarray(dp8.tensor("rng.seed", layout=rules))
    with caplog.at_level(logging.WARNING):
        found = np.asarray(dp8.tensor("rng.seed", layout=rules, allow_drift=True))
    assert found == dp8.rank(0)["rng.seed"]
    assert "'rng.seed'" in caplog.text and "taken from rank 0" in caplog.text


def test_stages_of_a_pipeline_hold_different_tensors() -> None:
    stages = given(STRATEGIES / "pp2_merged.ckpt")
    assert stages.n_ranks == 8
    (head,), (embedding,) = map(stages.placements, ("head.weight", "backbone.embedding.weight"))
    assert (head.first, embedding.first) == (4, 0)
    assert not stages.placements("1-head.weight") and not stages.placements("global_step")


def test_the_files_of_all_stages_say_what_the_merged_one_says(tmp_path: Path) -> None:
    for rank in (0, 4):
        shutil.copy(STRATEGIES / f"pp2_dp1mp4_rank{rank}.ckpt", tmp_path)
    apart, merged = given(tmp_path), given(STRATEGIES / "pp2_merged.ckpt")
    names = {*expected("ms_strategies")["files"]["pp2_merged.ckpt"]["layouts"]}
    assert len(names) == 60
    for name in names:
        plain = name.partition("-")[2]
        assert apart.placements(plain) == merged.placements(plain) != ()
    with pytest.raises(UsageError, match=r"stages \[1\]"):
        given(STRATEGIES / "pp2_dp1mp4_rank4.ckpt")


def test_a_pipeline_reshards_to_ranks_without_stages_and_back(tmp_path: Path) -> None:
    with slimckpt.open(DP8) as ckpt:
        # What the whole tensors are is known; accumulated gradients are not in this state.
        for rank, view in ckpt.reshard(STRATEGIES / "pp2_merged.ckpt").items():
            assert ("head.weight" in view) == (rank >= 4)
            assert ("backbone.embedding.weight" in view) == (rank < 4)
            tensors = [
                (name, *view.info(name), np.ascontiguousarray(view[name]).tobytes())
                for name in view
                if name in WHOLE
            ]
            path = tmp_path / f"rank_{rank}" / "net.safetensors"
            path.parent.mkdir()
            path.write_bytes(safetensors_file(tensors))
    with slimckpt.open(tmp_path) as ckpt:
        one = ckpt.reshard(STRATEGIES / "dp2mp4_rank0.ckpt", layout=STRATEGIES / "pp2_merged.ckpt")
        with slimckpt.open(DP8) as first:
            for rank in range(8):
                own = first.rank(rank)
                assert set(one[rank]) == set(WHOLE)
                for name in WHOLE:
                    assert one[rank][name].tobytes() == own[name].tobytes()


REFUSED = {
    "field slice": (ParameterLayout(((4,),), ((0, -1),), field=8), "field slice"),
    "an axis that is not there": (ParameterLayout(((4,),), ((1, -1),)), "has not"),
    "one axis twice": (ParameterLayout(((2, 2),), ((0, 0),)), "over one"),
    "rows that start elsewhere": (
        ParameterLayout(((2,),), ((0, -1),), ((3, 5),), ((0, 4),)),
        r"start at \[0, 4\]",
    ),
    "another step": (
        ParameterLayout(((2, 4),), ((0, -1),), opt_weight_shard_step=1, opt_weight_shard_size=-1),
        "step 1",
    ),
    "a size that does not divide": (
        ParameterLayout(((6,),), ((-1,),), opt_weight_shard_step=1, opt_weight_shard_size=4),
        "size 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_of_a_strategy_is_refused_by_name(name: str) -> None:
    layout, match = REFUSED[name]
    with pytest.raises(NotUnderstoodError, match=match) as caught:
        StrategyRules([Strategy(1, {}, {"table": layout})], "s.ckpt")
    assert "s.ckpt" in str(caught.value) and "'table'" in str(caught.value)


def test_one_axis_may_be_split_over_two_device_axes() -> None:
    layout = ParameterLayout(((2, 3),), ((1, 0), (-1,)))
    rules = StrategyRules([Strategy(1, {}, {"w": layout})], "s.ckpt")
    shards = rules.place({"w": ("F32", (12, 4))}).tensors["w"].shards
    assert [shard.pieces[0].box.offsets for shard in shards] == [(2 * r, 0) for r in range(6)]
    swapped = ParameterLayout(((2, 3),), ((0, 1), (-1,)))
    rules = StrategyRules([Strategy(1, {}, {"w": swapped})], "s.ckpt")
    shards = rules.place({"w": ("F32", (12, 4))}).tensors["w"].shards
    rows = [shard.pieces[0].box.offsets[0] for shard in shards]
    assert rows == [4 * mp + 2 * dp for dp in range(2) for mp in range(3)]


TUPLE = ([8, 8], [0, -1], [80, 5120], 0, True, "8-682084589588865485", [5120, 5120])


def test_a_layout_tuple_says_what_each_rank_has() -> None:
    tensor = layout_of_tuple("w", TUPLE, "F16")
    assert tensor.shape == (5120, 5120) and len(tensor.shards) == 64
    # 640 rows for each mp rank, of which each of the 8 dp ranks has 80.
    for rank, shard in enumerate(tensor.shards):
        box = shard.pieces[0].box
        assert box.lengths == shard.shape == (80, 5120)
        assert box.offsets == (rank % 8 * 640 + rank // 8 * 80, 0)
    assert layout_of_tuple("w", TUPLE[:6], "F16") == tensor
    assert layout_of_tuple("w", (*TUPLE, [80, 5120]), "F16") == tensor


def test_the_ranks_of_the_group_are_compared_with_the_rule() -> None:
    name = "dp2mp4_group_rank5.ckpt"
    groups = read_groups((STRATEGIES / name).read_bytes(), name)
    pair, mp = "2-12944936785892925600", "4-15700679239691767905"
    assert groups.groups[pair] == (1, 5) and groups.groups[mp] == (4, 5, 6, 7)
    described = ([2, 4], [0, -1], [4, 3], 0, True, pair)
    assert layout_of_tuple("w", described, "F32", groups).shape == (32, 3)
    with pytest.raises(UsageError, match="no group"):
        layout_of_tuple("w", (*described[:5], "2-7"), "F32", groups)
    over_mp = ([2, 4], [1, -1], [4, 3], 0, True, mp)
    assert layout_of_tuple("w", over_mp, "F32", groups).shape == (32, 3)
    with pytest.raises(UsageError, match=r"ranks \[4, 5, 6, 7\]; expected one of"):
        layout_of_tuple("w", ([4, 2], [0, -1], [4, 3], 0, True, mp), "F32", groups)


BAD_TUPLES = {
    "five items": (TUPLE[:5], UsageError, "6 to 8"),
    "a field": ((*TUPLE[:3], 8, *TUPLE[4:]), NotUnderstoodError, "field slice"),
    "uneven": ((*TUPLE[:4], False, *TUPLE[5:]), NotUnderstoodError, "unevenly"),
    "no shapes": ((*TUPLE[:2], [], *TUPLE[3:6]), UsageError, "neither.*compile"),
    "no group name": ((*TUPLE[:5], "hccl"), UsageError, "hccl"),
    "shapes that contradict": ((*TUPLE[:6], [640, 5120]), UsageError, r"\[80, 5120\]"),
    "no tuple": (("a", [0], [1], 0, True, ""), UsageError, "expected"),
}


@pytest.mark.parametrize("name", BAD_TUPLES)
def test_a_tuple_that_cannot_be_meant_is_refused(name: str) -> None:
    described, kind, match = BAD_TUPLES[name]
    with pytest.raises(SlimckptError, match=match) as caught:
        layout_of_tuple("w", described, "F32")
    assert isinstance(caught.value, kind)


def test_what_is_a_slice_already_is_not_sliced_again(caplog: pytest.LogCaptureFixture) -> None:
    described = ([8, 8], [0, -1], [80, 64], 0, True, "8-682084589588865485", [5120, 64])
    whole = np.arange(5120 * 64, dtype=np.float32).reshape(5120, 64)
    for rank in (0, 1, 9, 63):
        part = slice_by_tuple(whole, "w", described, rank)
        start = rank % 8 * 640 + rank // 8 * 80
        assert (part == whole[start : start + 80]).all() and part.base is not None
        assert not caplog.records
        with caplog.at_level(logging.INFO):
            assert slice_by_tuple(part, "w", described, rank) is part
        assert "not sliced again" in caplog.text and "'w'" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(("rows", "cause"), [(10, "sliced twice"), (640, "another")])
def test_any_other_shape_is_an_error_that_names_the_likely_cause(rows: int, cause: str) -> None:
    described = ([8, 8], [0, -1], [80, 64], 0, True, "8-682084589588865485")
    with pytest.raises(CheckFailedError, match=cause) as caught:
        slice_by_tuple(np.zeros((rows, 64)), "emb", described, 3)
    for said in ("'emb'", f"[{rows}, 64]", "[5120, 64]", "[80, 64]", "[8, 8]"):
        assert said in str(caught.value)
    assert "equal division" not in str(caught.value)


def test_a_layout_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    with slimckpt.open(DP8) as ckpt:
        with pytest.raises(UsageError, match=r"nowhere\.toml"):
            ckpt.layout(tmp_path / "nowhere.toml")
        with pytest.raises(UsageError, match="no strategy files"):
            ckpt.layout(tmp_path)
        (tmp_path / "x.toml").write_bytes(os.urandom(64))
        with pytest.raises(UsageError, match=r"x\.toml"):
            ckpt.layout(tmp_path / "x.toml")


def test_a_tensor_in_parts_that_the_new_layout_leaves_out_is_refused(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('[mesh]\ntp = 2\n[[rule]]\nmatch = "adam_*"\nper_rank = true\n')
    with slimckpt.open(DP8) as ckpt:
        with pytest.raises(UsageError, match=r"'adam_m\.backbone\.pos\.weight' is in parts.*skip"):
            ckpt.reshard(rules)
        view = ckpt.reshard(rules, skip=["adam_*"])[1]
        assert not any(name.startswith("adam_") for name in view)
        assert sha(view["head.weight"]) == WHOLE["head.weight"]["sha256"]
        assert set(view.carried) == OUTSIDE - {"note"}
