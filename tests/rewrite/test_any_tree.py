"""Law 1 on trees of every kind: what is slimmed and restored is what was there."""

import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mindspore_bytes import record, with_crc
from safetensors_bytes import safetensors_file
from trees import body, contents, small_run, snapshot

from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify

SIZES = (4096, 1024, 0, 4, 1020, 1028, 65536, 70000)
"""Around the floor of 1 KiB, and where small datasets end."""
MARK = b'{"format":"slimckpt",'
NAMES = (
    b"a",
    b"a.h5",
    b"b",
    b"A",
    b"rank_0",
    b"rank_1",
    b"net-1_1.ckpt",
    b"net-2_1.ckpt",
    b"model.safetensors",
    b"checkpoint-10",
    b"checkpoint-20",
    b"whole",
    b"own",
    b"slimckpt.json",
    b"slimckpt.json.2",
    b"whole-files.h5",
    b"000001",
    b"sp ace\n\t%2F",
    b"\xff\xfe not utf-8",
    b"\xed\xa0\x80\xed\xb0\x80",
    "模型-é🙂".encode(),
    b"n" * 255,
    b"m" * 240 + b".ckpt",
)
names = st.sampled_from(NAMES)
tensors = st.lists(
    st.tuples(
        st.sampled_from(["w", "b", "adam_m.w", "layers.0.q/k", "..", "模型", "a\nb", "x%"]),
        st.integers(0, 2),
        st.sampled_from(SIZES),
    ),
    min_size=1,
    max_size=6,
)


