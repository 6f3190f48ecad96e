"""What the machine gives this process: cores, memory, mounts, and what cgroups allow of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SPECIAL = {
    "overlay": "overlay",
    "tmpfs": "in memory",
    "ramfs": "in memory",
    "squashfs": "a read-only image",
    "erofs": "a read-only image",
    "iso9660": "a read-only image",
    **dict.fromkeys(
        (
            *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts"),
            *("efivarfs", "fusectl", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs"),
            *("securityfs", "selinuxfs", "sysfs", "tracefs"),
        ),
        "virtual",
    ),
}


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of ``/proc/self/mountinfo`` (proc(5)); ``root`` is what of the device is mounted."""

    device: str
    root: bytes
    point: bytes
    type: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores and bytes of memory this process may use; a limit is ``None`` where there is none."""

    system: str
    cores: int
    cores_of_machine: int
    quota: float | None
    memory: int
    available: int | None
    memory_limit: int | None
    page: int


def machine(proc: Path = Path("/proc")) -> Machine:
    """This machine, as this process sees it."""
    about = os.uname()
    page = os.sysconf("SC_PAGE_SIZE")
    memory = page * os.sysconf("SC_PHYS_PAGES")
    limit = min(_limits(proc, "memory", "memory.max", "memory.limit_in_bytes"), default=memory)
    available = re.search(r"^MemAvailable:\s*(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    return Machine(
        system=f"{about.sysname} {about.release} {about.machine}",
        cores=len(os.sched_getaffinity(0)),
        cores_of_machine=os.cpu_count() or 1,
        quota=min(_limits(proc, "cpu", "cpu.max", "cpu.cfs_quota_us"), default=None),
        memory=memory,
        available=int(available[1]) * 1024 if available else None,
        memory_limit=int(limit) if limit < memory else None,
        page=page,
    )


def mounts(proc: Path = Path("/proc")) -> list[Mount]:
    """All mounts this process sees."""
    found = []
    for line in _text(proc / "self" / "mountinfo").splitlines():
        left, dash, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if dash and len(fields) > 5 and len(more) > 2:
            options = tuple(fields[5].split(",") + more[2].split(","))
            point, root = _unescaped(fields[4]), _unescaped(fields[3])
            found.append(Mount(fields[2], root, point, more[0], more[1], options))
    return found


def mount_of(path: bytes, among: list[Mount]) -> Mount | None:
    """The mount that a path lies on: the longest mount point above it, the last one mounted there.

    Where several are mounted on one point, one with the path's own ``st_dev`` wins; alone that
    number decides nothing, because btrfs gives every subvolume its own.
    """
    path = os.path.realpath(path)
    try:
        device = os.stat(path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
    except OSError:
        number = ""
    above = [m for m in among if path == m.point or path.startswith(os.path.join(m.point, b""))]
    ranked = sorted(above, key=lambda m: (len(m.point), m.device == number))
    return ranked[-1] if ranked else None


def kind_of(filesystem: str) -> str:
    """``local``, or what is special about a type of file system."""
    if filesystem == "fuse" or filesystem.startswith("fuse."):
        return "FUSE"
    if filesystem in _SPECIAL:
        return _SPECIAL[filesystem]
    from slimckpt.sources.files import is_network

    return "network" if is_network(filesystem) else "local"


def _limits(proc: Path, controller: str, unified: str, legacy: str) -> Iterator[float]:
    """What each cgroup from this process's own upwards grants of a resource (cgroups(7)).

    Version 2 says ``max`` or a number, for cores ``QUOTA PERIOD``; version 1 says -1 for no
    quota and a number near 2**63 for no limit of memory.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        for mount in mounts(proc):
            if mount.type == "cgroup2" and number == "0":
                name = unified
            elif mount.type == "cgroup" and controller in controllers.split(","):
                if controller not in mount.options:
                    continue
                name = legacy
            else:
                continue
            top = Path(os.fsdecode(mount.point))
            inside = os.path.relpath(path, os.fsdecode(mount.root))
            own = top if inside.startswith("..") else top / inside
            for group in (own, *own.parents):
                if group != top and top not in group.parents:
                    break
                words = _text(group / name).split()
                period = words[1:] or _text(group / "cpu.cfs_period_us").split()
                if words and words[0] not in ("max", "-1"):
                    cut = int(period[0]) if controller == "cpu" and period else 1
                    yield int(words[0]) / cut


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _unescaped(field: str) -> bytes:
    r"""Spaces, tabs, line ends and backslashes are ``\ooo`` there."""
    raw = field.encode("utf-8", "surrogateescape")
    return re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), raw)
