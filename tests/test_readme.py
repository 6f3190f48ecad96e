"""The README says what happens: every console block of it is run, and its output compared."""

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def _steps(block: str) -> list[tuple[str, str]]:
    """Commands and what the README shows of their output."""
    steps: list[tuple[str, str]] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            steps.append((line[2:], ""))
        else:
            steps[-1] = (steps[-1][0], steps[-1][1] + line + "\n")
    return steps


@pytest.mark.parametrize("block", [b for b in BLOCKS if "scripts/" not in b])
def test_a_console_block_prints_what_the_readme_shows(block: str, tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    environment["PATH"] = (
        f"{ROOT / 'scripts'}:{os.path.dirname(sys.executable)}:{environment['PATH']}"
    )
    for command, shown in _steps(block):
        ran = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == shown, command


def test_the_two_commands_at_the_top_exist_and_can_be_run() -> None:
    first = BLOCKS[0]
    commands = re.findall(r"^\$ (\S+)", first, re.MULTILINE)
    assert commands == ["scripts/demo", "scripts/test"]
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def test_every_command_has_help_and_is_named_in_the_readme() -> None:
    from slimckpt.cli import main

    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command.help, name
        assert f"slimckpt {name}" in README
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{name} {option.name}"


def test_the_exit_codes_of_the_errors_are_those_of_the_table() -> None:
    from slimckpt import errors

    table = {int(n) for n in re.findall(r"^\| (\d) \|", README, re.MULTILINE)}
    codes = {
        e.exit_code
        for e in vars(errors).values()
        if isinstance(e, type) and issubclass(e, errors.SlimckptError)
    }
    assert codes <= table


def test_calls_of_loaders_are_ones_that_they_take() -> None:
    """The examples need frameworks; tests/interop runs calls such as these."""
    checked = set()
    for block in PYTHON:
        for call in (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)):
            module, _, name = ast.unparse(call.func).rpartition(".")
            if module.startswith("slim_"):
                loader = getattr(import_module(f"slimckpt.frameworks.{module[5:]}"), name)
                keywords = {str(keyword.arg): None for keyword in call.keywords}
                inspect.signature(loader).bind(*call.args, **keywords)
                checked.add(f"{module}.{name}")
    assert len(checked) == 7, checked
