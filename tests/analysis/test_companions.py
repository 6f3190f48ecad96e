"""Names and dtypes that the metadata beside a file gives its tensors."""

import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np
import pytest
from sample_files import SAMPLES

import slimckpt
from slimckpt.rewrite.slim import slim

MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"


@pytest.fixture
def paddle(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Classes of the names that Paddle's have, so that they pickle as Paddle's do."""
    module = ModuleType(MODULE)
    for name, fields in {
        "Metadata": ["state_dict_metadata", "storage_metadata", "flat_mapping"],
        "LocalTensorMetadata": ["global_offset", "local_shape", "dtype"],
    }.items():
        cls = dataclass(type(name, (), {"__annotations__": dict.fromkeys(fields, object)}))
        cls.__module__ = MODULE
        setattr(module, name, cls)
    parts = MODULE.split(".")
    for at in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:at]), ModuleType(parts[at - 1]))
    monkeypatch.setitem(sys.modules, MODULE, module)
    yield module


def test_arrays_in_npy_files_have_the_names_of_their_files(tmp_path: Path) -> None:
    place, arrays = tmp_path / "run", {}
    for rank in (0, 1):
        (place / f"rank_{rank}").mkdir(parents=True)
        arrays[rank] = {
            "w": np.arange(2000.0),
            "layer.0.bias": np.arange(9.0) + rank,
            "b\\xff": np.ones(3, "f4"),
            "no suffix": np.float64(rank),
        }
        for name, array in arrays[rank].items():
            suffix = "" if name == "no suffix" else ".npy"
            file = name.replace("\\xff", os.fsdecode(b"\xff")) + suffix
            with (place / f"rank_{rank}" / file).open("wb") as opened:
                np.save(opened, array)
    slim(place, tmp_path / "store", min_saving=0)
    for where in (place, tmp_path / "store"):
        with slimckpt.open(where) as ckpt:
            for rank in (0, 1):
                found = dict(ckpt.rank(rank))
                assert found.keys() == arrays[rank].keys()
                for name, array in arrays[rank].items():
                    np.testing.assert_array_equal(found[name], array)
            file = ckpt.files["rank_1/w.npy"]
            assert (list(file), list(file.by_path)) == (["w"], ["arr_0"])


def test_float8_of_paddle_is_told_by_its_metadata(paddle: ModuleType, tmp_path: Path) -> None:
    values = np.arange(-64, 64, dtype=np.int8)
    state = {
        "w": values,
        "ints": values,
        "half": values[:100],
        "StructuredToParameterName@@": {"w": "w_0", "ints": "i_0", "half": "h_0"},
    }
    place = tmp_path / "run"
    place.mkdir()
    for rank in (0, 1):
        (place / f"{rank}_7.distcp").write_bytes(pickle.dumps(state, protocol=4))

    def chunk(dtype: str, count: int) -> list[object]:
        return [paddle.LocalTensorMetadata((0,), (count,), dtype)]

    metadata = paddle.Metadata(
        {
            "w": chunk("float8_e4m3fn", 128),
            "ints": chunk("int8", 128),
            "half": chunk("float8_e5m2", 100),
        },
        {},
        {},
    )
    (place / "7.metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    slim(place, tmp_path / "store", min_saving=0)
    for where in (place, tmp_path / "store"):
        with slimckpt.open(where) as ckpt:
            view = ckpt.rank(1)
            assert {name: view.info(name).dtype for name in view} == {
                "w": "F8_E4M3",
                "ints": "I8",
                "half": "F8_E5M2",
            }
            assert view["w"].dtype == ml_dtypes.float8_e4m3fn
            assert np.array_equal(view["w"].view(np.int8), values)
    (place / "7.metadata").rename(place / "8.metadata")
    with slimckpt.open(place) as ckpt:
        assert ckpt.rank(1).info("w").dtype == "I8"


def test_names_of_a_metadata_that_does_not_fit_are_not_given(tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(SAMPLES / "fsdp_dcp_4", place)
    shutil.copy(place / "__0_0.distcp", place / "__1_0.distcp")
    with slimckpt.open(place) as ckpt:
        assert "model.wte.weight" in ckpt.files["__0_0.distcp"]
        assert list(ckpt.files["__1_0.distcp"])[:2] == ["0", "1"]
