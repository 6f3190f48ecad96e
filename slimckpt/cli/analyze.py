"""``slimckpt analyze``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from slimckpt.cli.show import (
    category_option,
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

if TYPE_CHECKING:
    from slimckpt.analysis.report import Amount, Report

_MOST_FILES = 10


@click.command("analyze")
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.option("--exact", is_flag=True, help="Hash all bytes; else savings are an upper bound.")
@click.option(
    "--groups",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    help="How many replica groups to list.",
)
@category_option
@click.option("--min-saving", default=5.0, show_default=True, metavar="PCT", help="As for slim.")
@jobs_option
@json_option
@quiet_option
def analyze_command(
    sources: tuple[str, ...],
    exact: bool,
    groups: int,
    categories: list[tuple[str, str]],
    min_saving: float,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show what is replicated in SRC, and what slimming it would save.

    Several directories are looked at together. Writes nothing. Without --exact it reads headers
    and under a KiB of each tensor.
    """
    from slimckpt.analysis.analyze import analyze

    report = analyze(
        sources,
        exact=exact,
        categories=categories,
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
    title = ", ".join(report.sources)
    click.echo(f"{title}: {count(report.files, 'file')} ({formats or 'none'})")
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
    rows += [_row(root, amount) for root, amount in report.by_root]
    if len(report.by_step) > 1:
        rows += [
            _row(" ".join(filter(None, [run, _step(step)])), amount)
            for run, step, amount in report.by_step
        ]
    rows += [_row(name, amount) for name, amount in report.by_category.items() if amount.before]
    click.echo("\n" + table(rows))
    _show_cost(report)
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
    for note in (*_findings(report), *report.notes):
        click.echo(f"note: {note}")
    click.echo("\n" + _conclusion(report))
    _show_savings(report)


def _show_cost(report: Report) -> None:
    """Bytes per parameter of the newest step; of several runs, of the one that comes last."""
    if not report.step_costs:
        return
    cost = report.step_costs[-1]
    kinds = [kind for kind, nbytes in cost.now.items() if nbytes]
    where = " ".join(filter(None, ["of", cost.run, _step(cost.step)]))
    where = f" {where}" if len(report.step_costs) > 1 else ""
    bound = "" if report.exact else "at least "
    click.echo(f"\nbytes per parameter{where} ({bound}{cost.parameters:,} parameters)")
    rows = [["", *kinds, "in all"]]
    for title, nbytes in (("now", cost.now), ("distinct", cost.distinct)):
        values = [nbytes[kind] for kind in kinds]
        figures = [value / cost.parameters for value in (*values, sum(values))]
        rows.append([title, *(f"{figure:.2f}" for figure in figures)])
    click.echo(table(rows))


def _findings(report: Report) -> list[str]:
    """What is odd about the bytes, whatever is stored twice."""
    found = []
    bound = "" if report.exact else "up to "
    if report.constants.payloads:
        tensors = count(report.constants.payloads, "tensor")
        found.append(
            f"{bound}{tensors} ({size(report.constants.nbytes)}) are one number over and over,"
            f" such as {report.constants.example}"
        )
    if report.dead.payloads:
        found.append(
            f"{size(report.dead.nbytes)} are stored that no tensor uses, as in"
            f" {report.dead.example}"
        )
    if report.repeated_steps:
        run, step, earlier = report.repeated_steps[0]
        more = len(report.repeated_steps) - 1
        seems = "has" if report.exact else "seems to have"
        found.append(
            f"step {step}{' of ' + run if run else ''} {seems} all tensors of step {earlier}"
            + (f"; {count(more, 'more step')} like that" if more else "")
        )
    return found


def _show_savings(report: Report) -> None:
    """What to type. Only for one source: ``slim`` takes one."""
    if len(report.sources) > 1:
        click.echo("`slimckpt slim` takes one directory: move them under one to share among them.")
        return
    source = report.sources[0].rstrip("/") or "/"
    command = f"slimckpt slim {shlex.quote(source)} {shlex.quote(source + '.slim')}"
    drops = [saving for saving in report.savings if saving.options]
    if report.gain or drops:
        click.echo(f"  {command}{'' if report.gain else ' OPTIONS'}")
    if drops:
        click.echo(
            "What is not repeated but not resumed from may be left out, for good, by OPTIONS:"
        )
        more = "more" if report.gain else "in all"
        rows = [[saving.options, f"saves about {size(saving.saved)} {more}"] for saving in drops]
        click.echo(table(rows, left=(0, 1)))


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
