"""Names and dtypes that the metadata beside a file gives its tensors."""

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
