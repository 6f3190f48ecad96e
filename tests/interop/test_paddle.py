"""What Paddle itself writes goes through slimckpt and is loaded by Paddle again.

Truth are the tensors in memory that were saved. Run by ``scripts/interop``.
"""

import filecmp
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

import slimckpt
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify


class Array(NamedTuple):
    """A tensor by value: bits, not numbers, so that NaN equals itself."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def array(value: Any) -> Array:
    """The elements of a tensor in C order."""
    dtype = ""
    if isinstance(value, paddle.Tensor):
        dtype = str(value.dtype).removeprefix("paddle.")
        value = value.numpy()
    return Array(dtype or value.dtype.name, value.shape, value.tobytes())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    """All tensors and arrays in an object, by the Python subscript that leads to them."""
    if isinstance(value, paddle.Tensor | np.ndarray):
        yield path, array(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]")


def agrees(view: Any, value: Any) -> None:
    """Assert that a view has the tensors of an object, all of them and nothing else."""
    expected = dict(leaves(value))
    assert set(view) == set(expected)
    for path, wanted in expected.items():
        found = view[path]
        if wanted.dtype == "float8_e4m3fn":  # Paddle itself writes and loads it as int8
            wanted = wanted._replace(dtype="int8")
        assert Array(found.dtype.name, found.shape, found.tobytes()) == wanted, path


def tensor(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    return paddle.to_tensor(RANDOM.standard_normal(shape).astype(np.float32)).astype(dtype)


DTYPES = (
    "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64",
    "float8_e4m3fn", "int16", "int32", "int64", "int8", "uint8",
)  # fmt: skip
RANDOM = np.random.default_rng(5)


def state_dict() -> dict[str, paddle.Tensor]:
    """All values are tensors: Paddle's first writer, which keeps arrays and a table of names."""
    found = {dtype: tensor(30, 40, dtype=dtype) for dtype in DTYPES}
    found["transposed"] = tensor(30, 41).t()
    found["slice"] = tensor(50, 60)[:, 7:19]
    found["scalar"] = paddle.to_tensor(2.5)
    found["true"], found["also true"] = paddle.to_tensor([True]), paddle.to_tensor([True])
    found["empty"] = paddle.zeros([0, 4])
    found["tied"] = found["float32"]
    found["größe.日本"] = tensor(300)
    return found


def nested() -> dict[str, Any]:
    """Anything else: Paddle's second writer, which keeps names with arrays."""
    weight = tensor(40, 50, dtype="bfloat16")
    return {
        "model": {"weight": weight, "bias": tensor(300)},
        "list": [tensor(7, 100), {"deep": tensor(300).t()}],
        "tied": weight,
        "numpy": np.arange(600, dtype=np.int16).reshape(20, 30),
        "step": 7,
        "name": "text",
    }


def optimizer_states() -> dict[str, Any]:
    """AdamW of bfloat16 parameters, which have master weights, and of float32 ones."""
    found: dict[str, Any] = {}
    for name, dtype in (("mixed", "bfloat16"), ("plain", "float32")):
        layer = paddle.nn.Sequential(paddle.nn.Embedding(40, 16), paddle.nn.Linear(16, 30))
        layer.to(dtype=dtype)
        optimizer = paddle.optimizer.AdamW(
            parameters=layer.parameters(), multi_precision=dtype == "bfloat16"
        )
        # What step() does first; the step itself has no kernel for bfloat16 on the CPU.
        block = paddle.base.framework.default_main_program().global_block()
        optimizer._create_accumulators(block, layer.parameters())
        for moments in optimizer._accumulators.values():
            for moment in moments.values():
                moment.set_value(tensor(*moment.shape))
        found[name] = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
    return found


def adamw() -> dict[str, Any]:
    """A state of one optimizer, as ``.pdopt``."""
    found: dict[str, Any] = optimizer_states()["mixed"]["optimizer"]
    assert "master_weights" in found
    return found


CONTENTS = [state_dict, nested, optimizer_states, adamw]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content.__name__)
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_file_has_the_tensors_that_were_saved(
    tmp_path: Path, content: Callable[[], Any], protocol: int
) -> None:
    value = content()
    for rank in range(2):  # the same twice, so that there is something to gain
        path = tmp_path / "run" / f"rank_{rank}" / "model.pdparams"
        path.parent.mkdir(parents=True)
        paddle.save(value, str(path), protocol=protocol)
    check_round_trip(tmp_path, {f"rank_{rank}/model.pdparams": value for rank in range(2)})


def check_round_trip(parent: Path, truth: dict[str, Any]) -> None:
    """Slim the run, look at both, restore it, and load what was restored."""
    run, store, back = parent / "run", parent / "store", parent / "back"
    slim(run, store, min_saving=0)
    assert verify(store, against=run).safe
    slimckpt.restore(store, back)
    for root in (run, store):
        with slimckpt.open(root) as checkpoint:
            for path, value in truth.items():
                agrees(checkpoint.files[path].by_path, value)
    for path in truth:
        assert filecmp.cmp(run / path, back / path, shallow=False)
        first, second = paddle.load(str(run / path)), paddle.load(str(back / path))
        assert dict(leaves(second)) == dict(leaves(first))


