"""What the doctor finds is so, and where it looked everything is as it was."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from trees import body, snapshot

from slimckpt import effects
from slimckpt.doctor import Examination, examine, speed
from slimckpt.doctor.machine import Mount, kind_of, machine, mount_of, mounts
from slimckpt.doctor.trials import TRIALS, Trial
from slimckpt.doctor.versions import (
    Library,
    judge,
    libhdf5_issues,
    libraries,
    numbers,
    required,
)
from slimckpt.errors import UsageError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with something in it, and a time of its own."""
    folder = tmp_path / "run"
    (folder / "rank_0").mkdir(parents=True)
    (folder / "rank_0" / "model.bin").write_bytes(body(1, 5000))
    os.utime(folder, ns=(1_400_000_000_000_000_001, 1_500_000_000_123_456_789))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    (folder / "shared").mkdir(parents=True)
    (folder / "slimckpt.json").write_bytes(b'{"format":"slimckpt","version":0}')
    return folder


def serious(found: Examination) -> list[str]:
    return [finding.text for finding in found.findings if finding.serious]


def trial_of(found: Examination, name: str) -> Trial:
    return next(trial for trial in found.filesystem.trials if trial.name == name)


def test_the_place_is_left_as_it_was_with_its_times(run: Path) -> None:
    before, atime = snapshot(run), run.stat().st_atime_ns
    found = examine(run)
    assert run.stat().st_atime_ns == atime
    assert snapshot(run) == before
    assert found.filesystem.tried_in == str(run)


def test_a_time_that_somebody_else_changed_meanwhile_stays(run: Path) -> None:
    def somebody(effect: str, path: bytes) -> None:
        if effect == "symlink":
            (run / "new").touch()

    with effects.observe(somebody):
        examine(run, quick=True)
    assert run.stat().st_mtime_ns > 1_600_000_000_000_000_000
    assert sorted(os.listdir(run)) == ["new", "rank_0"]


class Stopped(BaseException):
    """As a signal that strikes at an effect."""


def test_the_place_is_left_as_it_was_wherever_a_signal_strikes(run: Path) -> None:
    seen: list[str] = []
    with effects.observe(lambda effect, path: seen.append(effect)):
        examine(run, quick=True)
    before = snapshot(run)
    last = seen.index("rmtree")
    for stop in range(0, last, 7):
        count = iter(range(last + 1))

        def strike(effect: str, path: bytes, count: Any = count, stop: int = stop) -> None:
            if next(count, -1) == stop:
                raise Stopped

        with effects.observe(strike), pytest.raises(Stopped):
            examine(run, quick=True)
        assert snapshot(run) == before


@pytest.mark.parametrize("inside", [".", "shared"])
def test_a_slim_checkpoint_is_not_written_to(store: Path, inside: str) -> None:
    written: list[bytes] = []
    before = snapshot(store.parent)
    with effects.observe(lambda effect, path: written.append(path)):
        found = examine(store / inside, quick=True)
    assert found.filesystem.tried_in == str(store.parent)
    assert written and not [p for p in written if p.startswith(os.fsencode(store))]
    assert snapshot(store.parent) == before


