"""Directories of torch.distributed.checkpoint, read back through their own metadata.

Whether torch itself loads them is for ``tests/interop/test_torch_export_dcp.py``.
"""

import hashlib
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.convert.dcp import export_dcp
from slimckpt.errors import CheckFailedError, UsageError
from slimckpt.formats.dcp_metadata import read_metadata
from slimckpt.layouts.layout import Box
from slimckpt.sources.positioned import FileSource


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_mindspore_ranks_become_chunks_each_written_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = export_dcp(SAMPLES / "ms_dp8_ckpt", out)
    truth = expected("ms_dp8_ckpt")["full_params"]
    with FileSource(str(out / ".metadata").encode(), "metadata") as source:
        metadata = read_metadata(source)
    assert set(truth) < set(metadata.tensors) == {*result.tensors}
    with slimckpt.open(SAMPLES / "ms_dp8_ckpt") as before, slimckpt.open(out) as ckpt:
        lowest: dict[tuple[str, Box], int] = {}
        for name in truth:
            for shard in before.layout().tensors[name].shards:
                assert isinstance(shard.holder, int) and len(shard.pieces) == 1
                key = name, shard.pieces[0].box
                lowest[key] = min(shard.holder, lowest.get(key, 8))
        written = {(i.name, i.offsets): i.file for i in metadata.items if i.name in truth}
        assert written == {
            (name, box.offsets): f"__{rank}_0.distcp" for (name, box), rank in lowest.items()
        }
        assert {p.name for p in out.iterdir()} == {".metadata", *written.values()}
        for name, tensor in truth.items():
            whole = ckpt.tensor(name)
            assert list(whole.shape) == tensor["shape"]
            assert sha(np.asarray(whole).tobytes()) == tensor["sha256"], name
            boxes = {piece.box for s in before.layout().tensors[name].shards for piece in s.pieces}
            assert {tuple(box) for box in boxes} == set(metadata.tensors[name].chunks.items())
        for name in result.carried:
            assert np.asarray(ckpt.tensor(name)).tobytes() == before.rank(0)[name].tobytes()
    assert "tokens_seen" in result.carried
    assert {one.name for one in result.left_out} >= {"rng.seed"}


def test_every_item_is_an_archive_of_its_own(tmp_path: Path) -> None:
    export_dcp(SAMPLES / "ms_dp8_ckpt", tmp_path / "out")
    with FileSource(str(tmp_path / "out" / ".metadata").encode(), "metadata") as source:
        items = read_metadata(source).items
    ends: dict[str, int] = {}
    for item in items:
        assert item.at == ends.get(item.file, 0)
        ends[item.file] = item.at + item.nbytes
        data = (tmp_path / "out" / item.file).read_bytes()[item.at : ends[item.file]]
        with zipfile.ZipFile(BytesIO(data)) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/version") == b"3\n"
    for name, end in ends.items():
        assert (tmp_path / "out" / name).stat().st_size == end
    assert len(items) > 100


@pytest.mark.parametrize("sample", ["fsdp_dcp_4", "deepspeed_zero3_dp4", "torch_ddp4"])
def test_other_layouts_give_the_same_whole_tensors(sample: str, tmp_path: Path) -> None:
    result = export_dcp(SAMPLES / sample, tmp_path / "out")
    with slimckpt.open(SAMPLES / sample) as before, slimckpt.open(tmp_path / "out") as ckpt:
        wholes = before.step(before.steps[0]).wholes if before.steps else None
        layout = before.layout()
        assert set(layout.tensors) <= set(result.tensors)
        for name in layout.tensors:
            one, other = before.tensor(name), ckpt.tensor(name)
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), name
        assert wholes is None or len(wholes)


def test_empty_tensors_numbers_and_only_weights(tmp_path: Path) -> None:
    tensors = [
        ("fc.weight", "F32", [2, 3], np.arange(6, dtype=np.float32).tobytes()),
        ("empty.weight", "F32", [0, 3], b""),
        ("exp_avg.fc.weight", "F32", [2, 3], bytes(24)),
        ("step", "I64", [], (5).to_bytes(8, "little")),
    ]
    run = tmp_path / "run"
    run.mkdir()
    (run / "model.safetensors").write_bytes(safetensors_file(tensors))
    export_dcp(run, tmp_path / "all")
    with slimckpt.open(tmp_path / "all") as ckpt:
        assert np.asarray(ckpt.tensor("step")).tolist() == 5
        assert np.asarray(ckpt.tensor("empty.weight")).shape == (0, 3)
        assert np.asarray(ckpt.tensor("fc.weight")).tolist() == [[0, 1, 2], [3, 4, 5]]
    result = export_dcp(run, tmp_path / "weights", only="weights")
    assert {*result.tensors} == {"fc.weight", "empty.weight"}
    assert {one.name for one in result.left_out} == {"exp_avg.fc.weight", "step"}


def test_ranks_that_differ_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    for rank in (0, 1):
        path = tmp_path / "run" / f"rank_{rank}" / "m.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(safetensors_file([("w", "F32", [2], bytes([rank] * 8))]))
    with pytest.raises(UsageError, match=r"differ in tensor 'w'.*layout="):
        export_dcp(tmp_path / "run", tmp_path / "out")
    rules = tmp_path / "rules.toml"
    rules.write_text("[mesh]\ndp = 2\n")
    with pytest.raises(CheckFailedError, match="'w' differs"):
        export_dcp(tmp_path / "run", tmp_path / "out", layout=rules)
    assert not list(tmp_path.glob("out*"))
