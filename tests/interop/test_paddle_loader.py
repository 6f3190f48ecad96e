"""``slimckpt.frameworks.paddle`` beside Paddle's own ``load``, which is the truth here.

Run by ``scripts/interop``.
"""

import gc
import os
import pickle
import re
import shutil
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from sample_files import SAMPLES
from test_paddle import CONTENTS, cut, tensor

import slimckpt
from slimckpt.errors import (
    DroppedTensorError,
    NotUnderstoodError,
    SlimckptError,
    StoreDamagedError,
    UnknownGlobalError,
    UsageError,
)
from slimckpt.frameworks import paddle as loader
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify

GENERATED = re.compile(r"(generated_tensor|eager_tmp)_\d+")
FOLDERS = (
    "paddle_dp4", "paddle_proto_variants", "paddle_distcp_4", "paddle26_distcp_4",
    "paddle_distcp_4_uneven", "paddle_distcp_4_bad5",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def files_of(folder: str) -> list[str]:
    root = SAMPLES / folder / "ckpt"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


SAMPLE_FILES = [
    (folder, file)
    for folder in FOLDERS
    for file in files_of(folder)
    if file != "binary_format.pdtensor"
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each sample, slimmed."""
    found = {}
    for folder in FOLDERS:
        found[folder] = tmp_path_factory.mktemp("stores") / folder
        slim(SAMPLES / folder / "ckpt", found[folder], min_saving=0)
    return found


def same(found: Any, wanted: Any, again: Any, where: str = "") -> None:
    """Assert that an object is what Paddle loaded, down to types, order, names and bits.

    ``again`` is what Paddle loads a second time: names that differ there are not from the file.
    """
    assert type(found) is type(wanted), where
    if isinstance(wanted, paddle.Tensor):
        for of in ("dtype", "shape", "strides", "stop_gradient", "persistable", "is_leaf"):
            assert getattr(found, of) == getattr(wanted, of), f"{where}: {of}"
        assert str(found.place) == str(wanted.place), where
        if wanted.name == again.name:
            assert found.name == wanted.name, where
        else:
            assert GENERATED.fullmatch(found.name), where
        assert found.numpy().tobytes() == wanted.numpy().tobytes(), where
    elif isinstance(wanted, np.ndarray):
        same_arrays(found, wanted, where)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            same(found[key], wanted[key], again[key], f"{where}[{key!r}]")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            same(found[number], value, again[number], f"{where}[{number}]")
    elif type(wanted).__name__ == "GeneratorState":
        assert found.__getstate__() == wanted.__getstate__(), where
    else:
        assert found == wanted, where


def same_arrays(found: Any, wanted: Any, where: str) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
    assert found.flags.writeable and found.flags.aligned, where
    assert found.flags.f_contiguous == wanted.flags.f_contiguous, where
    assert found.tobytes() == wanted.tobytes(), where


def like_paddle(root: Path, file: str, original: Path, **options: bool) -> None:
    """Assert that a file is loaded as Paddle loads the original."""
    if file.endswith(".safetensors"):
        options_of_paddle = {**options, "safetensors": True}
    else:
        options_of_paddle = options
    wanted, again = (paddle.load(str(original), **options_of_paddle) for _ in range(2))
    same(loader.load(root, file=file, **options), wanted, again)


@pytest.mark.parametrize(
    "options", [{}, {"return_numpy": True}, {"keep_name_table": True}], ids=str
)
@pytest.mark.parametrize(("folder", "file"), SAMPLE_FILES)
def test_files_of_samples_are_what_paddle_loads(
    stores: dict[str, Path], folder: str, file: str, options: dict[str, bool]
) -> None:
    original = SAMPLES / folder / "ckpt" / file
    for root in (stores[folder], SAMPLES / folder / "ckpt"):
        if (folder, file) == ("paddle26_distcp_4", "0.metadata"):
            # Its classes moved with Paddle 3.2.
            with pytest.raises(ImportError):
                paddle.load(str(original), **options)
            with pytest.raises(UnknownGlobalError, match=r"checkpoint\S*metadata.Metadata"):
                loader.load(root, file=file, **options)
        else:
            like_paddle(root, file, original, **options)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_paths_ranks_and_backends_lead_to_the_same_object(
    stores: dict[str, Path], backend: Any
) -> None:
    store, file = stores["paddle_dp4"], "rank_02/trainer_state.pdstate"
    original = str(SAMPLES / "paddle_dp4" / "ckpt" / file)
    wanted, again = paddle.load(original), paddle.load(original)
    for found in (
        loader.load(f"{store}/{file}", backend=backend),
        loader.load(original, backend=backend),
        loader.load(store, file=file.encode(), backend=backend),
        loader.load(store, file=file, backend=backend, check=True),
    ):
        same(found, wanted, again)
    with pytest.raises(UsageError, match="5 files of paddle"):
        loader.load(store, rank=2, backend=backend)


def test_the_only_file_of_a_rank_needs_no_name(tmp_path: Path) -> None:
    values = [{"w": tensor(40, 50)} for _ in range(2)]
    for rank, value in enumerate(values):
        paddle.save(value, str(tmp_path / f"run/step_7/rank_{rank}/model.pdparams"))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for rank, value in enumerate(values):
        found = loader.load(tmp_path / "store", rank=rank, step=7)
        assert found["w"].numpy().tobytes() == value["w"].numpy().tobytes()


def odd() -> dict[str, Any]:
    """What else a user may save: other containers, plain arrays beside tensors, scalars."""
    return {
        "ordered": OrderedDict(b=tensor(20, 20), a=OrderedDict()),
        "tuples": ((tensor(300).t(), "text"), ("name and", np.arange(300)), ()),
        "numpy": {"beside": np.asfortranarray(np.ones((20, 30))), "scalar": np.float32(2.5)},
        "sets": {1, 2, "three"},
        "large text": "ä" * 70000,
        "none": None,
        "number": 2**70,
        "complex": 1 + 2j,
        "empty": [tensor(0, 4), []],
        "generators": paddle.get_rng_state(),
    }


def scheduled() -> dict[str, Any]:
    """The state of an optimizer with a scheduler of learning rates."""
    rate = paddle.optimizer.lr.LinearWarmup(
        paddle.optimizer.lr.NoamDecay(64, 10), warmup_steps=3, start_lr=0.0, end_lr=0.1
    )
    layer = nn.Linear(20, 30)
    optimizer = paddle.optimizer.AdamW(rate, parameters=layer.parameters())
    layer(tensor(2, 20)).sum().backward()
    optimizer.step()
    rate.step()
    found: dict[str, Any] = optimizer.state_dict()
    assert found["LR_Scheduler"]
    return found


def plain_arrays() -> list[Any]:
    """No tensor at all: Paddle makes tensors of the arrays."""
    return [
        np.arange(600, dtype=np.uint16).reshape(20, 30),
        [np.ones((20, 20)), np.arange(300, dtype=">f4")],
    ]


def single() -> Any:
    return tensor(30, 40, dtype="bfloat16")


FRESH = [*CONTENTS, odd, scheduled, plain_arrays, single]


@pytest.mark.parametrize("content", FRESH, ids=lambda content: content.__name__)
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_fresh_files_are_what_paddle_loads(
    tmp_path: Path, content: Callable[[], Any], protocol: int
) -> None:
    for rank in range(2):
        path = tmp_path / "run" / f"rank_{rank}" / "saved"
        paddle.save(content(), str(path), protocol=protocol)
    shutil.copy(path, path.with_name("copy"))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    assert verify(tmp_path / "store", against=tmp_path / "run").safe
    for options in ({}, {"return_numpy": True}, {"keep_name_table": True}):
        for root in (tmp_path / "store", tmp_path / "run"):
            for file in ("rank_0/saved", "rank_1/saved", "rank_1/copy"):
                like_paddle(root, file, tmp_path / "run" / file, **options)


@pytest.mark.parametrize("protocol", [2, 3])
def test_arrays_that_paddle_cut_are_put_together(tmp_path: Path, protocol: int) -> None:
    value = {"big": np.arange(5000, dtype=np.float32).reshape(50, 100), "small": np.ones(400)}
    (tmp_path / "run").mkdir()
    for name in "ab":
        paddle.save(cut(dict(value), limit=700), str(tmp_path / "run" / name), protocol=protocol)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for root in (tmp_path / "run", tmp_path / "store"):
        like_paddle(root, "b", tmp_path / "run" / "b")
        found = loader.load(root, file="b", return_numpy=True)
        assert list(found) == ["small", "big"]
        assert np.array_equal(found["big"], value["big"])


def test_only_the_first_of_several_objects_is_loaded(tmp_path: Path) -> None:
    first, second = ({"w": tensor(20, 20)} for _ in range(2))
    for number, value in enumerate((first, second)):
        paddle.save(value, str(tmp_path / f"{number}"))
    (tmp_path / "run").mkdir()
    both = (tmp_path / "0").read_bytes() + (tmp_path / "1").read_bytes()
    (tmp_path / "run" / "both").write_bytes(both)
    like_paddle(tmp_path / "run", "both", tmp_path / "run" / "both")


def test_what_paddle_refuses_is_refused_by_name(tmp_path: Path) -> None:
    for name, value in {
        "frozen": [frozenset({1}), np.ones(3)],
        "bytes": {"a": b"\x00\xff" * 600, "b": np.ones(3)},
        "bytearray": {"a": bytearray(3), "b": ("name", np.ones(3))},
        "texts": [np.array(["a", "b"])],
        "objects": [np.array([1, None], object)],
    }.items():
        hostile(tmp_path / "run", value, name=name)
        with pytest.raises((NotImplementedError, ValueError)):
            paddle.load(str(tmp_path / "run" / name))
        with pytest.raises(NotUnderstoodError, match=f"{name}: paddle.load refuses"):
            loader.load(tmp_path / "run", file=name)


def test_safetensors_of_every_dtype_are_what_paddle_loads(tmp_path: Path) -> None:
    """Paddle takes U16 for bfloat16, and gives tensors in the order of their bytes."""
    sizes = {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
        "BF16": 2, "I32": 4, "F32": 4, "I64": 8, "F64": 8, "C64": 8,
    }  # fmt: skip
    header, body = {}, bytearray()
    for dtype, size in sizes.items():
        # Of empty ones Paddle 3.3 frees the same place twice, and ends the process.
        for name, shape in ((dtype, [20, 30]), (f"{dtype} scalar", [])):
            content = np.random.default_rng(size).bytes(size * int(np.prod(shape)))
            content = bytes(byte & 1 for byte in content) if dtype == "BOOL" else content
            offsets = [len(body), len(body) + len(content)]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            body += content
    listed = str(dict(reversed(header.items()))).replace("'", '"').encode()
    listed += b" " * (-len(listed) % 8)
    (tmp_path / "run").mkdir()
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / "run" / name).write_bytes(struct.pack("<Q", len(listed)) + listed + body)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for root in (tmp_path / "store", tmp_path / "run"):
        like_paddle(root, "b.safetensors", tmp_path / "run" / "b.safetensors")
    found = loader.load(tmp_path / "store", file="a.safetensors", return_numpy=True)
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        assert found[name].tobytes() == bytes(body[first:last]), name
        assert found[name].shape == tuple(entry["shape"]) and found[name].flags.writeable


def test_in_static_mode_paddle_has_its_own_kind_of_tensor(stores: dict[str, Path]) -> None:
    store, file = stores["paddle_dp4"], "rank_00/model_fp32.pdparams"
    paddle.enable_static()
    try:
        found = loader.load(store, file=file)
        wanted = paddle.load(str(SAMPLES / "paddle_dp4" / "ckpt" / file))
        assert {type(value).__name__ for value in wanted.values()} <= {"DenseTensor", "LoDTensor"}
        for name, value in wanted.items():
            assert type(found[name]) is type(value)
            assert np.array(found[name]).tobytes() == np.array(value).tobytes()
        with pytest.raises(UsageError, match="disable_static"):
            loader.tensors(store, file=file)
    finally:
        paddle.disable_static()


def model() -> tuple[Any, Any, Any]:
    """A layer, its optimizer and its schedule."""
    paddle.seed(3)
    layer = nn.Sequential(nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50))
    rate = paddle.optimizer.lr.NoamDecay(32, 4, 1.0)
    return layer, paddle.optimizer.AdamW(rate, parameters=layer.parameters()), rate


def train(layer: Any, optimizer: Any, rate: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        words = paddle.to_tensor(np.random.default_rng(step).integers(0, 50, (8, 6)))
        loss = nn.functional.cross_entropy(layer(words), (words + 1) % 50)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
        losses.append(float(loss))
    return losses


def test_training_goes_on_with_the_losses_of_the_original(tmp_path: Path) -> None:
    with paddle.utils.unique_name.guard():
        layer, optimizer, rate = model()
        train(layer, optimizer, rate, range(4))
        for rank in range(2):
            paddle.save(layer.state_dict(), str(tmp_path / f"run/rank_{rank}/model.pdparams"))
            paddle.save(optimizer.state_dict(), str(tmp_path / f"run/rank_{rank}/model.pdopt"))
        slim(tmp_path / "run", tmp_path / "store", min_saving=0)
        truth = train(layer, optimizer, rate, range(4, 9))

    def resumed(weights: Any, state: Any) -> list[float]:
        with paddle.utils.unique_name.guard():
            layer, optimizer, rate = model()
            layer.set_state_dict(weights)
            optimizer.set_state_dict(state)
            return train(layer, optimizer, rate, range(4, 9))

    files = ("rank_1/model.pdparams", "rank_1/model.pdopt")
    own = [paddle.load(str(tmp_path / "run" / file)) for file in files]
    assert resumed(*own) == truth
    for root in (tmp_path / "store", tmp_path / "run"):
        weights, state = (loader.load(root, file=file) for file in files)
        assert resumed(loader.tensors(root, file=files[0]), state) == truth
        weights, state = (loader.load(root, file=file) for file in files)
        assert resumed(weights, state) == truth
    assert verify(tmp_path / "store", against=tmp_path / "run").safe


def test_equal_tensors_are_independent_and_tied_ones_tied(tmp_path: Path) -> None:
    weight = tensor(600, 600)
    value = {"a": weight, "tied": weight, "equal": weight.clone(), "flipped": weight.t()}
    for rank in range(2):
        paddle.save([value, "not a state dict"], str(tmp_path / f"run/rank_{rank}/model.pdparams"))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    before = weight.numpy().copy()
    for root in (tmp_path / "store", tmp_path / "run"):
        found, other = (loader.tensors(root, rank=0) for _ in range(2))
        assert set(found) == {"0.a", "0.tied", "0.equal", "0.flipped"}
        found["0.a"].add_(paddle.ones_like(weight))
        assert (found["0.a"].numpy() == before + 1).all()
        assert (found["0.tied"].numpy() == before + 1).all()
        assert (found["0.equal"].numpy() == before).all()
        assert (found["0.flipped"].numpy() == before.T).all()
        assert all((other[name].numpy() == before).all() for name in ("0.a", "0.tied", "0.equal"))

        # As Paddle's own loading has it, there tensors are never tied.
        (loaded, _), (wanted, _) = (
            loader.load(root, rank=0),
            paddle.load(str(tmp_path / "run/rank_0/model.pdparams")),
        )
        for each in (loaded, wanted):
            each["a"].add_(paddle.ones_like(weight))
            assert (each["a"].numpy() == before + 1).all()
            assert (each["tied"].numpy() == before).all() and each["tied"].name == each["a"].name
            assert (each["equal"].numpy() == before).all()
    assert verify(tmp_path / "store", against=tmp_path / "run").safe


def test_arrays_that_the_file_holds_twice_are_one_as_with_paddle(tmp_path: Path) -> None:
    array = np.arange(5000.0)
    (tmp_path / "run").mkdir()
    for name in "ab":
        paddle.save({"x": [array, array], "t": tensor(3)}, str(tmp_path / "run" / name))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    found = loader.load(tmp_path / "store", file="a", return_numpy=True)["x"]
    wanted = paddle.load(str(tmp_path / "run" / "a"), return_numpy=True)["x"]
    assert wanted[0] is wanted[1] and found[0] is found[1]


@pytest.mark.parametrize("rank", range(4))
def test_tensors_by_name_have_the_bits_of_the_arrays(stores: dict[str, Path], rank: int) -> None:
    store = stores["paddle_dp4"]
    for name in ("model.pdparams", "model.pdopt", "model_fp32.pdparams", "trainer_state.pdstate"):
        file = f"rank_{rank:02}/{name}"
        found = loader.tensors(store, file=file)
        with slimckpt.open(store) as checkpoint:
            view = checkpoint.files[file]
            assert list(found) == list(view)
            for key, array in view.items():
                assert str(found[key].dtype) == f"paddle.{array.dtype.name}", key
                assert found[key].shape == list(array.shape), key
                assert found[key].numpy().tobytes() == array.tobytes(), key


def test_tensors_of_other_formats_and_dtypes_that_paddle_lacks(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    values = {
        "u16": np.arange(65536, dtype=np.uint16).reshape(256, 256),
        "flipped": np.asfortranarray(np.arange(600.0).reshape(20, 30)),
        "big-endian": np.arange(300, dtype=">i4"),
        "scalar": np.array(7, np.uint16),
        "half": np.ones((20, 30), np.float16),
        "none": np.zeros((3, 0), np.float32),
        "true": np.array([True, False] * 600),
    }
    for name in "ab":
        np.savez(tmp_path / "run" / f"{name}.npz", **values)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for root in (tmp_path / "store", tmp_path / "run"):
        found = loader.tensors(root, file="a.npz")
        assert list(found) == list(values)
        for name, value in values.items():
            if value.dtype == np.uint16:
                assert found[name].shape == [*value.shape, 2]
                assert found[name].dtype == paddle.uint8
                assert found[name].numpy().tobytes() == value.tobytes()
            else:
                assert found[name].numpy().dtype == value.dtype.newbyteorder("=")
                assert found[name].shape == list(value.shape)
                assert (found[name].numpy() == value).all()


def mappings(root: Path) -> int:
    """How many mappings of files under a directory this process has."""
    return sum(f"{root}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_tensors_keep_the_mapping_alive_and_let_go_of_it(tmp_path: Path) -> None:
    value = {"f32": tensor(600, 600), "bf16": tensor(600, 600, dtype="bfloat16"), "n": 1}
    value["tied"] = value["bf16"]
    for name in ("a", "b"):
        paddle.save(value, str(tmp_path / "run" / name))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for call in (loader.load, loader.tensors):
        found = call(tmp_path / "store", file="a")
        gc.collect()
        assert mappings(tmp_path / "store") == 1
        for name in ("f32", "bf16", "tied"):
            assert found[name].numpy().tobytes() == value[name].numpy().tobytes()
        kept = found["bf16"].reshape([-1])
        del found
        gc.collect()
        assert mappings(tmp_path / "store") == 1
        assert kept.numpy().tobytes() == value["bf16"].numpy().tobytes()
        kept.fill_(0.0)
        del kept
        gc.collect()
        assert mappings(tmp_path / "store") == 0
    assert verify(tmp_path / "store", against=tmp_path / "run").safe


def private_kib() -> int:
    """Memory that is this process's own."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_tensors_share_the_mapped_memory(tmp_path: Path, dtype: str) -> None:
    value = {f"{number}": tensor(1024, 2048).astype(dtype) for number in range(4)}
    nbytes = 4 * value["0"].numpy().nbytes
    for name in ("a", "b"):
        paddle.save(value, str(tmp_path / "run" / name))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for call in (loader.load, loader.tensors):
        before = private_kib()
        found = call(tmp_path / "store", file="a")
        assert private_kib() - before < nbytes / 1024 / 4
        for key, wanted in value.items():
            assert found[key].numpy().tobytes() == wanted.numpy().tobytes()


def test_dropped_tensors_are_named_and_the_others_can_be_had(tmp_path: Path) -> None:
    layer, optimizer, rate = model()
    train(layer, optimizer, rate, range(2))
    both = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()}
    for number in range(2):
        paddle.save(both, str(tmp_path / f"run/step_{number}/rank_0/both.pdparams"))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0, drop=["optimizer"])
    file = "step_1/rank_0/both.pdparams"
    with pytest.raises(DroppedTensorError, match=r"both.pdparams: 4 .*moment.*by name: .*tensors"):
        loader.load(tmp_path / "store", file=file)
    found = loader.tensors(tmp_path / "store", file=file)
    with slimckpt.open(tmp_path / "run") as checkpoint:
        names = set(checkpoint.files[file])
    gone = {name for name in names if "moment" in name} - {
        name for name in found if found[name].numpy().nbytes < 1024
    }
    assert len(gone) == 4 and set(found) == names - gone
    assert found["model.0.weight"].numpy().tobytes() == layer[0].weight.numpy().tobytes()


