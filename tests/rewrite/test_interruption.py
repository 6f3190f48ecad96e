"""Runs that are stopped at any moment, and sources that change while they are read."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from trees import small_run, snapshot

from slimckpt import effects
from slimckpt.errors import (
    DestinationError,
    NoSpaceError,
    SlimckptError,
    StoppedError,
    UnfaithfulSourceError,
)
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify


class Crash(BaseException):
    """The process is gone: nothing of ours runs after it, cleaning included."""


class StopAt:
    """Lets ``count`` effects happen; every later one fails, as after the end of a process."""

    def __init__(self, count: int, failure: Callable[[], BaseException], once: bool) -> None:
        self.count, self.failure, self.once = count, failure, once
        self.seen: list[tuple[str, bytes]] = []

    def __call__(self, effect: str, path: bytes) -> None:
        self.seen.append((effect, path))
        late = len(self.seen) - 1 - self.count
        if late == 0 or (late > 0 and not self.once):
            raise self.failure()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_run(tmp_path / "source", 1024)


def _effects_of(work: Callable[[], object]) -> list[tuple[str, bytes]]:
    stop = StopAt(10**9, Crash, once=False)
    with effects.observe(stop):
        work()
    return stop.seen


def _moments(total: int, most: int) -> Iterator[int]:
    """All moments, or evenly many of them and always the last twelve, where publishing is."""
    step = -(-total // most)
    yield from sorted({*range(0, total, step), *range(max(0, total - 12), total)})


def test_a_slim_run_that_dies_at_any_effect_leaves_the_source_and_no_half_store(
    source: Path, tmp_path: Path
) -> None:
    before = snapshot(source)
    seen = _effects_of(lambda: slim(source, tmp_path / "first", min_saving=0, jobs=1))
    assert {effect for effect, _ in seen} >= {"mkdir", "create", "write", "fsync", "rename"}
    published = 0
    for moment in _moments(len(seen), 120):
        target = tmp_path / "store"
        with (
            pytest.raises(Crash),
            effects.observe(StopAt(moment, Crash, once=False)),
        ):
            slim(source, target, min_saving=0, jobs=1)
        if target.exists():
            published += 1
            assert verify(target, against=source).safe, seen[moment]
            target.rename(tmp_path / f"published-{moment}")
        else:
            # What is left behind is in the way of nobody: the next run takes it away.
            slim(source, target, min_saving=0, jobs=1)
            assert not (tmp_path / "store.slimckpt-part").exists()
            assert verify(target, quick=True).sound
            target.rename(tmp_path / f"store-{moment}")
    assert snapshot(source) == before
    assert published >= 1
    assert not list(tmp_path.glob("*.slimckpt-part"))


def test_everything_is_on_disk_before_the_store_gets_its_name(source: Path, tmp_path: Path) -> None:
    seen = _effects_of(lambda: slim(source, tmp_path / "store", min_saving=0, jobs=1))
    renames = [number for number, (effect, _) in enumerate(seen) if effect == "rename"]
    assert [seen[number] for number in renames] == [("rename", bytes(tmp_path / "store"))]
    before, after = seen[: renames[0]], seen[renames[0] + 1 :]
    assert after == [("fsync", bytes(tmp_path))]
    work = bytes(tmp_path / "store.slimckpt-part")
    for path in [work, *(os.path.join(work, p) for p in snapshot(tmp_path / "store") if p)]:
        touched = [n for n, (effect, at) in enumerate(before) if at == path and effect == "write"]
        synced = [n for n, (effect, at) in enumerate(before) if at == path and effect == "fsync"]
        assert synced, path
        assert not touched or max(touched) < max(synced), path
    assert all(path.startswith(work) for effect, path in before), (
        "something was written outside the work directory"
    )


def test_a_restore_that_dies_at_any_effect_leaves_no_half_tree(
    source: Path, tmp_path: Path
) -> None:
    slim(source, tmp_path / "store", min_saving=0)
    store, tree = snapshot(tmp_path / "store"), snapshot(source)
    seen = _effects_of(lambda: restore(tmp_path / "store", tmp_path / "first", jobs=1))
    published = 0
    for moment in _moments(len(seen), 80):
        target = tmp_path / "back"
        with (
            pytest.raises(Crash),
            effects.observe(StopAt(moment, Crash, once=False)),
        ):
            restore(tmp_path / "store", target, jobs=1)
        if target.exists():
            published += 1
        else:
            restore(tmp_path / "store", target, jobs=1)
        assert snapshot(target) == tree, seen[moment]
        target.rename(tmp_path / f"back-{moment}")
    assert published >= 1
    assert snapshot(tmp_path / "store") == store
    assert not list(tmp_path.glob("*.slimckpt-part"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("verb", ["slim", "restore"])
def test_a_full_disk_at_any_effect_ends_in_one_message_and_leaves_nothing(
    source: Path, tmp_path: Path, verb: str, number: int
) -> None:
    slim(source, tmp_path / "store", min_saving=0)

    def work(target: Path) -> object:
        if verb == "slim":
            return slim(source, target, min_saving=0, jobs=1)
        return restore(tmp_path / "store", target, jobs=1)

    seen = _effects_of(lambda: work(tmp_path / "whole"))
    kinds = ("mkdir", "create", "write", "allocate", "fsync", "truncate", "link", "symlink")
    fits = [n for n, (effect, _) in enumerate(seen[:-1]) if effect in kinds]
    for moment in fits[:: -(-len(fits) // 40)]:
        failure = StopAt(moment, lambda: OSError(number, os.strerror(number)), once=True)
        with (
            pytest.raises(StoppedError, match=r"target.*nothing was kept.*run it again"),
            effects.observe(failure),
        ):
            work(tmp_path / "target")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "store", "whole"]


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    for moment in (0, 5, 40):
        with (
            pytest.raises(KeyboardInterrupt),
            effects.observe(StopAt(moment, KeyboardInterrupt, once=True)),
        ):
            slim(source, tmp_path / "store", min_saving=0)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_a_killed_run_left_is_removed_by_the_next(source: Path, tmp_path: Path) -> None:
    left = tmp_path / "store.slimckpt-part"
    (left / "own" / "deep").mkdir(parents=True)
    (left / "own" / "deep" / "file").write_bytes(b"half")
    (left / "own" / "deep").chmod(0o500)
    (left / "link").symlink_to(source)
    before = snapshot(source)
    slim(source, tmp_path / "store", min_saving=0)
    assert not left.exists()
    assert verify(tmp_path / "store").problems == [] == verify(tmp_path / "store").notes
    assert snapshot(source) == before


def test_the_work_of_a_run_that_lives_is_not_touched(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "store.slimckpt-part"
    work.mkdir()
    (work / "theirs").write_bytes(b"x")
    lock = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(DestinationError, match="in use by another run"):
            slim(source, tmp_path / "store", min_saving=0)
    finally:
        os.close(lock)
    assert (work / "theirs").read_bytes() == b"x"
    assert not (tmp_path / "store").exists()


def test_a_run_that_loses_the_race_for_the_work_directory_leaves_it_to_the_winner(
    source: Path, tmp_path: Path
) -> None:
    work = tmp_path / "store.slimckpt-part"
    locks: list[int] = []

    def other_run_locks(effect: str, path: bytes) -> None:
        # Between our making the directory and our locking it, another run takes it over.
        if effect == "mkdir" and path == bytes(work) and not locks:
            work.mkdir()
            (work / "theirs").write_bytes(b"x")
            locks.append(os.open(work, os.O_RDONLY | os.O_DIRECTORY))
            fcntl.flock(locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB)

    real = effects.make_directory

    def make_directory(path: bytes, mode: int = 0o777) -> None:
        try:
            real(path, mode)
        except FileExistsError:
            if path != bytes(work) or len(locks) != 1:
                raise
            locks.append(-1)  # as if our own mkdir had just succeeded

    effects.make_directory = make_directory
    try:
        with (
            pytest.raises(DestinationError, match="in use by another run"),
            effects.observe(other_run_locks),
        ):
            slim(source, tmp_path / "store", min_saving=0)
    finally:
        effects.make_directory = real
        os.close(locks[0])
    assert (work / "theirs").read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_of_the_work_directory_s_name_is_left_alone(
    source: Path, tmp_path: Path, kind: str
) -> None:
    work = tmp_path / "store.slimckpt-part"
    if kind == "file":
        work.write_bytes(b"mine")
    else:
        work.symlink_to(source)
    before = snapshot(tmp_path)
    with pytest.raises(DestinationError, match="in the way"):
        slim(source, tmp_path / "store", min_saving=0)
    assert snapshot(tmp_path) == before


def test_a_destination_that_appears_during_the_run_is_not_replaced(
    source: Path, tmp_path: Path
) -> None:
    def appear(effect: str, path: bytes) -> None:
        if effect == "rename":
            (tmp_path / "store").mkdir()

    with pytest.raises(OSError, match="exists"), effects.observe(appear):
        slim(source, tmp_path / "store", min_saving=0)
    assert list((tmp_path / "store").iterdir()) == []
    assert not (tmp_path / "store.slimckpt-part").exists()


def test_what_does_not_fit_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def full(path: bytes) -> os.statvfs_result:
        found = list(real(path))
        found[4] = 1  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(NoSpaceError, match="nothing was written"):
        slim(source, tmp_path / "store", min_saving=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def rewrite_in_place(source: Path) -> None:
    path = source / "rank_0" / "net-1_1.ckpt"
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(stat.st_size - 100)
        file.write(b"?")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def rewrite_and_put_back(source: Path) -> None:
    path = source / "rank_0" / "net-1_1.ckpt"
    stat, data = path.stat(), path.read_bytes()
    path.write_bytes(data[::-1])
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replace_by_rename(source: Path) -> None:
    path = source / "args.json"
    stat = path.stat()
    (source / "new").write_bytes(b'{"lr": 0.2}\n')
    os.utime(source / "new", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (source / "new").replace(path)


def replace_by_fifo(source: Path) -> None:
    (source / "checkpoint-20" / "model.safetensors").unlink()
    os.mkfifo(source / "checkpoint-20" / "model.safetensors")


def remove_a_directory(source: Path) -> None:
    (source / "checkpoint-20" / "model.safetensors").unlink()
    (source / "checkpoint-20").rmdir()


def retarget(source: Path) -> None:
    (source / "latest").unlink()
    (source / "latest").symlink_to("checkpoint-10")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte, with the old size and time": rewrite_in_place,
    "a byte and back": rewrite_and_put_back,
    "another file of the same name, size and time": replace_by_rename,
    "a file that grows": lambda s: os.truncate(s / "args.json", 100),
    "a file cut": lambda s: os.truncate(s / "rank_1" / "net-1_1.ckpt", 700),
    "a file emptied": lambda s: os.truncate(s / "checkpoint-10" / "model.safetensors", 0),
    "a new file": lambda s: (s / "rank_0" / "net-2_1.ckpt").write_bytes(b""),
    "a file removed": lambda s: (s / "rank_0" / "net-1_1.ckpt").unlink(),
    "a file kept whole removed": lambda s: (s / "args.json").unlink(),
    "a directory removed": remove_a_directory,
    "a FIFO in a file's place": replace_by_fifo,
    "a link's target": retarget,
    "a mode": lambda s: (s / "args.json").chmod(0o600),
    "a mode of a directory": lambda s: (s / "empty").chmod(0o700),
    "a time": lambda s: os.utime(s / "args.json", ns=(5, 5)),
    "a further hard link": lambda s: os.link(s / "args.json", s / "empty" / "second"),
}


@pytest.mark.parametrize("moment", ["first effect", "first copy", "after the copies"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_source_that_changes_during_the_run_is_not_slimmed(
    source: Path, tmp_path: Path, what: str, moment: str
) -> None:
    changed: list[int] = []

    def change(effect: str, path: bytes) -> None:
        here = {
            "first effect": True,
            "first copy": effect == "write" and path.endswith(b".h5"),
            "after the copies": path.endswith(b"/README.txt"),
        }[moment]
        if here and not changed:
            changed.append(1)
            CHANGES[what](source)

    with pytest.raises(UnfaithfulSourceError), effects.observe(change):
        slim(source, tmp_path / "store", min_saving=0, jobs=1)
    assert changed
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_reading_a_source_is_no_change(source: Path, tmp_path: Path) -> None:
    def read(effect: str, path: bytes) -> None:
        (source / "args.json").read_bytes()
        os.utime(tmp_path)

    with effects.observe(read):
        slim(source, tmp_path / "store", min_saving=0)
    assert verify(tmp_path / "store", against=source).safe


def test_errors_of_an_interrupted_run_are_of_one_tree() -> None:
    assert issubclass(StoppedError, SlimckptError) and StoppedError.exit_code == 4
    assert issubclass(UnfaithfulSourceError, SlimckptError)
    assert UnfaithfulSourceError.exit_code == 5