def test_a_slim_checkpoint_that_is_a_file_system_of_its_own_is_left_alone(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        st_dev = -1

    real = os.stat
    above = os.fsencode(store.parent)
    monkeypatch.setattr(
        os, "stat", lambda path, **how: Other if path == above else real(path, **how)
    )
    found = examine(store, quick=True)
    assert found.filesystem.tried_in is None
    assert "file system of its own" in found.filesystem.not_tried
    assert found.well


@pytest.mark.parametrize("name", ["missing", "missing/below", "file", "file/below"])
def test_what_is_no_directory_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / name))):
        examine(tmp_path / name, quick=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("path", ["/proc", "/proc/self", "/sys"])
def test_a_virtual_file_system_is_said_to_be_one(path: str) -> None:
    found = examine(path, quick=True)
    assert found.filesystem.kind == "virtual"
    assert [text.startswith(f"{path} lies on ") for text in serious(found)] == [True]
    assert "neither a source nor a destination" in serious(found)[0]
    assert {trial.works for trial in found.filesystem.trials} == {None}


def test_an_empty_path_is_not_the_current_directory() -> None:
    with pytest.raises(UsageError, match="empty"):
        examine("")


def test_a_place_that_refuses_writes_is_a_remark_with_the_reason(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: bytes, mode: int = 0) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(effects, "make_directory", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = examine(run, quick=True)
    assert found.well
    assert "Permission denied" in found.filesystem.not_tried
    assert any("it can be a source, not a destination" in f.text for f in found.findings)
    assert {trial.works for trial in found.filesystem.trials} == {None}


def test_what_was_tried_is_what_other_programs_find(tmp_path: Path) -> None:
    found = examine(tmp_path, quick=True)
    (tmp_path / "a").write_bytes(body(2, 70_000))
    cp = ["cp", "--reflink=always", tmp_path / "a", tmp_path / "b"]
    reflink = subprocess.run(cp, stderr=subprocess.DEVNULL, check=False).returncode == 0
    assert trial_of(found, "reflink").works == reflink
    subprocess.run(["truncate", "-s", "9M", tmp_path / "c"], check=True)
    used = subprocess.run(["du", "-B1", tmp_path / "c"], capture_output=True, check=True).stdout
    assert trial_of(found, "sparse files").works == (int(used.split()[0]) < 9 * 2**20)
    allocated = subprocess.run(["fallocate", "-l", "1M", tmp_path / "d"], check=False)
    if allocated.returncode == 0:
        assert trial_of(found, "space reserved ahead").works
    df = ["df", "--output=fstype,target", tmp_path]
    shown = subprocess.run(df, capture_output=True, text=True, check=True).stdout
    assert [found.filesystem.type, found.filesystem.mount_point] == shown.splitlines()[1].split()


def test_every_trial_works_on_a_file_system_in_memory_but_sharing_blocks() -> None:
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK) or not any(m.point == b"/dev/shm" for m in mounts()):
        pytest.skip("there is no file system in memory here")
    found = examine(place, quick=True)
    assert [t.name for t in found.filesystem.trials if not t.works] == ["reflink"]
    assert found.filesystem.kind == "in memory"
    assert any("gone" in finding.text for finding in found.findings) and found.well


def refusing(error: OSError) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("effect", "names", "fails"),
    [
        ("sync_directory", {"fsync of directories", "rename of a directory"}, True),
        ("rename_new", {"rename of a directory"}, True),
        ("rename_over", {"rename over a file"}, True),
        ("sync", {"fsync of files"}, True),
        ("link", {"hard links"}, False),
        ("symlink", {"symbolic links"}, False),
        ("change_mtime", {"times to the nanosecond"}, False),
        ("copy_in_kernel", set(), False),
    ],
)
def test_what_does_not_work_is_found_and_said_to_matter_or_not(
    run: Path, monkeypatch: pytest.MonkeyPatch, effect: str, names: set[str], fails: bool
) -> None:
    monkeypatch.setattr(effects, effect, refusing(OSError(22, "Invalid argument")))
    found = examine(run, quick=True)
    texts = {f.text.split(":")[0]: f for f in found.findings}
    assert names <= set(texts)
    assert all("Invalid argument" in texts[name].text for name in names)
    assert found.well != fails
    assert os.listdir(run) == ["rank_0"]


def test_a_file_system_that_lies_is_found_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "change_mode", lambda path, mode: None)
    monkeypatch.setattr(effects, "rename_new", os.replace)
    real = effects.change_mtime
    monkeypatch.setattr(effects, "change_mtime", lambda p, t: real(p, t - t % 2_000_000_000))
    found = examine(run, quick=True)
    assert trial_of(found, "permission bits").works is False
    assert "becomes" in trial_of(found, "permission bits").detail
    assert trial_of(found, "rename of a directory").detail == "it replaces a directory that exists"
    assert "becomes 1500000000000000000 ns" in trial_of(found, "times to the nanosecond").detail


def test_names_and_consequences_of_trials_are_sentences_a_table_can_hold() -> None:
    names = [name for name, *_ in TRIALS]
    assert len(set(names)) == len(names) and max(map(len, names)) < 30
    assert all(consequence for _, _, consequence, serious in TRIALS if serious)


def test_a_full_file_system_stands_in_the_way(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(run)
    fields = list(real)
    fields[4] = 0  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*fields, 0]))
    found = examine(run, quick=True)
    assert serious(found) == [f"{run} has no space left; free some"]


