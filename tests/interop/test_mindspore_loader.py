"""MindSpore starts from a slim checkpoint as from the original files.

Truth is ``mindspore.load_checkpoint`` on the originals. Run by ``scripts/interop``.
"""

import hashlib
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
import ml_dtypes
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore_bytes import map_record, record
from safetensors_bytes import safetensors_file

import slimckpt
from slimckpt.frameworks.mindspore import load_checkpoint, tensors

SAMPLES = Path(__file__).parents[1] / "samples"
FILES = sorted(
    path.relative_to(SAMPLES)
    for path in SAMPLES.glob("ms_*/**/*")
    if path.suffix in (".ckpt", ".safetensors")
    and path.relative_to(SAMPLES).parts[0] not in ("ms_encrypted", "ms_strategies")
    and "strategy" not in path.name
)
KEEP_ALL = {"min_saving": 0}
"""Options of ``slim`` with which small files are rewritten too."""


class Value(NamedTuple):
    """What there is to see of a Parameter. MindSpore numbers those that have no name."""

    kind: type
    name: str
    dtype: str
    shape: tuple[int, ...]
    content: bytes
    flags: tuple[Any, ...]


def value(found: Any) -> Value | str:
    if isinstance(found, str):
        return found
    flags = found.requires_grad, found.layerwise_parallel, found.parallel_optimizer, found.sliced
    name = re.sub(r"^Parameter#\d+$", "Parameter#", found.name)
    content = bytes(found.get_bytes())
    return Value(type(found), name, str(found.dtype), tuple(found.shape), content, flags)


def values(loaded: dict[str, Any]) -> tuple[type, list[tuple[str, Value | str]]]:
    """A loaded dict with the order of its names."""
    return type(loaded), [(name, value(found)) for name, found in loaded.items()]


def own(path: Path, **options: Any) -> dict[str, Any]:
    return mindspore.load_checkpoint(str(path), format=path.suffix[1:], **options)


def address(tensor: Any) -> int:
    return tensor.asnumpy().__array_interface__["data"][0]


def mapped_file(address: int) -> str | None:
    """The file of which memory is a mapping, as the kernel says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, path = (*line.split(maxsplit=5), "")[:6]
        first, last = (int(end, 16) for end in addresses.split("-"))
        if first <= address < last:
            return path or None
    raise AssertionError("no such memory")


def digests(root: Path) -> dict[Path, str]:
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Net(nn.Cell):
    """Two layers that start alike, of which Adam makes different ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first = nn.Dense(64, 64, weight_init=Tensor(noise(seed, 64, 64) / 8))
        self.second = nn.Dense(64, 64, weight_init=Tensor(noise(seed, 64, 64) / 8))
        self.scale = Parameter(Tensor(np.float32(1.5)), name="scale")

    def construct(self, x: Tensor) -> Tensor:
        return self.second(ops.relu(self.first(x))) * self.scale


