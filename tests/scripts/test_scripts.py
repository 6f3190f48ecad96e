"""The shell scripts can be run."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELL = [
    path
    for path in [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash\n")
]


def test_there_are_scripts() -> None:
    names = {"benchmark", "demo", "interop", "make_checkpoint", "run", "test"}
    assert {path.name for path in SHELL} >= names


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_a_script_is_executable_and_parses_and_stops_at_errors(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    assert "\nset -euo pipefail\n" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)
