"""``slimckpt export``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

import click

from slimckpt.cli.show import (
    category_option,
    count,
    emit_json,
    jobs_option,
    json_option,
    progress,
    quiet_option,
    ranks_option,
    size,
    step_options,
)

SCHEMA = "slimckpt.export/1"
FORMATS = ("safetensors", "mindspore", "torch", "npz", "hdf5", "dcp")
_SHOWN = 5


@click.command("export")
@click.argument("source", metavar="STORE")
@click.argument("destination", metavar="DST")
@click.option("--format", required=True, type=click.Choice(FORMATS), help="Of the files.")
@ranks_option("--rank", "ranks", "Write only these ranks.")
@step_options
@click.option("--only", type=click.Choice(["weights"]), help="Only what belongs to the model.")
@category_option
@click.option("--skip", multiple=True, metavar="GLOB", help="Leave out tensors of these names.")
@click.option("--layout", metavar="FILE", help="Of dcp: how STORE lies, where it does not say.")
@click.option(
    "--allow-drift",
    is_flag=True,
    help="Of dcp: where ranks that should hold the same differ, take the lowest, and say so.",
)
@click.option("--dry-run", is_flag=True, help="Decide and measure; write nothing.")
@jobs_option
@json_option
@quiet_option
def export_command(
    source: str,
    destination: str,
    format: str,
    ranks: tuple[int, ...] | None,
    step: str | None,
    run: str | None,
    only: str | None,
    categories: list[tuple[str, str]],
    skip: tuple[str, ...],
    layout: str | None,
    allow_drift: bool,
    dry_run: bool,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the tensors of each rank of STORE as files of another format.

    STORE is a slim checkpoint, one that `reshard` made, or a directory of originals. Each rank
    becomes one file, at the path of its own. What has no place in the format is listed, and a
    tensor whose dtype it does not have is an error.

    \b
    safetensors  tensors that share a storage are written each
    mindspore    a .ckpt for mindspore.load_checkpoint
    torch        a dict of tensors for torch.load(weights_only=True); shared storages stay shared
    npz          dtypes that numpy does not have are V1 and V2: .view(ml_dtypes.bfloat16)
    hdf5         a dataset for each tensor; / in names makes groups
    dcp          all ranks as one directory of torch.distributed.checkpoint
    """
    from slimckpt.convert.export import export

    result = export(
        source,
        destination,
        format,
        ranks=ranks,
        step=step,
        run=run,
        only=only,
        categories=categories,
        skip=skip,
        layout=layout,
        allow_drift=allow_drift,
        jobs=jobs,
        dry_run=dry_run,
        progress=progress(quiet),
    )
    if as_json:
        found = asdict(result)
        keys = ("path", "name", "reason")
        found["left_out"] = [dict(zip(keys, one, strict=True)) for one in result.left_out]
        emit_json({"schema": SCHEMA, **found})
        return
    tensors = sum(file.tensors for file in result.files)
    click.echo(
        f"{destination}: {count(len(result.files), 'file')} of {format},"
        f" {count(tensors, 'tensor')}, {size(result.nbytes)}"
        + (" (nothing was written)" if dry_run else "")
    )
    reasons = Counter(reason for _, _, reason in result.left_out)
    for reason, number in reasons.items():
        names = dict.fromkeys(name for _, name, why in result.left_out if why == reason)
        shown = ", ".join([*names][:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        click.echo(f"  left out: {number:,} ({reason}): {shown}")
    if any(len({n for _, n, w in result.left_out if w == r}) > _SHOWN for r in reasons):
        click.echo("  (--json lists all)")
