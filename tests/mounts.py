"""Whether this machine can mount at all, found out without slimckpt, and what mount tests share."""

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_PROBE = """
import sys, mfusepy

class Empty(mfusepy.Operations):
    use_ns = True

mfusepy.FUSE(Empty(), sys.argv[1], foreground=True, ro=True)
"""


@functools.cache
def no_fuse() -> str | None:
    """Why an empty file system of mfusepy cannot be mounted; ``None`` where it can."""
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed"
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-c", _PROBE, place]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as probe:
            until(lambda: probe.poll() is not None or os.path.ismount(place))
            mounted = os.path.ismount(place)
            probe.terminate()
            said = probe.communicate()[0].decode(errors="replace").strip()
    return None if mounted else f"this machine mounts no FUSE: {said.rpartition(chr(10))[2]}"


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
