"""slimckpt.frameworks.torch on what DeepSpeed writes, against torch and DeepSpeed themselves.

DeepSpeed also resumes by it: two processes under ZeRO, whose checkpoint engine reads through
slimckpt. Run by ``scripts/interop``.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from same_object import require_same
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))
from mounts import skip_without_fuse
from sample_files import SAMPLES
from trees import contents

from slimckpt.errors import UnknownGlobalError
from slimckpt.frameworks import torch as slim_torch
from slimckpt.mount import mounted
from slimckpt.rewrite.slim import slim

TREES = ("deepspeed_zero1_dp4", "deepspeed_zero3_dp4")
FILES = [
    (tree, path.relative_to(SAMPLES / tree).as_posix())
    for tree in TREES
    for path in sorted((SAMPLES / tree).rglob("*.pt"))
]
RANKS = 2
STAGES = (1, 3)
STEPS = 3


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stores")
    for tree in TREES:
        slim(SAMPLES / tree, root / tree, min_saving=0)
    return {tree: root / tree for tree in TREES}


def own(path: Path) -> Any:
    return torch.load(path, weights_only=False, map_location="cpu")


@pytest.mark.parametrize("kind", ["store", "directory"])
@pytest.mark.parametrize("tree,name", FILES)
def test_an_object_is_the_one_that_torch_loads(
    tree: str, name: str, kind: str, stores: dict[str, Path]
) -> None:
    root = stores[tree] if kind == "store" else SAMPLES / tree
    wanted = own(SAMPLES / tree / name)
    require_same(wanted, slim_torch.load(root, file=name))
    require_same(wanted, slim_torch.load(os.path.join(root, name)))


@pytest.mark.parametrize("tree,stage", list(zip(TREES, (1, 3), strict=True)))
def test_objects_of_deepspeed_are_its_own(tree: str, stage: int, stores: dict[str, Path]) -> None:
    name = "global_step5/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    state = slim_torch.load(stores[tree], file=name)["optimizer_state_dict"]
    assert type(state["loss_scaler"]) is LossScaler
    assert state["zero_stage"] is ZeroStageEnum(stage)


class Note:
    """A class of a user's own, in the state that DeepSpeed saves for its client."""

    def __init__(self, text: str) -> None:
        self.text = text


class Model(nn.Module):
    """Few parameters, whose numbers two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(51, 20)
        self.fc = nn.Linear(20, 33)
        self.norm = nn.LayerNorm(33)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.fc(self.embed(tokens)))
        return found


class SlimEngine(TorchCheckpointEngine):
    """DeepSpeed's checkpoint engine, but it reads the files of ``run`` from elsewhere."""

    def __init__(self, run: Path, path: Path) -> None:
        super().__init__()
        self.run, self.path = run, path
        self.read: list[str] = []

    def load(self, path: str, map_location: Any = None) -> Any:
        self.read.append(os.path.relpath(path, self.run))
        return slim_torch.load(self.path, file=self.read[-1], allow=[Note])


def begin(rank: int, meeting: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    deepspeed.init_distributed(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        auto_mpi_discovery=False,
    )


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()
    # Torn down in the usual way, threads that torch left behind now and then abort the process.
    os._exit(0)


def engine_of(stage: int, seed: int) -> Any:
    torch.manual_seed(seed)
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
    return engine


def train(engine: Any, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        target = torch.arange(33.0) % 5 - step
        loss = (engine(torch.arange(4) + 3 * step + rank).float() - target).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save(rank: int, run: str, meeting: str) -> None:
    """Each stage, saved half way; the losses of the other half."""
    begin(rank, meeting)
    went_on = {}
    for stage in STAGES:
        engine = engine_of(stage, seed=stage)
        train(engine, rank)
        engine.save_checkpoint(
            f"{run}/stage_{stage}", tag="global_step3", client_state={"note": Note("kept")}
        )
        went_on[stage] = train(engine, rank)
    torch.save(went_on, f"{meeting}_went_on_{rank}.pt")
    end()


def resume(rank: int, run: str, store: str, meeting: str) -> None:
    """Each stage from the original by DeepSpeed alone, then through slimckpt: losses and files."""
    begin(rank, meeting)
    found = {}
    for stage in STAGES:
        for way in (None, store, run):
            engine = engine_of(stage, seed=100)
            if way is not None:
                engine.checkpoint_engine = SlimEngine(Path(run), Path(way))
            _, client = engine.load_checkpoint(f"{run}/stage_{stage}")
            assert client["note"].text == "kept"
            read = [] if way is None else engine.checkpoint_engine.read
            found[stage, way] = train(engine, rank), read
    torch.save(found, f"{meeting}_found_{rank}.pt")
    end()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What two ranks saved, and its slim checkpoint."""
    root = tmp_path_factory.mktemp("saved")
    (root / "run").mkdir()
    arguments = (str(root / "run"), str(root / "meeting"))
    torch.multiprocessing.spawn(save, args=arguments, nprocs=RANKS)
    slim(root / "run", root / "store", min_saving=0)
    return root / "run", root / "store"


def test_deepspeed_resumes_through_slimckpt_with_the_same_losses(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    run, store = saved
    before = contents(store)
    arguments = (str(run), str(store), str(tmp_path / "meeting"))
    torch.multiprocessing.spawn(resume, args=arguments, nprocs=RANKS)
    assert contents(store) == before
    for rank in range(RANKS):
        went_on = torch.load(run.with_name(f"meeting_went_on_{rank}.pt"))
        found = torch.load(tmp_path / f"meeting_found_{rank}.pt")
        for stage in STAGES:
            assert len(set(went_on[stage])) == STEPS
            assert found[stage, None] == (went_on[stage], [])
            for way in (str(store), str(run)):
                losses, read = found[stage, way]
                assert losses == went_on[stage]
                assert {Path(name).name for name in read} >= {
                    f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
                    "mp_rank_00_model_states.pt"
                    if stage == 1
                    else f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
                }


def test_a_class_of_the_client_is_named_and_can_be_allowed(saved: tuple[Path, Path]) -> None:
    run, store = saved
    name = "stage_1/global_step3/mp_rank_00_model_states.pt"
    with pytest.raises(UnknownGlobalError, match=r"Note.*allow=\[Note\]"):
        slim_torch.load(store, file=name)
    require_same(own(run / name), slim_torch.load(store, file=name, allow=[Note]))


def test_deepspeed_consolidates_a_mounted_checkpoint(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    skip_without_fuse()
    for tree in TREES:
        point = tmp_path / tree
        point.mkdir()
        with mounted(stores[tree], point):
            found = get_fp32_state_dict_from_zero_checkpoint(str(point))
            found = {name: tensor.clone() for name, tensor in found.items()}
        wanted = get_fp32_state_dict_from_zero_checkpoint(str(SAMPLES / tree))
        assert len(found) > 5 and list(found) == list(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), name
