"""A signal is raised once, and never lost."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
from slimckpt.signals import Stop, raising_on_stop

def kill():
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass

def run():
    {body}
    time.sleep(20)
    print("not heard")

try:
    with raising_on_stop(before={before!r}):
        run()
except Stop as stop:
    stop.taken = True
    print("heard")
"""

LOST = {
    "in a finalizer": "class Last:\n        __del__ = lambda self: kill()\n    Last()",
    "by who takes all": "try:\n        kill()\n    except BaseException:\n        pass",
    "while importing": "import importing; print('imported')",
}


IMPORTED = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass
except BaseException:
    print("raised")
"""


def run(body: str, directory: Path, before: str = "no") -> tuple[int, str]:
    (directory / "importing.py").write_text(IMPORTED)
    command = [sys.executable, "-c", PROGRAM.format(body=body, before=before)]
    ran = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, timeout=15)
    return ran.returncode, ran.stdout


@pytest.mark.parametrize("how", LOST)
def test_what_was_swallowed_comes_again(how: str, tmp_path: Path) -> None:
    expected = "imported\nheard\n" if how == "while importing" else "heard\n"
    assert run(LOST[how], tmp_path) == (0, expected)


def test_a_second_signal_leaves_cleaning_up_in_peace(tmp_path: Path) -> None:
    body = "try:\n        kill()\n    finally:\n        kill(); time.sleep(0.1); print('clean')"
    assert run(body, tmp_path) == (0, "clean\nheard\n")


def test_what_is_imported_before_anything_is_begun_is_not_waited_for(tmp_path: Path) -> None:
    body = "import importing; print('imported')"
    assert run(body, tmp_path, before="__main__") == (4, "")
    assert run("from importlib import import_module; import_module('importing')", tmp_path) == (
        0,
        "heard\n",
    )
