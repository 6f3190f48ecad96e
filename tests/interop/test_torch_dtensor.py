"""Ranks that each save their own state dict of DTensors: FSDP2, and FSDP2 on tensor parallelism,
which is _StridedShard. Truth is what ``full_tensor`` gives. Run by ``scripts/interop``.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import slimckpt
from slimckpt.errors import NotUnderstoodError
from slimckpt.layouts.toml_rules import read_toml
from slimckpt.layouts.toml_writing import to_toml
from slimckpt.rewrite.slim import slim

RANKS = 4
ROWS = """
[mesh]
half = 2

[[rule]]
match = ["*.bias", "*.weight", "*.exp_avg", "*.exp_avg_sq", "mixed.*"]
dim = 0
axis = "half"
split = "ceil"
"""


class Model(nn.Module):
    """Rows that ranks cannot share evenly: 13 and 5."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 13), nn.Linear(13, 5)


def trained(mesh: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    model = Model()
    if mesh.ndim == 2:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def mixed(mesh: Any) -> dict[str, torch.Tensor]:
    """Other placements, of other dtypes."""
    whole = torch.arange(7 * 6 * 3).reshape(7, 6, 3)
    last = [Replicate()] * (mesh.ndim - 1)
    found = {
        "columns": distribute_tensor(whole.bfloat16(), mesh, [*last, Shard(1)]),
        "everywhere": distribute_tensor(whole.double(), mesh, [*last, Replicate()]),
        "few": distribute_tensor(whole[:2].to(torch.int32), mesh, [Shard(0)] * mesh.ndim),
        "view": distribute_tensor(whole.half(), mesh, [Shard(0), *[Shard(2)] * (mesh.ndim - 1)]),
    }
    if mesh.ndim == 2:
        found["of one axis"] = distribute_tensor(whole.float(), mesh["tp"], [Shard(0)])
    return found


def work(rank: int, root: str, meeting: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    meshes = {
        "fsdp": init_device_mesh("cpu", (4,)),
        "both": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    }
    for name, mesh in meshes.items():
        folder = Path(root) / name
        folder.mkdir(exist_ok=True)
        state = trained(mesh) | {"mixed": mixed(mesh)}
        sums = DTensor.from_local(torch.ones(3), mesh, [Partial()] * mesh.ndim, run_check=False)
        legacy = name == "fsdp" and rank == 1
        torch.save(
            state | {"sums": sums},
            folder / f"rank_{rank}.pt",
            _use_new_zipfile_serialization=not legacy,
        )
        whole = {key: tensor.full_tensor() for key, tensor in dtensors(state).items()}
        if not rank:
            torch.save(whole, Path(root) / f"{name}-truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def dtensors(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, DTensor):
        return {path: state}
    found: dict[str, Any] = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        found |= dtensors(value, f"{path}.{key}" if path else str(key))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dtensor")
    arguments = (str(root), str(root / "meeting"))
    torch.multiprocessing.start_processes(work, arguments, nprocs=RANKS, start_method="fork")
    return root


@pytest.fixture(params=["fsdp", "both"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def truth_of(root: Path, kind: str) -> dict[str, torch.Tensor]:
    truth: dict[str, torch.Tensor] = torch.load(root / f"{kind}-truth.pt")
    assert len(truth) == (16 if kind == "fsdp" else 17)
    return truth


def equal(found: np.ndarray, wanted: torch.Tensor) -> bool:
    assert found.shape == tuple(wanted.shape)
    return found.tobytes() == wanted.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("stored", [False, True])
def test_the_whole_is_what_full_tensor_gives(
    saved: Path, kind: str, stored: bool, tmp_path: Path
) -> None:
    root = saved / kind
    if stored:
        slim(root, tmp_path / "store", min_saving=0)
        root = tmp_path / "store"
    with slimckpt.open(root) as ckpt:
        for name, wanted in truth_of(saved, kind).items():
            assert equal(np.asarray(ckpt.tensor(name)), wanted), name


def test_two_ranks_get_their_halves(saved: Path, kind: str, tmp_path: Path) -> None:
    rules = tmp_path / "halves.toml"
    rules.write_text(ROWS)
    with slimckpt.open(saved / kind) as ckpt:
        resharded = ckpt.reshard(rules, skip=["sums"])
        for name, wanted in truth_of(saved, kind).items():
            parts = torch.chunk(wanted, 2)
            for rank in range(2):
                assert equal(resharded[rank][name], parts[rank]), (rank, name)


def test_rules_written_of_it_give_back_what_ranks_had(saved: Path, kind: str) -> None:
    with slimckpt.open(saved / kind) as ckpt:
        rules = read_toml(to_toml(ckpt.layout()).encode(), "layout.toml")
        resharded = ckpt.reshard(rules, skip=["sums", "mixed.*"])
        for name in (name for name in truth_of(saved, kind) if not name.startswith("mixed.")):
            for rank in range(RANKS):
                found, wanted = resharded[rank][name], ckpt.rank(rank)[name]
                assert found.shape == wanted.shape and (found == wanted).all(), (rank, name)


def test_what_ranks_would_have_to_add_up_is_refused(saved: Path, kind: str) -> None:
    with (
        slimckpt.open(saved / kind) as ckpt,
        pytest.raises(NotUnderstoodError, match=r"rank_0\.pt: tensor 'sums' is Partial.*sum"),
    ):
        ckpt.tensor("sums")
