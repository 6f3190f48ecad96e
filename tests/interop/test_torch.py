"""What torch itself writes goes through slimckpt and is loaded by torch again.

Truth are the tensors in memory that were saved. Run by ``scripts/interop``.
"""

import filecmp
import io
import os
import re
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.serialization import config

import slimckpt
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify


class Array(NamedTuple):
    """A tensor by value: bits, not numbers, so that NaN equals itself."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


OPAQUE = "opaque"
"""What numpy has no dtype for: slimckpt has its bytes, and refuses to make an array of it."""
_OPAQUE = {
    "bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "complex32", "float4_e2m1fn_x2"
}  # fmt: skip
_AS = {"quint8": "uint8", "qint8": "int8", "qint32": "int32"}


def array(tensor: torch.Tensor) -> Array:
    """The elements of a dense tensor in C order, as they are meant."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        return Array(OPAQUE, tuple(tensor.shape), b"")
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.is_quantized:
        plain = plain.int_repr()
    nbytes = plain.numel() * plain.element_size()
    content = bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if nbytes else b""
    dtype = OPAQUE if dtype in _OPAQUE else _AS.get(dtype, dtype)
    return Array(dtype, tuple(tensor.shape), content)


def held(found: np.ndarray) -> Array:
    return Array(found.dtype.name, found.shape, found.tobytes())


def parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors that a tensor is made of, and what is added to its path for each."""
    layout = tensor.layout
    if hasattr(tensor, "_local_tensor"):  # DTensor
        yield "", tensor._local_tensor
    elif layout == torch.sparse_coo:
        yield from ((".indices", tensor._indices()), (".values", tensor._values()))
    elif layout in (torch.sparse_csr, torch.sparse_bsr):
        yield ".crow_indices", tensor.crow_indices()
        yield ".col_indices", tensor.col_indices()
        yield ".values", tensor.values()
    elif layout in (torch.sparse_csc, torch.sparse_bsc):
        yield ".ccol_indices", tensor.ccol_indices()
        yield ".row_indices", tensor.row_indices()
        yield ".values", tensor.values()
    elif tensor.is_nested and layout == torch.strided:
        yield ".buffer", tensor.values()
        yield ".sizes", tensor._nested_tensor_size()
        yield ".strides", tensor._nested_tensor_strides()
        yield ".offsets", tensor._nested_tensor_storage_offsets()
    else:
        yield "", tensor
        if tensor.is_quantized and tensor.qscheme() == torch.per_channel_affine:
            yield ".scales", tensor.q_per_channel_scales()
            yield ".zero_points", tensor.q_per_channel_zero_points()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    """All tensors and arrays in an object, by the Python subscript that leads to them."""
    if isinstance(value, torch.Tensor):
        yield from ((path + suffix, array(part)) for suffix, part in parts(value))
    elif isinstance(value, np.ndarray):
        yield path, Array(value.dtype.name, value.shape, value.tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]")


def agrees(view: Any, value: Any) -> None:
    """Assert that a view has the tensors of an object, all of them and nothing else."""
    expected = dict(leaves(value))
    assert set(view) | set(view.opaque) == set(expected)
    for path, wanted in expected.items():
        if wanted.dtype == OPAQUE:
            assert (view.info(path).shape, view.raw(path)) == wanted[1:], path
            with pytest.raises(TypeError):
                view[path]
        else:
            assert held(view[path]) == wanted, path


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


GENERATOR = torch.Generator().manual_seed(4)
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    - {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4},
    key=str,
)


def every_dtype(dtypes: Iterable[torch.dtype] = DTYPES) -> dict[str, torch.Tensor]:
    """Random bits in every dtype of torch, 1600 bytes each."""
    bits = torch.randint(0, 256, (1600,), dtype=torch.uint8, generator=GENERATOR)
    found = {}
    for dtype in dtypes:
        if re.search(r"int[1-7]$", str(dtype)):
            continue  # torch cannot save them
        raw = bits % 2 if dtype == torch.bool else bits
        found[str(dtype)] = raw.clone().view(dtype)
    return found


def old_dtypes() -> dict[str, torch.Tensor]:
    """Those that have a storage class of their own."""
    return every_dtype(torch.storage._dtype_to_storage_type_map().keys() & set(DTYPES))


def views() -> dict[str, Any]:
    base = random(40, 30)
    column = base[:, 3]
    return {
        "base": base,
        "rows": base[7:21],
        "column": column,
        "transposed": base.t(),
        "every other": base[::2, ::3],
        "overlapping": base.flatten().as_strided((10, 8), (3, 2), 5),
        "expanded": base[:1].expand(16, 30),
        "scalar": base[2, 2],
        "zero": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "empty view": base[:0],
        "tied": {"a": column, ("tuple", 1): base, 7: base},
        "alone": random(100, 100)[3:4],
        "five": random(2, 3, 4, 5, 6).permute(4, 2, 0, 3, 1),
    }


def sparse() -> dict[str, torch.Tensor]:
    dense = random(24, 16) * (torch.rand(24, 16, generator=GENERATOR) < 0.4)
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 5], [1, 1, 2]]), random(3, 6), (8, 3, 6)
        ),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((4, 4)),
        "bsc": dense.to_sparse_bsc((4, 4)),
    }


def nested() -> dict[str, torch.Tensor]:
    return {"nested": torch.nested.nested_tensor([random(3, 8), random(5, 8), random(1, 8)])}


def quantized() -> dict[str, torch.Tensor]:
    value = random(20, 32)
    scales = torch.rand(20, dtype=torch.float64, generator=GENERATOR) + 0.1
    found = {
        str(dtype): torch.quantize_per_tensor(value, 0.1, 3, dtype)
        for dtype in (torch.quint8, torch.qint8, torch.qint32)
    }
    found["channels"] = torch.quantize_per_channel(
        value, scales, torch.arange(20), axis=0, dtype=torch.qint8
    )
    return found


def marked() -> dict[str, torch.Tensor]:
    value = torch.complex(random(20, 20), random(20, 20))
    return {
        "plain": value,
        "conj": value.conj(),
        "conj of a slice": value[3:9, ::2].conj(),
        "neg": value.clone().conj().imag,
        "double": torch.complex(random(9).double(), random(9).double()).conj(),
    }


def containers() -> dict[Any, Any]:
    mapping: Any = defaultdict(list)
    mapping["many"] += [random(300), (random(2, 200), [random(300)])]
    attributed = nn.Parameter(random(33, 17))
    attributed.partition_dim = 1  # as Megatron does
    return {
        "ordered": OrderedDict(first=random(400), second=random(1)),
        "default": mapping,
        "numpy": np.arange(700, dtype=np.int16).reshape(7, 100),
        "fortran": np.asfortranarray(np.arange(800.0).reshape(20, 40)),
        "parameter": nn.Parameter(random(30, 30)),
        "attributed": attributed,
        "buffer": nn.Buffer(random(300)),
        "a.b": {"c'd": random(300), 'e"f\n': random(300), "日本": random(3)},
        -3: random(300),
        None: [1, "text", b"bytes" * 300, 2.5, True, torch.float16, torch.Size([3])],
        "parameters": nn.ParameterList([nn.Parameter(random(300))]).state_dict(),
        "meta": torch.empty(3, 4, device="meta"),
        "rng": torch.get_rng_state(),
    }


def trained() -> dict[str, Any]:
    model = nn.Sequential(
        nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 5)
    )
    found: dict[str, Any] = {}
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adafactor):
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.01, **options)
        model(torch.randint(0, 50, (8, 4), generator=GENERATOR)).sum().backward()
        optimizer.step()
        found[kind.__name__] = optimizer.state_dict()
    return {"model": model.state_dict(), "optimizer": found}


CONTENTS = [every_dtype, old_dtypes, views, sparse, nested, quantized, marked, containers, trained]


def as_zip(value: Any, path: Path, **options: Any) -> None:
    torch.save(value, path, **options)


def without_checksums(value: Any, path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, path)
    finally:
        torch.serialization.set_crc32_options(before)


def aligned(value: Any, path: Path) -> None:
    with config.patch("save.storage_alignment", 4096):
        torch.save(value, path)


def to_stream(value: Any, path: Path) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    path.write_bytes(stream.getvalue())


WRITERS: dict[str, Callable[[Any, Path], None]] = {
    "zip": as_zip,
    "zip protocol 3": lambda v, p: as_zip(v, p, pickle_protocol=3),
    "zip protocol 4": lambda v, p: as_zip(v, p, pickle_protocol=4),
    "zip protocol 5": lambda v, p: as_zip(v, p, pickle_protocol=5),
    "no checksums": without_checksums,
    "pages": aligned,
    "stream": to_stream,
    "legacy": lambda v, p: as_zip(v, p, _use_new_zipfile_serialization=False),
    "legacy protocol 4": lambda v, p: as_zip(
        v, p, _use_new_zipfile_serialization=False, pickle_protocol=4
    ),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content.__name__)
@pytest.mark.parametrize(
    "write",
    [pytest.param(write, id=name) for name, write in WRITERS.items()],
)
def test_a_file_has_the_tensors_that_were_saved(
    tmp_path: Path, write: Callable[[Any, Path], None], content: Callable[[], Any]
) -> None:
    if content in (nested, every_dtype) and write in (
        WRITERS["legacy"],
        WRITERS["legacy protocol 4"],
    ):
        pytest.skip("torch 2.13 cannot save or load these in the format before 1.6 itself")
    value = content()
    for rank in range(2):  # the same twice, so that there is something to gain
        path = tmp_path / "run" / f"rank_{rank}" / "model.pt"
        path.parent.mkdir(parents=True)
        write(value, path)
    check_round_trip(tmp_path, {f"rank_{rank}/model.pt": value for rank in range(2)})


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
    for path, value in truth.items():
        assert filecmp.cmp(run / path, back / path, shallow=False)
        loaded = torch.load(back / path, weights_only=False)
        assert dict(leaves(loaded)) == dict(leaves(value))


def test_a_pickled_module_is_read_without_its_class(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(40, 30), nn.TransformerEncoderLayer(32, 2, 64))
    (tmp_path / "run").mkdir()
    torch.save(module, tmp_path / "run" / "whole.pt")
    (tmp_path / "run" / "again.pt").write_bytes((tmp_path / "run" / "whole.pt").read_bytes())
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    wanted = sorted(array(tensor) for tensor in module.state_dict().values())
    for root in ("run", "store"):
        with slimckpt.open(tmp_path / root) as checkpoint:
            view = checkpoint.files["whole.pt"].by_path
            found = sorted(map(held, view.values()))
            assert found == wanted


class Colour(torch.Tensor):
    """A subclass, which is saved by name and with its attributes."""


def test_tensors_of_a_subclass_and_their_attributes_are_read(tmp_path: Path) -> None:
    value = {"colour": random(30, 30).as_subclass(Colour), "plain": random(300)}
    value["colour"].scale = random(400)
    (tmp_path / "run").mkdir()
    for name in ("a.pt", "b.pt"):
        torch.save(value, tmp_path / "run" / name)
    with slimckpt.open(tmp_path / "run") as checkpoint:
        view = checkpoint.files["a.pt"].by_path
        for path, tensor in {
            "['colour']": value["colour"],
            "['colour'].scale": value["colour"].scale,
            "['plain']": value["plain"],
        }.items():
            assert view[path].tobytes() == array(tensor.as_subclass(torch.Tensor)).content, path


def test_steps_of_a_trainer_with_a_frozen_base(tmp_path: Path) -> None:
    """As Hugging Face's Trainer lays them out: the base is stored once, whatever its format."""
    run = tmp_path / "run"
    base = {"embed.weight": random(200, 32), "layer.weight": random(64, 32)}
    truth: dict[str, Any] = {}
    for step in (10, 20, 30):
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        adapter = nn.Linear(32, 8)
        optimizer = torch.optim.AdamW(adapter.parameters())
        adapter(random(4, 32)).sum().backward()
        optimizer.step()
        weights = base | {f"lora.{k}": v.detach() for k, v in adapter.state_dict().items()}
        save_file(weights, folder / "model.safetensors")
        files = {"optimizer.pt": optimizer.state_dict(), "scheduler.pt": {"last_epoch": step}}
        for rank in range(2):
            files[f"rng_state_{rank}.pth"] = {"python": (3, (1, 2), None), "cpu": random(1264)}
        for name, value in files.items():
            torch.save(value, folder / name)
            truth[f"checkpoint-{step}/{name}"] = value
        truth[f"checkpoint-{step}/model.safetensors"] = weights
    slim(run, tmp_path / "store", min_saving=0)
    nbytes = base["embed.weight"].numpy().tobytes()
    stored = sum(p.read_bytes().count(nbytes) for p in (tmp_path / "store").rglob("*.h5"))
    assert stored == 1
    for root in (run, tmp_path / "store"):
        with slimckpt.open(root) as checkpoint:
            assert checkpoint.steps == (10, 20, 30)
            for step in checkpoint.steps:
                for rank in range(2):
                    view = checkpoint.step(step).rank(rank)
                    named = {
                        **truth[f"checkpoint-{step}/model.safetensors"],
                        "cpu": truth[f"checkpoint-{step}/rng_state_{rank}.pth"]["cpu"],
                    }
                    state = truth[f"checkpoint-{step}/optimizer.pt"]["state"]
                    for number, entry in state.items():
                        named |= {f"state.{number}.{key}": part for key, part in entry.items()}
                    assert set(view) == set(named)
                    for name, tensor in named.items():
                        found = view[name]
                        assert Array(found.dtype.name, found.shape, found.tobytes()) == array(
                            tensor
                        )


def test_a_file_that_would_run_code_is_read_and_runs_none(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    (tmp_path / "run").mkdir()
    weight = random(500)
    for name in ("a.pt", "b.pt"):
        torch.save({"trap": Trap(), "weight": weight}, tmp_path / "run" / name)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    slimckpt.restore(tmp_path / "store", tmp_path / "back")
    with slimckpt.open(tmp_path / "store") as checkpoint:
        assert checkpoint.files["a.pt"]["weight"].tobytes() == weight.numpy().tobytes()
    assert not (tmp_path / "sprung").exists()