def test_a_damaged_store_is_an_error(tmp_path: Path) -> None:
    value = tensor(600, 600)
    for number, name in enumerate("ab"):
        paddle.save({"w": value, "n": number}, str(tmp_path / "run" / name))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    container = max(files, key=lambda path: path.stat().st_size)
    content = container.read_bytes()
    container.chmod(0o644)
    middle = content.index(value.numpy().tobytes()) + 5000
    container.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    for call in (loader.load, loader.tensors):
        with pytest.raises(StoreDamagedError, match="'w'"):
            call(tmp_path / "store", file="a", check=True)
    container.write_bytes(content[:-5000])
    for call in (loader.load, loader.tensors):
        with pytest.raises(StoreDamagedError, match="truncated"):
            call(tmp_path / "store", file="a")
    container.unlink()
    for call in (loader.load, loader.tensors):
        with pytest.raises(StoreDamagedError, match="No such file"):
            call(tmp_path / "store", file="a")


class Calls:
    """Pickled as a call of ``what``."""

    def __init__(self, what: Any, *args: Any) -> None:
        self.found = what, args

    def __reduce__(self) -> Any:
        return self.found


def hostile(folder: Path, value: Any, protocol: int = 4, name: str = "saved") -> None:
    """Write what Paddle itself would not."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(pickle.dumps(value, protocol))


def evil(marker: str) -> dict[str, Any]:
    array = np.ones(3)
    return {
        "system": Calls(os.system, f"touch {marker}"),
        "eval": Calls(eval, f"open({marker!r}, 'w')"),
        "eval of data": Calls(eval, f"open({marker!r}, 'w')", {"data": array}),
        "eval of more": Calls(eval, "data", {"data": array, "more": array}),
        "eval of no array": Calls(eval, "data", {"data": "text"}),
        "exec": Calls(exec, f"open({marker!r}, 'w')"),
        "getattr": Calls(getattr, "text", "upper"),
        "load": Calls(paddle.load, marker),
        "layer": Calls(nn.Linear, 3, 4),
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", evil(""))
def test_nothing_that_a_file_asks_for_is_run(tmp_path: Path, name: str, protocol: int) -> None:
    marker = tmp_path / "marker"
    hostile(tmp_path / "run", {"w": np.ones(600), "x": evil(str(marker))[name]}, protocol)
    with pytest.raises(NotUnderstoodError, match=r"saved: ") as caught:
        loader.load(tmp_path / "run", file="saved")
    if "eval" not in name and name != "getattr":
        assert isinstance(caught.value, UnknownGlobalError)
        assert "allow=[" in str(caught.value) or "posix" in str(caught.value)
    assert not marker.exists()


class Configuration:
    """A class of the user's own."""

    def __init__(self) -> None:
        self.width, self.scale = 3, np.ones(600)


