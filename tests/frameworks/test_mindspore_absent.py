"""Where MindSpore is absent, too old, or beside a numpy without its bfloat16, errors say so."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from mindspore_bytes import record

import slimckpt
from slimckpt.errors import FrameworkMissingError
from slimckpt.frameworks.mindspore import load_checkpoint, tensors

CALLS: list[Callable[..., Any]] = [load_checkpoint, tensors]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rank_0" / "net-1_1.ckpt"
    path.parent.mkdir()
    path.write_bytes(record("half", "BFloat16", [2], bytes(4)))
    return path


def of_version(version: str, error: Exception | None = None) -> SimpleNamespace:
    """A MindSpore in which no tensor can be made of an array."""

    def from_numpy(array: object) -> NoReturn:
        assert error
        raise error

    tensor = SimpleNamespace(from_numpy=from_numpy)
    return SimpleNamespace(__version__=version, Tensor=tensor, Parameter=None)


@pytest.mark.parametrize("call", CALLS)
def test_without_mindspore_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, file: Path, call: Callable[..., Any]
) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", None)
    with pytest.raises(ImportError, match=r"pip install 'slimckpt\[mindspore\]'") as caught:
        call(file)
    assert isinstance(caught.value, slimckpt.SlimckptError)
    assert "numpy 1.26 for bfloat16" in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
def test_a_mindspore_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, file: Path, call: Callable[..., Any]
) -> None:
    monkeypatch.setitem(sys.modules, "mindspore", of_version("2.6.0rc1"))
    with pytest.raises(FrameworkMissingError, match=r"mindspore is 2\.6\.0rc1; .* needs MindS"):
        call(file)


def test_a_numpy_without_bfloat16_is_named(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    error = TypeError("The Numpy bfloat16 data type is not supported now")
    monkeypatch.setitem(sys.modules, "mindspore", of_version("2.10.0", error))
    with pytest.raises(FrameworkMissingError, match=r"MindSpore 2\.10\.0.*numpy==1\.26") as caught:
        tensors(file)["half"]
    assert caught.value.__cause__ is error
    with pytest.raises(FrameworkMissingError, match=r"numpy==1\.26"):
        load_checkpoint(file)


def test_the_loader_is_imported_without_its_framework() -> None:
    program = "import slimckpt.frameworks.mindspore, sys; print('mindspore' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
