"""``python -m slimckpt``, and the installed command: hears signals before anything is imported."""

from __future__ import annotations

import os
import sys
from typing import Any

from slimckpt.errors import StoppedError
from slimckpt.signals import STOPPED, on_stop


def main() -> None:
    """Run the command line. A signal while it is still being imported ends in code 4 too."""
    on_stop(_stop_at_once)
    from slimckpt.cli import main as command

    command()


def _stop_at_once(*_: Any) -> None:
    # Not an exception: what is half imported would wrap it, print it or swallow it.
    print(STOPPED, file=sys.stderr, flush=True)
    os._exit(StoppedError.exit_code)


if __name__ == "__main__":
    main()
