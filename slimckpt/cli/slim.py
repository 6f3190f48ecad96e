"""``slimckpt slim``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
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
    from slimckpt.rewrite.slim import DroppedTensor

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
@click.option(
    "--drop",
    multiple=True,
    type=click.Choice(["optimizer", "master"]),
    help="Leave out for good: optimizer (moments and step state), master (master weights that"
    " have a weight beside them). --dry-run lists every tensor.",
)
@click.option(
    "--keep-full",
    metavar="RULES",
    help="Steps that --drop spares: last:2 (the newest two), every:1000 (multiples), or both.",
)
@category_option
@click.option("--dry-run", is_flag=True, help="Decide and predict; write nothing.")
@click.option("--strict", is_flag=True, help="Stop, before writing, if a file is damaged.")
@jobs_option
@json_option
@quiet_option
def slim_command(
    source: str,
    destination: str,
    min_saving: float,
    drop: tuple[str, ...],
    keep_full: str | None,
    categories: list[tuple[str, str]],
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
        drop=drop,
        keep_full=keep_full,
        categories=categories,
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
    if result.dropped:
        _show_dropped(result.dropped, result.dropped_nbytes, dry_run)
    if dry_run:
        click.echo("Nothing was written (--dry-run). The size is a prediction, rounded up.")
        click.echo(f"While it is written, the same {size(result.store_nbytes)} lie beside DST.")
    else:
        click.echo("Read back and checked. `slimckpt verify --against` says if SRC can go.")


def _show_dropped(dropped: Sequence[DroppedTensor], nbytes: int, every: bool) -> None:
    """What is left out; with ``every``, each tensor, those that several files have joined."""
    files = len({tensor.file for tensor in dropped})
    kinds = ", ".join(sorted({tensor.category for tensor in dropped}))
    click.echo(
        f"  dropped: {count(len(dropped), 'tensor')}, {size(nbytes)}"
        f" ({kinds}); {count(files, 'file')} cannot be restored any more"
    )
    if not every:
        return
    joined: dict[tuple[str, ...], list[DroppedTensor]] = {}
    for tensor in dropped:
        key: tuple[str, ...] = (tensor.name, tensor.category, tensor.dtype, str(list(tensor.shape)))
        joined.setdefault(key, []).append(tensor)
    rows: list[Sequence[str]] = [["dropped", "category", "dtype", "shape", "each", "from"]]
    for key, tensors in joined.items():
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        rows.append([*key, size(tensors[0].nbytes), tensors[0].file + more])
    click.echo(table(rows, left=(0, 1, 2, 3, 5)))
