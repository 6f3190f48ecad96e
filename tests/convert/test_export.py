"""Exported files, read back by other readers than the code that wrote them."""

import hashlib
import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from mindspore_bytes import record
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES
from trees import body

import slimckpt
from slimckpt.convert import blueprint
from slimckpt.convert.export import FORMATS
from slimckpt.errors import DestinationError, NoSpaceError, UnknownRankError, UsageError

DTYPES = (
    *("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"),
    *("F16", "BF16", "F32", "F64"),
)
"""Those that all formats have, but torch's oldest."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two ranks of safetensors with every common dtype, odd shapes and one large tensor."""
    for rank in (0, 1):
        tensors = [
            (f"block.{dtype}", dtype, [3, 5], body(number + rank, 15 * width(dtype)))
            for number, dtype in enumerate(DTYPES)
            if dtype != "BOOL"
        ]
        tensors += [
            ("mask", "BOOL", [3], b"\1\0\1"),
            ("scalar", "F32", [], body(90 + rank, 4)),
            ("große/tensor", "F32", [500, 700], body(91, 500 * 700 * 4)),
        ]
        path = tmp_path / "run" / f"rank_{rank}" / "net.part.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(safetensors_file(tensors))
    return tmp_path / "run"


def width(dtype: str) -> int:
    return 2 if dtype == "BF16" else max(int("".join(filter(str.isdigit, dtype)) or 8) // 8, 1)


def contents(root: Path, rank: int) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    with slimckpt.open(root) as ckpt:
        view = ckpt.rank(rank)
        return {
            name: (view.info(name).dtype, view.info(name).shape, view.raw(name)) for name in view
        }


def numpy_truth(tree: Path, rank: int) -> dict[str, np.ndarray]:
    """The original tensors, parsed here from the bytes of safetensors."""
    raw = (tree / f"rank_{rank}" / "net.part.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    names = {"BF16": ml_dtypes.bfloat16, "BOOL": np.bool_}
    found = {}
    for name, entry in json.loads(raw[8 : 8 + size]).items():
        low, high = entry["data_offsets"]
        kind = entry["dtype"]
        plain = {"F": "f", "I": "i", "U": "u"}[kind[0]] if kind not in names else ""
        dtype = np.dtype(names.get(kind) or f"<{plain}{width(kind)}")
        data = raw[8 + size + low : 8 + size + high]
        found[name] = np.frombuffer(data, dtype).reshape(entry["shape"])
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_exported_reads_back_equal(format: str, tree: Path, tmp_path: Path) -> None:
    skip = ["block.U16", "block.U32", "block.U64"] if format == "torch" else []
    store = tmp_path / "store"
    slimckpt.slim(tree, store)
    for source in (tree, store):
        target = tmp_path / f"out-{source.name}"
        result = slimckpt.export(source, target, format, skip=skip)
        ending = FORMATS[format].ending
        assert [file.path for file in result.files] == [
            f"rank_{rank}/net.part{ending}" for rank in (0, 1)
        ]
        assert {name for _, name, _ in result.left_out} == set(skip)
        for rank in (0, 1):
            path = target / f"rank_{rank}" / f"net.part{ending}"
            assert path.stat().st_size == result.files[rank].nbytes
            wanted = {n: v for n, v in contents(tree, rank).items() if n not in skip}
            found = contents(target, rank)
            if format == "npz":
                with slimckpt.open(target) as ckpt:
                    found["block.BF16"] = ("BF16", (3, 5), ckpt.rank(rank).raw("block.BF16"))
            assert found == wanted


def test_numpy_reads_npz(tree: Path, tmp_path: Path) -> None:
    slimckpt.export(tree, tmp_path / "out", "npz", ranks=[1])
    assert not (tmp_path / "out" / "rank_0").exists()
    path = tmp_path / "out" / "rank_1" / "net.part.npz"
    assert zipfile.ZipFile(path).testzip() is None
    truth = numpy_truth(tree, 1)
    with np.load(path) as found:
        assert set(found) == set(truth)
        for name, array in truth.items():
            here = found[name]
            if array.dtype == ml_dtypes.bfloat16:
                assert here.dtype == np.dtype("V2")
                here = here.view(ml_dtypes.bfloat16)
            assert here.dtype == array.dtype and here.shape == array.shape
            assert here.tobytes() == array.tobytes()


def test_h5py_reads_hdf5(tree: Path, tmp_path: Path) -> None:
    slimckpt.export(tree, tmp_path / "out", "hdf5")
    for rank in (0, 1):
        truth = numpy_truth(tree, rank)
        with h5py.File(tmp_path / "out" / f"rank_{rank}" / "net.part.h5") as file:
            assert set(file) == {name.partition("/")[0] for name in truth}
            for name, array in truth.items():
                dataset = file[name]
                assert dataset.shape == array.shape
                if array.dtype == ml_dtypes.bfloat16:
                    # libhdf5 converts it: every value of bfloat16 is one of float32.
                    here = np.empty(array.shape, np.float32)
                    dataset.read_direct(here)
                    wanted = array.astype(np.float32)
                    assert np.array_equal(here, wanted, equal_nan=True)
                else:
                    assert dataset.dtype == array.dtype
                    assert dataset[()].tobytes() == array.tobytes()


def test_safetensors_are_laid_out_as_the_format_says(tree: Path, tmp_path: Path) -> None:
    slimckpt.export(tree, tmp_path / "out", "safetensors")
    raw = (tmp_path / "out" / "rank_0" / "net.part.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert size % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
    truth = numpy_truth(tree, 0)
    assert set(header) == set(truth)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        low, high = entry["data_offsets"]
        assert low == end and raw[8 + size + low : 8 + size + high] == truth[name].tobytes()
        assert low % truth[name].itemsize == 0
        end = high
    assert 8 + size + end == len(raw)


def test_mindspore_files_come_back_byte_for_byte(tmp_path: Path) -> None:
    """MindSpore's own writer made these: strings, scalars, all of its dtypes."""
    source = SAMPLES / "ms_dp8_ckpt"
    slimckpt.export(source, tmp_path / "out", "mindspore")
    for path in sorted(source.glob("rank_*/*.ckpt")):
        assert (tmp_path / "out" / path.relative_to(source)).read_bytes() == path.read_bytes()


def test_a_resharded_store_is_exported(tmp_path: Path) -> None:
    slimckpt.reshard(
        SAMPLES / "ms_dp8_ckpt",
        tmp_path / "four",
        SAMPLES / "ms_reshard_8to4" / "strategy.ckpt",
    )
    result = slimckpt.export(tmp_path / "four", tmp_path / "out", "mindspore")
    assert [file.rank for file in result.files] == [0, 1, 2, 3]
    truth = json.loads((SAMPLES / "ms_reshard_8to4" / "expected.json").read_text())["files"]
    for rank, file in enumerate(result.files):
        assert file.path == f"step_1_1/rank_{rank}/tensors.ckpt"
        params = truth[f"rank_{rank}/net{rank}.ckpt"]["params"]
        with slimckpt.open(tmp_path / "out") as ckpt:
            view = ckpt.files[file.path]
            assert set(view) == set(params) and view.opaque == ("note",)
            for name, param in params.items():
                assert hashlib.sha256(view.raw(name)).hexdigest() == param["sha256"], name


def test_a_store_without_its_optimizer_is_exported(tmp_path: Path) -> None:
    source = tmp_path / "run" / "rank_0" / "net-1_1.ckpt"
    source.parent.mkdir(parents=True)
    weight = body(1, 8192)
    source.write_bytes(
        record("dense.weight", "Float32", [2048], weight)
        + record("moments.dense.weight", "Float32", [2048], body(2, 8192))
        + record("copy.weight", "Float32", [2048], weight)
    )
    slimckpt.slim(tmp_path / "run", tmp_path / "store", drop=["optimizer"], min_saving=0)
    result = slimckpt.export(tmp_path / "store", tmp_path / "out", "mindspore")
    assert [(name, "--drop" in why) for _, name, why in result.left_out] == [
        ("moments.dense.weight", True)
    ]
    assert (tmp_path / "out" / "rank_0" / "net-1_1.ckpt").read_bytes() == (
        record("dense.weight", "Float32", [2048], weight)
        + record("copy.weight", "Float32", [2048], weight)
    )


def test_only_weights_leaves_out_training_state_by_name(tmp_path: Path) -> None:
    tensors: list[Any] = [
        ("model.linear.weight", "F32", [4, 4], body(1, 64)),
        ("model.norm.weight", "F32", [4], body(2, 16)),
        ("model.norm.num_batches_tracked", "I64", [], body(3, 8)),
        ("model.linear.weight.exp_avg", "F32", [4, 4], body(4, 64)),
        ("learning_rate", "F32", [], body(5, 4)),
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes(safetensors_file(tensors))
    result = slimckpt.export(tmp_path / "run", tmp_path / "out", "npz", only="weights")
    with np.load(tmp_path / "out" / "model.npz") as found:
        assert set(found) == {row[0] for row in tensors[:3]}
    assert {name: why for _, name, why in result.left_out} == {
        "model.linear.weight.exp_avg": "it is no weight: moment",
        "learning_rate": "it is no weight: scalar",
    }


def test_values_of_a_pickle_are_named_where_they_are_left_out(tmp_path: Path) -> None:
    result = slimckpt.export(SAMPLES / "torch_ddp4", tmp_path / "out", "torch", ranks=[2])
    names = {name for _, name, why in result.left_out if "value of Python" in why}
    assert {"epoch", "loss"} <= names
    with slimckpt.open(SAMPLES / "torch_ddp4") as ckpt:
        assert not names & set(ckpt.rank(2))


def test_tensors_that_share_a_storage_share_it_in_a_file_of_torch(tmp_path: Path) -> None:
    slimckpt.export(SAMPLES / "torch_ddp4", tmp_path / "out", "torch", ranks=[0])
    (path,) = (tmp_path / "out").rglob("*.pt")
    storages = [name for name in zipfile.ZipFile(path).namelist() if "/data/" in name]
    with slimckpt.open(SAMPLES / "torch_ddp4") as ckpt:
        view = ckpt.rank(0)
        payloads = {view.info(name).payload for name in view}
        assert len(storages) == len(payloads) < len(view)
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize(("format", "able"), [("hdf5", "npz"), ("mindspore", "hdf5")])
def test_a_dtype_that_the_format_has_not_is_refused_by_name(
    format: str, able: str, tmp_path: Path
) -> None:
    kind = "F8_E5M2" if format == "mindspore" else "F8_E4M3"
    (tmp_path / "run").mkdir()
    rows = [("fine", "F32", [1], bytes(4)), ("odd", kind, [4], bytes(4))]
    (tmp_path / "run" / "model.safetensors").write_bytes(safetensors_file(rows))
    with pytest.raises(UsageError, match=rf"'odd' \({kind}\).*{able}.*--skip"):
        slimckpt.export(tmp_path / "run", tmp_path / "out", format)
    assert not (tmp_path / "out").exists()
    slimckpt.export(tmp_path / "run", tmp_path / "out", format, skip=["o*"])
    assert set(contents(tmp_path / "out", 0)) == {"fine"}


@pytest.mark.parametrize("names", [("a", "a/b"), ("a//b",), ("a/./b",), ("a\0b",)])
def test_hdf5_refuses_names_it_would_change(names: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    rows = [(name, "F32", [1], bytes(4)) for name in names]
    (tmp_path / "run" / "model.safetensors").write_bytes(safetensors_file(rows))
    with pytest.raises(UsageError, match="HDF5 cannot have"):
        slimckpt.export(tmp_path / "run", tmp_path / "out", "hdf5")
    slimckpt.export(tmp_path / "run", tmp_path / "npz", "npz")
    assert not (tmp_path / "out").exists()


def test_tensors_without_elements_are_named_where_mindspore_drops_them(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    rows = [("some", "F32", [1], bytes(4)), ("none", "F32", [0, 3], b"")]
    (tmp_path / "run" / "model.safetensors").write_bytes(safetensors_file(rows))
    result = slimckpt.export(tmp_path / "run", tmp_path / "out", "mindspore")
    assert [(name, "without elements" in why) for _, name, why in result.left_out] == [
        ("none", True)
    ]
    for format in ("hdf5", "npz", "safetensors", "torch"):
        slimckpt.export(tmp_path / "run", tmp_path / format, format)
        assert contents(tmp_path / format, 0)["none"][1] == (0, 3)


def test_a_dry_run_writes_nothing_and_predicts_every_byte(tree: Path, tmp_path: Path) -> None:
    expected = slimckpt.export(tree, tmp_path / "out", "safetensors", dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    done = slimckpt.export(tree, tmp_path / "out", "safetensors")
    assert expected.dry_run and expected.files == done.files
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").rglob("*.safetensors"))]
    assert sizes == [file.nbytes for file in done.files]


def test_bad_requests_leave_nothing(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no format 'onnx'"):
        slimckpt.export(tree, tmp_path / "out", "onnx")
    with pytest.raises(UnknownRankError, match="no rank 7; there are 0-1"):
        slimckpt.export(tree, tmp_path / "out", "npz", ranks=[7])
    with pytest.raises(DestinationError):
        slimckpt.export(tree, tree / "out", "npz")
    with monkeypatch.context() as patched:
        found = os.statvfs(tmp_path)
        full = os.statvfs_result((*found[:4], 1, *found[5:]))
        patched.setattr(os, "statvfs", lambda path: full)
        with pytest.raises(NoSpaceError, match="nothing was written"):
            slimckpt.export(tree, tmp_path / "out", "npz")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_interrupted_export_leaves_nothing(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blueprint.effects, "write_at", failing)
    with pytest.raises(slimckpt.SlimckptError):
        slimckpt.export(tree, tmp_path / "out", "npz")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_files_are_no_more_readable_than_their_sources(tree: Path, tmp_path: Path) -> None:
    (tree / "rank_1" / "net.part.safetensors").chmod(0o400)
    slimckpt.export(tree, tmp_path / "out", "npz")
    modes = [path.stat().st_mode & 0o777 for path in sorted((tmp_path / "out").rglob("*.npz"))]
    assert modes[1] == 0o400 and modes[0] & stat.S_IRUSR
