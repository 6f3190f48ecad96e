"""What works on a file system, each thing tried for real in an empty directory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slimckpt import effects
from slimckpt.model import show_path

_BODY = b"slimckpt" * 8192
_FAR = 8 * 1024 * 1024
_RESERVED = 1024 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What these stop says nothing about what would work."""
_TIME = 1_500_000_000_123_456_789


class _DoesNotWork(Exception):
    """It was done without an error, and the result is wrong: how."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing and whether it works; ``None`` where it was not tried. ``detail`` says why not.

    ``consequence`` is what it means for slimckpt that it does not work, nothing where that does
    not matter; ``serious`` where slimckpt fails then.
    """

    name: str
    works: bool | None
    detail: str = ""
    consequence: str = ""
    serious: bool = False


def try_all(at: bytes) -> list[Trial]:
    """Try everything in ``at``, an empty directory; what is made there is left there."""
    return [_try(at, *row) for row in TRIALS]


def not_tried(reason: str) -> list[Trial]:
    """The same list where nothing can be tried."""
    return [Trial(name, None, reason) for name, *_ in TRIALS]


def _try(
    at: bytes, name: str, trial: Callable[[bytes], None], consequence: str, serious: bool
) -> Trial:
    place = os.path.join(at, name.encode())
    try:
        effects.make_directory(place)
        trial(place)
    except _DoesNotWork as wrong:
        return Trial(name, False, str(wrong), consequence, serious)
    except ImportError as missing:
        return Trial(name, None, str(missing))
    except (OSError, ValueError, RuntimeError) as error:  # h5py raises all of them
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) in _FULL:
            return Trial(name, None, reason)
        return Trial(name, False, reason, consequence, serious)
    return Trial(name, True)


@contextmanager
def _file(place: bytes, name: bytes = b"file", body: bytes = b"") -> Iterator[int]:
    path = os.path.join(place, name)
    fd = effects.create_file(path)
    try:
        effects.write_at(fd, body, 0, path)
        yield fd
    finally:
        os.close(fd)


def _require(works: bool, otherwise: str) -> None:
    if not works:
        raise _DoesNotWork(otherwise)


def _random_writes(place: bytes) -> None:
    with _file(place, body=b"start") as fd:
        effects.write_at(fd, b"far", _FAR, place)
        effects.write_at(fd, b"S", 0, place)
        read = os.pread(fd, 8, 0) + os.pread(fd, 8, _FAR - 2)
        _require(read == b"Start\0\0\0\0\0far", "other bytes are read back")


def _holes(place: bytes) -> None:
    with _file(place) as fd:
        effects.write_at(fd, b"far", _FAR, place)
        effects.sync(fd, place)
        _require(os.fstat(fd).st_blocks * 512 < _FAR, "holes take space")


def _reserved(place: bytes) -> None:
    with _file(place) as fd:
        effects.allocate(fd, _RESERVED, place)
        _require(os.fstat(fd).st_blocks * 512 >= _RESERVED, "no space is taken")


def _sync(place: bytes) -> None:
    with _file(place, body=_BODY) as fd:
        effects.sync(fd, place)


def _mapped(place: bytes) -> None:
    with _file(place, body=_BODY) as fd, mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as pages:
        _require(pages[:] == _BODY, "other bytes are read")


def _mapped_private(place: bytes) -> None:
    with _file(place, body=_BODY) as fd:
        with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as pages:
            pages[:8] = b"changed!"
            _require(pages[:16] == b"changed!" + _BODY[:8], "changes are not seen")
        _require(os.pread(fd, 8, 0) == _BODY[:8], "changes reach the file")


def _reflink(place: bytes) -> None:
    with _file(place, body=_BODY) as source, _file(place, b"copy") as fd:
        _require(effects.clone(source, fd, place), "not offered")
        _require(os.pread(fd, len(_BODY), 0) == _BODY, "other bytes are read back")


def _copied_in_kernel(place: bytes) -> None:
    with _file(place, body=_BODY) as source, _file(place, b"copy") as fd:
        done = effects.copy_in_kernel(source, fd, len(_BODY), place)
        _require(os.pread(fd, done + 1, 0) == _BODY[:done] != b"", "other bytes are read back")


def _directories_synced(place: bytes) -> None:
    effects.sync_directory(place)


def _file_renamed_over(place: bytes) -> None:
    old, new = (os.path.join(place, name) for name in (b"old", b"new"))
    effects.write_file(old, b"old")
    effects.write_file(new, b"newer")
    effects.rename_over(new, old)
    _require(os.listdir(place) == [b"old"], "both are there")
    _require(os.path.getsize(old) == len(b"newer"), "the old one is there")
    effects.sync_directory(place)


