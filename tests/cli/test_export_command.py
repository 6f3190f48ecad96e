"""``slimckpt export`` as a shell sees it."""

import json
import subprocess
import sys
from pathlib import Path

from safetensors_bytes import safetensors_file
from sample_files import SAMPLES

import slimckpt
from slimckpt.cli.export import FORMATS as OFFERED
from slimckpt.convert.export import FORMATS


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slimckpt", "export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_format_is_offered() -> None:
    assert set(FORMATS) <= set(OFFERED)


def test_one_rank_of_one_step_as_json(tmp_path: Path) -> None:
    source, target = SAMPLES / "ms_dp8_ckpt", tmp_path / "out"
    done = run(source, target, "--format", "npz", "--rank", "3,5", "--step", "1_1", "--json")
    assert done.returncode == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    assert found["schema"] == "slimckpt.export/1" and found["left_out"] == []
    assert [(file["path"], file["rank"], file["tensors"]) for file in found["files"]] == [
        (f"rank_{rank}/net-1_1.npz", rank, 58) for rank in (3, 5)
    ]
    assert sorted(path.parent.name for path in target.rglob("*.npz")) == ["rank_3", "rank_5"]


def test_a_layout_is_given_for_dcp_and_for_it_alone(tmp_path: Path) -> None:
    for rank in (0, 1):
        path = tmp_path / "run" / f"rank_{rank}" / "m.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(safetensors_file([("w", "U8", [2], bytes([rank, rank]))]))
    (tmp_path / "rules.toml").write_text('[mesh]\ntp = 2\n[[rule]]\nmatch="w"\ndim=0\naxis="tp"\n')
    given = [tmp_path / "run", tmp_path / "out", "--format"]
    layout = ["--layout", tmp_path / "rules.toml"]
    without, other = run(*given, "dcp"), run(*given, "npz", *layout)
    assert without.returncode == 2 and "--layout FILE" in without.stderr
    assert other.returncode == 2 and "--format dcp" in other.stderr
    assert run(*given, "dcp", *layout).returncode == 0
    with slimckpt.open(tmp_path / "out") as ckpt:
        assert ckpt.tensor("w")[:].tolist() == [0, 0, 1, 1]


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    done = run(SAMPLES / "torch_ddp4", tmp_path / "out", "--format", "safetensors", "--rank", "0")
    assert done.returncode == 0 and "value of Python, no tensor): epoch, loss" in done.stdout
    again = run(SAMPLES / "torch_ddp4", tmp_path / "out", "--format", "safetensors")
    assert again.returncode == 2 and "exists" in again.stderr
