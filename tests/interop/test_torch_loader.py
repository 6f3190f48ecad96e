"""slimckpt.frameworks.torch against torch itself: the objects, and what happens to them."""

import copy
import dataclasses
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from same_object import require_same
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import DeviceMesh

sys.path.append(str(Path(__file__).parents[1]))
from mounts import skip_without_fuse
from sample_files import SAMPLES
from trees import contents

import slimckpt
from slimckpt.errors import (
    CheckFailedError,
    DroppedTensorError,
    SlimckptError,
    StoreDamagedError,
    UnknownGlobalError,
    UnknownRankError,
    UsageError,
)
from slimckpt.frameworks import torch as slim_torch
from slimckpt.mount import mounted
from slimckpt.rewrite.slim import slim

TREES = ("torch_corners", "torch_ddp4", "lora_steps")
FILES = [
    (tree, path.relative_to(SAMPLES / tree).as_posix())
    for tree in TREES
    for path in sorted((SAMPLES / tree).rglob("*"))
    if path.suffix in (".pt", ".pth", ".bin", ".safetensors") and "malicious" not in path.name
]
"""All but two that torch would run commands of."""


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
    try:
        wanted = own(SAMPLES / tree / name)
    except ModuleNotFoundError as error:
        missing = re.escape(str(error.name).partition(".")[0])
        with pytest.raises(UnknownGlobalError, match=missing):
            slim_torch.load(root, file=name)
    except Exception:  # noqa: BLE001 - torch has no error of its own for files
        with pytest.raises(SlimckptError, match=re.escape(Path(name).name)):
            slim_torch.load(root, file=name)
    else:
        require_same(wanted, slim_torch.load(root, file=name))
        require_same(wanted, slim_torch.load(os.path.join(root, name)))


def test_what_would_run_a_command_is_an_error_that_names_it(stores: dict[str, Path]) -> None:
    for name, what in (("malicious_os_system.pt", "system"), ("malicious_eval.pt", "eval")):
        with pytest.raises(UnknownGlobalError, match=what):
            slim_torch.load(stores["torch_corners"], file=name)


def test_a_rank_is_loaded_by_its_number_and_a_missing_one_is_named(
    stores: dict[str, Path],
) -> None:
    store = stores["torch_ddp4"]
    require_same(own(SAMPLES / "torch_ddp4/checkpoint_rank2.pt"), slim_torch.load(store, rank=2))
    with pytest.raises(UnknownRankError, match="ranks 0-3"):
        slim_torch.load(store, rank=4)
    with pytest.raises(UnknownRankError, match="4 ranks"):
        slim_torch.load(store)
    with pytest.raises(UsageError, match="leave out"):
        slim_torch.load(store, file="checkpoint_rank2.pt", rank=2)


class Config:
    """A class of a user's own."""

    def __init__(self, width: int) -> None:
        self.width = width


