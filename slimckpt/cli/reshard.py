"""``slimckpt reshard``."""

from __future__ import annotations

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
    source_layout_options,
    step_options,
)

SCHEMA = "slimckpt.reshard/1"
_SHOWN = 5


@click.command("reshard")
@click.argument("source", metavar="STORE")
@click.argument("destination", metavar="DST")
@click.option("--layout", metavar="FILE", help="How DST is wanted: TOML, as `layout` prints it.")
@click.option("--strategy", metavar="FILE", help="How DST is wanted: a strategy file of MindSpore.")
@click.option(
    "--ranks", type=click.IntRange(1), metavar="N", help="A number of ranks, if it says enough."
)
@ranks_option("--only-ranks", "only_ranks", "Write only these of the new ranks.")
@source_layout_options
@click.option("--skip", multiple=True, metavar="GLOB", help="Leave out these whole tensors.")
@step_options
@click.option("--dry-run", is_flag=True, help="Prove and measure it; write nothing.")
@jobs_option
@json_option
@quiet_option
def reshard_command(
    source: str,
    destination: str,
    layout: str | None,
    strategy: str | None,
    ranks: int | None,
    only_ranks: tuple[int, ...] | None,
    source_layout: str | None,
    allow_drift: bool,
    skip: tuple[str, ...],
    step: str | None,
    run: str | None,
    dry_run: bool,
    jobs: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write DST, a slim checkpoint of one step as other ranks would hold it.

    STORE is a slim checkpoint or a directory of originals. What it says of its tensors is proved
    before it is used: shapes, coverage, equality of replicas. DST stands alone; its ranks are read
    by `slimckpt.open`, and `slimckpt export` makes files of them. Exactly one of --layout,
    --strategy and --ranks says what is wanted.
    """
    from slimckpt.convert.reshard import reshard
    from slimckpt.model import compact_ranks

    if sum(wanted is not None for wanted in (layout, strategy, ranks)) != 1:
        raise click.UsageError("give exactly one of --layout FILE, --strategy FILE and --ranks N")
    result = reshard(
        source,
        destination,
        layout if layout is not None else strategy,
        ranks=ranks,
        only_ranks=only_ranks,
        layout=source_layout,
        step=step,
        run=run,
        skip=skip,
        allow_drift=allow_drift,
        jobs=jobs,
        dry_run=dry_run,
        progress=progress(quiet),
    )
    for pattern in result.unused:
        click.echo(f"slimckpt: a rule of {layout} matches no tensor: {pattern}", err=True)
    if as_json:
        emit_json(
            {
                "schema": SCHEMA,
                "ranks": result.ranks,
                "tensors": result.tensors,
                "tensor_nbytes": result.tensor_nbytes,
                "store_nbytes": result.store_nbytes,
                "carried": result.carried,
                "unused": result.unused,
                "dry_run": dry_run,
            }
        )
        return
    click.echo(
        f"{destination}: ranks {compact_ranks(result.ranks)}, {count(result.tensors, 'tensor')},"
        f" {size(result.tensor_nbytes)} in {size(result.store_nbytes)}"
        + (" (nothing was written)" if dry_run else "")
    )
    if result.carried:
        more = len(result.carried) - _SHOWN
        click.echo(
            f"  outside the layout, each rank's own or else of the first rank:"
            f" {', '.join(result.carried[:_SHOWN])}" + (f" and {more} more" if more > 0 else "")
        )
