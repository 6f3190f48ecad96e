"""The command line: parsing and printing, nothing else. One module a command."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

import click

from slimckpt.cli.analyze import analyze_command
from slimckpt.cli.ls import ls_command
from slimckpt.cli.restore import restore_command
from slimckpt.cli.slim import slim_command
from slimckpt.cli.verify import verify_command
from slimckpt.errors import SlimckptError, StoppedError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signal(BaseException):
    """A signal came. Not a KeyboardInterrupt: one that passes through the ``exec`` of an import
    makes Python end by the signal, whoever caught it."""


class _Group(click.Group):
    """Ends every error of ours in one message and its exit code."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except SlimckptError as error:
            click.echo(f"slimckpt: {error}", err=True)
            context.exit(error.exit_code)
        except (_Signal, KeyboardInterrupt):
            click.echo("slimckpt: stopped; nothing was kept. Run it again", err=True)
            context.exit(StoppedError.exit_code)
        except BrokenPipeError:
            raise
        except OSError as error:
            click.echo(f"slimckpt: {_os_error(error)}", err=True)
            context.exit(SlimckptError.exit_code)


def _os_error(error: OSError) -> str:
    name = error.filename
    if isinstance(name, bytes):
        name = name.decode("utf-8", "backslashreplace")
    return f"{name}: {error.strerror}" if name else str(error)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="slimckpt")
def main() -> None:
    """Find what the rank files of a training run have in common, store it once, and give every
    rank of every step its view back.

    \b
    Exit codes: 0 done, sound, same · 1 the check found something · 2 usage or error
    3 nothing to gain · 4 stopped, run it again · 5 the source cannot be copied faithfully
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # what was begun is cleaned up in peace
    raise _Signal


for command in (analyze_command, slim_command, restore_command, verify_command, ls_command):
    main.add_command(command)


if __name__ == "__main__":
    sys.exit(main())
