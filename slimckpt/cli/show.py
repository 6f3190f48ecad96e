"""How the commands show sizes, tables, progress and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from slimckpt.model import parse_ranks
from slimckpt.progress import SILENT, Progress

T = TypeVar("T", bound=Callable[..., None])

MOST = 100
"""Characters of a cell; longer ones are cut."""
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def size(nbytes: int) -> str:
    """``1.50 GB``: three figures, decimal units."""
    value, unit = float(nbytes), 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return f"{nbytes} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {_UNITS[unit]}"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Aligned columns; those in ``left`` to the left, others to the right."""
    rows = [[cell if len(cell) <= MOST else cell[: MOST - 1] + "…" for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def emit_json(value: Any) -> None:
    """One JSON document on stdout; bytes of names that are not UTF-8 stay escaped."""
    click.echo(json.dumps(value, indent=2))


def quiet_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")(command)


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--json", "as_json", is_flag=True, help="The result as JSON, with a versioned schema."
    )(command)


def jobs_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--jobs", "-j", type=click.IntRange(1), help="Threads; by default as many as cores."
    )(command)


def selection_options(command: Callable[..., None]) -> Callable[..., None]:
    """Which original files: ``steps``, ``ranks``, ``files`` and ``run``."""
    for option in (
        click.option("--run", help="Only files of the run under this path prefix."),
        click.option(
            "--file", "files", multiple=True, metavar="GLOB", help="Only these original paths."
        ),
        click.option("--rank", "ranks", multiple=True, type=int, help="Only files of this rank."),
        click.option("--step", "steps", multiple=True, help="Only files of this step; repeatable."),
    ):
        command = option(command)
    return command


def step_options(command: Callable[..., None]) -> Callable[..., None]:
    """Which one step: ``step`` and ``run``."""
    for option in (
        click.option("--run", help="Of the run under this path prefix."),
        click.option("--step", help="This step, where there are several."),
    ):
        command = option(command)
    return command


def source_layout_options(command: Callable[..., None]) -> Callable[..., None]:
    """How the source lies: ``source_layout`` and ``allow_drift``."""
    for option in (
        click.option(
            "--allow-drift",
            is_flag=True,
            help="Where ranks that should hold the same differ, take the lowest, and say so.",
        ),
        click.option(
            "--source-layout",
            metavar="FILE",
            help="How the source lies (TOML, a strategy file), if it does not record it.",
        ),
    ):
        command = option(command)
    return command


def ranks_option(flag: str, name: str, help: str) -> Callable[[T], T]:
    """A set of ranks, written ``0-3,8``: a tuple, or ``None``."""
    return click.option(flag, name, metavar="RANKS", callback=_ranks, help=f"{help} As in 0-3,8.")


def _ranks(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    try:
        return None if text is None else parse_ranks(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def category_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--category",
        "categories",
        multiple=True,
        metavar="NAME=GLOB",
        callback=_pairs,
        help="Tensors whose name matches GLOB are of category NAME; repeatable.",
    )(command)


def _pairs(
    context: click.Context, parameter: click.Parameter, texts: Sequence[str]
) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, equals, glob = text.partition("=")
        if not equals or not glob:
            raise click.BadParameter(f"{text!r} is not NAME=GLOB")
        pairs.append((name, glob))
    return pairs


def progress(quiet: bool) -> Progress:
    """A bar on a terminal, nothing elsewhere."""
    shown = sys.stderr is not None and sys.stderr.isatty() and not quiet
    return _Bar() if shown else SILENT


class _Bar(Progress):
    """Bytes, rate and time left, by phase."""

    def __init__(self) -> None:
        self._bar: Any = None

    def start(self, phase: str, total: int) -> None:
        from tqdm import tqdm

        self.finish()
        unit = "files" if phase == "reading headers" else "B"
        self._bar = tqdm(
            total=total,
            desc=phase,
            unit=unit,
            unit_scale=unit == "B",
            leave=False,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def advance(self, amount: int) -> None:
        if self._bar is not None:
            self._bar.update(amount)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
