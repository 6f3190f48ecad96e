"""The command line: parsing and printing, nothing else. One module a command."""

from __future__ import annotations

import contextlib
import sys
from importlib import import_module
from typing import Any

import click

from slimckpt.errors import SlimckptError, StoppedError
from slimckpt.signals import STOPPED, Stop, raising_on_stop

COMMANDS = {
    "analyze": "Show what is replicated in SRC, and what slimming it would save.",
    "doctor": "Say what this machine, its libraries and the file system of PATH can do.",
    "export": "Write the tensors of each rank of STORE as files of another format.",
    "extract": "Write DST, a slim checkpoint of some ranks of STORE, for one node.",
    "layout": "Print which part of each tensor each rank of SRC has, as rules in TOML.",
    "ls": "List what PATH holds: files, or with --step and --rank the tensors in them.",
    "merge": "Write the whole tensors of one step of STORE as safetensors.",
    "mount": "Show the original files of STORE, all or a selection, read-only on MOUNTPOINT.",
    "reshard": "Write DST, a slim checkpoint of one step as other ranks would hold it.",
    "restore": "Write the original files of STORE, all or a selection, to DST.",
    "slim": "Write DST, a slim checkpoint: the files of SRC with what they share stored once.",
    "verify": "Check that STORE is sound, and with --against that SRC can be deleted.",
}
"""The first sentence of the help of each: a command is imported only when it is called."""


class _Group(click.Group):
    """Imports the command that is called, and ends every error in one message and its code."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found: click.Command = getattr(import_module(f"slimckpt.cli.{name}"), f"{name}_command")
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().main(*arguments, **options)
        except OSError as error:
            if not _is_of_output(error):
                raise
            with contextlib.suppress(OSError):
                click.echo(
                    f"slimckpt: the output could not be written ({error.strerror}); the work itself"
                    " is done",
                    err=True,
                )
            sys.exit(1)  # as click does for a closed pipe

    def invoke(self, context: click.Context) -> Any:
        try:
            with raising_on_stop(before=__name__):
                return super().invoke(context)
        except SlimckptError as error:
            click.echo(f"slimckpt: {error}", err=True)
            context.exit(error.exit_code)
        except (Stop, KeyboardInterrupt) as stop:
            if isinstance(stop, Stop):
                stop.taken = True
            click.echo(STOPPED, err=True)
            context.exit(StoppedError.exit_code)
        except OSError as error:
            if _is_of_output(error):
                raise
            click.echo(f"slimckpt: {_os_error(error)}", err=True)
            context.exit(SlimckptError.exit_code)


def _is_of_output(error: OSError) -> bool:
    """Whether an error is of writing the result, a closed pipe or a full disk, not of the work.

    All that the commands print goes through click, and click touches no other file.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals["__name__"].startswith("click.")


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


if __name__ == "__main__":
    sys.exit(main())
