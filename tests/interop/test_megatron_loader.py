"""slimckpt.frameworks.torch on what Megatron writes, against torch and Megatron themselves.

Run by ``scripts/interop``.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.enums import ModelType
from same_object import require_same
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

sys.path.append(str(Path(__file__).parents[1]))
from mounts import skip_without_fuse
from sample_files import SAMPLES

from slimckpt.errors import UnknownGlobalError
from slimckpt.frameworks import torch as slim_torch
from slimckpt.mount import mounted
from slimckpt.rewrite.slim import slim

TREES = ("megatron_tp2_pp2", "megatron_swiglu_gqa", "megatron_moe_torch_dist")
FILES = [
    (tree, path.relative_to(SAMPLES / tree).as_posix())
    for tree in TREES
    for path in sorted((SAMPLES / tree).rglob("*.pt"))
]
DISTRIBUTED = [
    (tree, path.parent.relative_to(SAMPLES / tree).as_posix())
    for tree in TREES
    for path in sorted((SAMPLES / tree).rglob(".metadata"))
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("stores")
    for tree in TREES:
        slim(SAMPLES / tree, root / tree, min_saving=0)
    return {tree: root / tree for tree in TREES}


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Megatron asks for its rank when it loads."""
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    yield
    torch.distributed.destroy_process_group()


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


def test_arguments_of_training_are_megatrons_own(stores: dict[str, Path]) -> None:
    state = slim_torch.load(
        stores["megatron_tp2_pp2"], file="iter_0000010/mp_rank_01_001/model_optim_rng.pt"
    )
    assert type(state["args"]) is argparse.Namespace
    assert any(isinstance(value, ModelType) for value in vars(state["args"]).values())
    assert state["iteration"] == 10


class Schedule:
    """A class of a user's own, of the kind that ends up in ``args``."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps


def test_a_class_of_the_user_in_the_arguments_is_named_and_can_be_allowed(tmp_path: Path) -> None:
    state = own(SAMPLES / "megatron_tp2_pp2/iter_0000010/mp_rank_00_000/model_optim_rng.pt")
    state["args"].schedule = Schedule(3, 5)
    for rank in range(2):
        path = tmp_path / f"run/iter_0000010/mp_rank_0{rank}/model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        torch.save(state, path)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    file = "iter_0000010/mp_rank_01/model_optim_rng.pt"
    with pytest.raises(UnknownGlobalError, match=r"Schedule.*allow=\[Schedule\]"):
        slim_torch.load(tmp_path / "store", file=file)
    require_same(state, slim_torch.load(tmp_path / "store", file=file, allow=[Schedule]))


def blank(metadata: Any) -> dict[str, Any]:
    """A state to load into: zeros, and nothing where objects are."""
    return {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


@pytest.mark.parametrize("kind", ["store", "directory"])
@pytest.mark.parametrize("tree,name", DISTRIBUTED)
def test_a_distributed_checkpoint_is_read_as_torch_reads_it(
    tree: str, name: str, kind: str, stores: dict[str, Path]
) -> None:
    root = stores[tree] if kind == "store" else SAMPLES / tree
    theirs = dcp.FileSystemReader(SAMPLES / tree / name)
    ours = slim_torch.StorageReader(root, directory=name)
    described, found = theirs.read_metadata(), ours.read_metadata()
    described.storage_meta = found.storage_meta = None  # how each reader numbers its loads
    require_same(described, found)
    states = blank(described), blank(described)
    for state, reader in zip(states, (theirs, ours), strict=True):
        dcp.load(state, storage_reader=reader, no_dist=True)
    require_same(*states)
    kinds = {type(value) for value in states[1].values()}
    assert torch.Tensor in kinds and len(kinds) > 1 and type(None) not in kinds


def test_megatron_loads_a_mounted_checkpoint(
    stores: dict[str, Path], group: None, tmp_path: Path
) -> None:
    skip_without_fuse()
    for tree, name in DISTRIBUTED:
        point = tmp_path / tree
        point.mkdir(exist_ok=True)
        wanted = dist_checkpointing.load_plain_tensors(str(SAMPLES / tree / name))
        with mounted(stores[tree], point):
            found = dist_checkpointing.load_plain_tensors(str(point / name))
            common = dist_checkpointing.load_common_state_dict(str(point / name))
        assert len(found) > 10
        require_same(wanted, found)
        require_same(dist_checkpointing.load_common_state_dict(str(SAMPLES / tree / name)), common)
