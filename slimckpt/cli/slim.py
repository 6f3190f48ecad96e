"""``slimckpt slim``."""

from __future__ import annotations

from dataclasses import asdict

import click

from slimckpt.cli.show import (
    count,
    emit_json,
    jobs_option,
    json_option,
    percent,
    progress,
    quiet_option,
    size,
)

SCHEMA = "slimckpt.slim/1"
_MOST_FILES = 10


@click.command("slim")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--min-saving",
    default=5.0,
    show_default=True,
    metavar="PCT",
    help="Rewrite a file only if this much of it is shared; 0: all that are understood.",
)
@click.option("--dry-run", is_flag=True, help="Decide and predict; write nothing.")
@click.option("--strict", is_flag=True, help="Stop, before writing, if a file is damaged.")
@jobs_option
@json_option
@quiet_option
def slim_command(
    source: str,
    destination: str,
    min_saving: float,
    dry_run: bool,
    strict: bool,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write DST, a slim checkpoint: the files of SRC with what they share stored once.

    SRC is never changed. Every byte of DST is read back and checked before it gets its name.
    """
    from slimckpt.rewrite.slim import slim

    result = slim(
        source,
        destination,
        min_saving=min_saving,
        jobs=jobs,
        dry_run=dry_run,
        strict=strict,
        progress=progress(quiet),
    )
    if as_json:
        found = asdict(result)
        found["kept_whole"] = [{"path": p, "reason": r} for p, r in result.kept_whole]
        emit_json({"schema": SCHEMA, **found})
        return
    for warning in result.warnings:
        click.echo(f"slimckpt: warning: {warning}", err=True)
    saved = result.source_nbytes - result.store_nbytes
    gain = (
        f"{percent(saved, result.source_nbytes)} saved"
        if saved > 0
        else f"{size(-saved)} MORE than the source"
    )
    verb = "would hold" if dry_run else "holds"
    about = "about " if dry_run else ""
    click.echo(
        f"{destination} {verb} {count(result.files, 'file')} of {size(result.source_nbytes)} in"
        f" {about}{size(result.store_nbytes)} ({gain}),"
        f" {result.store_inodes} inodes"
    )
    click.echo(f"  rewritten: {result.rewritten}, kept whole: {len(result.kept_whole)}")
    for path, reason in result.kept_whole[:_MOST_FILES]:
        click.echo(f"    {path}: {reason.removeprefix(path + ': ')}")
    if len(result.kept_whole) > _MOST_FILES:
        click.echo(f"    … and {len(result.kept_whole) - _MOST_FILES} more (--json lists all)")
    if dry_run:
        click.echo("Nothing was written (--dry-run). The size is a prediction, rounded up.")
        click.echo(f"While it is written, the same {size(result.store_nbytes)} lie beside DST.")
    else:
        click.echo("Read back and checked. `slimckpt verify --against` says if SRC can go.")