def test_what_a_full_disk_stops_is_not_said_not_to_work(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "write_at", refusing(OSError(28, "No space left on device")))
    found = examine(run, quick=True)
    assert serious(found) == [f"{run}: not everything could be tried: No space left on device"]
    assert trial_of(found, "permission bits").works is None
    assert trial_of(found, "fsync of directories").works is True


def test_speeds_are_those_of_what_was_written_and_of_a_tenth_of_what_is_free(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(speed, "WRITTEN", 16 * 2**20)
    monkeypatch.setattr(speed, "HASHED", 64 * 2**20)
    real = effects.remove_tree

    def look_first(path: bytes) -> None:
        sizes.append(os.path.getsize(os.path.join(path, b"speed")))
        real(path)

    monkeypatch.setattr(effects, "remove_tree", look_first)
    found = examine(run)
    assert found.filesystem.speed is not None and found.hash_speed is not None
    assert sizes == [found.filesystem.speed.nbytes] and sizes[0] <= 16 * 2**20
    assert min(found.filesystem.speed.write, found.filesystem.speed.read) > 1e5
    assert 1e7 < found.hash_speed.one < 1e12
    assert found.hash_speed.threads == len(os.sched_getaffinity(0))
    at = os.fsencode(run)
    assert speed.disk_speed(at, 39 * 2**20) is None
    small = speed.disk_speed(at, 95 * 2**20)
    assert small is not None and small.nbytes == 8 * 2**20


# Versions


def test_the_lowest_versions_are_those_of_the_project_file() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = text[text.index("dependencies = [") :].split("]")[0]
    found = libraries()
    assert [x.name for x in found[:2]] == ["slimckpt", "Python"]
    assert found[-1] == Library("libhdf5", h5py.version.hdf5_version)
    for library in found[2:-1]:
        assert f'"{library.name}>={library.lowest}"' in listed
    # What only some Pythons need (`; python_version < …`) is not looked for.
    assert len(found) - 3 == sum(">=" in line and ";" not in line for line in listed.splitlines())
    assert not any(library.problem for library in found)
    assert next(x for x in found if x.name == "numpy").version == np.__version__


def test_requirements_of_extras_are_not_required() -> None:
    assert required(["numpy>=1.26", 'pytest>=8; extra == "test"', "ml_dtypes >= 0.5"]) == [
        ("numpy", "1.26"),
        ("ml_dtypes", "0.5"),
    ]


@pytest.mark.parametrize(
    ("version", "lowest", "old"),
    [
        ("1.9", "1.26", True),
        ("1.26.0", "1.26", False),
        ("2.0.0rc1", "2", False),
        ("3.10.0+local7", "3.11", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, lowest: str, old: bool) -> None:
    assert bool(judge("x", version, lowest).problem) == old
    assert numbers("2") == (2, 0, 0)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("1.10.9", {"overflow"}),
        ("1.14.3", {"overflow"}),
        ("1.14.4", set()),
        ("1.14.6", set()),
        ("2.0.0", {"refuses", "convert"}),
        ("2.1.1", {"refuses", "convert"}),
        ("2.2.0", {"convert"}),
    ],
)
def test_each_libhdf5_has_the_issues_its_release_notes_tell(version: str, words: set[str]) -> None:
    found = [issue.what for issue in libhdf5_issues(version)]
    assert len(found) == len(words)
    assert all(any(word in what for what in found) for word in words)


BROKEN = "raise ImportError('libopenblas.so.0: cannot open shared object file')"


@pytest.mark.parametrize("module", ["numpy", "h5py", "blake3"])
def test_a_library_that_cannot_be_imported_is_told_and_not_a_trace(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(BROKEN)
    ran = subprocess.run(
        [sys.executable, "-m", "slimckpt", "doctor", tmp_path],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1, ran.stderr
    assert ran.stderr == ""
    last = ran.stdout.splitlines()[-1]
    assert last.startswith(module) and "libopenblas" in last
    assert os.listdir(tmp_path) == [f"{module}.py"]


def test_a_library_that_is_missing_or_too_old_stands_in_the_way(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slimckpt.doctor import versions

    real = versions.metadata.version

    def version(name: str) -> str:
        if name == "tqdm":
            raise versions.metadata.PackageNotFoundError(name)
        return "3.9.0" if name == "h5py" else real(name)

    monkeypatch.setattr(versions.metadata, "version", version)
    found = examine(run)
    assert serious(found) == [
        "h5py 3.9.0 is too old; install 3.10 or newer",
        "tqdm is not installed; install 4.60 or newer",
    ]
    assert found.filesystem.tried_in is None and found.hash_speed is None


# The machine


MOUNTINFO = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:40 / /a\040b\134c rw - nfs4 server:/export rw,vers=4.2
24 22 0:41 / /data rw - tmpfs tmpfs rw
25 22 0:42 / /data rw - lustre 10.0.0.1@tcp:/fs rw,flock
26 25 0:43 /sub /data/deep rw shared:5 master:1 - btrfs /dev/sdb rw,subvol=/sub
27 22 0:44 / /dat rw - fuse.sshfs host: rw
broken line
"""


def fake_proc(tmp_path: Path, mountinfo: str, cgroup: str = "") -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text(mountinfo)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    return tmp_path / "proc"


@pytest.mark.parametrize(
    ("path", "kind", "filesystem"),
    [
        (b"/elsewhere", "local", "ext4"),
        (b"/a b\\c/run", "network", "nfs4"),
        (b"/data", "network", "lustre"),
        (b"/data/deeper", "network", "lustre"),
        (b"/data/deep/er", "local", "btrfs"),
        (b"/dat/x", "FUSE", "fuse.sshfs"),
    ],
)
def test_the_longest_and_last_mount_above_a_path_is_its_own(
    tmp_path: Path, path: bytes, kind: str, filesystem: str
) -> None:
    found = mount_of(path, mounts(fake_proc(tmp_path, MOUNTINFO)))
    assert found is not None
    assert (found.type, kind_of(found.type)) == (filesystem, kind)


def test_of_mounts_on_one_point_the_one_with_the_device_of_the_path_counts(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    own = f"{os.major(device)}:{os.minor(device)}"
    rows = [Mount(d, b"/", b"/", t, "x", ()) for d, t in (("9:1", "a"), (own, "b"), ("9:2", "c"))]
    assert mount_of(os.fsencode(tmp_path), rows) == rows[1]


@pytest.mark.parametrize(
    ("filesystem", "kind"),
    [
        ("overlay", "overlay"),
        ("gpfs", "network"),
        ("nfs", "network"),
        ("fuse", "FUSE"),
        ("tmpfs", "in memory"),
        ("squashfs", "a read-only image"),
        ("proc", "virtual"),
        ("xfs", "local"),
    ],
)
def test_kinds_of_file_systems(filesystem: str, kind: str) -> None:
    assert kind_of(filesystem) == kind


def test_limits_of_cgroups_of_version_2_are_the_tightest_upwards(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    group = top / "job" / "step"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("max 100000\n")
    (top / "job" / "cpu.max").write_text("150000 100000\n")
    (group / "memory.max").write_text("1000000000\n")
    (top / "job" / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("1 100000\n")  # outside: not a cgroup
    line = f"31 22 0:38 / {top} rw - cgroup2 cgroup2 rw\n"
    found = machine(fake_proc(tmp_path, line, "0::/job/step\n"))
    assert (found.quota, found.memory_limit) == (1.5, 1_000_000_000)


def test_limits_of_cgroups_of_version_1_are_read_by_controller(tmp_path: Path) -> None:
    cpu, memory = tmp_path / "cpu,cpuacct", tmp_path / "memory"
    cpu.mkdir()
    memory.mkdir()
    (cpu / "cpu.cfs_quota_us").write_text("50000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    (memory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    # Inside a container the mount shows the container's own cgroup as its root.
    lines = (
        f"31 22 0:38 /docker/1f {cpu} rw - cgroup cgroup rw,cpu,cpuacct\n"
        f"32 22 0:39 /docker/1f {memory} rw - cgroup cgroup rw,memory\n"
    )
    groups = "4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n1:name=systemd:/docker/1f\n"
    found = machine(fake_proc(tmp_path, lines, groups))
    assert (found.quota, found.memory_limit) == (0.5, None)
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine(fake_proc(tmp_path, lines, groups)).quota is None


def test_a_quota_below_the_cores_and_little_memory_are_remarks(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from slimckpt.doctor import examination

    tight = replace(machine(), cores=8, quota=1.5, memory_limit=100_000_000)
    monkeypatch.setattr(examination, "machine", lambda: tight)
    found = examine(run, quick=True)
    assert found.well
    texts = " ".join(finding.text for finding in found.findings)
    assert "grants 1.5 of 8 cores; --jobs 2" in texts and "only 100 MB of memory" in texts
