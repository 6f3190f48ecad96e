"""``slimckpt doctor``."""

from __future__ import annotations

from dataclasses import asdict

import click

from slimckpt.cli.show import count, emit_json, json_option, size, table
from slimckpt.doctor import Examination, examine
from slimckpt.errors import CheckFailedError

SCHEMA = "slimckpt.doctor/1"


@click.command("doctor")
@click.argument("path", metavar="[PATH]", default=".")
@click.option("--quick", is_flag=True, help="Measure no speeds.")
@json_option
@click.pass_context
def doctor_command(context: click.Context, path: str, quick: bool, as_json: bool) -> None:
    """Say what this machine, its libraries and the file system of PATH can do.

    PATH is a directory, by default the current one. Things are tried for real in a hidden
    directory made inside it and removed again; the times of PATH are then put back where this
    user may. A slim checkpoint is never written to: they are tried beside it.

    Exits 1 when anything is found that would make slimckpt fail.
    """
    found = examine(path, quick=quick)
    if as_json:
        issues = [issue._asdict() for issue in found.libhdf5_issues]
        emit_json({"schema": SCHEMA, "well": found.well, **asdict(found), "libhdf5_issues": issues})
    else:
        _show(found)
    if not found.well:
        context.exit(CheckFailedError.exit_code)


def _show(found: Examination) -> None:
    rows = [["", "version", "lowest", ""]]
    rows += [[x.name, x.version or "-", x.lowest or "-", x.problem] for x in found.libraries]
    click.echo(table(rows, left=(0, 3)))
    for issue in found.libhdf5_issues:
        click.echo(f"  known of this libhdf5: {issue.what}; {issue.effect}")
    _show_machine(found)
    _show_file_system(found)
    click.echo()
    for finding in sorted(found.findings, key=lambda finding: finding.serious):
        click.echo(("" if finding.serious else "note: ") + finding.text)
    if found.well:
        click.echo("Nothing stands in the way.")


def _show_machine(found: Examination) -> None:
    machine = found.machine
    quota = "" if machine.quota is None else f"; the cgroup grants {machine.quota:g}"
    limit = "" if machine.memory_limit is None else f"; at most {size(machine.memory_limit)} here"
    left = "" if machine.available is None else f", {size(machine.available)} available"
    rows = [
        ["system", machine.system],
        ["cores", f"{machine.cores} of {machine.cores_of_machine}{quota}"],
        ["memory", f"{size(machine.memory)}{left}{limit}"],
        ["pages", f"{machine.page} B"],
    ]
    if found.hash_speed is not None:
        hashed = found.hash_speed
        rows.append(["BLAKE3, one thread", f"{size(int(hashed.one))}/s"])
        threads = count(hashed.threads, "thread")
        rows.append([f"BLAKE3, {threads}", f"{size(int(hashed.all))}/s"])
    click.echo("\n" + table(rows, left=(0, 1)))


def _show_file_system(found: Examination) -> None:
    system = found.filesystem
    free = "-" if system.free is None else size(system.free)
    if system.free_inodes is not None:
        free += f", {count(system.free_inodes, 'inode')}"
    where = f"mounted at {system.mount_point}" if system.mount_point else "mounted somewhere"
    rows = [
        ["file system", f"{system.type} ({system.kind}), {system.source} {where}"],
        ["free", free],
    ]
    if system.tried_in not in (None, system.path):
        rows.append(["tried in", system.tried_in or ""])
    if system.tried_in is None:
        rows.append(["nothing tried", system.not_tried])
    else:
        answer = {True: "works", False: "no", None: "not tried"}
        rows += [
            [t.name, answer[t.works] + (f": {t.detail}" if t.detail else "")] for t in system.trials
        ]
    if system.speed is not None:
        speed = system.speed
        rows.append(["write and fsync", f"{size(int(speed.write))}/s ({size(speed.nbytes)})"])
        rows.append(["read again", f"{size(int(speed.read))}/s"])
    click.echo(f"\n{system.path}\n" + table(rows, left=(0, 1)))
