"""Whether this machine can mount at all, found out without slimckpt, and what mount tests share."""

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


@functools.cache
def no_fuse() -> str | None:
    """Why nothing can be mounted by FUSE here; ``None`` where it can."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory() as place:
        options = b"fd=%d,rootmode=40000,user_id=%d,group_id=%d"
        data = options % (device, os.geteuid(), os.getegid())
        failed = libc.mount(b"probe", os.fsencode(place), b"fuse.probe", 0, data)
        why = os.strerror(ctypes.get_errno())
        if not failed:
            libc.umount2(os.fsencode(place), 3)
        os.close(device)
    if failed and not (shutil.which("fusermount3") or shutil.which("fusermount")):
        return f"mounting by FUSE: {why}"
    return None


def skip_without_fuse() -> None:
    if reason := no_fuse():
        pytest.skip(reason)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether something comes true in time."""
    end = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def is_mounted(path: Path) -> bool:
    """Whether something is mounted there, by the kernel's own list: a stale mount is too."""
    shown = str(path).replace(" ", "\\040")
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == shown for line in mounts)


def take_away(path: Path) -> None:
    """Unmount from outside, as a user does."""
    helper = ["umount"] if os.geteuid() == 0 else ["fusermount", "-u"]
    subprocess.run([*helper, path], check=True)


@contextlib.contextmanager
def running(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process with its outputs as pipes; killed at the end if it still runs, so that a test
    of one that cannot be stopped fails."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with subprocess.Popen(command, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
