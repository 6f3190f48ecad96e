"""Files brought to storage of the node: by one process, once, and never wrong."""

import errno
import logging
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore_bytes import record
from trees import body, snapshot

from slimckpt import effects, views
from slimckpt.errors import (
    ClosedError,
    DamagedFileError,
    StoreDamagedError,
    UnfaithfulSourceError,
    UsageError,
)
from slimckpt.rewrite.slim import slim
from slimckpt.sources import files
from slimckpt.sources.backends import BackendName
from slimckpt.views import staging

NBYTES = 600_000
SHARED = body(1, NBYTES)
BACKENDS: tuple[BackendName, ...] = ("mmap", "pread")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def own(rank: int) -> bytes:
    return body(100 + rank, NBYTES)


def run(root: Path, ranks: int = 2) -> Path:
    """A tensor that all ranks share, and one of each its own."""
    for rank in range(ranks):
        (root / f"rank_{rank}").mkdir(parents=True)
        (root / f"rank_{rank}" / "net-1_1.ckpt").write_bytes(
            record("shared", "Float32", [NBYTES // 4], SHARED)
            + record("own", "Float32", [NBYTES // 4], own(rank))
        )
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return run(tmp_path / "run")


@pytest.fixture
def store(source: Path, tmp_path: Path) -> Path:
    slim(source, tmp_path / "slim", min_saving=0)
    return tmp_path / "slim"


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    return tmp_path / "stage"


def read(path: Path, stage: Path, rank: int = 0, backend: BackendName = "mmap") -> None:
    """Read a rank, and compare it with what was saved."""
    with views.open(path, backend, stage=stage) as ckpt:
        view = ckpt.rank(rank)
        assert view["shared"].tobytes() == SHARED
        assert view["own"].tobytes() == own(rank)


def staged(stage: Path) -> list[Path]:
    return sorted(stage.iterdir())


READER = """
import os, sys, signal, time
import slimckpt
from slimckpt import effects
path, stage, rank, log, backend, stop = sys.argv[1:]
seen = []
def observe(effect, at):
    with open(log, "a") as out:
        out.write(f"{os.getpid()} {effect} {os.fsdecode(at)}\\n")
    seen.append(effect)
    if stop and f"{effect}{seen.count(effect)}" == stop:
        print("stopped", flush=True)
        signal.pause()
with effects.observe(observe), slimckpt.open(path, backend, stage=stage) as ckpt:
    view = ckpt.rank(int(rank))
    data = b"".join(view[name].tobytes() for name in sorted(view))
sys.stdout.buffer.write(__import__("hashlib").sha256(data).hexdigest().encode())
"""


class Reader:
    """A process that reads a rank, and with ``stop`` waits at an effect of its own."""

    def __init__(
        self, path: Path, stage: Path, rank: int, backend: str = "mmap", stop: str = ""
    ) -> None:
        self.rank, self.log = rank, path.parent / "effects"
        words = [path, stage, str(rank), self.log, backend, stop]
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if stop:
            assert self.process.stdout and self.process.stdout.readline() == "stopped\n"

    def must_be_right(self) -> None:
        said, complaints = self.process.communicate(timeout=60)
        assert (self.process.returncode, complaints) == (0, "")
        assert said == sha256(own(self.rank) + SHARED).hexdigest()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=60)


# What is staged, and what is served.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["directory", "store"])
def test_arrays_are_those_of_copies_in_the_stage(
    source: Path, store: Path, stage: Path, kind: str, backend: BackendName
) -> None:
    path = source if kind == "directory" else store
    read(path, stage, 0, backend)
    copies = staged(stage)
    assert stat.S_IMODE(stage.stat().st_mode) == 0o700
    assert {stat.S_IMODE(copy.stat().st_mode) for copy in copies} == {0o600}
    bodies = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    assert copies and all(copy.read_bytes() in bodies for copy in copies)
    # From now on the stage is what is read.
    for copy in copies:
        data = copy.read_bytes()
        copy.write_bytes(data.replace(SHARED, own(7)))
    with views.open(path, backend, stage=stage) as ckpt:
        assert ckpt.rank(0)["shared"].tobytes() == own(7)
    assert staged(stage) == copies


def test_only_files_whose_tensors_are_read_are_staged(store: Path, stage: Path) -> None:
    with views.open(store, stage=stage) as ckpt:
        view = ckpt.rank(0)
        assert len(view) == 2 and view.info("own").nbytes == NBYTES
        view.in_storage_order()
        assert staged(stage) == []
        assert view["own"].tobytes() == own(0)
        (only,) = staged(stage)
        assert own(0) in only.read_bytes() and own(1) not in only.read_bytes()
        view.prefetch().wait()
        assert len(staged(stage)) == len({view._pieces(name)[0].path for name in view}) == 2
        assert not any(own(1) in copy.read_bytes() for copy in staged(stage))


def test_a_second_store_and_a_second_version_share_the_stage_and_are_told_apart(
    tmp_path: Path, stage: Path
) -> None:
    for number in range(3):
        for path in (tmp_path / "run", tmp_path / "slim"):
            if path.exists():
                path.rename(tmp_path / f"old-{path.name}-{number}")
        source = run(tmp_path / "run")
        for rank in (0, 1):
            path = source / f"rank_{rank}" / "net-1_1.ckpt"
            path.write_bytes(path.read_bytes().replace(SHARED, body(number, NBYTES)))
            os.utime(path, ns=(5, 5))
        slim(source, tmp_path / "slim", min_saving=0)
        for container in (tmp_path / "slim").rglob("*.h5"):
            os.utime(container, ns=(5, 5))
        for path in (tmp_path / "slim", source):
            with views.open(path, stage=stage) as ckpt:
                assert ckpt.rank(1)["shared"].tobytes() == body(number, NBYTES)


def test_a_file_that_was_rewritten_with_its_old_size_and_time_is_staged_again(
    source: Path, stage: Path
) -> None:
    read(source, stage)
    path = source / "rank_0" / "net-1_1.ckpt"
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(SHARED, own(5)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with views.open(source, stage=stage) as ckpt:
        assert ckpt.rank(0)["shared"].tobytes() == own(5)


def test_views_that_travel_take_the_stage_with_them(store: Path, stage: Path) -> None:
    with views.open(store, "pread", stage=stage) as ckpt:
        parts = ckpt, ckpt.rank(1), ckpt.files["rank_0/net-1_1.ckpt"]
        again, rank, file = pickle.loads(pickle.dumps(parts))
    assert staged(stage) == []
    assert rank["own"].tobytes() == own(1) and file["own"].tobytes() == own(0)
    assert len(staged(stage)) == 2
    again.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stage_that_is_removed_is_made_again_and_arrays_keep_what_they_have(
    store: Path, stage: Path, backend: BackendName
) -> None:
    with views.open(store, backend, stage=stage) as ckpt:
        view = ckpt.rank(0)
        array = view["shared"]
        effects.remove_tree(os.fsencode(stage))
        assert array.tobytes() == SHARED
        assert view["own"].tobytes() == own(0)
        out = np.empty(NBYTES // 4, np.float32)
        view.copy_into("shared", out)
        assert out.tobytes() == SHARED
    assert stage.is_dir()


# Several processes.


@pytest.mark.parametrize("backend", BACKENDS)
def test_eight_processes_bring_each_file_once(
    tmp_path: Path, stage: Path, backend: BackendName
) -> None:
    slim(run(tmp_path / "run", 8), tmp_path / "slim", min_saving=0)
    readers = [Reader(tmp_path / "slim", stage, rank, backend) for rank in range(8)]
    for reader in readers:
        reader.must_be_right()
    lines = readers[0].log.read_text().splitlines()
    made = [line.split()[2] for line in lines if line.split()[1] == "create"]
    assert len(made) == len(set(made)) == len(staged(stage)) == 9
    assert not list(stage.glob("*.part"))


@pytest.mark.parametrize("stop", ["create1", "allocate1", "write1", "fsync1", "rename1", "write2"])
def test_when_the_process_that_stages_is_killed_one_that_waits_does_it_anew(
    store: Path, stage: Path, stop: str
) -> None:
    first = Reader(store, stage, 0, stop=stop)
    second, third = Reader(store, stage, 0), Reader(store, stage, 1, "pread")
    for waiting in (second, third):
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.process.wait(0.7)
    first.kill()
    second.must_be_right()
    third.must_be_right()
    assert not list(stage.glob("*.part"))
    assert len(staged(stage)) == 3


def test_what_a_killed_process_left_is_removed_by_the_next(store: Path, stage: Path) -> None:
    Reader(store, stage, 1, stop="fsync1").kill()
    (left,) = stage.glob("*.part")
    read(store, stage, 0)
    assert not left.exists() and len(staged(stage)) == 2


def test_a_process_that_needs_nothing_new_does_not_wait(store: Path, stage: Path) -> None:
    read(store, stage, 0)
    busy = Reader(store, stage, 1, stop="write1")
    Reader(store, stage, 0).must_be_right()
    busy.kill()


class Crash(BaseException):
    """The process is gone: nothing of ours runs after it."""


class FailFrom:
    """Lets ``moment`` effects happen; later ones fail, but those ``spared``."""

    def __init__(self, moment: int, failure: Callable[[], BaseException], *spared: str) -> None:
        self.moment, self.failure, self.spared = moment, failure, spared
        self.seen: list[str] = []

    def __call__(self, effect: str, path: bytes) -> None:
        if effect not in self.spared:
            self.seen.append(effect)
            if len(self.seen) > self.moment:
                raise self.failure()


def effects_of(store: Path, stage: Path, backend: BackendName = "mmap") -> list[str]:
    all_of_them = FailFrom(10**9, Crash)
    with effects.observe(all_of_them):
        read(store, stage, 0, backend)
    return all_of_them.seen


def test_a_crash_at_any_effect_leaves_nothing_that_is_served(store: Path, tmp_path: Path) -> None:
    seen = effects_of(store, tmp_path / "first")
    assert {"mkdir", "create", "allocate", "write", "fsync", "rename"} == set(seen)
    for moment in range(len(seen)):
        stage = tmp_path / f"stage-{moment}"
        with pytest.raises(Crash), effects.observe(FailFrom(moment, Crash)):
            read(store, stage)
        read(store, stage)
        assert not list(stage.glob("*.part"))


# Where it cannot be done.


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_space_files_are_used_where_they_are_and_it_is_said_once(
    store: Path, tmp_path: Path, caplog: Any, backend: BackendName, number: int
) -> None:
    for moment in range(1, len(effects_of(store, tmp_path / "first", backend))):
        stage = tmp_path / f"stage-{moment}"
        full = FailFrom(moment, lambda: OSError(number, os.strerror(number)), "unlink")
        caplog.clear()
        with caplog.at_level(logging.WARNING), effects.observe(full):
            read(store, stage, 0, backend)
        assert len(full.seen) > moment
        (said,) = caplog.records
        assert os.strerror(number) in said.getMessage() and str(stage) in said.getMessage()
        assert not list(stage.glob("*.part"))


def test_on_a_network_what_does_not_fit_is_brought_into_the_page_cache(
    source: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(effect: str, path: bytes) -> None:
        if effect == "allocate":
            raise OSError(errno.ENOSPC, "No space left on device")

    far: list[bytes] = []
    monkeypatch.setattr(files, "on_network", lambda directory: far.append(directory) or True)
    with effects.observe(full), views.open(source, stage=stage) as ckpt:
        view = ckpt.rank(0)
        for _ in range(2):
            assert view["own"].tobytes() == own(0)
        assert ckpt._backend._warm  # type: ignore[attr-defined]
    read(source, stage)
    with views.open(source, stage=stage) as ckpt:
        assert ckpt.rank(0)["own"].tobytes() == own(0)
        assert not ckpt._backend._warm  # type: ignore[attr-defined]


def test_a_file_that_changes_while_it_is_staged_is_an_error(source: Path, stage: Path) -> None:
    path = source / "rank_0" / "net-1_1.ckpt"

    def change(effect: str, at: bytes) -> None:
        if effect == "write":
            with path.open("r+b") as file:
                file.seek(NBYTES)
                file.write(b"?")

    with (
        effects.observe(change),
        views.open(source, stage=stage) as ckpt,
        pytest.raises(UnfaithfulSourceError, match="changed while it was staged"),
    ):
        ckpt.rank(0)["own"]
    assert staged(stage) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_damage_is_the_error_it_is_without_a_stage(
    source: Path, store: Path, stage: Path, backend: BackendName
) -> None:
    for path, error in ((source, DamagedFileError), (store, StoreDamagedError)):
        with views.open(path, backend, stage=stage) as ckpt:
            view = ckpt.rank(0)
            place = view._pieces("own")[0].path
            assert place
            cut = Path(os.fsdecode(place))
            os.truncate(cut, cut.stat().st_size - 1)
            with pytest.raises(error, match=f"{cut.name} looks truncated"):
                view["own"]
            cut.unlink()
            with pytest.raises(error, match=f"{cut.name}: No such file"):
                view["own"]
        assert not stage.exists() or not any(own(0) in f.read_bytes() for f in staged(stage))


def test_closing_the_checkpoint_stops_what_is_being_staged(store: Path, stage: Path) -> None:
    begun, may_go_on = threading.Event(), threading.Event()

    def slow(effect: str, path: bytes) -> None:
        if effect == "allocate":
            begun.set()
            may_go_on.wait(20)

    with effects.observe(slow):
        ckpt = views.open(store, stage=stage)
        ahead = ckpt.rank(0).prefetch()
        assert begun.wait(20)
        ckpt.close()
        may_go_on.set()
        with pytest.raises(ClosedError):
            ahead.wait()
    assert staged(stage) == []


# Directories and files of others.


def test_a_link_a_file_and_a_directory_others_can_write_to_are_refused(
    store: Path, tmp_path: Path
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    for name, why in (
        ("link", "symbolic link"),
        ("file", "no directory"),
        ("open", "others can write to it .mode 1777.*0700"),
        ("file/below", "Not a directory|no directory"),
    ):
        before = snapshot(tmp_path)
        with pytest.raises(UsageError, match=f"{name}.*{why}"):
            views.open(store, stage=tmp_path / name)
        assert snapshot(tmp_path) == before
    views.open(store, stage=f"{tmp_path / 'real'}/").close()
    views.open(store, stage=tmp_path / "new" / "and" / "deep").close()
    assert stat.S_IMODE((tmp_path / "new" / "and").stat().st_mode) == 0o700


def test_a_stage_in_the_checkpoint_itself_is_refused(
    source: Path, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(store.name)
    for root, inside in (
        (store, store),
        (store, store / "own"),
        (store, tmp_path / "link" / "new"),
        (source, source / "new"),
    ):
        before = snapshot(tmp_path)
        with pytest.raises(UsageError, match="lies in the checkpoint itself"):
            views.open(root, stage=inside)
        assert snapshot(tmp_path) == before
    views.open(store, stage=f"{store}.stage").close()


@as_root
def test_a_directory_of_another_user_is_refused(store: Path, stage: Path) -> None:
    stage.mkdir(mode=0o700)
    os.chown(stage, 65534, -1)
    with pytest.raises(UsageError, match="belongs to user 65534, not to 0"):
        views.open(store, stage=stage)


def half(copy: Path) -> None:
    os.truncate(copy, copy.stat().st_size // 2)


def link(copy: Path) -> None:
    copy.rename(copy.with_name("elsewhere"))
    copy.symlink_to("elsewhere")


def fifo(copy: Path) -> None:
    copy.unlink()
    os.mkfifo(copy)


def writable(copy: Path) -> None:
    copy.chmod(0o666)


def given_away(copy: Path) -> None:
    os.chown(copy, 65534, -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "plant", [half, link, fifo, writable, pytest.param(given_away, marks=as_root)]
)
def test_a_file_that_is_not_the_copy_is_not_served_but_replaced(
    store: Path, stage: Path, plant: Callable[[Path], None], backend: BackendName
) -> None:
    read(store, stage)
    copies = staged(stage)
    for copy in copies:
        data = copy.read_bytes()
        copy.write_bytes(bytes(len(data)))
        plant(copy)
    read(store, stage, 0, backend)
    for copy in copies:
        assert stat.S_ISREG(copy.lstat().st_mode) and stat.S_IMODE(copy.lstat().st_mode) == 0o600
        assert copy.lstat().st_uid == os.geteuid()


def test_other_files_in_the_stage_are_left_alone(store: Path, stage: Path) -> None:
    stage.mkdir(mode=0o700)
    for name in ("mine.part", "slimckpt-notes", "x"):
        (stage / name).write_bytes(b"mine")
    read(store, stage)
    for name in ("mine.part", "slimckpt-notes", "x"):
        assert (stage / name).read_bytes() == b"mine"


def test_a_directory_that_is_removed_while_one_waits_for_its_lock_is_made_again(
    store: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, removed = staging.fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        real(fd, how)
        if not removed:
            removed.append(1)
            effects.remove_tree(os.fsencode(stage))

    monkeypatch.setattr(staging.fcntl, "flock", flock)
    read(store, stage)
    assert len(staged(stage)) == 2
