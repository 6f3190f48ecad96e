"""``slimckpt mount`` as a shell sees it: what cannot be mounted, and what one that is says."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mounts import is_mounted, running, skip_without_fuse
from trees import small_run

from slimckpt.rewrite.slim import slim

COMMAND = [sys.executable, "-m", "slimckpt", "mount"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    small_run(tmp_path / "source")
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    (tmp_path / "point").mkdir()
    (tmp_path / "file").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["source", "point"], "is not a slim checkpoint"),
        (["nothing", "point"], "is not a slim checkpoint"),
        (["store", "missing"], "missing: No such file or directory; make it: mkdir missing"),
        (["store", "file"], "file: Not a directory; a mount goes on an empty directory"),
        (["store", "source"], "source is not empty; a mount goes on an empty directory"),
        (["store", "store"], "store is not empty"),
        (["store", "store/inner"], "lies inside"),
        (["--step", "30", "store", "point"], "no step 30; there are 10, 20"),
        (["--rank", "7", "store", "point"], "no rank 7 in what is selected; there are 0-1"),
        (["--file", "*.x", "store", "point"], "no file matches '*.x'"),
    ],
)
def test_what_cannot_be_mounted_is_one_clear_message_and_code_2(
    arguments: list[str], message: str, place: Path
) -> None:
    (place / "store" / "inner").mkdir()
    ran = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, cwd=place, timeout=30, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("slimckpt: ") and ran.stderr.count("\n") == 1
    assert message in ran.stderr
    assert not is_mounted(place / "point")


def test_a_damaged_manifest_is_found_before_anything_is_mounted(place: Path) -> None:
    part = place / "store" / "parts" / "0001.json"
    (part,) = sorted(part.parent.iterdir())[:1]
    os.truncate(part, part.stat().st_size - 1)
    ran = subprocess.run(
        [*COMMAND, place / "store", place / "point"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert str(part) in ran.stderr
    assert not is_mounted(place / "point")


def test_a_mount_says_so_in_one_line_and_nothing_else(place: Path) -> None:
    skip_without_fuse()
    command = [*COMMAND, "--step", "20", "store", "point"]
    with running(command, text=True, cwd=place) as process:
        assert process.stdout is not None
        # model.safetensors of 20, and args.json, which belongs to no step.
        line = process.stdout.readline()
        shown = sorted(p.name for p in (place / "point").rglob("*") if p.is_file())
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    size = (place / "source" / "checkpoint-20" / "model.safetensors").stat().st_size + 12
    assert line == f"point: 2 files, {size / 1000:.3g} KB mounted\n"
    assert shown == ["args.json", "model.safetensors"]
    assert (process.returncode, out, err) == (0, "", "")
