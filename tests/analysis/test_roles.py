"""What paths say of files."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.analysis.roles import assign_roles, role_of, step_key
from slimckpt.model import Role

TOO_LONG = "1" * 19

STEPS = {
    "checkpoints/checkpoint_3/f": 3,
    "ckpt-70/f": 70,
    "ckpt_70/f": 70,
    "iter_0000010/f": 10,
    "iteration_00000010/f": 10,
    "global_step5/f": 5,
    "checkpoint-10/f": 10,
    "step_1000/f": 1000,
    "step-1000/f": 1000,
    "step1000/f": 1000,
    "epoch=3-step=100/f": 100,
    "epoch=3-step=100.ckpt/f": 100,
    "net-1_5.ckpt": "1_5",
    "net-1_5.safetensors": "1_5",
    "net_rank_3-1_5.ckpt": "1_5",
    "net_2-1_5.ckpt": "1_5",
    "epoch=3-step=100.ckpt": 100,
    "last-epoch=3-step=100-v1.ckpt": 100,
    "model_step_1000.pt": 1000,
    "step_" + "9" * 18 + "/f": 10**18 - 1,
}
NO_STEPS = (
    "model-00001-of-00008.safetensors",
    "net.ckpt",
    "net3.ckpt",
    "net-1_5.txt",
    "net-5.ckpt",
    "step_x/f",
    "timestep_5.pt",
    "tmp-checkpoint-10/f",
    "iter_0000010",
    "checkpoint-10.old/f",
    f"iter_{TOO_LONG}/f",
    f"step_{TOO_LONG}/f",
    f"model_step_{TOO_LONG}.pt",
    f"net-1_{TOO_LONG}.ckpt",
    f"net-{TOO_LONG}_1.ckpt",
    f"epoch=1-step={TOO_LONG}.ckpt",
    "step_\u0661/f",
    "step_1\n/f",
)
RANKS = {
    "step_10/__0_0.distcp": 0,
    "iter_0000010/__3_1.distcp": 3,
    "ckpt/3_12.distcp": 3,
    "checkpoint-10/rng_state_3.pth": 3,
    "checkpoint_0/random_states_2.pkl": 2,
    "actor/optim_world_size_8_rank_3.pt": 3,
    "m/model-rank-2-part-1.safetensors": 2,
    "rank_3/net-1_5.ckpt": 3,
    "rank-3/f": 3,
    "rank3/f": 3,
    "rank_3/net3.ckpt": 3,
    "net_rank_3-1_5.ckpt": 3,
    "checkpoint_rank2.pt": 2,
    "checkpoint_rank_2.pt": 2,
    "rank_0.pt": 0,
    "exp_rank_1.pt": 1,
    "model_world_size_8_rank_3.pt": 3,
    "model_step_10_rank_3.pt": 3,
}
NO_RANKS = (
    "ckpt/0.metadata",
    "checkpoint-10/rng_state.pth",
    "pytorch_model-00001-of-00002.bin",
    "global_step5/expp_rank_1_mp_rank_02_optim_states.pt",
    "mp_rank_00/f",
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "pp_rank_1/f",
    "pp_rank_1.pt",
    "net_tp_rank_1.pt",
    "net-dp-rank-1.pt",
    "local_rank_1.pt",
    "lora_rank_8.safetensors",
    "rankings_3.pt",
    "crank_3.pt",
    "rank_3x.pt",
    f"rank_{TOO_LONG}/f",
    f"checkpoint_rank{TOO_LONG}.pt",
)
COORDINATES = {
    "global_step5/layer_3_expert_7_mp_rank_01_model_states.pt": {"ep": 7, "tp": 1},
    "global_step5/expp_rank_1_mp_rank_02_optim_states.pt": {"ep": 1, "tp": 2},
    "global_step5/layer_05-model_02-model_states.pt": {"tp": 2},
    "mp_rank_01/f": {"tp": 1},
    "mp_rank_01_002/f": {"tp": 1, "pp": 2},
    "mp_rank_01_002_003/f": {"tp": 1, "pp": 2, "ep": 3},
    "mp_rank_01_model_states.pt": {"tp": 1},
    "mp_rank_01_002.pt": {"tp": 1, "pp": 2},
    "zero_pp_rank_3_mp_rank_01_optim_states.pt": {"dp": 3, "tp": 1},
    "bf16_zero_pp_rank_3_mp_rank_01_optim_states.pt": {"dp": 3, "tp": 1},
    "fp16_zero_pp_rank_3_mp_rank_01_optim_states.pt": {"dp": 3, "tp": 1},
    "zero_pp_rank_3_mp_rank_01/f": {"dp": 3, "tp": 1},
    "pp_rank_1/f": {},
    "model-00001-of-00008.safetensors": {},
    f"mp_rank_{TOO_LONG}/f": {},
    f"mp_rank_00_{TOO_LONG}/f": {},
    f"mp_rank_00_{TOO_LONG}.pt": {},
    f"zero_pp_rank_0_mp_rank_{TOO_LONG}_optim_states.pt": {},
}
RUNS = {
    "runs/a/iter_0000010/mp_rank_00/f": "runs/a",
    "runs/a/rank_0/net-1_5.ckpt": "runs/a",
    "runs/a/net-1_5.ckpt": "runs/a",
    "iter_0000010/f": "",
    "net-1_5.ckpt": "",
    "runs/a/tokenizer.json": "",
}
PIECES = st.one_of(
    st.sampled_from(["rank", "mp_rank", "zero_pp_rank", "step", "epoch=", "-step=", "iter_"]),
    st.sampled_from(["checkpoint-", "net-", ".ckpt", "global_step", "_", "-", ".", "/"]),
    st.sampled_from(["0", "17", "9" * 18, "9" * 19, "\udcff", "\n"]),
)


@pytest.mark.parametrize(("path", "step"), STEPS.items())
def test_a_path_states_its_step(path, step):
    assert role_of(path.encode()).step == step


@pytest.mark.parametrize("path", NO_STEPS)
def test_what_only_looks_like_a_step_is_none(path):
    assert role_of(path.encode()).step is None


@pytest.mark.parametrize(("path", "rank"), RANKS.items())
def test_a_path_states_its_rank(path, rank):
    assert role_of(path.encode()).rank == rank


@pytest.mark.parametrize("path", NO_RANKS)
def test_what_only_looks_like_a_rank_of_the_job_is_none(path):
    assert role_of(path.encode()).rank is None


@pytest.mark.parametrize(("path", "coordinates"), COORDINATES.items())
def test_a_path_states_its_coordinates(path, coordinates):
    assert role_of(path.encode()).coords == coordinates


@pytest.mark.parametrize(("path", "run"), RUNS.items())
def test_the_run_is_what_comes_before_the_first_component_that_states_anything(path, run):
    assert role_of(path.encode()).run == run


def test_one_path_can_state_everything():
    path = b"runs/a/global_step5/bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt"
    assert role_of(path) == Role("runs/a", 5, None, {"dp": 2, "tp": 1})
    assert role_of(b"a/step_7/rank_3/net-1_5.ckpt") == Role("a", 7, 3)


def test_the_outermost_step_and_the_innermost_rank_win():
    role = role_of(b"step_1/rank_2/step_3/rank_4/net_rank_5-6_7.ckpt")
    assert (role.step, role.rank, role.run) == (1, 5, "")


def test_the_last_component_of_a_directory_is_a_directory():
    assert role_of(b"a/iter_0000010", directory=True) == Role("a", 10)
    assert role_of(b"a/rank_3/mp_rank_01", directory=True) == Role("a", None, 3, {"tp": 1})
    assert role_of(b"a/net-1_5.ckpt", directory=True) == Role()


def test_a_run_whose_name_is_not_utf8_keeps_its_bytes():
    run = role_of(b"\xff\xfe/step_1/f").run
    assert run.encode("utf-8", "surrogateescape") == b"\xff\xfe"


def test_files_that_state_nothing_belong_to_the_innermost_run_around_them():
    expected = {
        "a/step_1/rank_0/f": "a",
        "a/b/net-1_5.ckpt": "a/b",
        "a/config.json": "a",
        "a/b/config.json": "a/b",
        "a/b/c/d/config.json": "a/b",
        "ab/config.json": "",
        "config.json": "",
    }
    roles = assign_roles([path.encode() for path in expected])
    assert dict(zip(expected, (role.run for role in roles), strict=True)) == expected


def test_an_assigned_run_brings_no_step_or_rank():
    assert assign_roles([b"a/step_1/rank_0/f", b"a/config.json"])[1] == Role("a")


def test_no_files_have_no_roles():
    assert assign_roles([]) == []


def test_roles_are_not_shared_between_paths():
    first, second = assign_roles([b"mp_rank_00/f", b"mp_rank_00/f"])
    first.coords["tp"] = 9
    assert second.coords == {"tp": 0}


def test_labels_sort_by_the_numbers_in_them():
    ordered = [None, 2, 10, 1000, "1_5", "2_5", "10_1", "10_1b"]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled, key=step_key) == ordered


@given(st.binary(max_size=80) | st.lists(st.binary(max_size=8)).map(b"/".join), st.booleans())
def test_any_bytes_are_a_path(path, directory):
    role_of(path, directory=directory)
    assert len(assign_roles([path, path])) == 2


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans())
def test_whatever_a_path_states_is_in_it_and_fits_64_bits(text, directory):
    path = text.encode("utf-8", "surrogateescape")
    role = role_of(path, directory=directory)
    numbers = {int(number) for number in re.findall("[0-9]+", text)}
    stated = [n for n in (role.step, role.rank, *role.coords.values()) if isinstance(n, int)]
    assert numbers.issuperset(stated)
    assert all(0 <= number < 2**63 for number in stated)
    assert role.run == "" or text.startswith(role.run + "/")
    assert step_key(None) <= step_key(role.step)
