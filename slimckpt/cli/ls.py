"""``slimckpt ls``."""

from __future__ import annotations

from typing import Any

import click

from slimckpt.cli.show import emit_json, json_option, size, table

SCHEMA = "slimckpt.ls/1"


@click.command("ls")
@click.argument("path", metavar="PATH")
@click.option("--step", help="Tensors of this step.")
@click.option("--rank", type=int, help="Tensors of this rank.")
@click.option("--run", help="Only the run under this path prefix.")
@json_option
def ls_command(
    path: str, step: str | None, rank: int | None, run: str | None, as_json: bool
) -> None:
    """List what PATH holds: files, or with --step and --rank the tensors in them.

    PATH is a slim checkpoint or an original directory.
    """
    from slimckpt.rewrite.listing import list_path

    listing = list_path(path, step=step, rank=rank, run=run)
    tensors = step is not None or rank is not None
    if as_json:
        emit_json({"schema": SCHEMA, **listing.as_json(tensors)})
        return
    rows: list[list[str]] = []
    if tensors:
        rows = [["tensor", "dtype", "shape", "size", "file"]]
        for file in listing.files:
            rows += [
                [
                    t.name,
                    t.dtype,
                    str(list(t.shape)),
                    "dropped" if number in file.dropped else size(t.nbytes),
                    file.path,
                ]
                for number, t in enumerate(file.tensors)
            ]
        click.echo(table(rows, left=(0, 1, 2, 4)))
    else:
        rows = [["file", "size", "step", "rank", "tensors", "format", "stored"]]
        rows += [
            [
                file.path,
                size(file.nbytes),
                _or_dash(file.step),
                _or_dash(file.rank),
                _or_dash(len(file.tensors) if file.tensors else None),
                file.format,
                f"{file.stored}, {len(file.dropped)} dropped" if file.dropped else file.stored,
            ]
            for file in listing.files
        ]
        click.echo(table(rows, left=(0, 5, 6)))
    for problem in listing.problems:
        click.echo(f"slimckpt: warning: {problem}", err=True)


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)
