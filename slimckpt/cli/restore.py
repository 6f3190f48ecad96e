"""``slimckpt restore``."""

from __future__ import annotations

import click

from slimckpt.cli.show import (
    count,
    emit_json,
    jobs_option,
    json_option,
    progress,
    quiet_option,
    size,
)

SCHEMA = "slimckpt.restore/1"


@click.command("restore")
@click.argument("store", metavar="STORE")
@click.argument("destination", metavar="DST")
@click.option("--step", "steps", multiple=True, help="Only files of this step; repeatable.")
@click.option("--rank", "ranks", multiple=True, type=int, help="Only files of this rank.")
@click.option("--file", "files", multiple=True, metavar="GLOB", help="Only these original paths.")
@click.option("--run", help="Only files of the run under this path prefix.")
@jobs_option
@json_option
@quiet_option
def restore_command(
    store: str,
    destination: str,
    steps: tuple[str, ...],
    ranks: tuple[int, ...],
    files: tuple[str, ...],
    run: str | None,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the original files of STORE, all or a selection, to DST.

    With --step or --rank, files of the step that belong to no rank, and files of no step, come
    along. Everything is read back and checked before DST gets its name.
    """
    from slimckpt.rewrite.restore import restore

    result = restore(
        store,
        destination,
        steps=steps,
        ranks=ranks,
        files=files,
        run=run,
        jobs=jobs,
        progress=progress(quiet),
    )
    if as_json:
        emit_json({"schema": SCHEMA, "files": result.files, "nbytes": result.nbytes})
    else:
        click.echo(f"{destination}: {count(result.files, 'file')}, {size(result.nbytes)} restored")
