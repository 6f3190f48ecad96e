"""Where MindSpore is absent or too old, errors say what to do."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mindspore_bytes import record

import slimckpt
from slimckpt.errors import FrameworkMissingError
from slimckpt.frameworks.mindspore import imported, load_checkpoint, tensors

CALLS: list[Callable[..., Any]] = [load_checkpoint, tensors]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rank_0" / "net-1_1.ckpt"
    path.parent.mkdir()
    path.write_bytes(record("half", "BFloat16", [2], bytes(4)))
    return path


@pytest.mark.parametrize("call", CALLS)
def test_without_mindspore_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, file: Path, call: Callable[..., Any]
) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", None)
    with pytest.raises(ImportError, match=r"pip install 'slimckpt\[mindspore\]'") as caught:
        call(file)
    assert isinstance(caught.value, slimckpt.SlimckptError)
    assert "needs MindSpore 2.7 or newer" in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
def test_a_mindspore_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, file: Path, call: Callable[..., Any]
) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", SimpleNamespace(__version__="2.6.0rc1"))
    with pytest.raises(FrameworkMissingError, match=r"mindspore is 2\.6\.0rc1; .* needs MindS"):
        call(file)


@pytest.mark.parametrize("version", ["2.7.0", "2.7rc1", "2.10.0", "3.0.0.dev20260101"])
def test_newer_ones_will_do(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    new = SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "mindspore", new)
    assert imported() is new


def test_the_loader_is_imported_without_its_framework() -> None:
    program = "import slimckpt.frameworks.mindspore, sys; print('mindspore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