def _directory_renamed(place: bytes) -> None:
    work, there, target = (os.path.join(place, name) for name in (b"work", b"there", b"target"))
    effects.make_directory(work)
    effects.make_directory(there)
    effects.write_file(os.path.join(work, b"file"), b"body")
    try:
        effects.rename_new(work, there)
    except FileExistsError:
        pass
    else:
        raise _DoesNotWork("it replaces a directory that exists")
    effects.rename_new(work, target)
    _require(os.listdir(target) == [b"file"], "its file is not there")
    effects.sync_directory(place)


def _locked(place: bytes) -> None:
    first = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    second = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        raise _DoesNotWork("a second lock is given")
    finally:
        os.close(second)
        os.close(first)


def _hdf5_opened_twice(place: bytes) -> None:
    from h5py import h5f

    from slimckpt.store.container import Dataset, lay_out

    path = os.path.join(place, b"file.h5")
    with _file(place, b"file.h5") as fd:
        layout = lay_out(fd, path, [Dataset("tensors", "x", 8)], [])
        effects.write_at(fd, bytes(8), layout.offsets[0], path)
    first = h5f.open(path, h5f.ACC_RDONLY)
    try:
        h5f.open(path, h5f.ACC_RDONLY).close()
    finally:
        first.close()


def _hard_links(place: bytes) -> None:
    one, two = (os.path.join(place, name) for name in (b"one", b"two"))
    effects.write_file(one, b"body")
    effects.link(one, two)
    _require(os.path.samefile(one, two), "the names are two files")


def _symbolic_links(place: bytes) -> None:
    link = os.path.join(place, b"link")
    effects.symlink(b"nowhere/at all", link)
    effects.change_mtime(link, _TIME)
    _require(os.readlink(link) == b"nowhere/at all", "it points elsewhere")


def _times(place: bytes) -> None:
    path = os.path.join(place, b"file")
    effects.write_file(path, b"body")
    effects.change_mtime(path, _TIME)
    found = os.stat(path).st_mtime_ns
    _require(found == _TIME, f"{_TIME} ns becomes {found} ns")


def _modes(place: bytes) -> None:
    path = os.path.join(place, b"file")
    effects.write_file(path, b"body")
    for mode in (0o640, 0o400, 0o755):
        effects.change_mode(path, mode)
        found = stat.S_IMODE(os.stat(path).st_mode)
        _require(found == mode, f"{mode:04o} becomes {found:04o}")


def _long_names(place: bytes) -> None:
    _names(place, b"n" * 255)


def _odd_names(place: bytes) -> None:
    _names(place, b"\xff \xfe\n")


def _names_in_both_cases(place: bytes) -> None:
    _names(place, b"Name", b"nAME")


def _names(place: bytes, *names: bytes) -> None:
    for name in names:
        effects.write_file(os.path.join(place, name), b"body")
    found = sorted(os.listdir(place))
    _require(found == sorted(names), "listed as " + ", ".join(map(show_path, found)))


_MAPPING = "tensors are read instead of mapped: processes of a node share no memory"
_NO_RESTORE = "trees that have them cannot be stored or restored here"

TRIALS: tuple[tuple[str, Callable[[bytes], None], str, bool], ...] = (
    ("mapping, read-only", _mapped, _MAPPING, False),
    ("mapping, copy-on-write", _mapped_private, "writable loads read instead of mapping", False),
    ("random writes", _random_writes, "nothing can be written here by slim or restore", True),
    ("sparse files", _holes, "", False),
    ("space reserved ahead", _reserved, "", False),
    ("reflink", _reflink, "", False),
    ("copy inside the kernel", _copied_in_kernel, "", False),
    ("fsync of files", _sync, "slim and restore stop rather than lose data in a crash", True),
    (
        "fsync of directories",
        _directories_synced,
        "renames are not durable: slim and restore stop rather than lose data in a crash",
        True,
    ),
    ("rename over a file", _file_renamed_over, "manifests cannot be replaced", True),
    ("rename of a directory", _directory_renamed, "slim and restore cannot publish", True),
    ("locks of directories", _locked, "slim and restore cannot keep two runs apart", True),
    (
        "HDF5 file opened twice",
        _hdf5_opened_twice,
        "h5py and HDF5 tools need HDF5_USE_FILE_LOCKING=FALSE; slimckpt reads without locks",
        False,
    ),
    ("hard links", _hard_links, _NO_RESTORE, False),
    ("symbolic links", _symbolic_links, _NO_RESTORE, False),
    (
        "times to the nanosecond",
        _times,
        "restored files get other times, and files kept whole in a slim checkpoint are not opened"
        " in place",
        False,
    ),
    ("permission bits", _modes, "restored files get other modes", False),
    ("names of 255 bytes", _long_names, _NO_RESTORE, False),
    ("names that are not UTF-8", _odd_names, _NO_RESTORE, False),
    ("names that differ in case", _names_in_both_cases, _NO_RESTORE, False),
)
"""Name, trial, what follows if it does not work, and whether slimckpt fails then."""
