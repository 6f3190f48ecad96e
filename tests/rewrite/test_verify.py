"""``verify`` misses no bit, and says when a source is safe to delete."""

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from mindspore_bytes import record, with_crc
from trees import body, set_times_and_modes, small_run, snapshot

from slimckpt.errors import NotAStoreError, UsageError
from slimckpt.rewrite import compare
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import sentence, verify
from slimckpt.store.reader import Store

SMALL = 600
"""Of files up to this size every byte is tried, of larger ones some."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, and a store of it with shared, own and whole files and nothing else."""
    root = tmp_path_factory.mktemp("verify")
    source = small_run(root / "source", 2048)
    (source / "cut.safetensors").write_bytes((b"\x40" + bytes(7) + b'{"a"').ljust(200))
    slim(source, root / "store", min_saving=0)
    return root


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine / "store", tmp_path / "store"))


def files_of(store: Path) -> list[str]:
    return sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())


def payload_ranges(store: Path) -> dict[str, list[tuple[int, int]]]:
    """For each container, the ranges that hold payloads and skeletons, not indexes."""
    opened = Store(os.fsencode(store))
    found: dict[str, list[tuple[int, int]]] = {}
    for part in opened.parts():
        indexes = {(e.index.container, e.index.offset) for e in part.files if e.index is not None}
        for number, container in enumerate(part.containers):
            contents = opened.contents(container)
            found[os.fsdecode(container.name)] = [
                (offset, offset + nbytes)
                for offset, nbytes in zip(contents.offset, contents.nbytes, strict=True)
                if (number, offset) not in indexes
            ]
    return found


