"""What a mount is made of, without mounting anything."""

import errno
import os
import stat
import struct
from pathlib import Path

import pytest
from safetensors_bytes import safetensors_file
from trees import body, small_run

from slimckpt.errors import MountError, StoreDamagedError
from slimckpt.model import Role, SourceFile, Stat
from slimckpt.mount import bodies as bodies_module
from slimckpt.mount import place, protocol
from slimckpt.mount.bodies import Bodies
from slimckpt.mount.session import Session
from slimckpt.mount.tree import Node, tree_of
from slimckpt.rewrite.select import Chosen, Selection, choose
from slimckpt.rewrite.slim import slim
from slimckpt.store.manifest import FileEntry, OtherEntry, Part, Place
from slimckpt.store.reader import Store

STAT = Stat(0o640, 1_500_000_000_123_456_789, 11, 12)


def chosen_of(directories: list[bytes], files: list[list[bytes]], links: list[bytes]) -> Chosen:
    skeleton = Place("fill", 513, "")
    entries = [FileEntry(SourceFile(names[0], 513, STAT, Role()), skeleton) for names in files]
    return Chosen(
        [(Part("", None), entry, names) for entry, names in zip(entries, files, strict=True)],
        [OtherEntry(path, STAT) for path in directories],
        [OtherEntry(path, STAT, b"a/b") for path in links],
    )


def test_names_of_one_body_are_one_node() -> None:
    nodes = tree_of(chosen_of([b"", b"d"], [[b"d/f", b"g"], [b"h"]], [b"l"]))
    root = nodes[1]
    assert sorted(nodes) == [1, 2, 3, 4, 5]
    assert (root.kind, root.links, root.mode) == (stat.S_IFDIR, 3, stat.S_IFDIR | 0o640)
    assert set(root.inside) == {b"d", b"g", b"h", b"l"}
    assert nodes[root.inside[b"d"]].inside == {b"f": root.inside[b"g"]}
    file = nodes[root.inside[b"g"]]
    assert (file.links, file.body, file.nbytes, file.mode) == (2, 0, 513, stat.S_IFREG | 0o640)
    link = nodes[root.inside[b"l"]]
    assert (link.target, link.nbytes, link.mode) == (b"a/b", 3, stat.S_IFLNK | 0o777)


@pytest.mark.parametrize(
    ("directories", "files", "message"),
    [
        ([b""], [[b"a"], [b"a"]], "a is listed twice"),
        ([b"", b"a"], [[b"a"]], "a is listed twice"),
        ([b""], [[b"d/f"]], "does not list its directory"),
        ([b""], [[b"a"], [b"a/b"]], "does not list its directory"),
        ([b"d"], [], "does not list its directory"),
        ([], [[b"a"]], "does not list its directory"),
    ],
)
def test_a_store_that_lists_what_cannot_be_is_damaged(
    directories: list[bytes], files: list[list[bytes]], message: str
) -> None:
    with pytest.raises(StoreDamagedError, match=message):
        tree_of(chosen_of(directories, files, []))


def bodies_of(source: Path) -> tuple[Bodies, Chosen]:
    slim(source, source.with_name("store"), min_saving=0)
    store = Store(os.fsencode(source.with_name("store")))
    chosen = choose(store, Selection(), "mount")
    return Bodies(store, chosen.files), chosen


def test_files_that_nobody_has_open_are_forgotten_when_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies_module, "_IDLE", 1)
    source = small_run(tmp_path / "source")
    bodies, chosen = bodies_of(source)
    for row, (_, entry, names) in enumerate(chosen.files):
        expected = (source / os.fsdecode(names[0])).read_bytes()
        bodies.open(row)
        bodies.open(row)
        bodies.release(row)
        assert b"".join(bodies.buffers(row, 0, entry.file.size + 100)) == expected
        assert b"".join(bodies.buffers(row, 3, 2)) == expected[3:5]
        assert bodies.buffers(row, entry.file.size, 5) == []
        assert bodies.buffers(row, entry.file.size + 5, 5) == []
        bodies.release(row)
        with pytest.raises(KeyError):
            bodies.buffers(row, 0, 1)
    assert len(chosen.files) == 5
    assert list(bodies._idle) == [4]


def test_a_read_of_more_pieces_than_a_message_takes_is_one_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [(f"t{n}", "U8", [1025], body(n, 1025)) for n in range(20)]
    for rank in (0, 1):
        path = tmp_path / "source" / f"rank_{rank}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(safetensors_file([*tensors, ("own", "U8", [9], body(90 + rank, 9))]))
    bodies, chosen = bodies_of(tmp_path / "source")
    (row,) = [n for n, (_, e, _) in enumerate(chosen.files) if e.file.path.startswith(b"rank_1")]
    bodies.open(row)
    several = bodies.buffers(row, 0, 1 << 20)
    assert len(several) > 20
    monkeypatch.setattr(bodies_module, "_MOST_PIECES", len(several) - 1)
    (one,) = bodies.buffers(row, 0, 1 << 20)
    assert one == b"".join(several) == path.read_bytes()


NODE = Node(stat.S_IFREG, STAT, 2, 5_000_000_001, 3)


