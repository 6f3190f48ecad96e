"""MindSpore loads what ``slimckpt export`` writes. Truth is what MindSpore made or loads itself."""

import sys
from pathlib import Path
from typing import Any

import mindspore
import pytest

sys.path.append(str(Path(__file__).parents[1]))
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES
from trees import body

import slimckpt


def loaded(path: Path) -> dict[str, Any]:
    """Name to dtype, shape and bytes; texts as they are."""
    return {
        name: found
        if isinstance(found, str)
        else (str(found.dtype), tuple(found.shape), bytes(found.get_bytes()))
        for name, found in mindspore.load_checkpoint(str(path)).items()
    }


def test_four_ranks_of_eight_are_what_mindspore_makes_of_them(tmp_path: Path) -> None:
    truth = SAMPLES / "ms_reshard_8to4"
    slimckpt.reshard(SAMPLES / "ms_dp8_ckpt", tmp_path / "four", truth / "strategy.ckpt")
    result = slimckpt.export(tmp_path / "four", tmp_path / "out", "mindspore")
    assert len(result.files) == 4 and not result.left_out
    for rank, file in enumerate(result.files):
        ours = loaded(tmp_path / "out" / file.path)
        theirs = loaded(truth / f"rank_{rank}" / f"net{rank}.ckpt")
        # MindSpore's own resharding cannot carry texts, and fails where there are some.
        assert isinstance(ours.pop("note"), str) and len(theirs) == 58
        assert ours == theirs


@pytest.mark.parametrize("sample", ["ms_dp4_real_ckpt", "ms_dp8_ckpt"])
def test_files_load_as_their_originals_do(sample: str, tmp_path: Path) -> None:
    result = slimckpt.export(SAMPLES / sample, tmp_path / "out", "mindspore")
    assert {Path(file.path) for file in result.files} == {
        path.relative_to(SAMPLES / sample) for path in (SAMPLES / sample).glob("rank_*/*.ckpt")
    }
    for file in result.files:
        original = loaded(SAMPLES / sample / file.path)
        assert list(original) and loaded(tmp_path / "out" / file.path) == original


def test_every_dtype_loads_as_from_files_of_mindspore(tmp_path: Path) -> None:
    slimckpt.export(SAMPLES / "ms_dtypes", tmp_path / "out", "mindspore")
    (path,) = (tmp_path / "out").rglob("*.ckpt")
    truth: dict[str, Any] = {}
    for original in sorted((SAMPLES / "ms_dtypes").rglob("*.ckpt")):
        truth |= loaded(original)
    assert len(truth) >= 13 and loaded(path) == truth


def test_bits_of_bfloat16_are_kept(tmp_path: Path) -> None:
    raw = body(5, 4096) + b"\x81\x7f\x81\xff\xff\x7f"  # and NaNs with a payload
    (tmp_path / "run").mkdir()
    rows = [("w", "BF16", [len(raw) // 2], raw)]
    (tmp_path / "run" / "model.safetensors").write_bytes(safetensors_file(rows))
    slimckpt.export(tmp_path / "run", tmp_path / "out", "mindspore")
    found = loaded(tmp_path / "out" / "model.ckpt")
    assert found == {"w": ("BFloat16", (len(raw) // 2,), raw)}
