"""The examination: everything that is looked at, and what of it stands in the way."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slimckpt.doctor.machine import Machine, Mount, kind_of, machine, mount_of, mounts
from slimckpt.doctor.versions import KnownIssue, Library, libhdf5_issues, libraries
from slimckpt.errors import UsageError
from slimckpt.signals import held

if TYPE_CHECKING:  # they come with numpy and blake3, which may be what is missing
    from slimckpt.doctor.speed import DiskSpeed, HashSpeed
    from slimckpt.doctor.trials import Trial

NEEDED = 200 * 1000 * 1000
"""Bytes of private memory that any command may take."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that matters. ``serious``: slimckpt fails because of it."""

    text: str
    serious: bool


@dataclass(slots=True)
class FileSystem:
    """Where PATH lies, and what works there.

    ``tried_in`` is the directory in which things were tried, ``None`` with the reason in
    ``not_tried``. Free bytes and inodes are ``None`` where the file system counts none.
    """

    path: str
    mount_point: str | None
    type: str
    kind: str
    source: str
    free: int | None
    free_inodes: int | None
    tried_in: str | None = None
    not_tried: str = ""
    trials: list[Trial] = field(default_factory=list)
    speed: DiskSpeed | None = None


@dataclass(slots=True)
class Examination:
    """All that :func:`examine` found."""

    libraries: list[Library]
    libhdf5_issues: list[KnownIssue]
    machine: Machine
    filesystem: FileSystem
    hash_speed: HashSpeed | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether nothing stands in the way."""
        return not any(finding.serious for finding in self.findings)

    def remark(self, text: str, serious: bool = False) -> None:
        self.findings.append(Finding(text, serious))


def examine(path: str | os.PathLike[str] = ".", *, quick: bool = False) -> Examination:
    """Look at versions, the machine, and the file system of ``path``.

    Things are tried in a directory made inside ``path`` and removed again; its times are put
    back, as far as this user may and nobody else changed it meanwhile. A slim checkpoint is
    never written to: what holds it is tried instead, where that is the same file system.

    Parameters
    ----------
    path
        A directory.
    quick
        Measure no speeds.

    Returns
    -------
    Examination
        Also where ``path`` cannot be read or written to: it says so.

    Raises
    ------
    UsageError
        ``path`` is not there, or is no directory.
    """
    if not os.fsencode(path):
        raise UsageError("the path is empty; name a directory")
    target = os.path.abspath(os.fsencode(path))
    _require_directory(target)
    found_libraries = libraries()
    versions = [x.version for x in found_libraries if x.name == "libhdf5" and x.version]
    known = [issue for version in versions for issue in libhdf5_issues(version)]
    result = Examination(found_libraries, known, machine(), _file_system(target))
    _judge_libraries(result)
    _judge_machine(result)
    usable = not any(library.problem for library in found_libraries)
    _try(result, target, usable, quick)
    if usable and not quick:
        from slimckpt.doctor.speed import hash_speed

        result.hash_speed = hash_speed()
    return result


def _require_directory(target: bytes) -> None:
    try:
        directory = stat.S_ISDIR(os.stat(target).st_mode)
    except PermissionError:
        return  # found later: whatever it is
    except OSError as error:
        raise UsageError(f"{_label(target)}: {error.strerror}; name a directory") from None
    if not directory:
        raise UsageError(f"{_label(target)} is not a directory; name the directory that holds it")


def _label(path: bytes) -> str:
    try:
        from slimckpt.model import show_path
    except ImportError:
        return ascii(os.fsdecode(path))[1:-1]
    return show_path(path)


def _file_system(target: bytes) -> FileSystem:
    """What can be said without writing: of the nearest directory that exists."""
    there = target
    while not os.path.exists(there):
        there = os.path.dirname(there)
    mount = mount_of(there, mounts()) or Mount("", b"/", b"", "unknown", "unknown", ())
    try:
        kind = kind_of(mount.type)
    except ImportError:
        kind = "unknown"
    status = os.statvfs(there)
    return FileSystem(
        path=_label(target),
        mount_point=_label(mount.point) if mount.point else None,
        type=mount.type,
        kind=kind,
        source=mount.source,
        free=status.f_bavail * status.f_frsize if status.f_blocks else None,
        free_inodes=status.f_favail if status.f_files else None,
    )


def _judge_libraries(result: Examination) -> None:
    for library in result.libraries:
        if library.problem:
            text = " ".join(filter(None, [library.name, library.version, library.problem]))
            if library.lowest:
                text += f"; install {library.lowest} or newer"
            result.remark(text, serious=True)


def _judge_machine(result: Examination) -> None:
    found = result.machine
    if found.quota is not None and found.quota < found.cores:
        jobs = max(1, round(found.quota))
        result.remark(
            f"the cgroup grants {found.quota:g} of {found.cores} cores; --jobs {jobs} fits that"
        )
    room = [n for n in (found.memory_limit, found.available) if n is not None]
    if room and min(room) < NEEDED:
        result.remark(
            f"only {min(room) // 1_000_000} MB of memory can be had; a command may take"
            f" {NEEDED // 1_000_000} MB: give the job more"
        )


def _try(result: Examination, target: bytes, usable: bool, quick: bool) -> None:
    system = result.filesystem
    if system.kind == "in memory":
        result.remark(f"{system.type}: what is written here takes memory and is gone on a restart")
    if system.kind == "overlay":
        result.remark("overlay: what is written to a container's own layer is gone with it")
    if not usable:
        system.not_tried = "libraries are missing"
        return
    from slimckpt.doctor import trials

    system.not_tried = _obstacle(system, target)
    if system.not_tried:
        result.remark(f"{system.path} {system.not_tried}", serious=True)
        system.trials = trials.not_tried(system.not_tried)
        return
    place, system.not_tried = _place(target)
    if place is None:
        result.remark(f"{system.path} {system.not_tried}")
    elif 0 in (system.free, system.free_inodes):
        system.not_tried = "has no " + ("inodes" if system.free else "space") + " left"
        result.remark(f"{system.path} {system.not_tried}; free some", serious=True)
    else:
        try:
            with _bench(place, result) as at:
                system.tried_in = _label(place)
                system.trials = trials.try_all(at)
                if not quick:
                    _measure(result, at)
        except OSError as error:
            system.not_tried = f"cannot be written to: {error.strerror}"
            writable = os.access(place, os.W_OK)
            advice = "find out why" if writable else "it can be a source, not a destination"
            result.remark(f"{_label(place)} {system.not_tried}; {advice}", serious=writable)
    if system.tried_in is None:
        system.trials = trials.not_tried(system.not_tried)
        return
    for why in sorted({trial.detail for trial in system.trials if trial.works is None}):
        result.remark(f"{system.tried_in}: not everything could be tried: {why}", serious=True)
    for trial in system.trials:
        if trial.works is False and trial.consequence:
            text = f"{trial.name}: {trial.detail}; {trial.consequence}"
            result.remark(
                text + "; choose another file system" * trial.serious, serious=trial.serious
            )


def _measure(result: Examination, at: bytes) -> None:
    from slimckpt.doctor.speed import disk_speed

    system = result.filesystem
    try:
        system.speed = disk_speed(at, system.free or 0)
    except OSError as error:
        result.remark(f"{system.path}: its speed could not be measured: {error.strerror}")


def _obstacle(system: FileSystem, target: bytes) -> str:
    """Why ``target`` can be neither source nor destination; nothing where it may be."""
    neither = "it can be neither a source nor a destination"
    if system.kind == "virtual":
        return f"lies on {system.type}, which is no storage but a view of the system; {neither}"
    what = "entered"
    try:
        os.stat(os.path.join(target, b"."))
        what = "listed"
        os.scandir(target).close()
    except OSError as error:
        return f"cannot be {what}: {error.strerror}; {neither} for this user"
    return ""


def _place(target: bytes) -> tuple[bytes | None, str]:
    """Where to try things for ``target``, or why nowhere: never inside a slim checkpoint."""
    from slimckpt.analysis.tree import is_store

    place = inner = os.path.realpath(target)
    while True:
        if is_store(inner):
            place = os.path.dirname(inner)
        if inner == os.path.dirname(inner):
            break
        inner = os.path.dirname(inner)
    if os.stat(place).st_dev != os.stat(target).st_dev:
        return None, "is a slim checkpoint, never written to, and a file system of its own"
    return place, ""


@contextlib.contextmanager
def _bench(place: bytes, result: Examination) -> Iterator[bytes]:
    """An empty directory inside ``place``, removed at the end, and the times of ``place``."""
    from slimckpt import effects

    before = os.stat(place)
    at = os.path.join(place, b".slimckpt-doctor-" + os.urandom(6).hex().encode())
    made = 0
    try:
        with held():
            effects.make_directory(at, 0o700)
            made = os.stat(place).st_mtime_ns
        effects.change_mode(at, 0o700)  # whatever the umask
        yield at
    finally:
        with held():
            alone = os.stat(place).st_mtime_ns == made
            try:
                if made:
                    effects.remove_tree(at)
            except OSError as error:
                result.remark(f"{_label(at)} could not be removed: {error.strerror}; remove it")
            if alone:
                with contextlib.suppress(OSError):
                    effects.change_times(place, before.st_atime_ns, before.st_mtime_ns)
