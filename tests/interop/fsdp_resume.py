"""FSDP2 on gloo processes: ``fsdp_resume.py save|resume RANKS ROOT``.

``save`` trains and writes ``ROOT/run`` by torch.distributed.checkpoint. ``resume`` loads that, and
the slim checkpoint of it in ``ROOT/store`` through slimckpt's reader, and asserts that states and
the losses of further training are equal.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from slimckpt.frameworks import torch as slim_torch

WIDTH = 13
"""Over 4 ranks: 4, 4, 4, 1."""


def made(n_ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    mesh = init_device_mesh("cpu", (n_ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    generator = torch.Generator().manual_seed(9)
    for _ in range(steps):
        loss = model(torch.randn(8, 7, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def loaded(n_ranks: int, reader: Any) -> tuple[dict[str, Any], list[float]]:
    model, optimizer = made(n_ranks)
    trained(model, optimizer, 1)  # so that there is optimizer state to load into
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments}
    dcp.load(state, storage_reader=reader)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    local = {
        f"{kind}.{name}.{key}": tensor.to_local().clone()
        for kind, part in (("model", weights), ("optim", moments["state"]))
        for name, entry in part.items()
        for key, tensor in (entry.items() if isinstance(entry, dict) else [("", entry)])
        if hasattr(tensor, "to_local")
    }
    return local, trained(model, optimizer, 4)


def work(rank: int, part: str, n_ranks: int, root: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=n_ranks)
    if part == "save":
        model, optimizer = made(n_ranks)
        trained(model, optimizer, 3)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=Path(root) / "run")
    else:
        theirs = loaded(n_ranks, dcp.FileSystemReader(Path(root) / "run"))
        ours = loaded(n_ranks, slim_torch.StorageReader(Path(root) / "store"))
        assert theirs[0].keys() == ours[0].keys() and len(ours[0]) >= 12
        for name, tensor in theirs[0].items():
            assert torch.equal(tensor, ours[0][name]), (rank, name)
        assert theirs[1] == ours[1], (theirs[1], ours[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    part, n_ranks, root = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked: importing torch once takes long enough.
    start_processes(work, (part, n_ranks, root, port), n_ranks, start_method="fork")
