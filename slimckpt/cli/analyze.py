"""``slimckpt analyze``."""

from __future__ import annotations

import click

from slimckpt.analysis.categories import CATEGORIES
from slimckpt.analysis.report import Amount, Report
from slimckpt.cli.show import (
    count,
    emit_json,
    jobs_option,
    json_option,
    percent,
    progress,
    quiet_option,
    size,
    table,
)

_MOST_FILES = 10


@click.command("analyze")
@click.argument("source", metavar="SRC")
@click.option("--exact", is_flag=True, help="Hash all bytes; else savings are an upper bound.")
@click.option(
    "--groups",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    help="How many replica groups to list.",
)
@click.option(
    "--category",
    "categories",
    multiple=True,
    metavar="NAME=GLOB",
    help=f"Count tensors whose name matches as NAME ({', '.join(CATEGORIES)}).",
)
@click.option("--min-saving", default=5.0, show_default=True, metavar="PCT", help="As for slim.")
@jobs_option
@json_option
@quiet_option
def analyze_command(
    source: str,
    exact: bool,
    groups: int,
    categories: tuple[str, ...],
    min_saving: float,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what is replicated in SRC, and what slimming it would save.

    Writes nothing. Without --exact it reads headers and under a KiB of each tensor.
    """
    from slimckpt.analysis.analyze import analyze

    pairs = []
    for text in categories:
        name, equals, glob = text.partition("=")
        if not equals or not glob:
            raise click.BadParameter(f"{text!r} is not NAME=GLOB", param_hint="--category")
        pairs.append((name, glob))
    report = analyze(
        source,
        exact=exact,
        categories=pairs,
        most_groups=groups,
        min_saving=min_saving,
        jobs=jobs,
        progress=progress(quiet),
    )
    if as_json:
        emit_json(report.as_json())
    else:
        _show(report)


def _show(report: Report) -> None:
    formats = ", ".join(f"{number} {name}" for name, number in report.formats.items())
    click.echo(f"{report.source}: {count(report.files, 'file')} ({formats or 'none'})")
    said = [count(report.tensors, "tensor")]
    if report.ranks:
        said.append(f"ranks {report.ranks}")
    if report.steps:
        steps = [str(step) for step in report.steps]
        said.append("steps " + ", ".join(steps if len(steps) < 8 else [*steps[:6], "…", steps[-1]]))
    if len(report.runs) > 1:
        said.append(f"runs {', '.join(run or '.' for run in report.runs)}")
    click.echo("  " + "; ".join(said))
    bound = "after" if report.exact else "after, at best"
    rows = [["", "now", bound, "saved"], _row("all files", report.total)]
    if len(report.by_step) > 1:
        rows += [
            _row(" ".join(filter(None, [run, _step(step)])), amount)
            for run, step, amount in report.by_step
        ]
    rows += [_row(name, amount) for name, amount in report.by_category.items() if amount.before]
    click.echo("\n" + table(rows))
    if report.groups:
        click.echo("\nlargest replica groups (same bytes, held by)")
        rows = [["held by", "copies", "tensors", "each copy", "repeats", "such as"]]
        rows += [
            [g.ranks, str(g.copies), f"{g.tensors:,}", size(g.nbytes), size(g.saved), g.example]
            for g in report.groups
        ]
        click.echo(table(rows, left=(0, 5)))
        if report.groups_total > len(report.groups):
            click.echo(f"  … and {report.groups_total - len(report.groups)} more (--groups)")
    if report.not_slimmed:
        click.echo(f"\nkept as they are: {count(len(report.not_slimmed), 'file')}")
        for path, reason, nbytes in report.not_slimmed[:_MOST_FILES]:
            reason = reason.removeprefix(f"{path}: ").removeprefix(f"{path} is ")
            click.echo(f"  {path} ({size(nbytes)}): {reason}")
        if len(report.not_slimmed) > _MOST_FILES:
            click.echo(f"  … and {len(report.not_slimmed) - _MOST_FILES} more (--json lists all)")
    for note in report.notes:
        click.echo(f"note: {note}")
    click.echo("\n" + _conclusion(report))


def _step(step: int | str | None) -> str:
    return "no step" if step is None else f"step {step}"


def _row(name: str, amount: Amount) -> list[str]:
    saved = amount.before - amount.after
    return [name, size(amount.before), size(amount.after), percent(saved, amount.before)]


def _conclusion(report: Report) -> str:
    saved = report.total.before - report.total.after
    if not report.gain:
        return "There is nothing to gain: hardly anything in these files is stored twice."
    if report.exact:
        return f"Slimming saves {size(saved)} of {size(report.total.before)}."
    return (
        f"Slimming saves at most {size(saved)} of {size(report.total.before)}"
        " (an upper bound, from samples; --exact hashes all bytes)."
    )
