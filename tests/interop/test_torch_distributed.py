"""What torch.distributed.checkpoint writes goes through slimckpt and is loaded by torch again.

Two processes train with FSDP on the CPU and save; truth is what they held. Run by
``scripts/interop``.
"""

import filecmp
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import slimckpt
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify

RANKS = 2

Value = tuple[str, tuple[int, ...], str]
"""Dtype, shape, SHA-256 of the elements in C order."""


class Model(nn.Module):
    """Rows that two ranks cannot share evenly: 13, 3, and a single one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 24)
        self.fc = nn.Linear(24, 33)
        self.narrow = nn.Linear(33, 1)
        self.norm = nn.LayerNorm(24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.narrow(self.fc(self.norm(self.embed(tokens))))
        return found


def flat(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a state, by the dotted names that torch gives them."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    found = {}
    for key, item in items:
        found |= flat(item, f"{path}.{key}" if path else str(key))
    return found


def value_of(tensor: torch.Tensor) -> Value:
    plain = tensor.detach().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype, tuple(tensor.shape), hashlib.sha256(content).hexdigest()


def held(array: np.ndarray) -> Value:
    return array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).hexdigest()


def train(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(3)
    model = Model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.arange(rank, 13)).sum().backward()
        optimizer.step()
    parameters, states = get_state_dict(model, optimizer)
    whole = torch.arange(35 * 40, dtype=torch.float32).reshape(35, 40)
    return {
        "model": parameters,
        "optim": states,
        "columns": distribute_tensor(whole.bfloat16(), mesh, [Shard(1)]),
        "rows": distribute_tensor(whole[:3].double(), mesh, [Shard(0)]),
        "replicated": DTensor.from_local(
            whole.to(torch.float8_e4m3fn), mesh, [Replicate()], run_check=False
        ),
        "plain": whole.half().t(),
        "view": whole[4:7],
        "scalar": torch.tensor(7),
        f"of rank {rank}": torch.full((300,), rank),
        "trainer": {"step": 2, "list": [torch.ones(5) * 2, "text"]},
    }


def write_all(rank: int, root: str, meeting: str) -> None:
    """What one rank does: each way of saving in its folder, and the truth beside."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    state = train(rank)
    for name, save in WRITERS.items():
        save(state, Path(root) / name.replace(" ", "_"))
        dist.barrier()
    locally = Path(root) / "locally" / f"model_{rank}" / f"rank_{rank}.pt"
    locally.parent.mkdir(parents=True)
    torch.save(state["model"], locally)
    truth = {
        "whole": {
            name: value_of(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
            for name, tensor in flat(state).items()
        },
        "local": {
            name: value_of(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
            for name, tensor in flat(state["model"]).items()
        },
    }
    torch.save(truth, Path(root).parent / f"truth_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def as_default(state: Any, path: Path, planner: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), planner=planner)


def as_safetensors(state: Any, path: Path) -> None:
    """As Hugging Face's files: tensors only, the place of each shard in the header."""
    tensors = flat({"model": state["model"], "columns": state["columns"], "rows": state["rows"]})
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(path), save_distributed=True))


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "default": as_default,
    "lowest rank": lambda state, path: as_default(
        state, path, dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    ),
    "two threads": lambda state, path: as_default(state, path, thread_count=2),
    "file per item": lambda state, path: as_default(state, path, single_file_per_rank=False),
    "asynchronous": lambda state, path: dcp.async_save(
        state, storage_writer=dcp.FileSystemWriter(path)
    ).result(),
    "safetensors": as_safetensors,
}
DCP = [name.replace(" ", "_") for name in WRITERS if name != "safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("dcp")
    (parent / "run").mkdir()
    arguments = (str(parent / "run"), str(parent / "meeting"))
    torch.multiprocessing.spawn(write_all, args=arguments, nprocs=RANKS)
    return parent / "run"


@pytest.fixture(scope="module")
def store(run: Path) -> Path:
    slim(run, run.with_name("store"), min_saving=0)
    return run.with_name("store")


def truth(run: Path, kind: str) -> list[dict[str, Value]]:
    return [torch.load(run.with_name(f"truth_{rank}.pt"))[kind] for rank in range(RANKS)]


@pytest.mark.parametrize("where", ["run", "store"])
@pytest.mark.parametrize("way", DCP)
def test_every_whole_tensor_is_what_the_ranks_held(
    run: Path, store: Path, way: str, where: str
) -> None:
    whole = truth(run, "whole")
    with slimckpt.open(run if where == "run" else store) as checkpoint:
        step = checkpoint.step(None, run=way)
        for name, expected in {**whole[0], **whole[1]}.items():
            assert held(np.asarray(step.tensor(name))) == expected, name


@pytest.mark.parametrize("where", ["run", "store"])
def test_shards_in_safetensors_are_where_their_headers_say(
    run: Path, store: Path, where: str
) -> None:
    covered: dict[str, np.ndarray] = {}
    with slimckpt.open(run if where == "run" else store) as checkpoint:
        for path in sorted((run / "safetensors").glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            view = checkpoint.files[f"safetensors/{path.name}"]
            assert set(view) == set(offsets)
            for name, entry in offsets.items():
                axis = 1 if name == "columns" else 0
                before = covered.get(name, view[name].take([], axis))
                assert entry["saved_offsets"][axis] == before.shape[axis]
                covered[name] = np.concatenate([before, view[name]], axis)
    whole = truth(run, "whole")[0]
    assert {"model.embed.weight", "columns", "rows"} < set(covered)
    with slimckpt.open(run / "safetensors") as joined:
        for name, array in covered.items():
            assert held(array) == whole[name], name
            assert held(np.asarray(joined.tensor(name))) == whole[name], name


@pytest.mark.parametrize("where", ["run", "store"])
def test_shards_saved_locally_are_what_each_rank_held(run: Path, store: Path, where: str) -> None:
    with slimckpt.open(run if where == "run" else store) as checkpoint:
        for rank, local in enumerate(truth(run, "local")):
            view = checkpoint.files[f"locally/model_{rank}/rank_{rank}.pt"]
            assert set(view) >= set(local)
            for name, expected in local.items():
                assert held(view[name]) == expected, name


def test_torch_loads_what_was_restored(run: Path, store: Path, tmp_path: Path) -> None:
    assert verify(store, against=run).safe
    slimckpt.restore(store, tmp_path / "back")
    for path in (path for path in run.rglob("*") if path.is_file()):
        assert filecmp.cmp(path, tmp_path / "back" / path.relative_to(run), shallow=False)
    whole = truth(run, "whole")
    for way in DCP:
        dcp_to_torch_save(tmp_path / "back" / way, tmp_path / "joined.pt")
        joined = flat(torch.load(tmp_path / "joined.pt", weights_only=False))
        for name, expected in {**whole[0], **whole[1]}.items():
            assert value_of(joined[name]) == expected, name
