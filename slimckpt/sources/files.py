"""Files as a backend opens them, and whether they lie on a network."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

_NETWORK = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "gfs2",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    ]
)


class Files:
    """Opens files where they are."""

    def open(self, path: bytes, expected_size: int) -> int:
        """A descriptor to read the file ``path`` by; its length may be another all the same."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def far(self, path: bytes) -> bool:
        """Whether the file is read over a network."""
        return on_network(os.path.dirname(path))

    def close(self) -> None:
        """Begin nothing more."""


@lru_cache(maxsize=1024)
def on_network(directory: bytes) -> bool:
    """Whether a directory lies on a network file system (NFS, SMB, Lustre, FUSE and the like)."""
    try:
        device = os.stat(directory).st_dev
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(kind == number and is_network(name) for kind, name in _mounts())


def is_network(filesystem: str) -> bool:
    """Whether a type of file system, as the kernel names it, reads over a network."""
    return filesystem in _NETWORK or filesystem == "fuse" or filesystem.startswith("fuse.")


def _mounts() -> list[tuple[str, str]]:
    """Device number and type of each mount."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        left, _, right = line.partition(" - ")
        if right and len(left.split()) > 2:
            found.append((left.split()[2], right.split()[0]))
    return found