def mindspore(found: list[tuple[str, int, int]]) -> bytes:
    rows = [(f"{name}.{i}", seed, nbytes) for i, (name, seed, nbytes) in enumerate(found)]
    return b"".join(record(n, "Float32", [size // 4], body(seed, size)) for n, seed, size in rows)


def safetensors(found: list[tuple[str, int, int]]) -> bytes:
    return safetensors_file(
        [
            (f"{name}.{i}", "F32", [size // 4], body(seed, size))
            for i, (name, seed, size) in enumerate(found)
        ],
        {"format": "pt"},
    )


def cut(data: bytes, at: float) -> bytes:
    return data[: int(len(data) * at)]


def flip(data: bytes, at: float) -> bytes:
    if not data:
        return data
    place = min(int(len(data) * at), len(data) - 1)
    return data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


whole_files = st.one_of(
    st.builds(mindspore, tensors),
    st.builds(mindspore, tensors),
    st.builds(safetensors, tensors),
    st.builds(with_crc, st.builds(mindspore, tensors)),
    st.builds(body, st.integers(0, 3), st.sampled_from(SIZES)),
    st.builds(bytes, st.sampled_from(SIZES)),
    st.sampled_from(
        [
            b"",
            MARK,
            b'{"format":"slimckpt-part"}',
            b"{}",
            b"\x08" + bytes(7) + b"{}      ",
            b"\xff" * 40,
        ]
    ),
)
files = st.one_of(
    whole_files,
    whole_files,
    st.builds(cut, whole_files, st.floats(0, 1)),
    st.builds(flip, whole_files, st.floats(0, 1)),
)
times = st.integers(-(10**18), 4 * 10**18)
modes = st.sampled_from([0o644, 0o400, 0o600, 0o640, 0o000, 0o755, 0o444, 0o2755, 0o4711])
Make = Callable[[bytes, list[bytes], Path], None]
"""Makes an entry at a path, knowing the entries before it, and a slim checkpoint to copy."""


def write(data: bytes, mode: int) -> Make:
    def make(path: bytes, existing: list[bytes], store: Path) -> None:
        Path(os.fsdecode(path)).write_bytes(data)
        os.chmod(path, mode)

    return make


def link(target: bytes) -> Make:
    return lambda path, existing, store: os.symlink(target, path)


def hard_link(which: int) -> Make:
    def make(path: bytes, existing: list[bytes], store: Path) -> None:
        if existing:
            os.link(existing[which % len(existing)], path, follow_symlinks=False)

    return make


def store_inside(damaged: bool) -> Make:
    def make(path: bytes, existing: list[bytes], store: Path) -> None:
        shutil.copytree(os.fsencode(store), path)
        if damaged:
            os.unlink(os.path.join(path, b"slimckpt.json"))

    return make


entries = st.one_of(
    st.builds(write, files, modes),
    st.builds(write, st.builds(mindspore, tensors), modes),
    st.builds(write, st.builds(safetensors, tensors), modes),
    st.builds(hard_link, st.integers(0, 5)),
    st.builds(
        link,
        st.sampled_from([b"nowhere", b"/etc/passwd", b".", b"..", b"a", b"\xff", b"l" * 300]),
    ),
    st.builds(store_inside, st.booleans()),
    st.just(None),
)
paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: b"/".join(parts))
trees = st.lists(st.tuples(paths, entries, times), max_size=14, unique_by=lambda entry: entry[0])
directory_modes = st.lists(st.sampled_from([0o755, 0o555, 0o700, 0o500, 0o2770]), min_size=1)


def build(
    root: bytes, tree: list[tuple[bytes, Make | None, int]], modes: list[int], store: Path
) -> None:
    """Write a tree; an entry whose place is taken, or lies in something else, is left out."""
    os.mkdir(root)
    made: list[bytes] = []
    for path, make, _ in tree:
        here = os.path.join(root, path)
        above = [path[:at] for at in range(len(path)) if path[at : at + 1] == b"/"]
        taken = [p for p in above if os.path.lexists(os.path.join(root, p))]
        if os.path.lexists(here) or not all(
            stat.S_ISDIR(os.lstat(os.path.join(root, p)).st_mode) for p in taken
        ):
            continue
        os.makedirs(os.path.dirname(here), exist_ok=True)
        if make is None:
            os.mkdir(here)
            continue
        make(here, made, store)
        if os.path.lexists(here) and not os.path.isdir(here):
            made.append(here)
    clock = {os.path.join(root, path): time for path, _, time in tree}
    for number, (directory, _, found) in enumerate(os.walk(root, topdown=False)):
        for name in found:
            path = os.path.join(directory, name)
            if path in clock:
                os.utime(path, ns=(0, clock[path]), follow_symlinks=False)
        os.chmod(directory, modes[number % len(modes)])
        os.utime(directory, ns=(0, clock.get(directory, 10**18 + number)))


def is_marked_as_a_store(root: Path) -> bool:
    """Whether a tree says of itself, at its top, that it is a slim checkpoint."""
    manifests = [root / "slimckpt.json", root / "slimckpt.json.2"]
    return any(
        not path.is_symlink() and path.is_file() and path.read_bytes().startswith(MARK)
        for path in manifests
    )


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A slim checkpoint, to be copied into trees."""
    root = tmp_path_factory.mktemp("older")
    slim(small_run(root / "run", 1024), root / "store", min_saving=0)
    return root / "store"


@settings(max_examples=100)
@given(trees, directory_modes, st.sampled_from([1, 2]))
def test_a_tree_restored_from_its_slim_checkpoint_is_the_tree(
    older: Path, tree: list[tuple[bytes, Make | None, int]], modes: list[int], jobs: int
) -> None:
    with TemporaryDirectory() as place:
        base = os.fsencode(place)
        source, store, back = (os.path.join(base, name) for name in (b"src", b"st", b"back"))
        build(source, tree, modes, older)
        assume(not is_marked_as_a_store(Path(os.fsdecode(source))))
        before = snapshot(source)
        slim(source, store, min_saving=0, jobs=jobs)
        checked = verify(store, against=source)
        # A damaged CRC of MindSpore's own is a true finding about a file that is kept as it is.
        assert [p for p in checked.problems if "CRC" not in p.upper()] == []
        restore(store, back, jobs=jobs)
        assert snapshot(back) == before
        assert snapshot(source) == before
        assert sorted(os.listdir(base)) == [b"back", b"src", b"st"]


def odd_tree(root: Path) -> Path:
    """One tree with everything that is odd at once."""
    top = os.fsencode(small_run(root, 2048))
    shared = mindspore([("w", 1, 70000), ("b", 2, 16)])
    for name in (b"a", b"a.h5/x", b"A", b"\xff\xfe", b"n" * 255, b"whole/own/whole", b"own/a.h5"):
        here = os.path.join(top, name)
        os.makedirs(os.path.dirname(here), exist_ok=True)
        Path(os.fsdecode(here)).write_bytes(shared)
    deep = b"/".join([b"d" * 200] * 12)
    os.makedirs(os.path.join(top, deep))
    Path(os.fsdecode(os.path.join(top, deep, b"net-1_1.ckpt"))).write_bytes(shared)
    for name in (b"slimckpt.json", b"empty/slimckpt.json.2"):
        Path(os.fsdecode(os.path.join(top, name))).write_bytes(b'{"format": "not a store"}')
    os.symlink(b"loop", os.path.join(top, b"loop"))
    os.symlink(b"../..", os.path.join(top, b"up"))
    return root


def test_the_odd_tree_comes_back_and_its_shared_bytes_are_stored_once(tmp_path: Path) -> None:
    source = odd_tree(tmp_path / "source")
    before = snapshot(source)
    slim(source, tmp_path / "store", min_saving=0)
    needle = body(1, 70000)
    assert sum(data.count(needle) for data in contents(tmp_path / "store").values()) == 1
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == before


@pytest.mark.parametrize("min_saving", [0, 5])
def test_slimming_twice_seconds_apart_gives_the_same_bytes(
    tmp_path: Path, min_saving: float
) -> None:
    source = odd_tree(tmp_path / "source")
    slim(source, tmp_path / "first", min_saving=min_saving, jobs=1)
    time.sleep(2)
    slim(source, tmp_path / "second", min_saving=min_saving, jobs=7)
    first = contents(tmp_path / "first")
    assert first == contents(tmp_path / "second")
    assert any(path.startswith(b"shared/") for path in first)
    modes = [
        {path: entry[-3] for path, entry in snapshot(tmp_path / name).items()}
        for name in ("first", "second")
    ]
    assert modes[0] == modes[1]


def test_a_store_inside_the_tree_is_kept_whole_and_still_sound(tmp_path: Path) -> None:
    source = small_run(tmp_path / "source")
    slim(source, tmp_path / "inner", min_saving=0)
    shutil.move(tmp_path / "inner", source / "older.slim")
    slim(source, tmp_path / "store", min_saving=0)
    inner = {p for p in contents(tmp_path / "store") if p.startswith(b"whole/older.slim/")}
    assert {p.removeprefix(b"whole/") for p in inner} == {
        p for p in contents(source) if p.startswith(b"older.slim/")
    }
    restore(tmp_path / "store", tmp_path / "back")
    assert verify(tmp_path / "back" / "older.slim").problems == []
    assert snapshot(tmp_path / "back") == snapshot(source)
