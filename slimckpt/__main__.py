"""``python -m slimckpt``, and the installed command: hears signals before anything is imported."""

from __future__ import annotations

import signal

from slimckpt.signals import exit_at_once, on_stop


def main() -> None:
    """Run the command line. A signal while it is still being imported ends in code 4 too."""
    on_stop(exit_at_once)
    from slimckpt.cli import main as command

    try:
        command()
    finally:
        on_stop(signal.SIG_IGN)  # while Python ends it would change the exit code, no more


if __name__ == "__main__":
    main()
