"""``slimckpt doctor`` as a shell sees it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trees import open_ways_to, snapshot

from slimckpt.doctor.trials import TRIALS

COMMAND = [sys.executable, "-m", "slimckpt", "doctor"]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_the_current_directory_is_examined_and_nothing_stands_in_the_way(tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    ran = run("--quick", cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert lines[-1] == "Nothing stands in the way."
    assert str(tmp_path) in lines
    assert all(any(line.startswith(f"  {name}  ") for line in lines) for name, *_ in TRIALS)
    assert "/s" not in ran.stdout.replace("read/s", "")
    assert snapshot(tmp_path) == before


def test_json_has_a_versioned_schema_and_all_that_was_found(tmp_path: Path) -> None:
    ran = run(tmp_path, "--json", "--quick")
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert found["schema"] == "slimckpt.doctor/1"
    assert found["well"] is True
    assert [x["name"] for x in found["libraries"]][:3] == ["slimckpt", "Python", "numpy"]
    assert found["machine"]["page"] == os.sysconf("SC_PAGE_SIZE")
    assert found["filesystem"]["path"] == str(tmp_path)
    assert [t["name"] for t in found["filesystem"]["trials"]] == [name for name, *_ in TRIALS]
    assert found["hash_speed"] is None and found["filesystem"]["speed"] is None
    assert all(set(i) == {"since", "before", "what", "effect"} for i in found["libhdf5_issues"])


def test_speeds_are_shown_and_memory_stays_below_what_any_command_may_take(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from slimckpt.cli import main
try:
    main(["doctor", sys.argv[1]])
except SystemExit as end:
    # Not ru_maxrss, which begins with that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    print(end.code, int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True
    )
    code, most = map(int, ran.stdout.splitlines()[-1].split())
    assert code == 0 and most < 200_000_000
    for name in ("BLAKE3, one thread", "write and fsync", "read again"):
        line = next(line for line in ran.stdout.splitlines() if name in line)
        assert line.split(name)[1].split()[1].endswith("B/s")


@pytest.mark.parametrize("extra", [[], ["--json"]])
@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_path_that_is_no_directory_is_code_2(tmp_path: Path, name: str, extra: list[str]) -> None:
    (tmp_path / "file").touch()
    ran = run(tmp_path / name, "--quick", *extra)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"slimckpt: {tmp_path / name}")


def test_an_empty_path_is_code_2() -> None:
    ran = run("")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("slimckpt: the path is empty")


AS_NOBODY = """
import os, sys
from slimckpt.cli import main
# Imports what nobody may be unable to read.
main(["doctor", sys.argv[1], "--quick"], standalone_mode=False)
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
main(["doctor", sys.argv[2], "--quick"])
"""


def as_nobody(tmp_path: Path, place: Path) -> subprocess.CompletedProcess[str]:
    open_ways_to(tmp_path)
    return subprocess.run(
        [sys.executable, "-c", AS_NOBODY, tmp_path, place],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


def test_a_directory_that_may_only_be_read_is_left_alone_and_said_to_be_a_source(
    tmp_path: Path,
) -> None:
    place = tmp_path / "run"
    place.mkdir(mode=0o555)
    ran = as_nobody(tmp_path, place)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "cannot be written to: Permission denied" in ran.stdout
    assert "it can be a source, not a destination" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "Nothing stands in the way."
    assert os.listdir(place) == []


@pytest.mark.parametrize(
    ("mode", "inside", "what"),
    [
        (0o000, ".", "entered"),
        (0o333, ".", "listed"),
        (0o444, ".", "entered"),
        (0o000, "inner", "entered"),
    ],
)
def test_a_directory_that_cannot_be_read_stands_in_the_way(
    tmp_path: Path, mode: int, inside: str, what: str
) -> None:
    place = tmp_path / "run"
    (place / "inner").mkdir(parents=True)
    place.chmod(mode)
    try:
        ran = as_nobody(tmp_path, place / inside)
    finally:
        place.chmod(0o755)
    assert (ran.returncode, ran.stderr) == (1, "")
    said = ran.stdout.splitlines()[-1]
    assert f"cannot be {what}: Permission denied; it can be neither a source" in said


def test_names_that_are_not_utf_8_are_shown_escaped(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"a\xff\x1b")
    odd.mkdir()
    ran = run(odd, "--quick")
    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stdout and r"a\xff\x1b" in ran.stdout
