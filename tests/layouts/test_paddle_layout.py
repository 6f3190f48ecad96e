"""Paddle's distributed checkpoints as whole tensors: what Paddle loads is the truth."""

import hashlib
import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from sample_files import SAMPLES

import slimckpt
from slimckpt.errors import CheckFailedError, UsageError
from slimckpt.rewrite.slim import slim

MODULE = "paddle.distributed.flex_checkpoint.dcp.metadata"
LOADS = sorted(
    path.relative_to(SAMPLES)
    for sample in ("paddle_distcp_4", "paddle26_distcp_4", "paddle_distcp_4_uneven")
    for path in (SAMPLES / sample / "loads").glob("*.json")
)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("where", ["directory", "store"])
@pytest.mark.parametrize("load", LOADS, ids=str)
def test_every_part_that_paddle_loads_on_other_ranks_is_read_the_same(
    load: Path, where: str, tmp_path: Path
) -> None:
    path = SAMPLES / load.parts[0] / "ckpt"
    if where == "store":
        slim(path, tmp_path / "store", min_saving=0)
        path = tmp_path / "store"
    truth = json.loads((SAMPLES / load).read_text())
    with slimckpt.open(path) as ckpt:
        for name, tensor in truth.items():
            sizes = tensor.get("local_shape", tensor.get("shape"))
            offsets = tensor.get("global_offset", [0] * len(sizes))
            whole = ckpt.tensor(name)
            assert list(whole.shape) == tensor.get("global_shape", sizes)
            # Paddle gives a tensor without axes an offset of one.
            spans = (slice(at, at + size) for at, size in zip(offsets, sizes, strict=False))
            assert digest(whole[(*spans, ...)]) == tensor["sha256"], name


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_resharded_over_rows_parts_are_those_of_paddle_and_make_up_the_whole(
    n_ranks: int, tmp_path: Path
) -> None:
    rules = tmp_path / "rows.toml"
    rule = '[[rule]]\nmatch = "rows*"\ndim = 0\naxis = "dp"\nsplit = "ceil"\n'
    rules.write_text(f"[mesh]\ndp = {n_ranks}\n\n{rule}")
    with slimckpt.open(SAMPLES / "paddle_distcp_4_uneven" / "ckpt") as ckpt:
        resharded = ckpt.reshard(rules)
        for name, rows in (("rows13", 13), ("rows9", 9), ("rows3", 3)):
            parts = [resharded[rank][name] for rank in range(n_ranks)]
            assert np.concatenate(parts).tobytes() == np.asarray(ckpt.tensor(name)).tobytes()
            each = -(-rows // n_ranks)
            assert [len(part) for part in parts] == [
                max(min(each, rows - rank * each), 0) for rank in range(n_ranks)
            ]


def test_metadata_that_lies_about_a_tensor_is_refused_for_that_tensor() -> None:
    with slimckpt.open(SAMPLES / "paddle_distcp_4_bad5" / "ckpt") as ckpt:
        with pytest.raises(CheckFailedError, match=r"rows5.*\[5, 4\].*2_0.distcp") as caught:
            ckpt.tensor("rows5")
        assert "another save" in str(caught.value)
        assert ckpt.tensor("rows8")[:].shape == (8, 4)


def test_a_save_over_the_save_of_other_ranks_is_refused(tmp_path: Path) -> None:
    # Paddle 3.3.1 leaves the metadata of 4 ranks beside the data of 2 (facts/paddle: re-save).
    ckpt = tmp_path / "ckpt"
    shutil.copytree(SAMPLES / "paddle_distcp_4" / "ckpt", ckpt)
    again = {
        "model.w_even": np.zeros((4, 6), np.float32),
        "StructuredToParameterName@@": {"model.w_even": "p"},
    }
    (ckpt / "0_0.distcp").write_bytes(pickle.dumps(again, protocol=4))
    with (
        slimckpt.open(ckpt) as opened,
        pytest.raises(CheckFailedError, match=r"expected F32 \[2, 6\].*found F32 \[4, 6\]"),
    ):
        opened.tensor("model.w_even")


def test_replicas_that_2_6_stored_on_every_rank_have_to_agree(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    shutil.copytree(SAMPLES / "paddle26_distcp_4" / "ckpt", ckpt)
    with slimckpt.open(ckpt) as opened:
        embedding = np.asarray(opened.tensor("model.embed.weight")).tobytes()
    file = ckpt / "2_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(embedding) + 100] ^= 1
    file.write_bytes(data)
    with slimckpt.open(ckpt) as opened:
        with pytest.raises(CheckFailedError, match=r"model\.embed\.weight"):
            opened.tensor("model.embed.weight")[:]
        drifted = opened.tensor("model.embed.weight", allow_drift=True)
        assert np.asarray(drifted).tobytes() == embedding


def test_a_missing_file_and_two_saves_are_named(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    shutil.copytree(SAMPLES / "paddle_distcp_4" / "ckpt", ckpt)
    (ckpt / "3_0.distcp").unlink()
    with slimckpt.open(ckpt) as opened, pytest.raises(CheckFailedError, match=r"3_0\.distcp"):
        opened.tensor("model.w_even")
    shutil.copy(ckpt / "0.metadata", ckpt / "1.metadata")
    with slimckpt.open(ckpt) as opened, pytest.raises(UsageError, match="2 saves"):
        opened.tensor("model.w_even")


@pytest.fixture
def paddle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Classes of the names that Paddle's have, so that they pickle as Paddle's do."""
    module: Any = ModuleType(MODULE)
    about = ["global_offset", "is_flattened", "flattened_range"]
    for name, fields in {
        "Metadata": ["state_dict_metadata", "storage_metadata", "flat_mapping"],
        "LocalTensorMetadata": [*about, "local_shape", "dtype", "global_shape"],
        "LocalTensorIndex": ["tensor_key", *about],
    }.items():
        made = type(name, (), {"__annotations__": dict.fromkeys(fields, object)})
        cls = dataclass(frozen=True)(made)
        cls.__module__ = MODULE
        setattr(module, name, cls)
    parts = MODULE.split(".")
    for at in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:at]), ModuleType(parts[at - 1]))
    monkeypatch.setitem(sys.modules, MODULE, module)
    yield module


def test_flattened_ranges_of_blocks_are_put_together(paddle: Any, tmp_path: Path) -> None:
    """Sharding stage 1 over tensor parallelism: each block of columns is cut in two, anywhere."""
    whole = np.arange(7 * 6, dtype=np.float32).reshape(7, 6)
    chunks, places = [], {}
    for rank, (first, start, stop) in enumerate([(0, 0, 10), (0, 10, 21), (3, 0, 13), (3, 13, 21)]):
        piece = whole[:, first : first + 3].reshape(-1)[start:stop]
        key = ((0, first), True, (start, stop))
        chunks.append(paddle.LocalTensorMetadata(*key, (7, 3), "float32", (7, 6)))
        places[paddle.LocalTensorIndex("moment", *key)] = f"{rank}_0.distcp"
        state = {"moment": piece.copy(), "StructuredToParameterName@@": {"moment": "m"}}
        (tmp_path / f"{rank}_0.distcp").write_bytes(pickle.dumps(state, protocol=4))
    metadata = paddle.Metadata({"moment": chunks}, places, {})
    (tmp_path / "0.metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    with slimckpt.open(tmp_path) as ckpt:
        tensor = ckpt.tensor("moment")
        np.testing.assert_array_equal(np.asarray(tensor), whole)
        np.testing.assert_array_equal(tensor[2:5, 1:4], whole[2:5, 1:4])
