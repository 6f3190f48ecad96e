"""What DeepSpeed itself writes goes through slimckpt and is loaded by DeepSpeed again.

Two processes train on the CPU under ZeRO and save; truth is what their engines held, and what
DeepSpeed's own ``zero_to_fp32`` makes of it. Run by ``scripts/interop``.
"""

import filecmp
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

import slimckpt
from slimckpt.errors import UsageError
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify

RANKS = 2
STAGES = (1, 2, 3)
STEPS = 2

Value = tuple[str, tuple[int, ...], str]
"""Dtype, shape, SHA-256 of the elements in C order."""


class Model(nn.Module):
    """Few parameters, whose numbers two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, 20)
        self.fc = nn.Linear(20, 33)
        self.norm = nn.LayerNorm(33)
        self.register_buffer("frequencies", torch.arange(300.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.fc(self.embed(tokens)))
        return found


def value_of(tensor: torch.Tensor) -> Value:
    plain = tensor.detach().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype, tuple(tensor.shape), hashlib.sha256(content).hexdigest()


def held(array: np.ndarray) -> Value:
    return array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def leaves(value: Any, path: str = "") -> dict[str, Value]:
    """All tensors and arrays in an object, by the Python subscript that leads to them."""
    if isinstance(value, torch.Tensor):
        return {path: value_of(value)}
    if isinstance(value, np.ndarray):
        return {path: held(value)}
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__"):
        return joined(leaves(item, f"{path}.{key}") for key, item in vars(value).items())
    return joined(leaves(item, f"{path}[{key!r}]") for key, item in items)


def joined(parts: Iterable[dict[str, Value]]) -> dict[str, Value]:
    return {path: value for part in parts for path, value in part.items()}


def train(rank: int, root: str, meeting: str) -> None:
    """What one rank does: for each stage two steps of training, each saved; the truth beside."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    deepspeed.init_distributed(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        auto_mpi_discovery=False,
    )
    truth = {}
    for stage in STAGES:
        torch.manual_seed(stage)
        model = Model()
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
        )
        for step in range(1, STEPS + 1):
            engine.backward(engine(torch.arange(4) + rank).float().square().sum())
            engine.step()
            engine.save_checkpoint(str(Path(root) / f"stage_{stage}"), tag=f"global_step{step}")
        truth[stage] = state_of(engine, stage)
    torch.save(truth, Path(root).parent / f"truth_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def state_of(engine: Any, stage: int) -> dict[str, Value]:
    """What the optimizer of this rank holds after the last step, by names in its file."""
    found = {}
    optimizer = engine.optimizer
    masters = (
        optimizer.fp32_partitioned_groups_flat
        if stage == 3
        else optimizer.single_partition_of_fp32_groups
    )
    for number, master in enumerate(masters):
        state = optimizer.optimizer.state[master]
        inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"optimizer_state_dict.{inner}.state.{number}.{key}"] = value_of(state[key])
        if stage == 3:
            found[f"optimizer_state_dict.fp32_flat_groups.{number}"] = value_of(master)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("deepspeed")
    (parent / "run").mkdir()
    arguments = (str(parent / "run"), str(parent / "meeting"))
    torch.multiprocessing.spawn(train, args=arguments, nprocs=RANKS)
    return parent / "run"


@pytest.fixture(scope="module")
def store(run: Path) -> Path:
    slim(run, run.with_name("store"), min_saving=0)
    return run.with_name("store")


@pytest.mark.parametrize("where", ["run", "store"])
def test_every_file_has_the_tensors_that_torch_loads_of_it(
    run: Path, store: Path, where: str
) -> None:
    paths = list(run.rglob("*.pt"))
    assert len(paths) == STEPS * (3 + 3 + 4)
    with slimckpt.open(run if where == "run" else store) as checkpoint:
        for path in paths:
            view = checkpoint.files[path.relative_to(run).as_posix()].by_path
            expected = leaves(torch.load(path, weights_only=False))
            assert len(expected) > 1
            assert {name: held(view[name]) for name in view} == expected


@pytest.mark.parametrize("where", ["run", "store"])
@pytest.mark.parametrize("stage", STAGES)
def test_states_are_those_the_optimizers_held(
    run: Path, store: Path, where: str, stage: int
) -> None:
    with slimckpt.open(run if where == "run" else store) as checkpoint:
        for rank in range(RANKS):
            truth = torch.load(run.with_name(f"truth_{rank}.pt"))[stage]
            file = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            view = checkpoint.files[f"stage_{stage}/global_step{STEPS}/{file}"]
            for name, expected in truth.items():
                assert held(view[name]) == expected, name


def test_deepspeed_loads_what_was_restored(run: Path, store: Path, tmp_path: Path) -> None:
    assert verify(store, against=run).safe
    slimckpt.restore(store, tmp_path / "back")
    for path in (path for path in run.rglob("*") if path.is_file()):
        assert filecmp.cmp(path, tmp_path / "back" / path.relative_to(run), shallow=False)
    for stage in STAGES:
        first, second = (
            get_fp32_state_dict_from_zero_checkpoint(str(root / f"stage_{stage}"))
            for root in (run, tmp_path / "back")
        )
        assert len(first) >= 5
        assert {k: value_of(v) for k, v in first.items()} == {
            k: value_of(v) for k, v in second.items()
        }


def test_without_the_moments_the_weights_are_still_consolidated(run: Path, tmp_path: Path) -> None:
    """Of a file that lost tensors only slimckpt reads the rest: the masters, here by hand."""
    whole = get_fp32_state_dict_from_zero_checkpoint(str(run / "stage_1"))
    wanted = torch.cat([whole[name].reshape(-1) for name, _ in Model().named_parameters()])
    slim(run / "stage_1", tmp_path / "store", min_saving=0, drop=["optimizer"])
    with slimckpt.open(tmp_path / "store") as checkpoint:
        parts = [
            checkpoint.files[
                f"global_step{STEPS}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            ]["optimizer_state_dict.single_partition_of_fp32_groups.0"]
            for rank in range(RANKS)
        ]
    found = np.concatenate(parts)
    assert found[: len(wanted)].tobytes() == wanted.detach().numpy().tobytes()


def test_masters_of_stage_three_are_never_dropped(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="master"):
        slim(run / "stage_3", tmp_path / "store", min_saving=0, drop=["master"])
    assert not (tmp_path / "store").exists()