class Training:
    """A small model with Adam, on data of its own."""

    def __init__(self, seed: int) -> None:
        self.net = Net(seed)
        self.loss = nn.MSELoss()
        self.adam = nn.Adam(self.net.trainable_params(), learning_rate=0.01)
        self.gradients = mindspore.value_and_grad(
            lambda x, y: self.loss(self.net(x), y), None, self.net.trainable_params()
        )

    def step(self, number: int) -> bytes:
        x, y = Tensor(noise(100 + number, 16, 64)), Tensor(noise(200 + number, 16, 64))
        loss, gradients = self.gradients(x, y)
        self.adam(gradients)
        return loss.asnumpy().tobytes()

    def steps(self, first: int, count: int) -> list[bytes]:
        return [self.step(number) for number in range(first, first + count)]

    def state(self) -> list[tuple[str, Value | str]]:
        return [(p.name, value(p)) for p in self.adam.get_parameters()] + [
            (name, value(p)) for name, p in self.net.parameters_and_names()
        ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two ranks that trained alike, in both formats, and their slim checkpoint."""
    root = tmp_path_factory.mktemp("trained")
    training = Training(1)
    training.steps(0, 3)
    for rank in range(2):
        for kind in ("ckpt", "safetensors"):
            path = root / "run" / f"rank_{rank}" / f"net-1_3.{kind}"
            path.parent.mkdir(parents=True, exist_ok=True)
            extra: dict[str, Any] = {"epoch_num": 1, "step_num": 3, "rank": rank}
            if kind == "ckpt":
                extra["note"] = "größe 日本"
            mindspore.save_checkpoint(
                training.adam, str(path), format=kind, append_dict=extra, crc_check=True
            )
    done = slimckpt.slim(root / "run", root / "slim")
    assert done.rewritten == 4
    return root / "run", root / "slim"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_sample_loads_as_its_own_loader_loads_it(tmp_path: Path, file: Path) -> None:
    sample, inner = SAMPLES / file.parts[0], Path(*file.parts[1:])
    slim = tmp_path / "slim"
    assert slimckpt.slim(sample, slim, **KEEP_ALL).rewritten > 0
    expected = values(own(SAMPLES / file))
    assert expected[1]
    for root in (sample, slim):
        assert values(load_checkpoint(root, file=inner)) == expected
        assert values(load_checkpoint(root / inner)) == expected


def test_a_rank_needs_no_file_where_it_has_one(tmp_path: Path) -> None:
    sample = SAMPLES / "ms_dp8_ckpt"
    slimckpt.slim(sample, tmp_path / "slim", **KEEP_ALL)
    for rank in range(8):
        expected = values(own(sample / f"rank_{rank}" / "net-1_1.ckpt"))
        for root in (sample, tmp_path / "slim"):
            assert values(load_checkpoint(root, rank)) == expected
            assert values(load_checkpoint(root, rank, "1_1", backend="pread")) == expected
            found = tensors(root, rank)
            assert set(found) == {name for name, one in expected[1] if isinstance(one, Value)}
            for name, one in expected[1]:
                if isinstance(one, Value):
                    tensor = found[name]
                    assert bytes(tensor.get_bytes()) == one.content
                    assert (str(tensor.dtype), tuple(tensor.shape)) == (one.dtype, one.shape)


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_training_goes_on_with_the_same_losses(run: tuple[Path, Path], kind: str) -> None:
    original, slim = run
    before = digests(slim)
    file = f"rank_1/net-1_3.{kind}"
    truth = Training(2)
    loaded = own(original / file)
    left = mindspore.load_param_into_net(truth.adam, loaded)
    assert left == ([], [name for name in loaded if name not in dict(truth.state())])
    losses = truth.steps(3, 4)
    assert losses != Training(2).steps(3, 4)
    for root in (original, slim):
        again = Training(2)
        found = load_checkpoint(root, file=file)
        assert mindspore.load_param_into_net(again.adam, found) == left
        assert again.steps(3, 4) == losses
        assert again.state() == truth.state()
    assert digests(slim) == before


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_net_is_loaded_as_by_its_own_loader(run: tuple[Path, Path], kind: str) -> None:
    original, slim = run
    file = f"rank_0/net-1_3.{kind}"
    truth = Training(3)
    expected = values(own(original / file, net=truth.net))
    assert truth.state() != Training(3).state()
    for root in (original, slim):
        again = Training(3)
        assert values(load_checkpoint(root, file=file, net=again.net)) == expected
        assert again.state() == truth.state()


def test_a_net_of_other_shapes_or_dtypes_fails_as_with_its_own_loader(
    run: tuple[Path, Path],
) -> None:
    original, slim = run
    file = "rank_0/net-1_3.ckpt"

    class Other(nn.Cell):
        def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
            super().__init__()
            self.weight = Parameter(Tensor(np.zeros(shape), dtype), name="first.weight")

    for shape, dtype in [((64, 32), mindspore.float32), ((64, 64), mindspore.float16)]:
        with pytest.raises(RuntimeError, match=r"first\.weight"):
            own(original / file, net=Other(shape, dtype), strict_load=True)
        with pytest.raises(RuntimeError, match=r"first\.weight"):
            load_checkpoint(slim, file=file, net=Other(shape, dtype), strict_load=True)
    truth, again = Other((64, 64), mindspore.float16), Other((64, 64), mindspore.float16)
    own(original / file, net=truth)
    load_checkpoint(slim, file=file, net=again)
    assert value(again.weight) == value(truth.weight)


def test_a_safetensors_file_without_redundancy_says_so_to_the_net(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rank_0" / "net-1_1.safetensors"
    path.parent.mkdir(parents=True)
    mindspore.save_checkpoint(Net(0), str(path), format="safetensors", remove_redundancy=True)
    assert values(load_checkpoint(path.parents[1], 0)) == values(own(path))
    for loads in (own, load_checkpoint):
        with pytest.raises((TypeError, RuntimeError, ValueError)) as caught:
            loads(path, net=Net(1))
        assert type(caught.value) is TypeError and "stand_alone" in str(caught.value)


CHOICES: list[dict[str, Any]] = [
    {"filter_prefix": "moment1"},
    {"filter_prefix": ["moment1", "moment2."]},
    {"specify_prefix": "first"},
    {"specify_prefix": ("moment1.first", "second"), "filter_prefix": "moment1.first.b"},
    {"specify_prefix": "first", "choice_func": lambda name: name.startswith("second")},
    {"choice_func": lambda name: name.startswith("second")},
    {"choice_func": lambda name: name == "note"},
]


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
@pytest.mark.parametrize("choice", CHOICES)
def test_choices_are_those_of_its_own_loader(
    run: tuple[Path, Path], kind: str, choice: dict[str, Any]
) -> None:
    original, slim = run
    file = f"rank_0/net-1_3.{kind}"
    try:
        expected = values(own(original / file, **choice))
    except ValueError:
        with pytest.raises(ValueError, match=r"rank_0/net-1_3.*no parameter is left"):
            load_checkpoint(slim, file=file, **choice)
    else:
        assert values(load_checkpoint(slim, file=file, **choice)) == expected


@pytest.mark.parametrize("prefix", [[], "", ["first", ""], ["first", 1]])
def test_a_prefix_that_is_none_is_an_error(run: tuple[Path, Path], prefix: Any) -> None:
    with pytest.raises(slimckpt.SlimckptError, match="prefix"):
        load_checkpoint(run[1], file="rank_0/net-1_3.ckpt", filter_prefix=prefix)


def test_of_names_that_are_there_twice_the_later_counts(tmp_path: Path) -> None:
    one, two = noise(1, 300).tobytes(), noise(2, 300).tobytes()
    path = tmp_path / "run" / "rank_0" / "net-1_1.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(
        record("a", "Float32", [300], one)
        + record("b", "Float32", [300], two)
        + record("a", "Float32", [20, 15], two)
    )
    slimckpt.slim(tmp_path / "run", tmp_path / "slim", **KEEP_ALL)
    expected = values(own(path))
    assert [name for name, _ in expected[1]] == ["a", "b"]
    only = values(own(path, filter_prefix="b"))
    assert only[1] == expected[1][:1]
    for root in (tmp_path / "run", tmp_path / "slim"):
        assert values(load_checkpoint(root, 0)) == expected
        assert values(load_checkpoint(root, 0, filter_prefix="b")) == only


REFUSED = {
    "two in a row": (
        record("a", "Float32", [2], bytes(8)) + record("a", "Float32", [2], bytes(8)),
        r"net-1_1\.ckpt: several entries in a row are named 'a'",
    ),
    "two strings in a row": (
        record("a", "str", [0], b"x\0\0\0") + record("a", "str", [0], b"y\0\0\0"),
        r"net-1_1\.ckpt: several entries in a row are named 'a'",
    ),
    "complex": (record("a", "Complex64", [2], bytes(16)), r"'a' is of type C64"),
    "unknown": (record("a", "HiFloat8", [2], bytes(2)), r"'a' is of type opaque:HiFloat8"),
    "map": (
        map_record("a", [("int32", [2], bytes(8)), ("float32", [2, 1], bytes(8))] * 2),
        r"'a' is of type opaque:MapParameter",
    ),
    "no text": (record("a", "str", [0], b"\xff" * 8), r"'a' is not UTF-32"),
    "half a text": (record("a", "str", [0], b"abcde"), r"'a' is not UTF-32"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_entries_of_which_no_parameter_can_be_made_are_named(tmp_path: Path, what: str) -> None:
    content, message = REFUSED[what]
    path = tmp_path / "run" / "rank_0" / "net-1_1.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(content + record("b", "Float32", [2], bytes(8)))
    with pytest.raises(slimckpt.SlimckptError, match=message):
        load_checkpoint(path)
    loaded = load_checkpoint(path, choice_func=lambda name: name != "a")
    assert values(loaded) == values(own(path, choice_func=lambda name: name != "a"))


DTYPES = [
    *(np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64),
    *(np.int64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16),
]


@pytest.fixture(scope="module")
def of_all_dtypes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One rank with a tensor of each dtype, of any bits."""
    root = tmp_path_factory.mktemp("dtypes")
    path = root / "run" / "rank_0" / "net-1_1.ckpt"
    path.parent.mkdir(parents=True)
    entries = []
    for dtype in map(np.dtype, DTYPES):
        bits = np.random.default_rng(dtype.itemsize).integers(0, 256, 4096, np.uint8)
        array = bits % 2 == 0 if dtype == np.bool_ else bits.view(dtype)
        entries.append({"name": dtype.name, "data": Tensor.from_numpy(array)})
    mindspore.save_checkpoint(entries, str(path))
    slimckpt.slim(root / "run", root / "slim", **KEEP_ALL)
    return path, root / "slim"


@pytest.mark.parametrize("name", [np.dtype(dtype).name for dtype in DTYPES])
def test_every_dtype_lies_in_the_mapped_store(of_all_dtypes: tuple[Path, Path], name: str) -> None:
    path, slim = of_all_dtypes
    expected = value(own(path, choice_func=lambda one: one == name)[name])
    parameter = load_checkpoint(slim, 0, choice_func=lambda one: one == name)[name]
    assert value(parameter) == expected
    assert mapped_file(address(parameter)).startswith(f"{slim}/")
    shared = tensors(slim, 0)
    assert bytes(shared[name].get_bytes()) == expected.content
    assert mapped_file(address(shared[name])).startswith(f"{slim}/")
    assert shared[name] is shared[name]
    assert type(shared[name]) is Tensor and str(shared[name].dtype) == expected.dtype


def test_a_tensor_that_does_not_lie_where_its_dtype_wants_it_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rank_0" / "net-1_1.ckpt"
    path.parent.mkdir(parents=True)
    for shift in range(4):
        path.write_bytes(record("n" * (1 + shift), "Float32", [300], noise(1, 300).tobytes()))
        found = tensors(path)["n" * (1 + shift)]
        assert address(found) % 4 == 0
        assert found.asnumpy().tobytes() == noise(1, 300).tobytes()


def update(tensor: Any) -> None:
    tensor[0, 0] = 42


def assign(tensor: Any) -> None:
    ops.assign(tensor, Tensor(np.full((300, 300), 42, np.float32)))


def add(tensor: Any) -> None:
    ops.assign_add(tensor, Tensor(np.full((300, 300), 42, np.float32)) - tensor)


UPDATES: list[Callable[[Any], None]] = [update, assign, add]


@pytest.mark.parametrize("change", UPDATES)
@pytest.mark.parametrize("load", [load_checkpoint, tensors])
def test_equal_tensors_stay_independent_and_no_file_changes(
    tmp_path: Path, load: Callable[..., Any], change: Callable[[Any], None]
) -> None:
    original, slim = tmp_path / "run", tmp_path / "slim"
    content = noise(5, 300, 300)
    for rank in range(2):
        path = original / f"rank_{rank}" / "net-1_1.ckpt"
        path.parent.mkdir(parents=True)
        entries = [{"name": name, "data": Tensor(content)} for name in ("one", "two")]
        mindspore.save_checkpoint(entries, str(path))
    assert slimckpt.slim(original, slim).store_nbytes < 2 * content.nbytes
    before = digests(tmp_path)
    for root in (original, slim):
        found, beside = load(root, 0), load(root, 1)
        change(found["one"])
        assert found["one"].asnumpy()[0, 0] == pytest.approx(42)
        for other in (found["two"], beside["one"], load(root, 0)["one"]):
            assert other.asnumpy().tobytes() == content.tobytes()
    assert digests(tmp_path) == before


def test_parameters_live_longer_than_the_checkpoint(run: tuple[Path, Path]) -> None:
    loaded = load_checkpoint(run[1], file="rank_0/net-1_3.ckpt")
    expected = values(own(run[0] / "rank_0/net-1_3.ckpt"))
    found = tensors(run[1], file="rank_0/net-1_3.ckpt")["first.weight"]
    np.random.default_rng(0).bytes(1 << 24)
    assert values(loaded) == expected
    assert bytes(found.get_bytes()) == dict(expected[1])["first.weight"].content


def test_tensors_are_of_files_of_any_format(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    fortran = np.asfortranarray(noise(1, 40, 30))
    swapped = noise(2, 500).astype(">f4")
    np.savez(run / "arrays.npz", fortran=fortran, swapped=swapped)
    eight = bytes(range(256)) * 8
    (run / "model.safetensors").write_bytes(
        safetensors_file(
            [
                ("c", "C64", [256], eight),
                ("eight", "F8_E4M3", [64, 32], eight),
                ("one", "F8_E5M2", [], b"\x3c"),
            ]
        )
    )
    slimckpt.slim(run, tmp_path / "slim", **KEEP_ALL)
    for root in (run, tmp_path / "slim"):
        found = tensors(root)
        assert set(found) == {"fortran", "swapped", "eight", "one", "c"}
        assert len(found) == 5
        assert "eight" in found and "nine" not in found
        np.testing.assert_array_equal(found["fortran"].asnumpy(), fortran)
        np.testing.assert_array_equal(found["swapped"].asnumpy(), swapped)
        assert found["eight"].dtype == mindspore.uint8
        assert found["eight"].asnumpy().tobytes() == eight and found["eight"].shape == (64, 32)
        assert found["one"].shape == () and int(found["one"]) == 0x3C
        assert found["c"].dtype == mindspore.complex64
        assert found["c"].asnumpy().tobytes() == eight
        with pytest.raises(slimckpt.SlimckptError, match="'c' is of type C64"):
            load_checkpoint(root, file="model.safetensors")
        with pytest.raises(slimckpt.SlimckptError, match=r"arrays\.npz.*found npz"):
            load_checkpoint(root, file="arrays.npz")


def test_tensors_travel_to_other_processes_by_path(tmp_path: Path) -> None:
    (tmp_path / "net.ckpt").write_bytes(record("w", "Float32", [2], bytes(8)))
    found = tensors(tmp_path, 0)
    found["w"][0] = 1  # in this process
    again = pickle.loads(pickle.dumps(found))
    assert list(again) == ["w"] and again["w"].asnumpy().tolist() == [0, 0]


def test_dropped_optimizer_state_is_named_or_left_out(run: tuple[Path, Path]) -> None:
    original, _ = run
    slim = original.parent / "weights only"
    dropped = slimckpt.slim(original, slim, drop=["optimizer"]).dropped
    assert {one.name for one in dropped} >= {"moment1.first.weight", "moment2.second.weight"}
    with pytest.raises(slimckpt.SlimckptError, match=r"rank_0/net-1_3\.ckpt.*'moment1\.first") as e:
        load_checkpoint(slim, file="rank_0/net-1_3.ckpt")
    assert isinstance(e.value, KeyError) and "filter_prefix" in str(e.value)
    choice = {"filter_prefix": ("moment1.", "moment2.")}
    expected = values(own(original / "rank_0/net-1_3.ckpt", **choice))
    assert values(load_checkpoint(slim, file="rank_0/net-1_3.ckpt", **choice)) == expected
    found = tensors(slim, file="rank_0/net-1_3.ckpt")
    assert "first.weight" in found and "moment1.first.weight" not in found
    with pytest.raises(KeyError, match="--drop"):
        found["moment1.first.weight"]


def test_arguments_that_name_no_file_say_which_there_are(run: tuple[Path, Path]) -> None:
    _, slim = run
    with pytest.raises(slimckpt.SlimckptError, match="no rank 7; there are ranks 0-1"):
        load_checkpoint(slim, 7)
    with pytest.raises(ValueError, match=r"2 files.*file=.*net-1_3\.ckpt.*net-1_3\.safetensors"):
        load_checkpoint(slim, 1)
    with pytest.raises(slimckpt.SlimckptError, match="no step"):
        load_checkpoint(slim, 1, "1_4")
    with pytest.raises(KeyError, match=r"no file 'rank_9/net-1_3\.ckpt'"):
        load_checkpoint(slim / "rank_9" / "net-1_3.ckpt")
    for call in (load_checkpoint, tensors):
        with pytest.raises(ValueError, match="leave out rank"):
            call(slim, 1, file="rank_1/net-1_3.ckpt")
        with pytest.raises(ValueError, match="leave out file"):
            call(slim / "rank_1/net-1_3.ckpt", file="rank_1/net-1_3.ckpt")


def test_encrypted_and_strategy_files_are_called_what_they_are() -> None:
    encrypted = SAMPLES / "ms_encrypted" / "net_AES-GCM.ckpt"
    with pytest.raises(slimckpt.SlimckptError, match=r"net_AES-GCM\.ckpt.*encrypted it with AES-G"):
        load_checkpoint(encrypted)
    with pytest.raises(slimckpt.SlimckptError, match="parallel strategy file"):
        load_checkpoint(SAMPLES / "ms_dp8_ckpt" / "strategy.ckpt")


@pytest.mark.parametrize("sound_too", [False, True])
def test_a_rank_with_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, sound_too: bool
) -> None:
    encrypted = tmp_path / "rank_0" / "secret-1_1.ckpt"
    encrypted.parent.mkdir()
    shutil.copy(SAMPLES / "ms_encrypted" / "net_AES-CBC.ckpt", encrypted)
    cut = tmp_path / "rank_1" / "net-1_1.ckpt"
    cut.parent.mkdir()
    cut.write_bytes((SAMPLES / "ms_edge" / "edge.ckpt").read_bytes()[:-5])
    if sound_too:
        for rank in range(2):
            shutil.copy(SAMPLES / "ms_edge" / "edge.ckpt", tmp_path / f"rank_{rank}/edge-1_1.ckpt")
    for rank, name, message in [(0, "secret", "encrypted it"), (1, "net", "truncated")]:
        with pytest.raises(ValueError, match=rf"rank_{rank}/{name}-1_1\.ckpt.*{message}"):
            load_checkpoint(tmp_path, rank)
    if sound_too:
        assert load_checkpoint(tmp_path, file="rank_1/edge-1_1.ckpt")["i"].asnumpy() == 3


def test_damage_is_found_where_it_is_looked_for(run: tuple[Path, Path], tmp_path: Path) -> None:
    original, sound = run
    slim = tmp_path / "slim"
    shutil.copytree(sound, slim)
    for path in slim.rglob("*.h5"):
        path.chmod(0o600)
    for kind in ("ckpt", "safetensors"):
        file = f"rank_0/net-1_3.{kind}"
        expected = values(own(original / file, crc_check=True))
        assert values(load_checkpoint(slim, file=file, crc_check=True)) == expected
    weight = own(original / "rank_0/net-1_3.ckpt")["first.weight"].get_bytes()
    (container,) = (path for path in slim.rglob("*.h5") if bytes(weight) in path.read_bytes())
    content = bytearray(container.read_bytes())
    content[content.index(weight) + 1000] ^= 1
    container.write_bytes(content)
    for kind in ("ckpt", "safetensors"):
        with pytest.raises(ValueError, match=rf"net-1_3\.{kind}.*CRC32"):
            load_checkpoint(slim, file=f"rank_0/net-1_3.{kind}", crc_check=True)
    with pytest.raises(slimckpt.SlimckptError, match=r"'first\.weight'"):
        load_checkpoint(slim, file="rank_0/net-1_3.ckpt", check=True)
    found = tensors(slim, file="rank_0/net-1_3.ckpt", check=True)
    assert bytes(found["scale"].get_bytes()) == dict(expected[1])["scale"].content
    with pytest.raises(slimckpt.SlimckptError, match=r"'first\.weight'"):
        found["first.weight"]
    assert not slimckpt.verify(slim).sound
    container.write_bytes(content[:-1000])
    with pytest.raises(slimckpt.SlimckptError, match=f"{container.name} looks truncated"):
        load_checkpoint(slim, file="rank_0/net-1_3.ckpt")
    with pytest.raises(slimckpt.SlimckptError, match=f"{container.name} looks truncated"):
        tensors(slim, file="rank_0/net-1_3.ckpt")["first.weight"]
