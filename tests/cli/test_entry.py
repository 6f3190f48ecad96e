"""The way into the command: signals while it is imported, output that cannot be written, help."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

COMMAND = [sys.executable, "-m", "slimckpt"]
ROOT = Path(__file__).parents[2]


def run_with(modules: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where ``modules`` come before the installed ones."""
    environment = {**os.environ, "PYTHONPATH": str(modules)}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.parametrize("module", ["click", "numpy"])
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_while_a_library_is_imported_ends_in_code_4(
    module: str, number: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(
        f"import os, signal, time; os.kill(os.getpid(), signal.{number}); time.sleep(9)"
    )
    ran = run_with(tmp_path, "analyze", str(tmp_path))
    assert ran.returncode == 4
    assert ran.stderr == "slimckpt: stopped; nothing was kept. Run it again\n"


def test_an_ignored_signal_stays_ignored_while_libraries_are_imported(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(
        "import os, signal, sys; os.kill(os.getpid(), signal.SIGHUP); sys.exit(7)"
    )
    script = 'trap "" HUP; exec "$@"'
    ran = subprocess.run(
        ["bash", "-c", script, "bash", *COMMAND, "ls", "."],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert ran.returncode == 7


def test_the_installed_command_and_the_module_enter_by_the_same_door() -> None:
    assert '\nslimckpt = "slimckpt.__main__:main"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["slim", "--help"], ["doctor", "-h"]]
)
def test_help_needs_no_numpy(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('numpy was imported')")
    ran = run_with(tmp_path, *arguments)
    assert ran.returncode == 0, ran.stderr


def test_the_list_of_commands_says_the_first_sentence_of_the_help_of_each() -> None:
    from slimckpt.cli import COMMANDS, main

    context = click.Context(main)
    assert list(COMMANDS) == sorted(COMMANDS)
    for name, sentence in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None and command.name == name
        assert command.get_short_help_str(limit=1000).rstrip(".") == sentence.rstrip(".")


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_output_that_finds_the_disk_full_is_not_an_error_of_the_work(
    extra: list[str], tmp_path: Path
) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ran = subprocess.run(
            [*COMMAND, "ls", str(tmp_path), *extra],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 1
    assert ran.stderr == (
        "slimckpt: the output could not be written (No space left on device); the work itself is"
        " done\n"
    )


def test_a_pipe_that_nobody_reads_ends_in_code_1_and_says_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [*COMMAND, "ls", str(tmp_path)], stdout=writing, stderr=subprocess.PIPE, check=False
    )
    os.close(writing)
    assert ran.returncode == 1
    assert ran.stderr == b""


def test_an_error_of_the_work_is_told_from_one_of_the_output(tmp_path: Path) -> None:
    ran = subprocess.run(
        [*COMMAND, "ls", str(tmp_path / "missing")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "missing" in ran.stderr and "output" not in ran.stderr
