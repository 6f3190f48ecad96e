"""Every write, fsync, rename, link and unlink of the program, in one place.

A test can stop the world at each: :func:`observe` calls back before every effect, and an
exception raised there leaves the file system as a crash at that moment would.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slimckpt.errors import UnfaithfulSourceError
from slimckpt.model import show_path

Observer = Callable[[str, bytes], None]
_observer: Observer | None = None

_FALL_BACK = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_COPY_BUFFER = 4 * 1024 * 1024
_FICLONE = 0x40049409
_RENAME_NOREPLACE = 1
_AT_FDCWD = -100


@contextlib.contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call ``observer(effect, path)`` before each effect, from whatever thread has it."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def _about_to(effect: str, path: bytes) -> None:
    if _observer is not None:
        _observer(effect, path)


def make_directory(path: bytes, mode: int = 0o777) -> None:
    _about_to("mkdir", path)
    os.mkdir(path, mode)


def make_directories(path: bytes, mode: int = 0o777) -> None:
    """Make ``path`` and what is missing above it."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        make_directory(path, mode)


def create_file(path: bytes, mode: int = 0o600) -> int:
    """A new file, open for reading and writing; its descriptor. It must not exist."""
    _about_to("create", path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)


def write_at(fd: int, data: Any, offset: int, path: bytes) -> None:
    """Write all of ``data`` at ``offset``."""
    _about_to("write", path)
    view = memoryview(data).cast("B")
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def write_file(path: bytes, data: bytes, mode: int = 0o666) -> None:
    """A new file with these bytes, synced."""
    fd = create_file(path, mode)
    try:
        write_at(fd, data, 0, path)
        sync(fd, path)
    finally:
        os.close(fd)


def open_device(path: bytes) -> int:
    """A device, open for reading and writing."""
    _about_to("open", path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def send(fd: int, parts: Sequence[Any]) -> None:
    """Hand a message to the other end of a device, in one piece; it lands in no file."""
    os.writev(fd, parts)


def set_in_kernel(path: bytes, value: bytes) -> None:
    """Write to a file of sysfs, which is a setting of the running kernel."""
    _about_to("set", path)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value)
    finally:
        os.close(fd)


def allocate(fd: int, nbytes: int, path: bytes) -> None:
    """Reserve disk space, where the file system can; the file becomes ``nbytes`` long."""
    _about_to("allocate", path)
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _FALL_BACK:
            raise
        os.ftruncate(fd, nbytes)


def copy_range(
    source: int, source_offset: int, fd: int, offset: int, nbytes: int, path: bytes, label: str
) -> None:
    """Copy bytes between files inside the kernel, or through memory where that is refused.

    Raises
    ------
    UnfaithfulSourceError
        The source (``label``) ends inside the range.
    """
    _about_to("write", path)
    while nbytes:
        try:
            done = os.copy_file_range(source, fd, nbytes, source_offset, offset)
        except OSError as error:
            if error.errno not in _FALL_BACK:
                raise
            done = 0
        if done == 0:
            data = os.pread(source, min(nbytes, _COPY_BUFFER), source_offset)
            if not data:
                raise UnfaithfulSourceError(
                    f"{label}: the file ends at byte {source_offset}, {nbytes} bytes early; it was"
                    " cut while it was read"
                )
            done = os.pwrite(fd, data, offset)
        source_offset, offset, nbytes = source_offset + done, offset + done, nbytes - done


def copy_in_kernel(source: int, fd: int, nbytes: int, path: bytes) -> int:
    """Copy the first bytes of a file inside the kernel, or raise where it refuses; how many."""
    _about_to("write", path)
    return os.copy_file_range(source, fd, nbytes, 0, 0)


def clone(source: int, fd: int, path: bytes) -> bool:
    """Make ``fd`` share all blocks of ``source``, where the file system can; whether it did."""
    _about_to("clone", path)
    try:
        fcntl.ioctl(fd, _FICLONE, source)
    except OSError:
        return False
    return True


def sync(fd: int, path: bytes) -> None:
    _about_to("fsync", path)
    os.fsync(fd)


def sync_directory(path: bytes) -> None:
    """Make the names in a directory durable."""
    _about_to("fsync", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget_pages(fd: int) -> None:
    """Drop a synced file from the page cache, so that reading it again asks the disk."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def rename_new(source: bytes, target: bytes) -> None:
    """Rename, never onto something that exists (a plain rename replaces an empty directory)."""
    _about_to("rename", target)
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        failed = errno.ENOSYS
    else:
        if renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE) == 0:
            return
        failed = ctypes.get_errno()
    if failed not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(failed, os.strerror(failed), show_path(target))
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), show_path(target))
    os.rename(source, target)


def rename_over(source: bytes, target: bytes) -> None:
    """Rename a file, in place of ``target`` if that exists."""
    _about_to("rename", target)
    os.replace(source, target)


def link(source: bytes, target: bytes) -> None:
    _about_to("link", target)
    os.link(source, target, follow_symlinks=False)


def symlink(points_to: bytes, path: bytes) -> None:
    _about_to("symlink", path)
    os.symlink(points_to, path)


def change_mode(path: bytes, mode: int) -> None:
    _about_to("chmod", path)
    os.chmod(path, mode)


def change_owner(path: bytes, uid: int, gid: int) -> None:
    """Give ``path`` to an owner and a group, as far as this user may."""
    now = os.lstat(path)
    for new_uid, new_gid in ((-1, gid), (uid, -1)):
        if (new_uid in (-1, now.st_uid)) and (new_gid in (-1, now.st_gid)):
            continue
        _about_to("chown", path)
        with contextlib.suppress(PermissionError, OSError):
            os.chown(path, new_uid, new_gid, follow_symlinks=False)


def change_mtime(path: bytes, mtime: int) -> None:
    """Set the modification time, in nanoseconds; of a symbolic link itself."""
    _about_to("utime", path)
    os.utime(path, ns=(mtime, mtime), follow_symlinks=False)


def change_times(path: bytes, atime: int, mtime: int) -> None:
    """Set both times, in nanoseconds."""
    _about_to("utime", path)
    os.utime(path, ns=(atime, mtime))


def directories_in(path: bytes) -> list[bytes]:
    """A directory and all below it, parents first; no link is followed, no depth too deep."""
    found = [path]
    for directory in found:
        with os.scandir(directory) as entries:
            found += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def remove_file(path: bytes) -> None:
    """Remove a file of ours."""
    _about_to("unlink", path)
    os.unlink(path)


def remove_tree(path: bytes) -> None:
    """Remove a directory of ours with all it holds; nothing if it is not there."""
    _about_to("rmtree", path)
    if not os.path.isdir(path):
        return
    found = [path]
    for directory in found:
        os.chmod(directory, 0o700)
        with os.scandir(directory) as listing:
            entries = list(listing)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append(entry.path)
            else:
                os.unlink(entry.path)
    for directory in reversed(found):
        os.rmdir(directory)
