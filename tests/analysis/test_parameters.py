"""Bytes per parameter: what counts as one, and what of it is stored how often."""

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.analysis.parameters import StepCost, numbered

RANDOM = np.random.default_rng(3)
WIDTHS = {"F32": 4, "BF16": 2, "I64": 8}


def write(path: Path, *tensors: tuple[str, str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(name, dtype, [len(body) // WIDTHS[dtype]], body) for name, dtype, body in tensors]
    path.write_bytes(safetensors_file(rows))


def costs(folder: Path) -> list[StepCost]:
    return slimckpt.analyze(folder, exact=True).step_costs


@pytest.mark.parametrize("exact", [False, True])
def test_a_weight_on_every_rank_is_one_and_shards_are_each_their_own(
    tmp_path: Path, exact: bool
) -> None:
    replica, moment = RANDOM.bytes(4000), RANDOM.bytes(4000)
    for rank in range(4):
        write(
            tmp_path / f"rank_{rank}" / "model.safetensors",
            ("norm_like.weight", "F32", replica),
            ("adam_m.norm_like.weight", "F32", moment),
            ("shard.weight", "F32", RANDOM.bytes(8000)),
            ("step_mask", "I64", bytes(8000)),
        )
    (cost,) = slimckpt.analyze(tmp_path, exact=exact).step_costs
    assert cost.parameters == 1000 + 4 * 2000
    assert cost.now["weights"] == 4 * (4000 + 8000)
    assert cost.distinct["weights"] == 4000 + 4 * 8000
    assert (cost.now["moments"], cost.distinct["moments"]) == (4 * 4000, 4000)
    assert cost.now["master weights"] == 0
    assert sum(cost.now.values()) == sum(path.stat().st_size for path in tmp_path.rglob("*.safet*"))


def test_tied_weights_are_one_and_constants_are_each_their_own(tmp_path: Path) -> None:
    embedding, ones = RANDOM.bytes(8000), b"\x00\x00\x80\x3f" * 1000
    write(
        tmp_path / "model.safetensors",
        ("embed.weight", "F32", embedding),
        ("head.weight", "F32", embedding),
        *((f"layers.{n}.norm.weight", "F32", ones) for n in range(3)),
        *((f"layers.{n}.norm.bias", "F32", bytes(64)) for n in range(3)),
    )
    (cost,) = costs(tmp_path)
    assert cost.parameters == 2000 + 3 * 1000 + 3 * 16


def test_constant_weights_that_a_file_ties_are_one(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank_{rank}").mkdir()
        with h5py.File(tmp_path / f"rank_{rank}" / "model.h5", "w") as file:
            file["norm.weight"] = np.ones(1000, "f4")
            file["other.norm.weight"] = np.ones(1000, "f4")
            file["short.weight"] = np.arange(9, dtype="f4")
            file["unset.weight"] = np.zeros(0, "f4")
            for n in range(20):
                file[f"layers.{n}.weight"] = file["norm.weight"]
                file[f"short.{n}.weight"] = file["short.weight"]
    (cost,) = costs(tmp_path)
    assert cost.parameters == 2 * 1000 + 9


def test_masters_are_the_parameters_where_there_are_no_weights(tmp_path: Path) -> None:
    write(
        tmp_path / "step_1" / "rank_0.safetensors",
        ("optimizer_state_dict.fp32_flat_groups.0", "F32", RANDOM.bytes(4000)),
        ("optimizer_state_dict.optimizer_state_dict.state.0.exp_avg", "F32", RANDOM.bytes(4000)),
    )
    write(
        tmp_path / "step_2" / "rank_0.safetensors",
        ("weight", "BF16", RANDOM.bytes(2000)),
        ("master_weights.weight", "F32", RANDOM.bytes(4000)),
    )
    first, second = costs(tmp_path)
    assert (first.step, first.parameters, first.now["master weights"]) == (1, 1000, 4000)
    assert (second.step, second.parameters, second.now["weights"]) == (2, 1000, 2000)
    assert second.now["master weights"] == 4000


def test_optimizer_state_alone_has_no_parameters(tmp_path: Path) -> None:
    write(tmp_path / "opt.safetensors", ("state.0.exp_avg", "F32", RANDOM.bytes(4000)))
    assert costs(tmp_path) == []


def test_equal_bytes_in_two_steps_are_distinct_in_each(tmp_path: Path) -> None:
    frozen = RANDOM.bytes(4000)
    for step in (1, 2):
        write(tmp_path / f"step_{step}" / "a.safetensors", ("w", "F32", frozen))
    assert [(c.parameters, c.distinct["weights"]) for c in costs(tmp_path)] == [(1000, 4000)] * 2


def test_real_lora_steps_have_the_parameters_of_the_truth() -> None:
    files = expected("lora_steps")["files"]
    for cost in costs(SAMPLES / "lora_steps"):
        tensors = files[f"checkpoint-{cost.step}/model.safetensors"]["tensors"].values()
        assert cost.parameters == sum(int(np.prod(t["shape"])) for t in tensors)
        assert cost.now["weights"] == sum(t["nbytes"] for t in tensors)


def test_real_mindspore_ranks_have_the_parameters_of_the_whole_model() -> None:
    whole = expected("ms_dp8_ckpt")["full_params"]
    wanted = sum(
        int(np.prod(p["shape"]))
        for name, p in whole.items()
        if name.startswith(("backbone.", "head.", "layers."))
    )
    (cost,) = costs(SAMPLES / "ms_dp8_ckpt")
    assert cost.parameters == pytest.approx(wanted, rel=0.01)
    assert os.sep not in cost.run


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(-1, 3),
            st.sampled_from([0, 1, 2**40, 2**62, 2**63 - 1]),
            st.sampled_from([-(2**63), -1, 0, 7]),
        )
    )
)
def test_rows_have_the_same_number_where_all_columns_agree(rows: list[tuple[int, ...]]) -> None:
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    numbers = numbered(list(columns)).tolist()
    assert len(numbers) == len(rows)
    assert len(set(zip(rows, numbers, strict=True))) == len(set(numbers)) == len(set(rows))