def test_classes_that_are_allowed_are_made(tmp_path: Path) -> None:
    value = {"configuration": Configuration(), "w": tensor(20, 20)}
    paddle.save(value, str(tmp_path / "run" / "saved"))
    with pytest.raises(UnknownGlobalError, match=r"allow=\[Configuration\]"):
        loader.load(tmp_path / "run", file="saved")
    found = loader.load(tmp_path / "run", file="saved", allow=[Configuration])
    assert found["configuration"].width == 3
    assert (found["configuration"].scale == 1).all()
    assert found["w"].numpy().tobytes() == value["w"].numpy().tobytes()


def test_a_generator_without_a_state_is_refused(tmp_path: Path) -> None:
    """Its memory would be anything."""
    kind = type(paddle.get_rng_state()[0])
    module, name = kind.__module__.encode(), kind.__name__.encode()
    (tmp_path / "run").mkdir()
    begun = b"\x80\x02c" + module + b"\n" + name + b"\n)\x81"
    (tmp_path / "run" / "saved").write_bytes(begun + b".")
    with pytest.raises(SlimckptError, match=r"saved: .*never given its state"):
        loader.load(tmp_path / "run", file="saved")
    (tmp_path / "run" / "text").write_bytes(begun + b"X\x01\x00\x00\x00ab.")
    with pytest.raises(NotUnderstoodError, match=r"text: .*GeneratorState refused the state"):
        loader.load(tmp_path / "run", file="text")


