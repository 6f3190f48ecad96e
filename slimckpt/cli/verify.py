"""``slimckpt verify``."""

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
    size,
)
from slimckpt.errors import CheckFailedError

SCHEMA = "slimckpt.verify/1"


@click.command("verify")
@click.argument("store", metavar="STORE")
@click.option(
    "--quick", is_flag=True, help="Manifests, indexes, structure and sizes; not payloads."
)
@click.option(
    "--against", metavar="SRC", help="Compare every file with SRC, byte for byte, and metadata."
)
@jobs_option
@json_option
@quiet_option
@click.pass_context
def verify_command(
    context: click.Context,
    store: str,
    quick: bool,
    against: str | None,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check that STORE is sound, and with --against that SRC can be deleted.

    Exits 1 when anything is wrong, after listing all of it; with --against, when SRC cannot be
    deleted: what was damaged in SRC before it was slimmed is listed, and is no reason to keep it.
    """
    from slimckpt.rewrite.verify import sentence, verify

    result = verify(store, quick=quick, against=against, jobs=jobs, progress=progress(quiet))
    if as_json:
        emit_json({"schema": SCHEMA, "sound": result.sound, **asdict(result)})
    else:
        for problem in result.problems:
            click.echo(problem)
        for note in result.notes:
            click.echo(f"note: {note}")
        state = "sound" if result.sound else count(len(result.problems), "problem")
        click.echo(
            f"{store}: {count(result.files, 'file')} in {count(result.containers, 'container')},"
            f" {size(result.nbytes_read)} read: {state}"
        )
        if quick:
            click.echo("Payloads were not read (--quick): their bytes were not checked.")
        if against is not None:
            click.echo(sentence(result, against))
    if not (result.sound if against is None else result.safe):
        context.exit(CheckFailedError.exit_code)
