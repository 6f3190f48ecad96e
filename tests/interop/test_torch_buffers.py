"""Tensors of torch as memory that slimckpt copies into. Truth is what was saved."""

from pathlib import Path

import numpy as np
import pytest
import torch

import slimckpt

DTYPES = (
    *(torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool),
    torch.complex64,
)
WITHOUT_NUMPY = (torch.bfloat16, torch.float8_e4m3fn)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("dtype", DTYPES + WITHOUT_NUMPY, ids=str)
def test_a_tensor_of_torch_is_filled_through_numpy(
    tmp_path: Path, dtype: torch.dtype, backend: str
) -> None:
    torch.manual_seed(0)
    saved = torch.randint(0, 2, (700, 513)).to(dtype)
    torch.save({"w": saved, "turned": saved.T}, tmp_path / "model.pt")
    with slimckpt.open(tmp_path, backend) as ckpt:  # type: ignore[arg-type]
        view = ckpt.rank(0)
        for name, wanted in (("w", saved), ("turned", saved.T)):
            out = torch.empty(wanted.shape, dtype=dtype)
            view.copy_into(name, out.view(torch.uint8).flatten().numpy())
            assert torch.equal(out.view(torch.uint8), wanted.contiguous().view(torch.uint8))
            if dtype in DTYPES:
                out = torch.zeros(wanted.shape[::-1], dtype=dtype)
                view.copy_into(name, out.T.numpy())
                assert torch.equal(out.T, wanted)


def test_a_tensor_of_torch_itself_is_refused_with_the_way_on(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with (
        slimckpt.open(tmp_path) as ckpt,
        pytest.raises(slimckpt.SlimckptError, match=r"found Tensor; .*tensor\.numpy\(\)"),
    ):
        ckpt.rank(0).copy_into("w", torch.empty(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a GPU")
def test_pinned_memory_is_filled(tmp_path: Path) -> None:
    saved = torch.arange(1_000_000, dtype=torch.float32)
    torch.save({"w": saved}, tmp_path / "model.pt")
    out = torch.empty(saved.shape, pin_memory=True)
    with slimckpt.open(tmp_path) as ckpt:
        ckpt.rank(0).copy_into("w", out.numpy())
    assert out.is_pinned() and np.array_equal(out.numpy(), saved.numpy())
