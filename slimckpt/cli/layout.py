"""``slimckpt layout``."""

from __future__ import annotations

import click

from slimckpt.cli.show import step_options


@click.command("layout")
@click.argument("source", metavar="SRC")
@click.option(
    "--layout",
    metavar="FILE",
    help="Say how SRC lies by this TOML or strategy file, instead of what it records.",
)
@step_options
def layout_command(source: str, layout: str | None, step: str | None, run: str | None) -> None:
    """Print which part of each tensor each rank of SRC has, as rules in TOML.

    SRC is a slim checkpoint or a directory of originals. The output is there to be edited, for
    `reshard --layout`. Tensors that no rule can give are named in
    comments, with the reason.
    """
    from slimckpt.layouts.toml_writing import to_toml
    from slimckpt.views.checkpoint import Checkpoint

    with Checkpoint(source) as checkpoint:
        chosen = checkpoint.only_step(run, "layout", step)
        click.echo(to_toml(chosen.layout(layout)), nl=False)
