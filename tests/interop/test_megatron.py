"""What Megatron itself writes goes through slimckpt and is loaded by Megatron again.

Truth is what Megatron held in memory while it saved (``make_megatron_moe.py``), and what its
``dist_checkpointing.load_plain_tensors`` loads. Run by ``scripts/interop``.
"""

import filecmp
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

import slimckpt
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify

MAKE = Path(__file__).with_name("make_megatron_moe.py")
FORMATS = ("dp_reshardable", "fully_reshardable")
STEP = "iter_0000002"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron") / "run"
    subprocess.run([sys.executable, "-W", "ignore", MAKE, root], check=True, capture_output=True)
    return root


@pytest.fixture(scope="module")
def store(run: Path) -> Path:
    slim(run, run.with_name("store"), min_saving=0)
    return run.with_name("store")


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Megatron asks for its rank when it loads."""
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    yield
    torch.distributed.destroy_process_group()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("where", ["run", "store"])
def test_every_shard_is_what_megatron_held(run: Path, store: Path, where: str, kind: str) -> None:
    ranks = json.loads((run / "expected.json").read_text())["ranks"]
    with slimckpt.open(run if where == "run" else store) as checkpoint:
        step, compared = checkpoint.step(2, run=kind), 0
        for item in (item for rank in ranks for item in rank["items"][kind] if "key" in item):
            whole = step.tensor(item["key"])
            assert list(whole.shape) == item["global_shape"], item["key"]
            box = zip(item["offset"], item["shape"], strict=True)
            found = whole[tuple(slice(offset, offset + size) for offset, size in box)]
            assert found.dtype.name == item["dtype"], item["key"]
            assert hashlib.sha256(found.tobytes()).hexdigest() == item["sha256"], item["key"]
            compared += 1
    assert compared > 80


@pytest.mark.parametrize("kind", FORMATS)
def test_megatron_loads_what_was_restored(
    run: Path, store: Path, group: None, tmp_path: Path, kind: str
) -> None:
    assert verify(store, against=run).safe
    slimckpt.restore(store, tmp_path / "back")
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    for path in files:
        assert filecmp.cmp(run / path, tmp_path / "back" / path, shallow=False)
    first, second = load(run / kind / STEP), load(tmp_path / "back" / kind / STEP)
    assert set(first) == set(second)
    with slimckpt.open(store) as checkpoint:
        step = checkpoint.step(2, run=kind)
        for name, tensor in first.items():
            assert bits(second[name]) == bits(tensor), name
            found = np.asarray(step.tensor(name))
            assert (found.shape, found.tobytes()) == (tuple(tensor.shape), bits(tensor)), name


def load(directory: Path) -> dict[str, torch.Tensor]:
    """All whole tensors; sharded objects are left out."""
    loaded = dist_checkpointing.load_plain_tensors(str(directory))
    found = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    assert len(found) > 10
    return found
