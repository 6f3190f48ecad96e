"""What tensors are, by their names."""

import time
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.analysis.categories import CATEGORIES, categorize
from slimckpt.errors import UsageError

OPTIMIZER = (
    *("adam_m", "adam_v", "moment", "moments", "moment1", "moment2", "accum", "accumulator"),
    *("exp_avg", "exp_avg_sq", "momentum", "momentum_buffer", "velocity", "optimizer", "optim"),
    *("optimizer_state", "beta1_power", "beta2_power", "beta1_pow_acc", "beta2_pow_acc"),
)
MASTER = (
    *("master_weights", "master_params", "fp32_params", "master", "fp32_from_fp16_params"),
    *("fp32_from_fp16", "single_partition_of_fp32_groups", "fp32_flat_groups", "fp32_param"),
)
OTHER_ANYWHERE = ("rng", "rng_state", "cuda_rng_state", "accu_grads", "grads")
OTHER_AT_THE_END = (
    *("learning_rate", "lr", "global_step", "step", "step_num", "epoch_num", "epoch", "seed"),
    *("loss_scale", "scale_sense"),
)
NAMES = {
    "backbone.embedding.weight": "weight",
    "model/layers/0/kernel": "weight",
    "bn.moving_mean": "weight",
    "": "weight",
    "..": "weight",
    "adam_m.backbone.embedding.weight": "optimizer",
    "optim.state.fc.weight.exp_avg": "optimizer",
    "optimizer/state/0/state1": "optimizer",
    "optimizer.state.0.absmax": "optimizer",
    "optimizer.state.0.qmap": "optimizer",
    "layers.0.weight.absmax": "weight",
    "layers.0.state2": "weight",
    "linear_0.w_0": "weight",
    "linear_0.w_0_moment1_0": "optimizer",
    "linear_0.b_0_moment2_12": "optimizer",
    "linear_0.w_0_beta1_pow_acc_0": "optimizer",
    "linear_0.w_0_velocity_0": "optimizer",
    "linear_0.w_0_fp32_master_0": "master weight",
    "linear_0.w_0_fp32_master_0_moment1_0": "optimizer",
    "optimizer.fp32_from_fp16_params.0.1": "master weight",
    "optimizer.state.fp32_param.decoder.weight": "master weight",
    "optim.param_groups.0.lr": "other",
    "optimizer.state.0.step": "other",
    "accu_grads.adam_m.weight": "other",
    "rng_state.cuda": "other",
    "optimizer_embedding.weight": "weight",
    "adam_model.weight": "weight",
    "momentum_encoder.weight": "weight",
    "my_optimizer.weight": "weight",
    "moment10.weight": "weight",
    "w_moment1_": "weight",
    "w_moment1_0_proj": "weight",
    "w_moment1_0\n": "weight",
    "masters.weight": "weight",
    "master_mind.weight": "weight",
    "step.weight": "weight",
    "epoch.proj.bias": "weight",
    "steps": "weight",
    "lr_scale": "weight",
    "Adam_M.weight": "weight",
}


def category(name, dtype="F32", overrides=()):
    return CATEGORIES[categorize([name], [dtype], overrides)[0]]


def test_the_categories_are_four():
    assert CATEGORIES == ("weight", "optimizer", "master weight", "other")


@pytest.mark.parametrize(
    ("segment", "expected"),
    [(segment, "optimizer") for segment in OPTIMIZER]
    + [(segment, "master weight") for segment in MASTER]
    + [(segment, "other") for segment in OTHER_ANYWHERE],
)
@pytest.mark.parametrize(
    "name", ["{}", "{}.layer.weight", "layer.weight.{}", "a/{}/b", "a/b.{}", "optim.{}"]
)
def test_a_whole_segment_says_what_a_tensor_is(name, segment, expected):
    assert category(name.format(segment)) == expected


@pytest.mark.parametrize(
    "segment",
    OPTIMIZER
    + tuple(segment for segment in MASTER if not segment.startswith("fp32_from_fp16"))
    + OTHER_ANYWHERE
    + OTHER_AT_THE_END,
)
@pytest.mark.parametrize("name", ["{}x.weight", "x{}.weight", "{}_proj", "my-{}"])
def test_part_of_a_segment_says_nothing(name, segment):
    assert category(name.format(segment)) == "weight"


@pytest.mark.parametrize("segment", OTHER_AT_THE_END)
def test_numbers_of_the_training_loop_are_other(segment):
    assert category(segment) == "other"
    assert category(f"optimizer.state.{segment}") == "other"


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_names_are_told_apart(name, expected):
    assert category(name) == expected


@pytest.mark.parametrize("name", ["layer.weight", "adam_m.layer.weight", "master.weight"])
def test_entries_that_are_no_arrays_are_other(name):
    assert category(name, "opaque:str") == "other"


def test_an_override_wins_over_name_and_dtype():
    assert category("teacher.weight", overrides=[("other", "teacher.*")]) == "other"
    assert category("adam_m.weight", overrides=[("weight", "adam_m.*")]) == "weight"
    assert category("blob", "opaque:str", [("weight", "blob")]) == "weight"


def test_the_first_override_that_matches_wins():
    overrides = [("optimizer", "a.b.*"), ("other", "a.*")]
    assert [category(name, overrides=overrides) for name in ("a.b.c", "a.c", "b")] == [
        "optimizer",
        "other",
        "weight",
    ]


def test_an_override_is_for_the_whole_name_in_its_case():
    overrides = [("other", "Teacher.[ab]?")]
    found = [
        category(name, overrides=overrides)
        for name in ("Teacher.a1", "teacher.a1", "Teacher.a12", "x.Teacher.a1", "Teacher.c1")
    ]
    assert found == ["other", "weight", "weight", "weight", "weight"]


def test_an_unknown_category_is_an_error_that_lists_those_there_are():
    with pytest.raises(UsageError, match=r"'weights'.*weight, optimizer, master weight, other"):
        categorize([], [], [("weights", "*")])


def test_no_tensors_have_no_categories():
    codes = categorize([], [])
    assert codes.dtype == np.uint8
    assert codes.shape == (0,)


@given(
    st.lists(st.text("abA.*?[]!\n", max_size=5), max_size=4),
    st.text("abA.\n", max_size=5),
    st.integers(0, 3),
)
def test_globs_match_as_the_standard_library_says(globs, name, code):
    overrides = [(CATEGORIES[(code + n) % 4], glob) for n, glob in enumerate(globs)]
    expected = [wanted for wanted, glob in overrides if fnmatchcase(name, glob)]
    assert category(name, overrides=overrides) == (expected[0] if expected else "weight")


@given(st.lists(st.text(max_size=20)))
def test_any_text_is_a_name(names):
    codes = categorize(names, ["F32"] * len(names))
    assert codes.dtype == np.uint8
    assert len(codes) == len(names)
    assert all(code < 4 for code in codes)


def test_two_hundred_thousand_names_take_no_time_to_speak_of():
    names = [f"backbone.layers.{n % 96}.experts.{n}.w_{n}" for n in range(200_000)]
    start = time.process_time()
    categorize(names, ["BF16"] * len(names))
    assert time.process_time() - start < 4
