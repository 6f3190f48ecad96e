"""Stores that were copied, cut or replaced by odd things, and trees at the edge of what is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors_bytes import safetensors_file

import slimckpt
from slimckpt.errors import StoreDamagedError, UsageError

COMMAND = [sys.executable, "-m", "slimckpt"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    body = os.urandom(200_000)
    for rank in range(2):
        folder = tmp_path / "run" / f"rank_{rank}"
        folder.mkdir(parents=True)
        file = safetensors_file([("w", "U8", [200_000], body)])
        (folder / "m.safetensors").write_bytes(file)
    (tmp_path / "run" / "config.json").write_text("{}")
    slimckpt.slim(tmp_path / "run", tmp_path / "store")
    return tmp_path / "run"


def test_a_store_copied_without_times_is_restored_and_sound_with_a_note(run: Path) -> None:
    copy = run.with_name("copy")
    shutil.copytree(run.with_name("store"), copy, copy_function=shutil.copyfile)
    result = slimckpt.verify(copy, against=run)
    assert (result.problems, result.safe) == ([], True)
    assert any("without times" in note for note in result.notes)
    slimckpt.restore(copy, run.with_name("back"))
    assert subprocess.run(["diff", "-r", run, run.with_name("back")], check=False).returncode == 0
    changed = copy / "whole" / "config.json"
    changed.write_text("[]")
    assert not slimckpt.verify(copy).sound
    with pytest.raises(StoreDamagedError, match=r"config\.json"):
        slimckpt.restore(copy, run.with_name("other"))


@pytest.mark.parametrize("what", ["fifo", "directory", "missing", "cut", "longer"])
@pytest.mark.parametrize("place", ["shared", "own"])
def test_a_container_that_is_something_else_is_damage_and_never_hangs(
    what: str, place: str, run: Path
) -> None:
    store = run.with_name("store")
    container = next(path for path in (store / place).rglob("*.h5"))
    data = container.read_bytes()
    container.unlink()
    if what == "fifo":
        os.mkfifo(container)
    elif what == "directory":
        container.mkdir()
    elif what != "missing":
        container.write_bytes(data[:-1000] if what == "cut" else data + b"more")
    for command in (["restore", store, run.with_name("back")], ["verify", store]):
        ran = subprocess.run(
            [*COMMAND, *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 1, ran.stderr
        assert container.name in ran.stdout + ran.stderr
        assert "Traceback" not in ran.stderr
    assert not run.with_name("back").exists()


def test_a_checksum_that_was_wrong_before_does_not_make_the_source_unsafe(tmp_path: Path) -> None:
    from mindspore_bytes import record, with_crc

    good = with_crc(record("w", "UInt8", [2000], bytes(2000)))
    bad = bytearray(good)
    bad[100] ^= 1
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "net.ckpt").write_bytes(bad)
    slimckpt.slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    result = slimckpt.verify(tmp_path / "store", against=tmp_path / "run")
    assert not result.sound
    assert len(result.problems) == result.inherited == 1
    assert result.safe is True


def test_deep_trees_are_slimmed_and_restored(tmp_path: Path) -> None:
    deep = tmp_path / "run"
    deep.mkdir()
    for _ in range(1300):
        deep = deep / "d"
        deep.mkdir()
    (deep / "m").write_bytes(safetensors_file([("w", "U8", [3000], bytes(3000))]))
    slimckpt.slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    slimckpt.restore(tmp_path / "store", tmp_path / "back")
    assert slimckpt.verify(tmp_path / "store", against=tmp_path / "back").safe
    for name in ("run", "store", "back"):
        subprocess.run(["rm", "-rf", tmp_path / name], check=True)


def test_times_beyond_64_bits_of_nanoseconds_come_back_without_slimckpt(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "m"
    file.write_bytes(safetensors_file([("w", "U8", [3000], bytes(3000))]))
    os.utime(file, ns=(15_000_000_000 * 10**9,) * 2)
    slimckpt.slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    script = [sys.executable, "-I", "-S", tmp_path / "store" / "restore.py"]
    subprocess.run([*script, tmp_path / "back"], check=True, capture_output=True)
    assert (tmp_path / "back" / "m").stat().st_mtime_ns == file.stat().st_mtime_ns


def test_an_empty_name_is_not_the_current_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="empty"):
        slimckpt.slim("", tmp_path / "store")


def test_a_closed_stderr_changes_nothing(run: Path) -> None:
    command = f"{sys.executable} -m slimckpt verify {run.with_name('store')} 2>&-"
    assert subprocess.run(command, shell=True, capture_output=True, check=False).returncode == 0


def test_a_full_stdout_does_not_make_the_way_out_say_that_nothing_was_restored(run: Path) -> None:
    script = run.with_name("store") / "restore.py"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ran = subprocess.run(
            [sys.executable, "-I", "-S", script, run.with_name("back")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert "Nothing was restored" not in ran.stderr
    assert (run.with_name("back") / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    "selection",
    [
        ["--file", "*"],
        ["--step", "1"],
        ["--step", "1", "--rank", "1"],
        ["--step", "2", "--rank", "1"],
        ["--file", "step_1/empty"],
        ["--run", "a"],
    ],
)
def test_both_ways_of_restoring_agree_on_a_selection(selection: list[str], tmp_path: Path) -> None:
    for name in ("step_1/rank_0", "step_1/rank_1", "step_2/rank_0"):
        folder = tmp_path / "run" / name
        folder.mkdir(parents=True)
        file = safetensors_file([(name, "U8", [3000], os.urandom(3000))])
        (folder / "m").write_bytes(file)
    for name in ("step_1/empty", "empty/inner"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "step_2" / "link").symlink_to("nowhere")
    slimckpt.slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    found = []
    for number, command in enumerate(
        (
            [*COMMAND, "restore", tmp_path / "store"],
            [sys.executable, "-I", "-S", tmp_path / "store" / "restore.py"],
        )
    ):
        out = tmp_path / f"out{number}"
        ran = subprocess.run([*command, out, *selection], capture_output=True, check=False)
        listed = sorted(str(p.relative_to(out)) for p in out.rglob("*")) if out.exists() else None
        found.append((ran.returncode, listed))
    assert found[0] == found[1]
