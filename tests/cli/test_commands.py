"""The commands as a shell sees them: exit codes, stdout and stderr, JSON, signals."""

import fcntl
import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES

COMMAND = [sys.executable, "-m", "slimckpt"]


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two ranks that share half a MiB, with a step in the path."""
    shared = os.urandom(512 * 1024)
    for rank in range(2):
        folder = tmp_path / "run" / "step_10" / f"rank_{rank}"
        folder.mkdir(parents=True)
        tensors = [
            ("embedding", "F32", [512, 256], shared),
            ("own", "U8", [4096], os.urandom(4096)),
        ]
        (folder / "model.safetensors").write_bytes(safetensors_file(tensors))
    return tmp_path / "run"


@pytest.fixture
def store(source: Path) -> Path:
    assert run("slim", source, source.with_name("run.slim")).returncode == 0
    return source.with_name("run.slim")


def assert_one_clear_message(ran: subprocess.CompletedProcess[str], code: int) -> None:
    assert ran.returncode == code, ran.stderr
    assert ran.stdout == ""
    assert ran.stderr.startswith("slimckpt: ")
    assert ran.stderr.count("\n") == 1
    assert "Traceback" not in ran.stderr


def test_the_whole_round_by_command(source: Path, tmp_path: Path) -> None:
    store, back = tmp_path / "s", tmp_path / "b"
    assert run("slim", source, store).returncode == 0
    verified = run("verify", store, "--against", source)
    assert verified.returncode == 0
    assert verified.stdout.splitlines()[-1].startswith(f"{source} is safe to delete")
    assert run("restore", store, back).returncode == 0
    assert subprocess.run(["diff", "-r", source, back], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        (["analyze", "{source}"], "slimckpt.analyze/2"),
        (["slim", "{source}", "{tmp}/dry", "--dry-run"], "slimckpt.slim/1"),
        (["verify", "{store}"], "slimckpt.verify/1"),
        (["restore", "{store}", "{tmp}/back"], "slimckpt.restore/1"),
        (["ls", "{store}"], "slimckpt.ls/1"),
        (["ls", "{source}", "--rank", "1"], "slimckpt.ls/1"),
    ],
)
def test_json_has_a_versioned_schema_and_nothing_else_on_stdout(
    arguments: list[str], schema: str, source: Path, store: Path, tmp_path: Path
) -> None:
    filled = [a.format(source=source, store=store, tmp=tmp_path) for a in arguments]
    ran = run(*filled, "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["schema"] == schema


def test_analyze_says_what_ranks_share_and_that_it_is_an_upper_bound(source: Path) -> None:
    found = json.loads(run("analyze", source, "--json").stdout)
    assert found["ranks"] == "0-1"
    assert found["steps"] == [10]
    assert found["total"]["before"] - found["total"]["after"] == 512 * 1024
    assert found["groups"][0]["ranks"] == "ranks 0-1"
    assert "upper bound" in run("analyze", source).stdout
    assert "upper bound" not in run("analyze", source, "--exact").stdout


def test_analyze_counts_a_tensor_as_a_glob_says(source: Path) -> None:
    found = json.loads(run("analyze", source, "--json", "--category", "master weight=own").stdout)
    assert found["by_category"]["master weight"]["before"] == 2 * 4096
    assert run("analyze", source, "--category", "nonsense=own").returncode == 2
    assert run("analyze", source, "--category", "own").returncode == 2


def test_unique_shards_are_nothing_to_gain(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / "run" / f"rank_{rank}"
        folder.mkdir(parents=True)
        file = safetensors_file([("w", "U8", [50_000], os.urandom(50_000))])
        (folder / "model.safetensors").write_bytes(file)
    analyzed = run("analyze", tmp_path / "run")
    assert analyzed.returncode == 0
    assert "nothing to gain" in analyzed.stdout
    assert_one_clear_message(run("slim", tmp_path / "run", tmp_path / "s"), 3)
    assert not (tmp_path / "s").exists()


def test_a_store_as_source_is_nothing_to_gain_and_names_add(store: Path, tmp_path: Path) -> None:
    ran = run("slim", store, tmp_path / "again")
    assert_one_clear_message(ran, 3)
    assert "slimckpt add" in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["slim", "missing", "d"],
        ["slim", "run", "run.slim"],
        ["slim", "run", "run/inside"],
        ["slim", "run", "missing/d"],
        ["slim", "run", "d", "--min-saving", "101"],
        ["restore", "run", "d"],
        ["restore", "run.slim", "d", "--step", "11"],
        ["restore", "run.slim", "d", "--rank", "7"],
        ["restore", "run.slim", "d", "--file", "nothing*"],
        ["restore", "run.slim", "run"],
        ["verify", "run"],
        ["verify", "run.slim", "--quick", "--against", "run"],
        ["ls", "run.slim", "--step", "11"],
        ["analyze", "run.slim"],
    ],
)
def test_what_cannot_be_meant_is_one_message_and_code_2(arguments: list[str], store: Path) -> None:
    before = sorted(os.listdir(store.parent))
    assert_one_clear_message(run(*arguments, cwd=store.parent), 2)
    assert sorted(os.listdir(store.parent)) == before


def test_a_fifo_in_the_source_is_code_5(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pipe")
    assert_one_clear_message(run("slim", source, tmp_path / "s"), 5)


def test_damage_is_listed_and_code_1(store: Path) -> None:
    container = next((store / "shared").iterdir())
    data = bytearray(container.read_bytes())
    data[-1000] ^= 1
    container.chmod(0o600)
    container.write_bytes(data)
    ran = run("verify", store)
    assert ran.returncode == 1
    assert str(container) in ran.stdout
    quick = run("verify", store, "--quick")
    assert quick.returncode == 0
    assert "Payloads were not read" in quick.stdout.splitlines()[-1]
    restored = run("restore", store, store.with_name("back"))
    assert_one_clear_message(restored, 1)
    assert "embedding" in restored.stderr
    assert not store.with_name("back").exists()


def test_a_source_that_changed_is_not_safe_to_delete(source: Path, store: Path) -> None:
    with (source / "step_10" / "rank_1" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    ran = run("verify", store, "--against", source)
    assert ran.returncode == 1
    assert "NOT safe to delete" in ran.stdout.splitlines()[-1]


def test_a_damaged_file_is_a_warning_and_with_strict_code_1(source: Path, tmp_path: Path) -> None:
    good = (source / "step_10" / "rank_0" / "model.safetensors").read_bytes()
    (source / "step_10" / "rank_0" / "cut.safetensors").write_bytes(good[:-5])
    strict = run("slim", source, tmp_path / "s", "--strict")
    assert_one_clear_message(strict, 1)
    assert "cut.safetensors" in strict.stderr
    assert not (tmp_path / "s").exists()
    ran = run("slim", source, tmp_path / "s")
    assert ran.returncode == 0
    assert "warning" in ran.stderr and "cut.safetensors" in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_code_4_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / "run" / f"rank_{rank}"
        folder.mkdir(parents=True)
        with (folder / "model.safetensors").open("wb") as file:
            nbytes = 2**29
            header = json.dumps(
                {"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
            )
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.truncate(8 + len(header) + nbytes)
    process = subprocess.Popen(
        [*COMMAND, "slim", tmp_path / "run", tmp_path / "s"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "s.slimckpt-part").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 4, errors
    assert errors.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_signal_in_the_middle_of_an_import_ends_in_code_4_too(
    source: Path, tmp_path: Path
) -> None:
    # Python ends by the signal when a KeyboardInterrupt has passed through exec() of a string.
    script = """
