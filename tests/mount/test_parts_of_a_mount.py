"""What a mount is made of, without mounting anything."""

import os
import stat
import sys
from pathlib import Path

import pytest
from trees import body, small_run

from slimckpt.errors import MountError, StoreDamagedError
from slimckpt.model import Role, SourceFile, Stat
from slimckpt.mount import bodies as bodies_module
from slimckpt.mount import place
from slimckpt.mount.bodies import Bodies
from slimckpt.mount.tree import Tree
from slimckpt.rewrite.select import Chosen, Selection, choose
from slimckpt.rewrite.slim import slim
from slimckpt.store.manifest import FileEntry, OtherEntry, Part, Place
from slimckpt.store.reader import Store

STAT = Stat(0o640, 1_500_000_000_123_456_789, 11, 12)


def chosen_of(directories: list[bytes], files: list[list[bytes]], links: list[bytes]) -> Chosen:
    part = Part("", None)
    entries = [
        FileEntry(SourceFile(names[0], 513, STAT, Role()), Place("fill", 513, ""))
        for names in files
    ]
    return Chosen(
        [(part, entry, names) for entry, names in zip(entries, files, strict=True)],
        [OtherEntry(path, STAT) for path in directories],
        [OtherEntry(path, STAT, b"a/b") for path in links],
    )


def test_nodes_have_the_attributes_that_were_recorded() -> None:
    tree = Tree(chosen_of([b"", b"d"], [[b"d/f", b"g"]], [b"l"]))
    assert set(tree) == {b"", b"d", b"d/f", b"g", b"l"}
    file, link, root = tree.node(b"g"), tree.node(b"l"), tree.node(b"")
    assert file is not None and link is not None and root is not None
    assert tree.node(b"d/f") is file
    assert tree.node(b"nothing") is None
    times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), STAT.mtime)
    assert {k: v for k, v in file.attributes.items() if k != "st_ino"} == {
        "st_mode": stat.S_IFREG | 0o640,
        "st_nlink": 2,
        "st_uid": 11,
        "st_gid": 12,
        "st_size": 513,
        "st_blocks": 2,
        **times,
    }
    assert link.attributes["st_mode"] == stat.S_IFLNK | 0o777
    assert (link.attributes["st_size"], link.target) == (3, b"a/b")
    assert root.attributes["st_nlink"] == 3
    assert set(root.children) == {b"d", b"g", b"l"}
    numbers = {node.attributes["st_ino"] for path in tree if (node := tree.node(path))}
    assert len(numbers) == 4


@pytest.mark.parametrize(
    ("directories", "files", "message"),
    [
        ([b""], [[b"a"], [b"a"]], "a is listed twice"),
        ([b"", b"a"], [[b"a"]], "a is listed twice"),
        ([b""], [[b"d/f"]], "does not list its directory"),
        ([b""], [[b"a"], [b"a/b"]], "does not list its directory"),
    ],
)
def test_a_store_that_lists_what_cannot_be_is_damaged(
    directories: list[bytes], files: list[list[bytes]], message: str
) -> None:
    with pytest.raises(StoreDamagedError, match=message):
        Tree(chosen_of(directories, files, []))


def test_files_that_nobody_has_open_are_closed_when_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies_module, "_IDLE", 1)
    small_run(tmp_path / "source")
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    store = Store(os.fsencode(tmp_path / "store"))
    chosen = choose(store, Selection())
    bodies = Bodies(store, chosen.files)
    before = set(os.listdir("/proc/self/fd"))
    held = []
    for row, (_, entry, names) in enumerate(chosen.files):
        for _ in range(2):
            bodies.open(row)
        buffer = bytearray(entry.file.size + 100)
        assert bodies.read_into(row, 0, memoryview(buffer)) == entry.file.size
        source = tmp_path / "source" / os.fsdecode(names[0])
        assert buffer[: entry.file.size] == source.read_bytes()
        assert bodies.read_into(row, entry.file.size + 5, memoryview(buffer)) == 0
        bodies.release(row)
        assert bodies.read_into(row, 0, memoryview(buffer)) == entry.file.size
        held.append(len(os.listdir("/proc/self/fd")))
        bodies.release(row)
    most = max(after - len(before) for after in held)
    assert len(os.listdir("/proc/self/fd")) - len(before) < most
    bodies.open(0)
    bodies.release(0)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing of FUSE had been imported yet."""
    monkeypatch.delitem(sys.modules, "slimckpt.mount.fuse", raising=False)
    monkeypatch.delitem(sys.modules, "mfusepy", raising=False)
    monkeypatch.delattr("slimckpt.mount.fuse", raising=False)
    monkeypatch.setenv("FUSE_LIBRARY_NAME", "fuse3")


@pytest.mark.usefixtures("unloaded")
def test_without_mfusepy_the_way_to_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mfusepy", None)
    with pytest.raises(MountError, match=r"mfusepy.*pip install 'slimckpt\[mount\]'"):
        place.load_fuse()


@pytest.mark.usefixtures("unloaded")
def test_without_libfuse_the_way_to_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mfusepy", exc_type=ImportError)
    monkeypatch.delitem(sys.modules, "mfusepy")
    monkeypatch.setenv("FUSE_LIBRARY_PATH", str(tmp_path / "libfuse.so"))
    with pytest.raises(MountError, match=r"libfuse.*libfuse.so.*apt-get install fuse3"):
        place.load_fuse()


def test_without_the_device_the_way_to_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _needs_library()
    monkeypatch.setattr(place, "DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(MountError, match=r"has no .*modprobe fuse.*--device"):
        place.load_fuse()


def test_without_permission_on_the_device_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _needs_library()
    (tmp_path / "fuse").write_bytes(b"")
    monkeypatch.setattr(place, "DEVICE", str(tmp_path / "fuse"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(MountError, match=r"no permission to read and write .*fuse"):
        place.load_fuse()


def _needs_library() -> None:
    try:
        import slimckpt.mount.fuse  # noqa: F401
    except (ImportError, OSError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kind", ["missing", "file", "full", "inside", "same"])
def test_a_mount_point_that_does_not_fit_is_refused(kind: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "inner").mkdir(parents=True)
    (tmp_path / "file").write_bytes(body(1, 3))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"")
    (tmp_path / "link").symlink_to("store/inner")
    path, message = {
        "missing": (tmp_path / "missing", "make it: mkdir"),
        "file": (tmp_path / "file", "Not a directory; a mount goes on an empty directory"),
        "full": (tmp_path / "full", "is not empty"),
        "inside": (tmp_path / "link", "lies inside"),
        "same": (store, "is not empty"),
    }[kind]
    with pytest.raises(MountError, match=message):
        place.check_mountpoint(os.fsencode(path), os.fsencode(store))


def test_an_empty_directory_is_taken_by_its_real_path(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store-2").mkdir()
    (tmp_path / "link").symlink_to("store-2")
    found = place.check_mountpoint(bytes(tmp_path / "link"), bytes(tmp_path / "store"))
    assert found == bytes(tmp_path.resolve() / "store-2")
