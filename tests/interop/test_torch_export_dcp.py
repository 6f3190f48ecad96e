"""torch.distributed.checkpoint loads what ``export --format dcp`` wrote.

Truth is what the frameworks that saved the samples hold. Run by ``scripts/interop``.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sample_files import SAMPLES, expected
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import slimckpt
from slimckpt.convert.dcp import export_dcp


def content(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(content(tensor)).hexdigest()


def empty_like(path: Path) -> dict[str, torch.Tensor]:
    """A flat state to load into, of what the metadata says."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    return {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }


def test_mindspore_ranks_are_loaded_by_torch(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = export_dcp(SAMPLES / "ms_dp8_ckpt", out)
    state = empty_like(out)
    assert set(state) == set(result.tensors)
    dcp.load(state, storage_reader=dcp.FileSystemReader(out), no_dist=True)
    truth = expected("ms_dp8_ckpt")["full_params"]
    for name, tensor in truth.items():
        assert list(state[name].shape) == tensor["shape"]
        assert sha(state[name]) == tensor["sha256"], name
    assert len(truth) == 45
    with slimckpt.open(SAMPLES / "ms_dp8_ckpt") as ckpt:
        for name in result.carried:
            assert content(state[name]) == ckpt.rank(0)[name].tobytes(), name
    texts: dict[str, Any] = {"note": ""}
    dcp.load(texts, storage_reader=dcp.FileSystemReader(out), no_dist=True)
    with slimckpt.open(SAMPLES / "ms_dp8_ckpt") as ckpt:
        assert texts["note"].encode("utf-32-le") == ckpt.rank(0).raw("note")


@pytest.mark.parametrize("stage", [1, 3])
def test_the_weights_of_deepspeed_become_a_file_of_torch(stage: int, tmp_path: Path) -> None:
    sample = f"deepspeed_zero{stage}_dp4"
    export_dcp(SAMPLES / sample, tmp_path / "out", only="weights")
    dcp_to_torch_save(tmp_path / "out", tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    truth = expected(sample)["fp32_state_dict_by_zero_to_fp32"]
    assert set(truth) <= set(found)
    for name, tensor in truth.items():
        assert str(found[name].dtype) == tensor["dtype"]
        assert (list(found[name].shape), sha(found[name])) == (tensor["shape"], tensor["sha256"])


def test_what_torch_saved_comes_back_through_slimckpt(tmp_path: Path) -> None:
    export_dcp(SAMPLES / "fsdp_dcp_4", tmp_path / "out")
    state = empty_like(tmp_path / "out")
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    truth = expected("fsdp_dcp_4")["full_tensors_after_dcp_to_torch_save"]["tensors"]
    assert len(truth) == len(state)
    for path, tensor in truth.items():
        name = ".".join(re.findall(r"\['?(.*?)'?\]", path))
        assert sha(state[name]) == tensor["sha256"], name


def test_every_dtype_of_torch_and_empty_tensors_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state: dict[str, torch.Tensor] = {
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(3.5),
        "mask": torch.tensor([True, False]),
    }
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.float8_e5m2, torch.complex64),
    ):
        state[str(dtype)] = torch.randn(5, 7).to(dtype)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16):
        state[str(dtype)] = torch.arange(12).reshape(3, 4).to(dtype)
    (tmp_path / "run").mkdir()
    torch.save(state, tmp_path / "run" / "model.pt")
    export_dcp(tmp_path / "run", tmp_path / "out")
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "out"), no_dist=True)
    for name, tensor in state.items():
        assert found[name].shape == tensor.shape and content(found[name]) == content(tensor), name
