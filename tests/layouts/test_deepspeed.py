"""ZeRO checkpoints as whole tensors: what DeepSpeed itself makes of them is the truth."""

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.errors import CheckFailedError, SlimckptError
from slimckpt.layouts.deepspeed import deepspeed_layout
from slimckpt.rewrite.slim import slim

BOTH = ["deepspeed_zero1_dp4", "deepspeed_zero3_dp4"]
STEP = "global_step5"


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def spelled(path: str) -> str:
    """A name as views have it, of a Python subscript."""
    return ".".join(re.findall(r"\['?(.*?)'?\]", path))


@pytest.fixture(params=[(sample, kind) for sample in BOTH for kind in ("directory", "store")])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[slimckpt.Checkpoint, Any]:
    sample, kind = request.param
    path = SAMPLES / sample
    if kind == "store":
        slim(path, tmp_path / "store", min_saving=0)
        path = tmp_path / "store"
    return slimckpt.open(path), expected(sample)


def test_the_weights_are_those_that_zero_to_fp32_gives(
    opened: tuple[slimckpt.Checkpoint, Any],
) -> None:
    ckpt, truth = opened
    weights = ckpt.layout().weights
    wanted = truth["fp32_state_dict_by_zero_to_fp32"]
    # Under stage 1 zero_to_fp32 loses frozen parameters; here they are.
    assert set(weights) - set(wanted) <= {"frozen.weight", "frozen.bias"}
    for name, tensor in wanted.items():
        whole, dtype = weights[name]
        array = np.asarray(ckpt.tensor(whole))
        if dtype == "F32":
            array = array.astype(np.float32)
        assert (array.shape, digest(array)) == (tuple(tensor["shape"]), tensor["sha256"]), name


def test_moments_are_those_of_a_universal_checkpoint(
    opened: tuple[slimckpt.Checkpoint, Any],
) -> None:
    ckpt, truth = opened
    found = 0
    for path, content in truth["universal_merge_by_ds_to_universal"].items():
        match = re.fullmatch(r"zero/(.+)/(exp_avg|exp_avg_sq)\.pt", path)
        if match:
            (tensor,) = content["tensors"].values()
            whole = ckpt.tensor(f"optimizer.state.{match[1]}.{match[2]}")
            assert (digest(np.asarray(whole)), whole.dtype) == (tensor["sha256"], "F32"), path
            found += 1
    assert found == 14


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_on_another_number_of_ranks_states_are_those_that_deepspeed_reloads(
    opened: tuple[slimckpt.Checkpoint, Any], n_ranks: int
) -> None:
    ckpt, truth = opened
    (step,) = ckpt._steps(None)
    resharded = ckpt.reshard(deepspeed_layout(step.members, n_ranks))
    files: Mapping[str, Any] = truth["real_reload_of_universal_at_other_dp"][f"dp{n_ranks}"]
    compared = 0
    for file, tensors in files.items():
        match = re.search(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states", file)
        if match:
            view = resharded[int(match[1])]
            for path, tensor in tensors.items():
                assert digest(view[spelled(path)]) == tensor["sha256"], (file, path)
                compared += 1
    assert compared == n_ranks * 8


def test_a_layout_on_as_many_ranks_gives_the_same_slices_back() -> None:
    with slimckpt.open(SAMPLES / "deepspeed_zero1_dp4") as ckpt:
        (step,) = ckpt._steps(None)
        again = ckpt.reshard(deepspeed_layout(step.members, 4))
        for rank in range(4):
            view = ckpt.rank(rank)
            for name in again[rank]:
                assert digest(again[rank][name]) == digest(view[name]), (rank, name)


def test_uninitialised_tails_do_not_enter_the_whole() -> None:
    # Under stage 3 the tail of the last rank's masters has a NaN: facts of the sample.
    with slimckpt.open(SAMPLES / "deepspeed_zero3_dp4") as ckpt:
        assert np.isnan(ckpt.rank(3)["optimizer_state_dict.fp32_flat_groups.1"]).any()
        assert not np.isnan(ckpt.tensor("fc.bias")[:]).any()


@pytest.mark.parametrize("sample", BOTH)
def test_a_missing_file_of_a_rank_is_an_error_that_says_so(sample: str, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / sample, tmp_path / "tree")
    (tmp_path / "tree" / STEP / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with (
        slimckpt.open(tmp_path / "tree") as ckpt,
        pytest.raises(CheckFailedError, match="4 ranks, and 3 files"),
    ):
        ckpt.layout()


def test_a_file_of_another_rank_in_place_of_one_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / BOTH[0], tmp_path / "tree")
    states = tmp_path / "tree" / STEP
    name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    (states / name.format(3)).unlink()
    shutil.copy(states / name.format(0), states / name.format(3))
    with slimckpt.open(tmp_path / "tree") as ckpt, pytest.raises(SlimckptError):
        for name in ckpt.layout().tensors:
            ckpt.tensor(name)[...]
