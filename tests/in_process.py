"""The command run in the process of the test, its two outputs apart on every click supported."""

import inspect
from collections.abc import Sequence

from click.testing import CliRunner, Result

from slimckpt.cli import main

# click before 8.2 mixes the outputs unless told not to; since 8.2 they are always apart.
_APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}


def invoke(arguments: Sequence[str]) -> Result:
    return CliRunner(**_APART).invoke(main, list(arguments))