def test_attributes_are_laid_out_as_in_the_header_of_the_kernel() -> None:
    found = protocol.attributes(7, NODE)
    # struct fuse_attr_out: attr_valid, attr_valid_nsec, dummy, struct fuse_attr.
    assert len(found) == 16 + 88
    sizes = struct.unpack_from("=6Q", found, 16)
    assert sizes[:3] == (7, 5_000_000_001, 9_765_626)
    assert sizes[3:] == (1_500_000_000,) * 3
    rest = struct.unpack_from("=10I", found, 16 + 48)
    assert rest == (*[123_456_789] * 3, stat.S_IFREG | 0o640, 2, 11, 12, 0, 4096, 0)


def test_times_before_1970_are_whole_seconds_before_and_nanoseconds_after() -> None:
    old = Node(stat.S_IFREG, Stat(0o600, -1, 0, 0), 1)
    found = protocol.attributes(2, old)
    assert struct.unpack_from("=q", found, 16 + 32) == (-1,)
    assert struct.unpack_from("=I", found, 16 + 52) == (999_999_999,)


def test_a_name_that_is_not_there_may_be_remembered_as_such() -> None:
    found = protocol.entry(0, None)
    assert len(found) == len(protocol.entry(7, NODE)) == 40 + 88
    number, _, valid = struct.unpack_from("=3Q", found)
    assert number == 0 and valid > 0


def test_a_directory_is_listed_in_as_many_pieces_as_it_takes() -> None:
    names = [(b"n" * length, length, stat.S_IFLNK) for length in range(1, 60)]
    found, offset, pieces = [], 0, 0
    while packed := protocol.listing(names, offset, 300):
        pieces += 1
        assert len(packed) <= 300
        while packed:
            number, offset, length, kind = struct.unpack_from("=QQII", packed)
            found.append((packed[24 : 24 + length], number, kind << 12))
            packed = packed[24 + length + -length % 8 :]
    assert found == names
    assert pieces > 10


@pytest.mark.parametrize("extended", [True, False])
def test_nothing_is_agreed_on_that_the_kernel_did_not_offer(extended: bool) -> None:
    offered = (1 << 0) | (1 << 22) | (1 << 30 if extended else 0)
    body = struct.pack("=4I", 7, 31, 131072, offered) + struct.pack("=I", 1 << 4) + bytes(44)
    found = protocol.init(memoryview(body if extended else body[:16]))
    assert len(found) == 64
    major, minor, readahead, flags = struct.unpack_from("=4I", found)
    assert (major, minor, readahead, flags) == (7, 31, 131072, offered)
    assert struct.unpack_from("=H", found, 28) == (256,)
    assert struct.unpack_from("=I", found, 32) == (1 << 4 if extended else 0,)


def test_a_question_that_breaks_the_session_is_answered_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers, device = os.pipe()
    bodies, chosen = bodies_of(small_run(tmp_path / "source"))
    session = Session(device, tree_of(chosen), bodies)
    header = struct.pack("=IIQQIIIHH", 40, protocol.GETATTR, 77, 999, 0, 0, 0, 0, 0)
    session._answer(protocol.request_of(memoryview(header)))
    assert struct.unpack("=IiQ", os.read(answers, 100)) == (16, -errno.EIO, 77)
    assert "KeyError: 999" in caplog.text
    os.close(answers)
    os.close(device)


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


def test_without_the_device_the_way_to_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "DEVICE", bytes(tmp_path / "fuse"))
    with pytest.raises(MountError, match=r"has no .*/fuse.*modprobe fuse.*--device"):
        place.attach(bytes(tmp_path))


def test_without_permission_on_the_device_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: bytes) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("slimckpt.effects.open_device", refuse)
    with pytest.raises(MountError, match=r"/dev/fuse: Operation not permitted; .*SYS_ADMIN"):
        place.attach(bytes(tmp_path))


def test_a_device_that_is_none_cannot_be_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "DEVICE", bytes(tmp_path / "fuse"))
    (tmp_path / "fuse").write_bytes(b"")
    monkeypatch.setenv("PATH", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MountError, match="cannot be mounted on"):
        place.attach(bytes(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


HELPER = """#!/usr/bin/env python3
import os, socket, sys
assert sys.argv[1:4] == ["-o", "ro,nosuid,nodev,fsname=slimckpt,subtype=slimckpt", "--"]
if os.environ.get("REFUSE"):
    sys.exit("fusermount3: " + sys.argv[4] + " is not yours")
with socket.socket(fileno=int(os.environ["_FUSE_COMMFD"])) as other:
    with open(sys.argv[4] + "/handed over", "rb") as file:
        socket.send_fds(other, [b"x"], [file.fileno()])
"""


@pytest.mark.parametrize("refuses", [True, False])
def test_who_is_not_root_mounts_by_the_program_that_may(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "fusermount3"
    helper.write_text(HELPER)
    helper.chmod(0o755)
    (tmp_path / "handed over").write_bytes(b"the device")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = b"ro,nosuid,nodev,fsname=slimckpt,subtype=slimckpt"
    if refuses:
        monkeypatch.setenv("REFUSE", "1")
        with pytest.raises(MountError, match=r"by this user: fusermount3: .* is not yours; "):
            place._attach_by_helper(bytes(tmp_path), options)
        return
    device = place._attach_by_helper(bytes(tmp_path), options)
    assert os.read(device, 100) == b"the device"
    assert not os.get_inheritable(device)
    os.close(device)


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_who_is_not_root_and_has_no_such_program_is_told_where_it_is(
    error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object, **__: object) -> None:
        raise error  # PermissionError: a directory of the path may not be looked into

    monkeypatch.setattr(place.subprocess, "run", run)
    with pytest.raises(MountError, match="apt-get install fuse3"):
        place._attach_by_helper(bytes(tmp_path), b"")
