"""``slimckpt.frameworks.paddle`` where Paddle is not installed, or too old."""

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from sample_files import SAMPLES

from slimckpt.errors import FrameworkMissingError
from slimckpt.frameworks import paddle

CKPT = SAMPLES / "paddle_dp4" / "ckpt"
CALLS = [paddle.load, paddle.tensors]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_without_paddle_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    monkeypatch.setitem(sys.modules, "paddle", None)
    with pytest.raises(FrameworkMissingError, match=r"pip install 'slimckpt\[paddle\]'") as caught:
        call(CKPT, file="rank_00/model.pdparams")
    assert isinstance(caught.value, ImportError)
    assert "Paddle 2.6 or newer" in str(caught.value)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("version", ["2.5.2", "2.5.0rc1", "1.8.5"])
def test_a_paddle_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, call: Callable[..., Any]
) -> None:
    old = ModuleType("paddle")
    old.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paddle", old)
    with pytest.raises(FrameworkMissingError, match=f"paddle is {version}; .* 2.6 or newer"):
        call(CKPT, file="rank_00/model.pdparams")


@pytest.mark.parametrize("version", ["2.6.2", "3.0.0-beta2", "3.3.1.post120", "0.0.0"])
def test_newer_ones_and_builds_of_the_development_branch_will_do(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    new = ModuleType("paddle")
    new.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paddle", new)
    assert paddle.imported() is new


def test_importing_the_module_imports_no_framework() -> None:
    program = "import sys, slimckpt.frameworks.paddle; print('paddle' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"
