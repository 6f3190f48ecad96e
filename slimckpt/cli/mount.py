"""``slimckpt mount``."""

from __future__ import annotations

import click

from slimckpt.cli.show import count, selection_options, size


@click.command("mount")
@click.argument("store", metavar="STORE")
@click.argument("mountpoint", metavar="MOUNTPOINT")
@selection_options
@click.option(
    "--allow-other", is_flag=True, help="Let other users read too, as far as modes and owners do."
)
@click.option("--while-stdin", is_flag=True, hidden=True, help="Stop where stdin ends.")
def mount_command(
    store: str,
    mountpoint: str,
    steps: tuple[str, ...],
    ranks: tuple[int, ...],
    files: tuple[str, ...],
    run: str | None,
    allow_other: bool,
    while_stdin: bool,
) -> None:
    """Show the original files of STORE, all or a selection, read-only on MOUNTPOINT.

    MOUNTPOINT is an empty directory. Stays in the foreground until it is stopped (Ctrl-C, SIGTERM)
    or unmounted (`fusermount -u MOUNTPOINT`), and ends in code 0 then. Bytes are not checked
    against digests. What --drop left out, and what is damaged, is an input/output error to who
    reads it, with a line on stderr that says why.
    """
    from slimckpt.mount.serve import serve, stop_where_stdin_ends
    from slimckpt.rewrite.select import Chosen

    def on_mounted(chosen: Chosen) -> None:
        nbytes = sum(entry.file.size for _, entry, _ in chosen.files)
        click.echo(f"{mountpoint}: {count(len(chosen.files), 'file')}, {size(nbytes)} mounted")

    if while_stdin:
        stop_where_stdin_ends()
    serve(
        store,
        mountpoint,
        steps=steps,
        ranks=ranks,
        files=files,
        run=run,
        allow_other=allow_other,
        on_mounted=on_mounted,
    )