def test_few_bytes_do_not_become_many(tmp_path: Path) -> None:
    laughs: Any = ["ha"]
    for _ in range(40):
        laughs = [laughs, laughs]
    hostile(tmp_path / "run", laughs)
    with pytest.raises(NotUnderstoodError, match="too often referred to"):
        loader.load(tmp_path / "run", file="saved")
    pieces = {
        "p": np.ones(100),
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (-1,), "slices": ("p",) * 1000}},
    }
    hostile(tmp_path / "run", pieces)
    with pytest.raises(SlimckptError, match="pieces of its tensors are not their own"):
        loader.load(tmp_path / "run", file="saved")


def test_nonsense_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    deep: Any = []
    for _ in range(400):
        deep = (deep,)
    itself: list[Any] = [1]
    itself.append(itself)
    for value in (
        {"StructuredToParameterName@@": {"missing": "name"}},
        {"StructuredToParameterName@@": [1]},
        {"w": np.ones(3), "StructuredToParameterName@@": {"w": 5}},
        {"UnpackBigParamInfor@@": {"w": {"OriginShape": (3,), "slices": ["missing"]}}},
        {"UnpackBigParamInfor@@": {"w": 3}},
        itself,
    ):
        hostile(tmp_path / "run", value)
        with pytest.raises(SlimckptError, match="saved"):
            loader.load(tmp_path / "run", file="saved")
    hostile(tmp_path / "run", deep)
    assert loader.load(tmp_path / "run", file="saved") == deep


def test_binary_files_and_those_of_others_say_what_to_do(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    for root in (stores["paddle_proto_variants"], SAMPLES / "paddle_proto_variants" / "ckpt"):
        with pytest.raises(NotUnderstoodError, match=r"binary_format.*restore it and load it"):
            loader.load(root, file="binary_format.pdtensor")
    (tmp_path / "run").mkdir()
    np.save(tmp_path / "run" / "array.npy", np.ones(600))
    with pytest.raises(NotUnderstoodError, match=r"expected a file of paddle.save, found npy"):
        loader.load(tmp_path / "run", file="array.npy")
    assert (loader.tensors(tmp_path / "run", file="array.npy")["array"].numpy() == 1).all()
