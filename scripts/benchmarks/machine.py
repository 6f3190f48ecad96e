"""What the figures were taken on: they do not compare with those of other machines."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from benchmarks.workshop import SCRIPTS

TOOLS = dict.fromkeys(("borg", "casync", "zstd", "bindfs"), "--version") | {"restic": "version"}


def machine() -> dict[str, object]:
    import h5py

    cpu = [
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    packages = ("slimckpt", "numpy", "h5py", "blake3", "click")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu[0] if cpu else platform.machine(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB",
        "kernel": platform.release(),
        "file system": _first_line(["findmnt", "-no", "FSTYPE", "-T", tempfile.gettempdir()]),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "libhdf5": h5py.version.hdf5_version,
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "tools": {name: _first_line([name, option]) for name, option in TOOLS.items()},
        "commit": _first_line(["git", "-C", str(SCRIPTS), "describe", "--always", "--dirty"]),
    }


def _first_line(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
    except FileNotFoundError:
        return None
