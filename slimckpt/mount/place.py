"""Where a mount goes, what it needs there, and taking it away again."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from ctypes.util import find_library
from types import ModuleType

from slimckpt import effects
from slimckpt.errors import MountError
from slimckpt.model import show_path

DEVICE = "/dev/fuse"
_HELPERS = ("fusermount3", "fusermount")
_READAHEAD = 1024
"""KiB. The kernel grants FUSE 128, and libfuse 3 takes requests of up to 1 MiB."""
_MNT_FORCE, _MNT_DETACH = 1, 2


def check_mountpoint(mountpoint: bytes, store: bytes) -> bytes:
    """The real path of a directory to mount on.

    Raises
    ------
    MountError
        It does not exist, is no directory, is not empty, lies inside the store, or is what a
        mount left behind whose process was killed.
    """
    shown = show_path(mountpoint)
    try:
        with os.scandir(mountpoint) as entries:
            empty = next(entries, None) is None
    except OSError as error:
        hints = {
            errno.ENOENT: f"; make it: mkdir {shown}",
            errno.ENOTDIR: "; a mount goes on an empty directory",
            errno.ENOTCONN: ": left by a mount whose process is gone; take it away with"
            f" `fusermount -u {shown}` (or `umount {shown}`) and run this again",
        }
        raise MountError(f"{shown}: {error.strerror}{hints.get(error.errno or 0, '')}") from None
    if not empty:
        raise MountError(f"{shown} is not empty; a mount goes on an empty directory")
    real, outer = os.path.realpath(mountpoint), os.path.realpath(store)
    if real.startswith(os.path.join(outer, b"")):
        raise MountError(f"{shown} lies inside {show_path(outer)}; name a directory outside")
    return real


def load_fuse() -> ModuleType:
    """:mod:`slimckpt.mount.fuse`.

    Raises
    ------
    MountError
        mfusepy, libfuse or the device is missing or out of reach; says how to get it.
    """
    if find_library("fuse3") and (os.geteuid() == 0 or _is_installed(_HELPERS[0])):
        # mfusepy would take libfuse 2 where both are: its requests end at 128 KiB.
        os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
    try:
        from slimckpt.mount import fuse
    except ModuleNotFoundError as error:
        if error.name != "mfusepy":
            raise
        raise MountError(
            "mounting needs the module mfusepy, which is not installed:"
            " pip install 'slimckpt[mount]'"
        ) from None
    except (OSError, AttributeError) as error:
        raise MountError(
            f"mounting needs libfuse, which cannot be loaded ({error}); on Debian and Ubuntu:"
            " apt-get install fuse3"
        ) from None
    if not os.path.exists(DEVICE):
        raise MountError(
            f"this machine has no {DEVICE}: `modprobe fuse` as root loads it; a container needs"
            f" --device {DEVICE} --cap-add SYS_ADMIN"
        )
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        raise MountError(f"no permission to read and write {DEVICE}; ask who runs this machine")
    return fuse


def widen_readahead(mountpoint: bytes) -> None:
    """Let the kernel ask for 1 MiB at a time, where this user may (as root)."""
    # This waits for the kernel to have made its own choice, which would undo ours.
    device = os.stat(mountpoint).st_dev
    path = b"/sys/class/bdi/%d:%d/read_ahead_kb" % (os.major(device), os.minor(device))
    with contextlib.suppress(OSError):
        effects.set_in_kernel(path, b"%d" % _READAHEAD)


def unmount(mountpoint: bytes) -> None:
    """Take a mount away, whoever still has files of it open."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(mountpoint, _MNT_FORCE | _MNT_DETACH) == 0:
        return
    for helper in _HELPERS:
        with contextlib.suppress(FileNotFoundError):
            subprocess.run([helper, "-u", "-z", "-q", "--", mountpoint], check=False)
            return


def _is_installed(program: str) -> bool:
    return any(os.access(os.path.join(p, program), os.X_OK) for p in os.get_exec_path())
