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
    selection_options,
    size,
)
from slimckpt.errors import DroppedTensorError

SCHEMA = "slimckpt.restore/1"


@click.command("restore")
@click.argument("store", metavar="STORE")
@click.argument("destination", metavar="DST")
@selection_options
@jobs_option
@json_option
@quiet_option
@click.pass_context
def restore_command(
    context: click.Context,
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
    along. Everything is read back and checked before DST gets its name. Files that lost tensors
    to --drop are named and left out; the exit code is then 1.
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
    lost = [
        dict(zip(("path", "tensors", "nbytes"), row, strict=True)) for row in result.not_restored
    ]
    if as_json:
        found = {"files": result.files, "nbytes": result.nbytes, "not_restored": lost}
        emit_json({"schema": SCHEMA, **found})
    else:
        click.echo(f"{destination}: {count(result.files, 'file')}, {size(result.nbytes)} restored")
    for path, tensors, nbytes in result.not_restored:
        click.echo(
            f"slimckpt: not restored: {path} lost {count(tensors, 'tensor')} ({size(nbytes)}) to"
            " --drop",
            err=True,
        )
    if lost:
        context.exit(DroppedTensorError.exit_code)
