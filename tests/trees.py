"""Trees of files: what one is in every respect that a restore must give back, and odd ones."""

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from mindspore_bytes import record
from safetensors_bytes import safetensors_file

MODES = (0o644, 0o400, 0o600, 0o664, 0o444, 0o755)


def snapshot(root: str | bytes | os.PathLike[str]) -> dict[bytes, Any]:
    """Every entry of a tree by its path, with kind, content, mode, mtime, owner and link group.

    Directories include the root, as the empty path. A link group is the first path, in byte
    order, that names the same inode.
    """
    top = os.fsencode(root)
    first: dict[tuple[int, int], bytes] = {}
    found: dict[bytes, Any] = {}
    for path in sorted(_paths(top)):
        here = os.path.join(top, path) if path else top
        status = os.lstat(here)
        owner = (status.st_uid, status.st_gid)
        if stat.S_ISLNK(status.st_mode):
            found[path] = ("link", os.readlink(here), status.st_mtime_ns, owner)
            continue
        about = (stat.S_IMODE(status.st_mode), status.st_mtime_ns, owner)
        if stat.S_ISDIR(status.st_mode):
            found[path] = ("directory", *about)
        else:
            group = first.setdefault((status.st_dev, status.st_ino), path)
            with open(here, "rb") as file:  # noqa: PTH123 - paths are bytes
                digest = hashlib.sha256(file.read()).hexdigest()
            found[path] = ("file", status.st_size, digest, group, *about)
    return found


def _paths(top: bytes) -> list[bytes]:
    found = [b""]
    for directory, names, files in os.walk(top):
        inner = os.path.relpath(directory, top)
        prefix = b"" if inner == b"." else inner + b"/"
        found += [prefix + name for name in names + files]
    return found


def contents(root: str | bytes | os.PathLike[str]) -> dict[bytes, bytes]:
    """The bytes of every regular file of a tree."""
    top = os.fsencode(root)
    return {
        path: Path(os.fsdecode(os.path.join(top, path))).read_bytes()
        for path in _paths(top)
        if path and stat.S_ISREG(os.lstat(os.path.join(top, path)).st_mode)
    }


def dressed(source: Path, target: Path) -> Path:
    """A copy of a tree with modes and times of all kinds, links and empty directories."""
    shutil.copytree(source, target)
    first = min(path for path in target.rglob("*") if path.is_file())
    (target / "no files here" / "nor here").mkdir(parents=True)
    (target / "dangling").symlink_to("nowhere/at all")
    (target / "absolute").symlink_to("/etc/hostname")
    (target / "again").symlink_to(first.relative_to(target))
    os.link(first, target / "z second name")
    os.link(target / "dangling", target / "dangling twice", follow_symlinks=False)
    set_times_and_modes(target)
    return target


def set_times_and_modes(root: Path) -> None:
    """Give every entry a time of its own, files six modes, every second directory 0555."""
    entries = sorted(root.rglob("*"), key=lambda path: (-len(path.parts), os.fsencode(path)))
    for number, path in enumerate([*entries, root]):
        time = 1_500_000_000_123_456_789 + number * 1_000_000_007
        if path.is_symlink():
            os.utime(path, ns=(time, time), follow_symlinks=False)
            continue
        if path.is_dir():
            path.chmod(0o555 if number % 2 else 0o750)
        else:
            path.chmod(MODES[number % len(MODES)])
        os.utime(path, ns=(time, time))


def open_ways_to(place: Path) -> None:
    """Let everybody reach a temporary directory, which is its maker's alone."""
    for directory in (place, *place.parents):
        if (mode := directory.stat().st_mode) & 0o011 != 0o011:
            directory.chmod(stat.S_IMODE(mode) | 0o011)


def body(seed: int, nbytes: int) -> bytes:
    """Bytes that do not repeat, the same for the same seed."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(nbytes)


def small_run(root: Path, nbytes: int = 4096) -> Path:
    """Two ranks of MindSpore and two steps of safetensors, in which much is shared."""
    shared, frozen = body(1, nbytes), body(2, nbytes)
    for rank in (0, 1):
        directory = root / f"rank_{rank}"
        directory.mkdir(parents=True)
        (directory / "net-1_1.ckpt").write_bytes(
            record("embedding", "Float32", [nbytes // 4], shared)
            + record("moment", "Float16", [nbytes // 2], body(10 + rank, nbytes))
            + record("bias", "Float32", [4], body(20 + rank, 16))
        )
    for step in (10, 20):
        directory = root / f"checkpoint-{step}"
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(
            safetensors_file(
                [
                    ("base.weight", "F32", [nbytes // 4], frozen),
                    ("lora_A.weight", "BF16", [nbytes // 2], body(step, nbytes)),
                ]
            )
        )
    (root / "args.json").write_bytes(b'{"lr": 0.1}\n')
    (root / "empty").mkdir()
    (root / "latest").symlink_to("checkpoint-20")
    os.link(root / "args.json", root / "checkpoint-10" / "args.json")
    return root