def test_a_class_that_is_allowed_is_made(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    state = {"config": Config(7), "w": torch.arange(1000.0)}
    for rank in range(2):
        torch.save(state, tree / f"rank_{rank}.pt")
    slim(tree, tmp_path / "store", min_saving=0)
    with pytest.raises(UnknownGlobalError, match=r"Config.*allow=\[Config\]"):
        slim_torch.load(tmp_path / "store", rank=0)
    require_same(state, slim_torch.load(tmp_path / "store", rank=0, allow=[Config]))


class Calls:
    """Pickles as a call of something."""

    def __init__(self, what: Any, *args: Any) -> None:
        self.made = (what, args)

    def __reduce__(self) -> Any:
        return self.made


def test_what_may_be_named_is_not_called_by_way_of_torch(tmp_path: Path) -> None:
    by_type = torch._tensor._rebuild_from_type_v2
    called = {
        "relu": Calls(by_type, nn.functional.relu, torch.Tensor, (torch.ones(3),), {}),
        "class of tensors": Calls(by_type, WriteItemType, WriteItemType, (1,), {"evil": 1}),
        "Linear": Calls(nn.Linear, 10, 10),
        "DeviceMesh": Calls(DeviceMesh, "cpu", [0]),
    }
    for what, call in called.items():
        torch.save({"w": torch.ones(3), "x": call}, tmp_path / f"{what}.pt")
    for what in called:
        with pytest.raises(SlimckptError, match=what):
            slim_torch.load(tmp_path, file=f"{what}.pt")
    assert not hasattr(WriteItemType(1), "evil")


@pytest.mark.parametrize("kind", ["store", "directory"])
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_by_name_share_what_they_share_and_lack_none_that_torch_has(
    kind: str, zipped: bool, tmp_path: Path
) -> None:
    tree = tmp_path / "directory"
    tree.mkdir()
    a = torch.randn(30, 40)
    codes = torch.randint(0, 255, (50, 60), dtype=torch.uint8)
    state = {
        "odd": codes[:, :7],
        "a": a,
        "tied": a,
        "rows": a[3:5],
        "turned": a.t(),
        "b": a.clone(),
    }
    if zipped:  # Torch itself does not read these back from files of its old format.
        state["half"] = torch.randn(30, 40, dtype=torch.complex64).to(torch.complex32)
        state["none"] = torch.empty(0, 3, dtype=torch.complex32)
        state["bits"] = codes.view(torch.bits8)
    torch.save(state, tree / "m.pt", _use_new_zipfile_serialization=zipped)
    slim(tree, tmp_path / "store", min_saving=0)
    found = slim_torch.state_dict(tmp_path / kind, file="m.pt")
    for name, tensor in found.items():  # their order is that of the views
        want = state[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (
            *(want.dtype, want.shape, want.stride()),
        )
        assert bits(tensor) == bits(want), name
    assert found.keys() == state.keys()
    found["a"].add_(1)
    assert torch.equal(found["tied"], a + 1) and torch.equal(found["turned"], (a + 1).t())
    assert torch.equal(found["rows"], a[3:5] + 1) and torch.equal(found["b"], a)


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return b"" if not tensor.numel() else flat.numpy().tobytes()


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_torch_can_save_whole_comes_back(protocol: int, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 20)).sum().backward()
    optimizer.step()
    jagged = torch.nested.nested_tensor([torch.ones(3, 5), torch.ones(4, 5)], layout=torch.jagged)
    state = {"optimizer": optimizer, "model": model, "rest": ..., "jagged": jagged}
    if protocol > 2:  # pickle itself does not write it else
        state["format"] = torch.channels_last
    torch.save(state, tmp_path / "m.pt", pickle_protocol=protocol)
    found, wanted = slim_torch.load(tmp_path, file="m.pt"), own(tmp_path / "m.pt")
    # Each jagged tensor has a symbol of its own for how long its rows are.
    jagged, twin = found.pop("jagged"), wanted.pop("jagged")
    assert all(map(torch.equal, jagged.unbind(), twin.unbind()))
    same = copy.copy(found), copy.copy(wanted)
    require_same(*[one["optimizer"].state_dict() for one in same])
    require_same(*[one["model"] for one in same])
    assert found["rest"] is ... and found.get("format") is wanted.get("format")
    assert found["optimizer"].param_groups[0]["params"][0] is found["model"][0].weight


class Tiny(nn.Module):
    """Two layers that start equal but are not tied, and a head that is tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(50, 24)
        self.left, self.right = nn.Linear(24, 24), nn.Linear(24, 24)
        self.right.load_state_dict(self.left.state_dict())
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        return self.head(torch.tanh(self.left(hidden)) + self.right(hidden))


def losses(state: dict[str, Any], steps: int) -> list[float]:
    """The losses of training on from a state."""
    model = Tiny()
    model.load_state_dict(state["model"], assign=True)
    model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(state["optimizer"])
    found = []
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        tokens = torch.randint(50, (8, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two ranks and two steps of a run, and its slim checkpoint."""
    root = tmp_path_factory.mktemp("trained")
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in (1, 2):
        tokens = torch.arange(48).reshape(8, 6)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        if step == 1:
            model.right.load_state_dict(model.left.state_dict())
        for rank in range(2):
            path = root / "run" / f"step_{step}" / f"rank_{rank}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(copy.deepcopy(state), path)
    slim(root / "run", root / "store", min_saving=0)
    return root / "run", root / "store"


def test_training_goes_on_with_the_same_losses(trained: tuple[Path, Path]) -> None:
    run, store = trained
    before = contents(store)
    wanted = losses(own(run / "step_2/rank_1.pt"), 5)
    assert len(set(wanted)) == 5
    assert losses(slim_torch.load(store, rank=1, step=2), 5) == wanted
    assert losses(slim_torch.load(run, rank=1, step=2), 5) == wanted
    assert contents(store) == before


def test_equal_parameters_are_independent_and_tied_ones_stay_tied(
    trained: tuple[Path, Path],
) -> None:
    _, store = trained
    before = contents(store)
    for found in (
        slim_torch.load(store, rank=0, step=1)["model"],
        {
            name.removeprefix("model."): tensor
            for name, tensor in slim_torch.state_dict(store, 0, step=1).items()
        },
    ):
        left, right = found["left.weight"], found["right.weight"]
        assert torch.equal(left, right)
        first = right.clone()
        left += 1
        assert torch.equal(right, first) and torch.equal(left, first + 1)
        embed, head = found["embed.weight"], found["head.weight"]
        assert embed.untyped_storage()._cdata == head.untyped_storage()._cdata
        head.zero_()
        assert not embed.any()
    again = slim_torch.load(store, rank=0, step=1)["model"]
    assert torch.equal(again["left.weight"], first) and again["embed.weight"].any()
    assert contents(store) == before


def test_a_state_without_optimizer_says_what_is_missing_and_gives_the_rest(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    run, _ = trained
    slim(run, tmp_path / "store", drop=["optimizer"], min_saving=0)
    with pytest.raises(DroppedTensorError, match=r"rank_0\.pt.*exp_avg.*state_dict"):
        slim_torch.load(tmp_path / "store", rank=0, step=2)
    weights = slim_torch.state_dict(tmp_path / "store", 0, step=2)
    wanted = own(run / "step_2/rank_0.pt")["model"]
    for name, tensor in wanted.items():
        assert torch.equal(weights[f"model.{name}"], tensor)


def test_a_damaged_store_is_an_error_not_another_object(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    run, store = trained
    for name in sorted(contents(store)):
        if not name.startswith((b"shared/", b"own/")):
            continue
        broken = Path(shutil.copytree(store, tmp_path / "broken"))
        path = broken / os.fsdecode(name)
        path.chmod(0o600)
        os.truncate(path, path.stat().st_size - 4096)
        wanted = own(run / "step_2/rank_1.pt")
        try:
            require_same(wanted, slim_torch.load(broken, rank=1, step=2))
        except StoreDamagedError as error:
            assert path.name in str(error)
        shutil.rmtree(broken)
    broken = Path(shutil.copytree(store, tmp_path / "flipped"))
    for container in sorted((broken / "shared").iterdir()):
        container.chmod(0o600)
        data = bytearray(container.read_bytes())
        for at in range(len(data) // 3, len(data), len(data) // 40):
            data[at] ^= 1
        container.write_bytes(data)
    with pytest.raises(StoreDamagedError):
        slim_torch.load(broken, rank=1, step=2, check=True)


@pytest.mark.parametrize(
    "sample", ["ms_dp8_ckpt", "ms_dtypes", "lora_steps", "keras_adam", "numpy_arrays", "paddle_dp4"]
)
def test_a_state_dict_of_any_format_has_the_values_of_the_views(
    sample: str, tmp_path: Path
) -> None:
    slim(SAMPLES / sample, tmp_path / "store", min_saving=0)
    compared = 0
    with slimckpt.open(tmp_path / "store") as ckpt:
        for path, view in ckpt.files.items():
            try:
                names = list(view)
            except SlimckptError:
                continue
            found = slim_torch.state_dict(tmp_path / "store", file=path)
            assert list(found) == names
            for name, tensor in found.items():
                array = view[name]
                native = np.array(array, array.dtype.newbyteorder("="), order="C")
                bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                assert tuple(tensor.shape) == array.shape, (path, name)
                assert bits.tobytes() == native.tobytes(), (path, name)
                compared += 1
    assert compared


def blank(metadata: Any) -> dict[str, Any]:
    """A state to load into: zeros, and nothing where objects are."""
    return {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def dcp_states(path: Path) -> list[Path]:
    return sorted(found.parent for found in path.rglob(".metadata"))


@pytest.mark.parametrize("sample", ["fsdp_dcp_4", "megatron_moe_torch_dist"])
def test_a_distributed_checkpoint_is_read_as_torch_reads_it(sample: str, tmp_path: Path) -> None:
    slim(SAMPLES / sample, tmp_path / "store", min_saving=0)
    for directory in dcp_states(SAMPLES / sample):
        inner = directory.relative_to(SAMPLES / sample)
        reader = slim_torch.StorageReader(
            tmp_path / "store", directory=None if inner == Path() else inner
        )
        theirs = dcp.FileSystemReader(directory)
        wanted, found = blank(theirs.read_metadata()), blank(reader.read_metadata())
        keys = [key for key, value in wanted.items() if value is not None]
        wanted, found = ({key: state[key] for key in keys} for state in (wanted, found))
        dcp.load(wanted, storage_reader=theirs, no_dist=True)
        dcp.load(found, storage_reader=reader, no_dist=True)
        require_same(wanted, found)


def test_objects_of_a_distributed_checkpoint_come_back_and_hostile_ones_do_not(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "ran"
    state = {"w": torch.arange(6.0), "epoch": 3, "note": {"a": [1, "b"]}}
    dcp.save(state, checkpoint_id=tmp_path / "good", no_dist=True)
    found = {"w": torch.zeros(6), "epoch": 0, "note": {"a": [0, ""]}}
    dcp.load(found, storage_reader=slim_torch.StorageReader(tmp_path / "good"), no_dist=True)
    require_same(state, found)

    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(marker),)

    dcp.save({"w": torch.arange(6.0), "x": Hostile()}, checkpoint_id=tmp_path / "bad", no_dist=True)
    with pytest.raises(dcp.CheckpointException, match="mkdir"):
        dcp.load(
            {"w": torch.zeros(6), "x": 0},
            storage_reader=slim_torch.StorageReader(tmp_path / "bad"),
            no_dist=True,
        )
    assert not marker.exists()


def test_metadata_without_a_chunk_of_a_tensor_are_an_error_that_names_it(tmp_path: Path) -> None:
    state = {"w": torch.arange(24.0).reshape(6, 4)}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    path = tmp_path / "run" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (chunk,) = metadata.state_dict_metadata["w"].chunks
    metadata.state_dict_metadata["w"].chunks = [
        dataclasses.replace(chunk, sizes=torch.Size([5, 4]))
    ]
    path.write_bytes(pickle.dumps(metadata))
    reader = slim_torch.StorageReader(tmp_path / "run")
    with pytest.raises(CheckFailedError, match=r"no chunk has \[5:6, 0:4\] of tensor 'w'"):
        reader.read_metadata()


def test_metadata_that_do_not_say_what_they_should_are_an_error(tmp_path: Path) -> None:
    state = {"w": torch.arange(700.0)}
    dcp.save(state, checkpoint_id=tmp_path / "good")
    with (tmp_path / "good" / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    (index, place), *_ = metadata.storage_data.items()
    gone = dataclasses.replace(place, relative_path="../good/__0_0.distcp")
    for name, stored, why in (
        ("list", [1], "does not say what was saved"),
        ("number", {index: 5}, "does not say what was saved"),
        ("offset", {index: dataclasses.replace(place, offset="x")}, "does not say what was"),
        ("none", {}, "lists 'w', but not where"),
        ("outside", {index: gone}, "has no file '../good/__0_0.distcp'"),
    ):
        shutil.copytree(tmp_path / "good", tmp_path / name)
        damaged = dataclasses.replace(metadata, storage_data=stored)
        (tmp_path / name / ".metadata").write_bytes(pickle.dumps(damaged))
        with pytest.raises((dcp.CheckpointException, AssertionError), match=why):
            dcp.load(state, storage_reader=slim_torch.StorageReader(tmp_path / name))
    loaded = {"w": torch.zeros(700)}
    for directory in ("good", "./good/", b"good"):
        reader = slim_torch.StorageReader(tmp_path, step=None, directory=directory)
        dcp.load(loaded, storage_reader=reader)
        assert torch.equal(loaded["w"], state["w"])


def test_what_dcp_saved_as_safetensors_is_loaded_from_a_mount(tmp_path: Path) -> None:
    state = {"w": torch.arange(600.0), "v": torch.ones(4, 300)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "run"), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for path in (tmp_path / "run", tmp_path / "store"):
        with pytest.raises(UsageError, match=r"0 files \.metadata.*mount.*tensor\(name\)"):
            slim_torch.StorageReader(path)
    skip_without_fuse()
    (tmp_path / "point").mkdir()
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with mounted(tmp_path / "store", tmp_path / "point"):
        reader = dcp.HuggingFaceStorageReader(str(tmp_path / "point"))
        dcp.load(found, storage_reader=reader, no_dist=True)
    require_same(state, found)


@pytest.mark.parametrize("n_ranks", [4, 2])
def test_fsdp2_resumes_through_the_reader_on_as_many_and_on_fewer_ranks(
    n_ranks: int, fsdp: Callable[..., None]
) -> None:
    fsdp("resume", n_ranks)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Runs parts of fsdp_resume.py on gloo processes; what was saved on 4 is slimmed once."""
    root = tmp_path_factory.mktemp("fsdp")
    script = Path(__file__).parent / "fsdp_resume.py"

    def run(part: str, n_ranks: int) -> None:
        command = [sys.executable, script, part, str(n_ranks), root]
        subprocess.run(command, check=True, timeout=300)

    run("save", 4)
    slim(root / "run", root / "store", min_saving=0)
    return run
