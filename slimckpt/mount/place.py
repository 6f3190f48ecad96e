"""Where a mount goes, attaching it there, and taking it away again."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import stat
import subprocess

from slimckpt import effects
from slimckpt.errors import MountError
from slimckpt.model import lies_in, show_path

DEVICE = b"/dev/fuse"
_HELPERS = ("fusermount3", "fusermount")
_NOT_THERE = (FileNotFoundError, PermissionError)
"""A program that no directory of the path has, or none that may be looked into."""
_READAHEAD = 1024
"""KiB; 128 is what the kernel gives a FUSE mount."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MNT_FORCE, _MNT_DETACH = 1, 2
_IN_A_CONTAINER = "a container needs --device /dev/fuse --cap-add SYS_ADMIN"


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
        there = f": something is mounted there already; `fusermount -u {shown}` takes a mount away"
        raise MountError(
            f"{shown} is not empty{there if os.path.ismount(mountpoint) else ''}; a mount goes on"
            " an empty directory"
        )
    real, outer = os.path.realpath(mountpoint), os.path.realpath(store)
    if lies_in(real, outer):
        raise MountError(f"{shown} lies inside {show_path(outer)}; name a directory outside")
    return real


def attach(mountpoint: bytes, *, allow_other: bool = False) -> int:
    """Mount a file system on a directory; the descriptor that its questions come from.

    As root by the system call, else by the program ``fusermount3`` that comes with libfuse.

    Raises
    ------
    MountError
        FUSE is not to be had, or this user may not mount; says what is needed.
    """
    rights = b",allow_other,default_permissions" if allow_other else b""
    try:
        device = effects.open_device(DEVICE)
    except (FileNotFoundError, NotADirectoryError):
        raise MountError(
            f"this machine has no {show_path(DEVICE)}: `modprobe fuse` as root loads it;"
            f" {_IN_A_CONTAINER}"
        ) from None
    except OSError as error:
        raise MountError(
            f"{show_path(DEVICE)}: {error.strerror}; ask who runs this machine for it;"
            f" {_IN_A_CONTAINER}"
        ) from None
    data = b"fd=%d,rootmode=%o,user_id=%d,group_id=%d" % (
        *(device, stat.S_IFDIR, os.geteuid(), os.getegid()),
    )
    flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"slimckpt", mountpoint, b"fuse.slimckpt", flags, data + rights) == 0:
        return device
    failed = ctypes.get_errno()
    os.close(device)
    if failed != errno.EPERM:
        raise MountError(f"{show_path(mountpoint)} cannot be mounted on: {os.strerror(failed)}")
    names = b",fsname=slimckpt,subtype=slimckpt"
    return _attach_by_helper(mountpoint, b"ro,nosuid,nodev" + names + rights)


def widen_readahead(mountpoint: bytes) -> None:
    """Let the kernel ask for 1 MiB at a time, where this user may (as root)."""
    # This waits for the kernel to have made its own choice, which would undo ours.
    device = os.stat(mountpoint).st_dev
    path = b"/sys/class/bdi/%d:%d/read_ahead_kb" % (os.major(device), os.minor(device))
    with contextlib.suppress(OSError):
        effects.set_in_kernel(path, b"%d" % _READAHEAD)


def detach(mountpoint: bytes) -> None:
    """Take a mount away, whoever still has files of it open."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(mountpoint, _MNT_FORCE | _MNT_DETACH) == 0:
        return
    for helper in _HELPERS:
        with contextlib.suppress(*_NOT_THERE):
            subprocess.run([helper, "-u", "-z", "-q", "--", mountpoint], check=False)
            return


def _attach_by_helper(mountpoint: bytes, options: bytes) -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = theirs.fileno()
        environment = {**os.environ, "_FUSE_COMMFD": str(number)}
        for helper in _HELPERS:
            command: list[str | bytes] = [helper, "-o", options, "--", mountpoint]
            try:
                done = subprocess.run(
                    command, env=environment, pass_fds=[number], stderr=subprocess.PIPE, check=False
                )
            except _NOT_THERE:
                continue
            if done.returncode:
                said = done.stderr.decode("utf-8", "replace").strip()
                raise MountError(
                    f"{show_path(mountpoint)} cannot be mounted on by this user: {said};"
                    f" {_IN_A_CONTAINER}"
                )
            _, (device,), _, _ = socket.recv_fds(ours, 1, 1)
            os.set_inheritable(device, False)
            return device
    raise MountError(
        f"{show_path(mountpoint)} cannot be mounted on by this user: it takes root or the program"
        f" fusermount3 (Debian, Ubuntu: apt-get install fuse3); {_IN_A_CONTAINER}"
    )
