"""``slimckpt extract``."""

from __future__ import annotations

from dataclasses import asdict

import click

from slimckpt.cli.show import (
    count,
    emit_json,
    jobs_option,
    json_option,
    progress,
    quiet_option,
    ranks_option,
    size,
)

SCHEMA = "slimckpt.extract/1"


@click.command("extract")
@click.argument("store", metavar="STORE")
@click.argument("destination", metavar="DST")
@ranks_option("--rank", "ranks", "Which ranks.")
@click.option("--step", "steps", multiple=True, help="Only files of this step; repeatable.")
@click.option("--run", help="Only files of the run under this path prefix.")
@click.option("--dry-run", is_flag=True, help="Select and measure; write nothing.")
@jobs_option
@json_option
@quiet_option
def extract_command(
    store: str,
    destination: str,
    ranks: tuple[int, ...] | None,
    steps: tuple[str, ...],
    run: str | None,
    dry_run: bool,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write DST, a slim checkpoint of some ranks of STORE, for one node.

    DST stands alone. Files of the step that belong to no rank, and files of no step, come along.
    What is copied is checked; `restore` gives from DST what it gives from STORE, byte for byte.
    """
    from slimckpt.convert.extract import extract
    from slimckpt.model import compact_ranks

    if ranks is None:
        raise click.UsageError("say which ranks: --rank 8-15")
    result = extract(
        store,
        destination,
        ranks,
        steps=steps,
        run=run,
        jobs=jobs,
        dry_run=dry_run,
        progress=progress(quiet),
    )
    if as_json:
        emit_json({"schema": SCHEMA, **asdict(result)})
        return
    click.echo(
        f"{destination}: ranks {compact_ranks(result.ranks)}, {count(result.files, 'file')},"
        f" {size(result.nbytes)} in {size(result.stored_nbytes)}"
        + (" (nothing was written)" if dry_run else "")
    )
