"""torch loads what ``slimckpt export`` writes, with ``weights_only=True``."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from mindspore_bytes import record
from sample_files import SAMPLES
from trees import body

import slimckpt


def flat(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors and arrays of an object, by their path in it."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    if isinstance(value, np.ndarray):  # of numpy's generator
        return {prefix: torch.from_numpy(value)}
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    found: dict[str, torch.Tensor] = {}
    for key, inner in items:
        found |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def require_equal(ours: dict[str, Any], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, there in theirs.items():
        here = ours[name]
        assert (here.dtype, here.shape, here.stride()) == (there.dtype, there.shape, there.stride())
        same = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (here, there)]
        assert torch.equal(*same), name


@pytest.mark.parametrize("slimmed", [False, True])
def test_tensors_are_those_of_the_originals_and_stay_tied(slimmed: bool, tmp_path: Path) -> None:
    source = SAMPLES / "torch_ddp4"
    if slimmed:
        slimckpt.slim(source, tmp_path / "store", min_saving=0)
    result = slimckpt.export(tmp_path / "store" if slimmed else source, tmp_path / "out", "torch")
    assert len(result.files) == 4
    tied = 0
    for file in result.files:
        ours = torch.load(tmp_path / "out" / file.path, weights_only=True)
        theirs = flat(torch.load(source / file.path, weights_only=False))
        require_equal(ours, theirs)
        for one in theirs:
            for other in theirs:
                shared = theirs[one].untyped_storage()._cdata == (
                    theirs[other].untyped_storage()._cdata
                )
                here = ours[one].untyped_storage()._cdata == ours[other].untyped_storage()._cdata
                tied += here and one != other
                assert shared == here, (one, other)
    assert tied


def test_views_with_strides_and_dtypes_of_all_kinds(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    state = {
        "all": base,
        "turned": base.t(),
        "every_second": base[::2, 1::3],
        "bf16": torch.randn(7, 5).to(torch.bfloat16),
        "fp8": torch.randn(7, 5).to(torch.float8_e4m3fn),
        "u16": torch.arange(5).to(torch.uint16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "none": torch.zeros(0, 4),
    }
    (tmp_path / "run").mkdir()
    torch.save(state, tmp_path / "run" / "state.bin")
    slimckpt.export(tmp_path / "run", tmp_path / "out", "torch")
    ours = torch.load(tmp_path / "out" / "state.pt", weights_only=True)
    require_equal(ours, state)
    ours["all"][0, 1] = -1
    assert ours["turned"][1, 0] == -1 and ours["every_second"][0, 0] == -1


def test_a_large_tensor_of_mindspore_comes_through_whole(tmp_path: Path) -> None:
    raw = body(7, 20 * 1024 * 1024)
    path = tmp_path / "run" / "rank_0" / "net-1_1.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(record("w", "BFloat16", [1024, len(raw) // 2048], raw))
    slimckpt.export(tmp_path / "run", tmp_path / "out", "torch")
    (found,) = torch.load(tmp_path / "out" / "rank_0" / "net-1_1.pt", weights_only=True).values()
    assert found.dtype == torch.bfloat16
    assert found.view(torch.uint8).numpy().tobytes() == raw
