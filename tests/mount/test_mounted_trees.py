"""A mount shows the original tree, in every respect that a restore gives back."""

import errno
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from mindspore_bytes import record
from sample_files import SAMPLES
from trees import body, dressed, set_times_and_modes, small_run, snapshot

from slimckpt.mount import mounted
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim

FOLDERS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


def assert_same_tree(found: Path, source: Path) -> None:
    """The mount has what the source has; and ``diff`` says so too."""
    assert snapshot(found) == snapshot(source)
    diff = ["diff", "-r", "--no-dereference", source, found]
    done = subprocess.run(diff, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def links_of(root: Path) -> dict[bytes, int]:
    """How many names each inode of a tree has, as ``lstat`` says; of a directory 2 and one for
    each directory in it."""
    top = os.fsencode(root)
    found = {}
    for directory, names, files in os.walk(top):
        found[os.path.relpath(directory, top)] = os.lstat(directory).st_nlink
        for name in names + files:
            path = os.path.join(directory, name)
            found[os.path.relpath(path, top)] = os.lstat(path).st_nlink
    return found


def odd_tree(root: Path) -> Path:
    """Names of every kind, links, empty things, files that share and files kept whole."""
    small_run(root)
    top = os.fsencode(root)
    names = [
        *(
            b"\xff\xfe not utf-8",
            b"\xed\xa0\x80\xed\xb0\x80",
            b"sp ace\n\t%2F",
            b"comma,back\\slash",
        ),
        *("模型-é🙂".encode(), b"n" * 255, b"-rf", b"slimckpt.json", b"whole", b".hidden"),
    ]
    for number, name in enumerate(names):
        data = record("embedding", "Float32", [1024], body(1, 4096)) if number % 2 else body(9, 777)
        Path(os.fsdecode(os.path.join(top, name))).write_bytes(data + bytes([number]))
    deep = root.joinpath(*(f"level {n}" for n in range(40)))
    deep.mkdir(parents=True)
    (deep / "one byte").write_bytes(b"\0")
    (deep / "empty").write_bytes(b"")
    (root / "zeros").write_bytes(bytes(3 << 20))
    os.mkdir(os.path.join(top, b"empty \xfe"))
    os.symlink(b"\xff\xfe not utf-8", os.path.join(top, b"link \xff"))
    os.link(deep / "one byte", root / "second name")
    os.link(deep / "one byte", root / "rank_0" / "third name")
    (root / "loop").symlink_to("loop")
    set_times_and_modes(root)
    return root


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_mounted_sample_is_what_it_was_made_of(folder: str, tmp_path: Path, point: Path) -> None:
    source = dressed(SAMPLES / folder, tmp_path / "source")
    slim(source, tmp_path / "store", min_saving=0)
    before = snapshot(tmp_path / "store")
    with mounted(tmp_path / "store", point):
        assert_same_tree(point, source)
    assert snapshot(tmp_path / "store") == before
    assert list(point.iterdir()) == []


def test_odd_names_links_and_empty_things_are_as_they_were(tmp_path: Path, point: Path) -> None:
    source = odd_tree(tmp_path / "source")
    slim(source, tmp_path / "store", min_saving=0)
    with mounted(tmp_path / "store", point):
        assert_same_tree(point, source)
        expected = links_of(source)
        for path in source.rglob("*"):
            if path.is_dir() and not path.is_symlink():  # not every file system counts so
                inside = [p for p in path.iterdir() if p.is_dir() and not p.is_symlink()]
                expected[os.fsencode(path.relative_to(source))] = 2 + len(inside)
        top = [p for p in source.iterdir() if p.is_dir() and not p.is_symlink()]
        expected[b"."] = 2 + len(top)
        assert links_of(point) == expected


def test_listing_a_directory_says_what_its_entries_are(tmp_path: Path, point: Path) -> None:
    source = odd_tree(tmp_path / "source")
    slim(source, tmp_path / "store", min_saving=0)
    with mounted(tmp_path / "store", point), os.scandir(point) as entries:
        for entry in entries:
            status = os.lstat(entry.path)
            assert entry.inode() == status.st_ino
            # From the listing alone: the entry was not looked up.
            assert entry.is_symlink() == stat.S_ISLNK(status.st_mode)
            assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(status.st_mode)


def test_sizes_on_disk_are_those_of_files_without_holes(tmp_path: Path, point: Path) -> None:
    slim(odd_tree(tmp_path / "source"), tmp_path / "store", min_saving=0)
    with mounted(tmp_path / "store", point):
        status = (point / "zeros").stat()
        assert status.st_size == 3 << 20 == status.st_blocks * 512
        assert (point / "args.json").stat().st_blocks == 1


@pytest.mark.parametrize(
    ("options", "selection"),
    [
        (["--step", "20"], {"steps": [20]}),
        (["--rank", "1"], {"ranks": [1]}),
        (["--file", "*.safetensors"], {"files": ["*.safetensors"]}),
        (["--file", "empty"], {"files": ["empty"]}),
        (["--rank", "0", "--file", "rank_*"], {"ranks": [0], "files": ["rank_*"]}),
    ],
)
def test_a_selection_shows_what_restore_would_write(
    options: list[str], selection: dict[str, list], tmp_path: Path, point: Path
) -> None:
    source = small_run(tmp_path / "source")
    slim(source, tmp_path / "store", min_saving=0)
    restore(tmp_path / "store", tmp_path / "back", **selection)
    with mounted(tmp_path / "store", point, *options):
        assert snapshot(point) == snapshot(tmp_path / "back")
        assert set(snapshot(point)) < set(snapshot(source))


def _truncate(path: Path) -> None:
    os.truncate(path, 0)


CHANGES: dict[str, Callable[[Path], object]] = {
    "write": lambda root: (root / "args.json").open("r+b"),
    "create": lambda root: (root / "new").open("xb"),
    "unlink": lambda root: (root / "args.json").unlink(),
    "truncate": lambda root: _truncate(root / "args.json"),
    "chmod": lambda root: (root / "args.json").chmod(0o777),
    "rename": lambda root: (root / "args.json").rename(root / "other"),
    "mkdir": lambda root: (root / "new").mkdir(),
    "rmdir": lambda root: (root / "empty").rmdir(),
    "utime": lambda root: os.utime(root / "args.json"),
    "symlink": lambda root: (root / "new").symlink_to("args.json"),
    "link": lambda root: os.link(root / "args.json", root / "new"),
}


def test_whatever_would_change_a_mount_is_refused_as_on_a_read_only_file_system(
    tmp_path: Path, point: Path
) -> None:
    source = small_run(tmp_path / "source")
    slim(source, tmp_path / "store", min_saving=0)
    with mounted(tmp_path / "store", point):
        for name, change in CHANGES.items():
            with pytest.raises(OSError) as caught:
                change(point)
            assert caught.value.errno == errno.EROFS, name
        assert_same_tree(point, source)


def test_several_mounts_stand_beside_each_other(tmp_path: Path, point: Path) -> None:
    other, third = tmp_path / "other", tmp_path / "third"
    other.mkdir()
    third.mkdir()
    first, second = small_run(tmp_path / "source"), odd_tree(tmp_path / "odd")
    slim(first, tmp_path / "store", min_saving=0)
    slim(second, tmp_path / "odd store", min_saving=0)
    with (
        mounted(tmp_path / "store", point),
        mounted(tmp_path / "odd store", other),
        mounted(tmp_path / "store", third),
    ):
        assert_same_tree(point, first)
        assert_same_tree(other, second)
        assert_same_tree(third, first)


def test_a_mount_can_be_slimmed_and_copied_like_any_directory(tmp_path: Path, point: Path) -> None:
    source = small_run(tmp_path / "source")
    slim(source, tmp_path / "store", min_saving=0)
    with mounted(tmp_path / "store", point):
        subprocess.run(["cp", "-a", f"{point}/.", tmp_path / "copy"], check=True)
        slim(point, tmp_path / "again", min_saving=0)
    assert snapshot(tmp_path / "copy") == snapshot(source)
    restore(tmp_path / "again", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("allowed", [True, False])
def test_other_users_read_what_modes_permit_and_only_where_they_are_let_in(
    allowed: bool, tmp_path: Path, point: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for mode in (0o644, 0o600):
        (source / f"{mode:o}.bin").write_bytes(body(mode, 5000))
        (source / f"{mode:o}.bin").chmod(mode)
    slim_anyway = small_run(source / "run")
    assert slim_anyway.is_dir()
    slim(source, tmp_path / "store", min_saving=0)
    place = Path(tempfile.mkdtemp())  # the way to tmp_path is open to its owner alone
    try:
        place.chmod(0o755)
        with mounted(tmp_path / "store", place, *(["--allow-other"] if allowed else [])):
            codes = [
                subprocess.run(["cat", place / name], user=65534, capture_output=True).returncode
                for name in ("644.bin", "600.bin")
            ]
            assert (place / "600.bin").read_bytes() == body(0o600, 5000)
        assert codes == ([0, 1] if allowed else [1, 1])
    finally:
        shutil.rmtree(place)