import sys
from slimckpt.store import writer
def lay_out(*_):
    exec("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)")
writer.lay_out = lay_out
from slimckpt.cli import main
main(["slim", *sys.argv[1:]])
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, source, tmp_path / "s"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert_one_clear_message(ran, 4)
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_a_bar_is_shown_on_a_terminal_only(source: Path, tmp_path: Path) -> None:
    assert run("slim", source, tmp_path / "a").stderr == ""
    for name, extra, shown in (("b", [], True), ("c", ["--quiet"], False)):
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
        subprocess.run(
            [*COMMAND, "slim", source, tmp_path / name, *extra],
            stdout=subprocess.PIPE,
            stderr=child,
            check=True,
        )
        os.close(child)
        assert (_drain(parent) != b"") == shown


def _drain(fd: int) -> bytes:
    found = b""
    try:
        while more := os.read(fd, 4096):
            found += more
    except OSError:
        pass
    os.close(fd)
    return found


def test_names_that_are_not_utf_8_are_shown_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    file = safetensors_file([("w\n\x1b[31m", "U8", [2000], bytes(2000))])
    for number in range(2):
        (folder / os.fsdecode(b"a\xff%d\x1b" % number)).write_bytes(file)
    for command in (["analyze", folder], ["ls", folder], ["slim", folder, tmp_path / "s"]):
        ran = run(*command, *(["--min-saving", "0"] if "slim" in command else []))
        assert ran.returncode == 0, ran.stderr
        assert "\x1b" not in ran.stdout + ran.stderr


def test_encrypted_and_strategy_files_are_named_as_such(tmp_path: Path) -> None:
    for folder, word in (("ms_encrypted", "AES-GCM"), ("ms_strategies", "strategy")):
        shutil.copytree(SAMPLES / folder, tmp_path / folder)
        shown = run("analyze", tmp_path / folder, "--json").stdout
        reasons = " ".join(row["reason"] for row in json.loads(shown)["not_slimmed"])
        assert word in reasons
