"""``slimckpt.frameworks.torch`` where torch is not installed, or too old."""

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from sample_files import SAMPLES

from slimckpt.errors import FrameworkMissingError
from slimckpt.frameworks import torch

CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (torch.load, {"path": SAMPLES / "torch_ddp4", "rank": 1}),
    (torch.state_dict, {"path": SAMPLES / "torch_ddp4", "rank": 1}),
    (torch.StorageReader, {"path": SAMPLES / "fsdp_dcp_4"}),
]
each_call = pytest.mark.parametrize("call,arguments", CALLS, ids=lambda value: "")


def torch_of(version: str) -> ModuleType:
    found = ModuleType("torch")
    found.__version__ = version  # type: ignore[attr-defined]
    return found


@each_call
def test_without_torch_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(FrameworkMissingError, match=r"pip install 'slimckpt\[torch\]'") as caught:
        call(**arguments)
    assert isinstance(caught.value, ImportError)
    assert "torch 2.4 or newer" in str(caught.value)


@each_call
@pytest.mark.parametrize("version", ["2.3.1+cu121", "2.0.0a0+gitc263bd4", "1.13.1"])
def test_a_torch_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    call: Callable[..., Any],
    arguments: dict[str, Any],
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_of(version))
    with pytest.raises(FrameworkMissingError, match=r"torch is .* 2\.4 or newer") as caught:
        call(**arguments)
    assert f"torch is {version};" in str(caught.value)


@pytest.mark.parametrize(
    "version", ["2.4.0", "2.10.1+cpu", "3.0.0a0+git0123456", "2.13.0.dev20260101"]
)
def test_newer_ones_will_do(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    new = torch_of(version)
    monkeypatch.setitem(sys.modules, "torch", new)
    assert torch.imported() is new


def test_a_torch_without_its_distributed_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds with USE_DISTRIBUTED=0 have no torch.distributed.checkpoint to import."""
    monkeypatch.setitem(sys.modules, "torch", torch_of("2.13.0"))
    monkeypatch.delitem(sys.modules, "slimckpt.frameworks.torch_dcp", raising=False)
    with pytest.raises(FrameworkMissingError, match=r"2\.13\.0 .*built with torch.distr"):
        torch.StorageReader(SAMPLES / "fsdp_dcp_4")


def test_importing_the_module_imports_no_framework() -> None:
    program = "import sys, slimckpt.frameworks.torch; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"
