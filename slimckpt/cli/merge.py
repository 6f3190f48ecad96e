"""``slimckpt merge``."""

from __future__ import annotations

from collections import Counter
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
    step_options,
)

SCHEMA = "slimckpt.merge/1"
_SHOWN = 5


@click.command("merge")
@click.argument("source", metavar="STORE")
@click.argument("destination", metavar="OUT")
@step_options
@click.option("--layout", metavar="FILE", help="How STORE lies, where it does not say: TOML.")
@click.option(
    "--max-shard-size", default="5GB", metavar="SIZE", help="Of a file's tensors (5GB, 500MiB)."
)
@click.option(
    "--dtype", type=click.Choice(["bf16", "f16", "f32"]), help="Round floating tensors to this."
)
@click.option("--only", type=click.Choice(["weights"]), help="No optimizer state.")
@click.option("--skip", multiple=True, metavar="GLOB", help="Leave out these whole tensors.")
@click.option("--rename", metavar="FILE", help="Rules for names: [[rule]] with match and to.")
@click.option(
    "--allow-drift",
    is_flag=True,
    help="Where ranks that should hold the same differ, take the lowest, and say so.",
)
@click.option("--dry-run", is_flag=True, help="Decide and measure; write nothing.")
@jobs_option
@json_option
@quiet_option
def merge_command(
    source: str,
    destination: str,
    step: str | None,
    run: str | None,
    layout: str | None,
    max_shard_size: str,
    dtype: str | None,
    only: str | None,
    skip: tuple[str, ...],
    rename: str | None,
    allow_drift: bool,
    dry_run: bool,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the whole tensors of one step of STORE as safetensors.

    STORE is a slim checkpoint or a directory of originals. OUT gets model.safetensors, or shards
    and their index, as transformers looks for them; config and tokenizer are yours to add. Bits
    stay as they are unless --dtype is given. With --only weights tensors get the names of the
    model's parameters where the files say them, as DeepSpeed's do. Tied tensors are written once.
    """
    from slimckpt.convert.merge import merge

    result = merge(
        source,
        destination,
        step=step,
        run=run,
        layout=layout,
        max_shard_size=max_shard_size,
        dtype=dtype,
        only=only,
        skip=skip,
        rename=rename,
        allow_drift=allow_drift,
        jobs=jobs,
        dry_run=dry_run,
        progress=progress(quiet),
    )
    for name in result.overflowed:
        click.echo(f"slimckpt: {name}: finite values became infinite in {dtype}", err=True)
    for pattern in result.unused:
        click.echo(f"slimckpt: a rule of {rename} matches no name: {pattern}", err=True)
    if as_json:
        found = asdict(result)
        found["left_out"] = [one._asdict() for one in result.left_out]
        emit_json({"schema": SCHEMA, **found})
        return
    click.echo(
        f"{destination}: {count(len(result.files), 'file')}, {count(result.tensors, 'tensor')},"
        f" {size(result.tensor_nbytes)}" + (" (nothing was written)" if dry_run else "")
    )
    for name, kept in result.tied.items():
        click.echo(f"  tied: {name} is {kept}")
    for reason, number in Counter(one.reason for one in result.left_out).items():
        names = [one.name for one in result.left_out if one.reason == reason]
        shown = ", ".join(names[:_SHOWN]) + (", …" if number > _SHOWN else "")
        click.echo(f"  left out: {number:,} ({reason}): {shown}")