def flips(size: int, samples: int) -> list[tuple[int, int]]:
    """Positions and bits: every byte of a small file, evenly many of a large one."""
    step = 1 if size <= SMALL else -(-size // samples) | 1
    return [(at, 1 << (at * 5 + at // 8) % 8) for at in range(0, size, step)]


def test_the_store_under_test_has_files_of_every_kind(pristine: Path) -> None:
    names = files_of(pristine / "store")
    assert {name.split("/")[0] for name in names} == {
        *("slimckpt.json", "slimckpt.json.2", "parts", "restore.py", "README.txt"),
        *("shared", "own", "whole"),
    }
    assert verify(pristine / "store").problems == []
    assert verify(pristine / "store", quick=True).problems == []


def test_a_flip_of_one_bit_anywhere_is_found(store: Path) -> None:
    missed = []
    for name in files_of(store):
        path = store / name
        data, stat = path.read_bytes(), path.stat()
        for at, bit in flips(len(data), 80):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ bit]))
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            if verify(store, jobs=1).sound:
                missed.append((name, at, bit))
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert missed == []
    assert verify(store).problems == []


def test_a_quick_check_finds_every_flip_outside_payloads(store: Path) -> None:
    payloads = payload_ranges(store)
    missed, excused = [], 0
    for name in files_of(store):
        if name.startswith("whole/"):
            continue
        path = store / name
        data = path.read_bytes()
        for at, bit in flips(len(data), 40):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            if verify(store, quick=True, jobs=1).sound:
                if any(start <= at < end for start, end in payloads.get(name, [])):
                    excused += 1
                else:
                    missed.append((name, at, bit))
        path.write_bytes(data)
    assert missed == []
    assert excused > 0


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("left", ["nothing", "half", "all but a byte", "a byte more"])
def test_a_truncated_or_longer_file_is_found(store: Path, left: str, quick: bool) -> None:
    for name in files_of(store):
        path = store / name
        data, stat = path.read_bytes(), path.stat()
        keep = {
            "nothing": b"",
            "half": data[: len(data) // 2],
            "all but a byte": data[:-1],
            "a byte more": data + b"\0",
        }[left]
        path.write_bytes(keep)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert not verify(store, quick=quick).sound, name
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert verify(store, quick=quick).sound


@pytest.mark.parametrize("quick", [False, True])
def test_a_missing_file_is_found_and_named(store: Path, quick: bool) -> None:
    for name in files_of(store):
        (store / name).rename(store / "aside")
        problems = verify(store, quick=quick).problems
        assert any(name in problem for problem in problems), name
        (store / "aside").rename(store / name)


def test_without_either_root_manifest_there_is_no_store(store: Path) -> None:
    (store / "slimckpt.json").unlink()
    (store / "slimckpt.json.2").unlink()
    with pytest.raises(NotAStoreError, match=r"has no slimckpt\.json"):
        verify(store)


def test_both_root_manifests_damaged_is_one_problem(store: Path) -> None:
    for name in ("slimckpt.json", "slimckpt.json.2"):
        (store / name).write_bytes(b"\xff\xfe not JSON")
    assert len(verify(store).problems) == 1


def test_all_damage_is_listed_not_only_the_first(store: Path) -> None:
    containers = [name for name in files_of(store) if name.endswith(".h5")]
    assert len(containers) >= 5
    for name in containers:
        (store / name).write_bytes(b"")
    problems = verify(store).problems
    assert all(any(name in problem for problem in problems) for name in containers)


def test_a_file_that_belongs_to_nothing_is_a_note(store: Path) -> None:
    (store / "shared" / "stray").write_bytes(b"?")
    checked = verify(store)
    assert checked.sound
    assert checked.notes == ["1 files in the store belong to nothing (first: shared/stray)"]


def test_a_quick_check_reads_no_payloads_and_the_full_one_reads_all(pristine: Path) -> None:
    quick, full = verify(pristine / "store", quick=True), verify(pristine / "store")
    assert (quick.quick, quick.nbytes_read) == (True, 0)
    payloads = sum(e - s for found in payload_ranges(pristine / "store").values() for s, e in found)
    assert full.nbytes_read >= payloads
    with pytest.raises(UsageError, match="contradict"):
        verify(pristine / "store", quick=True, against=pristine / "source")


def test_a_wrong_crc_of_the_framework_is_reported_though_the_store_is_as_it_was_written(
    tmp_path: Path,
) -> None:
    content = record("w", "Float32", [1024], body(1, 4096))
    good, bad = with_crc(content), bytearray(with_crc(content))
    bad[-1] ^= 1
    assert zlib.crc32(content).to_bytes(10, "big") == good[-10:]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "good.ckpt").write_bytes(good)
    (tmp_path / "source" / "bad.ckpt").write_bytes(bad)
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    problems = verify(tmp_path / "store").problems
    assert len(problems) == 1 and "bad.ckpt" in problems[0] and "CRC" in problems[0].upper()


def test_an_identical_source_is_safe_to_delete(pristine: Path) -> None:
    checked = verify(pristine / "store", against=pristine / "source")
    assert checked.safe is True
    assert sentence(checked, "run").startswith("run is safe to delete")
    assert verify(pristine / "store").safe is None


def test_a_damaged_store_makes_no_source_safe_to_delete(pristine: Path, store: Path) -> None:
    (store / "README.txt").write_bytes(b"")
    assert verify(store, against=pristine / "source").safe is False
    for name in ("slimckpt.json", "slimckpt.json.2"):
        (store / name).write_bytes(b"")
    assert verify(store, against=pristine / "source").safe is False


def change_a_byte(source: Path) -> None:
    path = source / "rank_1" / "net-1_1.ckpt"
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def change_a_byte_of_a_whole_file(source: Path) -> None:
    path = source / "args.json"
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"0.1", b"0.2"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def grow(source: Path) -> None:
    path = source / "args.json"
    stat = path.stat()
    with path.open("ab") as file:
        file.write(b"\n")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def keep_time(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """``change``, and the source directory's own time as it was."""

    def changed(source: Path) -> None:
        stat = source.stat()
        change(source)
        os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    return changed


def relink(source: Path) -> None:
    stat = (source / "latest").lstat()
    (source / "latest").unlink()
    (source / "latest").symlink_to("checkpoint-10")
    os.utime(source / "latest", ns=(0, stat.st_mtime_ns), follow_symlinks=False)


def part_hard_link(source: Path) -> None:
    path = source / "args.json"
    stat, data = path.stat(), path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    path.chmod(stat.st_mode & 0o7777)
    os.utime(path, ns=(0, stat.st_mtime_ns))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte": (change_a_byte, "rank_1/net-1_1.ckpt: differs between bytes"),
    "a byte of a file kept whole": (change_a_byte_of_a_whole_file, "args.json: differs"),
    "a length": (grow, "args.json: 13 bytes in the source, 12 in the store"),
    "a mode": (lambda s: (s / "args.json").chmod(0o611), "args.json: mode is"),
    "a mode of a directory": (lambda s: (s / "empty").chmod(0o711), "empty: mode is"),
    "a mode of the root": (lambda s: s.chmod(0o711), ".: mode is"),
    "a time": (lambda s: os.utime(s / "args.json", ns=(0, 1)), "args.json: mtime is 1 "),
    "a time by a nanosecond": (
        lambda s: os.utime(
            s / "rank_0", ns=(0, (s / "rank_0").stat().st_mtime_ns + 1)
        ),
        "rank_0: mtime is",
    ),
    "a time of a link": (
        lambda s: os.utime(s / "latest", ns=(0, 1), follow_symlinks=False),
        "latest: mtime is 1 ",
    ),
    "a further file": (
        keep_time(lambda s: (s / "new").write_bytes(b"")),
        "new is in the source but not in the store",
    ),
    "a further directory": (
        keep_time(lambda s: (s / "newdir").mkdir()),
        "newdir is in the source but not in the store",
    ),
    "a further link": (
        keep_time(lambda s: (s / "l").symlink_to("x")),
        "l is in the source but not in the store",
    ),
    "a file gone": (
        keep_time(lambda s: (s / "cut.safetensors").unlink()),
        "cut.safetensors is in the store but not in the source",
    ),
    "a directory gone": (
        keep_time(lambda s: (s / "empty").rmdir()),
        "empty is in the store but not in the source",
    ),
    "a target of a link": (keep_time(relink), "latest: points elsewhere"),
    "a hard link parted": (keep_time(part_hard_link), "args.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_source_with_any_change_is_not_safe_to_delete(
    pristine: Path, tmp_path: Path, what: str
) -> None:
    source = Path(shutil.copytree(pristine / "source", tmp_path / "source", symlinks=True))
    (source / "checkpoint-10" / "args.json").unlink()
    os.link(source / "args.json", source / "checkpoint-10" / "args.json")
    for path, original in (
        (source / name, pristine / "source" / name) for name in ("checkpoint-10", "args.json")
    ):
        stat = original.stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert snapshot(source) == snapshot(pristine / "source")
    change, problem = CHANGES[what]
    change(source)
    checked = verify(pristine / "store", against=source)
    assert checked.safe is False
    assert any(found.startswith(problem) for found in checked.problems), checked.problems
    assert "is NOT safe to delete" in sentence(checked, "run")


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("first", [0, 1023, 1024, 4095, 4096, 9000, 19_999])
def test_of_a_file_compared_in_stretches_the_first_difference_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, jobs: int
) -> None:
    monkeypatch.setattr(compare, "_STRETCH", 4096)
    monkeypatch.setattr(compare, "_BLOCK", 1024)
    data = bytearray(body(1, 20_000))
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_bytes(data)
    slim(source, tmp_path / "store", min_saving=0)
    assert verify(tmp_path / "store", against=source, jobs=jobs).safe
    for at in {first, 19_990}:
        data[at] ^= 1
    stat = (source / "b").stat()
    (source / "b").write_bytes(data)
    os.utime(source / "b", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (problem,) = verify(tmp_path / "store", against=source, jobs=jobs).problems
    start = min(first, 19_990) // 1024 * 1024
    assert problem == f"b: differs between bytes {start} and {min(start + 1024, 20_000)}"


def test_a_file_that_became_a_directory_or_a_link_is_not_safe_to_delete(
    pristine: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(pristine / "source", tmp_path / "source", symlinks=True))
    (source / "cut.safetensors").unlink()
    (source / "cut.safetensors").mkdir()
    (source / "empty").rmdir()
    (source / "empty").symlink_to("rank_0")
    problems = verify(pristine / "store", against=source).problems
    assert "cut.safetensors: a directory in the source, a file in the store" in problems
    assert "empty: a symbolic link in the source, a directory in the store" in problems


def test_a_source_of_odd_modes_and_times_is_safe_to_delete(tmp_path: Path) -> None:
    source = small_run(tmp_path / "source")
    set_times_and_modes(source)
    slim(source, tmp_path / "store", min_saving=0)
    assert verify(tmp_path / "store", against=source).safe is True