def test_a_training_of_four_ranks_is_stored_once(tmp_path: Path) -> None:
    layer = paddle.nn.Sequential(paddle.nn.Embedding(200, 32), paddle.nn.Linear(32, 60))
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    layer(paddle.arange(8)).sum().backward()
    optimizer.step()
    trainer = {"epoch": 3, "rng": paddle.get_rng_state(), "loss": tensor(1)}
    truth: dict[str, Any] = {}
    for rank in range(4):
        folder = tmp_path / "run" / f"rank_{rank}"
        for name, value in {
            "model.pdparams": layer.state_dict(),
            "model.pdopt": optimizer.state_dict(),
        }.items():
            paddle.save(value, str(folder / name))
            truth[f"rank_{rank}/{name}"] = value
        paddle.save(trainer, str(folder / "trainer.pdstate"))
    check_round_trip(tmp_path, truth)
    weight = layer[0].weight.numpy().tobytes()
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert sum(path.read_bytes().count(weight) for path in files) == 1
    with slimckpt.open(tmp_path / "store") as checkpoint:
        found = checkpoint.files["rank_2/trainer.pdstate"]["loss"]
        assert found.tobytes() == trainer["loss"].numpy().tobytes()


def test_pieces_of_arrays_over_the_limit_are_whole_tensors(tmp_path: Path) -> None:
    """Paddle cuts arrays of 1 GiB below protocol 4; here by its own function at less."""
    value = {"big": np.arange(5000, dtype=np.float32).reshape(50, 100), "small": np.ones(4)}
    pieces = cut(dict(value), limit=700)
    for rank in range(2):
        path = tmp_path / "run" / f"rank_{rank}" / "model.pdparams"
        path.parent.mkdir(parents=True)
        paddle.save(pieces, str(path), protocol=2)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for root in ("run", "store"):
        with slimckpt.open(tmp_path / root) as checkpoint:
            view = checkpoint.files["rank_1/model.pdparams"]
            assert view["big"].shape == (50, 100)
            assert view["big"].tobytes() == value["big"].tobytes()


def cut(value: dict[str, Any], limit: int) -> dict[str, Any]:
    """As ``_unpack_saved_dict`` of ``paddle/framework/io_utils.py`` does at 2**30 - 1 bytes."""
    flat = value["big"].flatten()
    names = []
    for number, start in enumerate(range(0, flat.size, limit)):
        names.append(f"big@@.{number}")
        value[names[-1]] = flat[start : start + limit]
    value["UnpackBigParamInfor@@"] = {
        "big": {"OriginShape": value.pop("big").shape, "slices": names}
    }
    return value


def test_a_file_in_binary_format_is_kept_whole(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("a.pdtensor", "b.pdtensor"):
        paddle.save(tensor(300), str(tmp_path / "run" / name), use_binary_format=True)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    slimckpt.restore(tmp_path / "store", tmp_path / "back")
    first = paddle.load(str(tmp_path / "run" / "a.pdtensor"))
    second = paddle.load(str(tmp_path / "back" / "a.pdtensor"))
    assert array(paddle.to_tensor(np.array(first))) == array(paddle.to_tensor(np.array(second)))


@pytest.mark.parametrize("safetensors", [False, True])
def test_what_save_state_dict_wrote_is_whole(tmp_path: Path, safetensors: bool) -> None:
    value = {
        "embed.weight": tensor(50, 16),
        "fc.weight": tensor(16, 33, dtype="bfloat16"),
        "norm.weight": tensor(16),
        "moment.0": tensor(50, 16),
    }
    if not safetensors:
        value["small"] = tensor(20, 60, dtype="float8_e4m3fn")
        value["step"] = paddle.to_tensor(9)
    for step in (1, 2):
        options = {"safetensors": True} if safetensors else {}
        dist.save_state_dict(value, str(tmp_path / "run" / f"step_{step}"), **options)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    assert verify(tmp_path / "store", against=tmp_path / "run").safe
    suffix = "safetensors" if safetensors else "distcp"
    (name,) = (path.name for path in (tmp_path / "run" / "step_1").glob(f"*.{suffix}"))
    for root in ("run", "store"):
        with slimckpt.open(tmp_path / root) as checkpoint:
            assert checkpoint.steps == (1, 2)
            for step in checkpoint.steps:
                view = checkpoint.files[f"step_{step}/{name}"]
                assert set(view) == set(value)
                for key, wanted in value.items():
                    found = view[key]
                    assert found.dtype.name == array(wanted).dtype, key
                    assert (found.shape, found.tobytes()) == array(wanted)[1:], key
    slimckpt.restore(tmp_path / "store", tmp_path / "back")
    loaded = {key: paddle.zeros_like(wanted) for key, wanted in value.items() if key != "small"}
    if not safetensors:
        dist.load_state_dict(loaded, str(tmp_path / "back" / "step_2"))
        assert {k: array(v) for k, v in loaded.items()} == {k: array(value[k]) for k in loaded}
    for path in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        back = tmp_path / "back" / path.relative_to(tmp_path / "run")
        assert filecmp.cmp(path, back, shallow=False)
        assert os.stat(path).st_mode == os.stat(back).st_mode
