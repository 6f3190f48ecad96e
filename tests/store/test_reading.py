"""Every sentence of FORMAT.md about readers: what they must know, refuse and bear."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from mindspore_bytes import record
from trees import body, contents, small_run, snapshot

from slimckpt import columns
from slimckpt.errors import (
    NotAStoreError,
    SlimckptError,
    StoreDamagedError,
    UnsupportedStoreError,
)
from slimckpt.model import Role, SourceFile, Span, Stat, Table, TableBuilder
from slimckpt.rewrite.naming import MAX_COMPONENT, MAX_PATH, Names
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify
from slimckpt.sources.digest import digest_of
from slimckpt.store.index import FILL, IN_SKELETON, PARTS, STORED, Contents, FileIndex, Places
from slimckpt.store.manifest import Container, FileEntry, Part, Place, safe_path
from slimckpt.store.reader import Store
from slimckpt.store.spliced import SplicedSource


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reading")
    slim(small_run(root / "source", 2048), root / "store", min_saving=0)
    return root


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine / "store", tmp_path / "store"))


Change = Callable[[dict[str, Any]], object]


def seal(raw: dict[str, Any]) -> bytes:
    """A root manifest with the digest that FORMAT.md asks for."""
    raw["digest"] = "0" * 64
    data = json.dumps(raw, separators=(",", ":")).encode() + b"\n"
    return data.replace(b"0" * 64, blake3(data).hexdigest().encode())


def edit_root(store: Path, change: Change) -> None:
    raw = json.loads((store / "slimckpt.json").read_bytes())
    change(raw)
    for name in ("slimckpt.json", "slimckpt.json.2"):
        (store / name).write_bytes(seal(raw))


def edit_parts(store: Path, change: Change) -> None:
    """Change every part, and make the root manifest name what they became."""
    root = json.loads((store / "slimckpt.json").read_bytes())
    for named in root["parts"]:
        path = store / named["name"]
        raw = json.loads(path.read_bytes())
        change(raw)
        data = json.dumps(raw).encode()
        path.write_bytes(data)
        named.update(nbytes=len(data), digest=digest_of(data).hex())
    edit_root(store, lambda raw: raw.update(parts=root["parts"]))


@pytest.mark.parametrize("edit", [edit_root, edit_parts])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw.update(requires=["time-travel"]), "needs time-travel"),
        (lambda raw: raw.update(version=1), "version 1"),
    ],
)
def test_a_store_that_needs_more_than_is_known_is_refused(
    store: Path, tmp_path: Path, edit: Callable[..., None], change: Change, says: str
) -> None:
    edit(store, change)
    with pytest.raises(UnsupportedStoreError, match=f"{says}.*use a newer slimckpt"):
        restore(store, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_unknown_keys_are_ignored(store: Path, tmp_path: Path, pristine: Path) -> None:
    def more(raw: dict[str, Any]) -> None:
        raw["later"] = {"x": 1}
        for entry in raw.get("entries", []):
            entry["later"] = [1]

    edit_parts(store, more)
    edit_root(store, more)
    restore(store, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(pristine / "source")
    assert verify(store).problems == []


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "empty"])
def test_the_second_manifest_is_read_when_the_first_fails(
    store: Path, pristine: Path, tmp_path: Path, damage: str
) -> None:
    path = store / "slimckpt.json"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        kept = {"cut": data[:-5], "flipped": data.replace(b'"files"', b'"filez"'), "empty": b""}
        path.write_bytes(kept[damage])
    assert len(Store(bytes(store)).problems) == 1
    restore(store, tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(pristine / "source")


def test_a_directory_without_manifests_is_no_store(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotAStoreError):
            Store(bytes(path))


UNSAFE = ["/etc/passwd", "../x", "a/../../x", "a//b", ".", "a/.", "..", "a/", "a\0b", "/"]


@pytest.mark.parametrize("path", UNSAFE)
@pytest.mark.parametrize("where", ["file", "directory", "symlink", "link", "container", "whole"])
def test_a_path_that_could_leave_its_directory_is_refused(
    store: Path, tmp_path: Path, path: str, where: str
) -> None:
    def change(raw: dict[str, Any]) -> None:
        for entry in raw["entries"]:
            if entry["kind"] == where:
                entry["path"] = path
            if where == "link" and entry["kind"] == "file":
                entry["links"] = [path]
            if where == "whole" and entry.get("skeleton", {}).get("kind") == "whole":
                entry["skeleton"]["name"] = path
        if where == "container":
            for container in raw["containers"]:
                container["name"] = path

    edit_parts(store, change)
    with pytest.raises(StoreDamagedError, match="unsafe path"):
        restore(store, tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["store"]
    assert not verify(store).sound


def test_the_name_of_a_part_cannot_leave_the_store(store: Path, tmp_path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["parts"][0]["name"] = "../outside.json"

    edit_root(store, change)
    with pytest.raises(StoreDamagedError, match=r"not a root manifest.*unsafe path"):
        Store(bytes(store))


@given(st.binary(max_size=40).map(lambda b: b.replace(b"\0", b"")))
def test_a_path_of_any_bytes_survives_json(path: bytes) -> None:
    text = json.loads(json.dumps(path.decode("utf-8", "surrogateescape")))
    if path and all(part not in (b"", b".", b"..") for part in path.split(b"/")):
        assert safe_path(text) == path
    else:
        with pytest.raises(ValueError, match="unsafe"):
            safe_path(text)


def test_a_link_whose_directory_is_a_link_cannot_write_outside(store: Path, tmp_path: Path) -> None:
    """Files are made before links, so that no path leads through a link of the store's making."""
    (tmp_path / "outside").mkdir()

    def change(raw: dict[str, Any]) -> None:
        for entry in raw["entries"]:
            if entry["kind"] == "symlink":
                entry.update(path="rank_0x", target=str(tmp_path / "outside"))
            if entry["kind"] == "file" and entry["path"] == "args.json":
                entry.update(path="rank_0x/args.json", links=[])

    edit_parts(store, change)
    with pytest.raises((SlimckptError, OSError)):
        restore(store, tmp_path / "back")
    assert list((tmp_path / "outside").iterdir()) == []
    assert not (tmp_path / "back").exists()


def places_of(kinds: list[int], n: int, **more: list[int]) -> Places:
    places = Places.none(n)
    places.kind = np.array(kinds, np.uint8)
    for name, values in more.items():
        setattr(places, name, np.array(values, getattr(places, name).dtype))
    return places


def three_payloads() -> Table:
    """Payloads of 6 bytes in two spans, 4 and 5 bytes, in a file of 30."""
    builder = TableBuilder()
    for name, spans in (("a", [(20, 2), (2, 4)]), ("b", [(10, 4)]), ("c", [(25, 5)])):
        payload = builder.payload(spans)
        nbytes = sum(n for _, n in spans)
        builder.tensor(name, "U8", [nbytes], nbytes, payload=payload)
    return builder.build()


ORIGINAL = bytes(range(100, 130))
CONTAINER = bytes(range(256))


def spliced(
    tmp_path: Path, places: Places, skeleton: Place, table: Table | None = None
) -> SplicedSource:
    """A source of :data:`ORIGINAL`'s length over one container of :data:`CONTAINER`."""
    source = small_run(tmp_path / "source")
    slim(source, tmp_path / "store", min_saving=0)
    (tmp_path / "store" / "c.h5").write_bytes(CONTAINER)
    part = Part("", None, [Container(b"unused"), Container(b"c.h5", 256)])
    file = SourceFile(b"f", 30, Stat(0o644, 0, 0, 0), Role(), condition="understood")
    entry = FileEntry(file, skeleton)
    index = FileIndex.unpack(FileIndex(table or three_payloads(), places).pack(), "f")
    return SplicedSource(Store(bytes(tmp_path / "store")), part, entry, index)


def test_a_reader_knows_every_kind_of_place_and_splices_them(tmp_path: Path) -> None:
    places = places_of(
        [PARTS, FILL, IN_SKELETON], 3,
        offset=[0, 7, 0], part_end=[3], part_container=[1, 1, 1], part_offset=[200, 50, 9],
        part_nbytes=[1, 4, 1],
    )  # fmt: skip
    skeleton = Place("parts", 20, "", parts=[(1, 0, 12), (1, 60, 8)])
    with spliced(tmp_path, places, skeleton) as source:
        found = source.read(0, 30)
        payload = bytes([200, 50, 51, 52, 53, 9])
        rest = CONTAINER[0:12] + CONTAINER[60:68]
        want = bytearray(30)
        want[20:22], want[2:6] = payload[:2], payload[2:]
        want[10:14] = bytes([7]) * 4
        taken = {*range(20, 22), *range(2, 6), *range(10, 14)}
        for at, byte in zip((i for i in range(30) if i not in taken), rest, strict=True):
            want[at] = byte
        assert found == bytes(want)
        for _ in range(200):
            start = random.Random(_).randrange(31)
            end = random.Random(-_ - 1).randrange(start, 31)
            assert source.read(start, end - start) == want[start:end]
            buffer = bytearray(b"?" * 40)
            source.read_into(start, memoryview(buffer)[5 : 5 + end - start])
            assert buffer == b"?????" + want[start:end] + b"?" * (35 - end + start)


def test_a_filled_skeleton_and_stored_payloads_are_spliced(tmp_path: Path) -> None:
    places = places_of([STORED] * 3, 3, container=[1, 1, 1], offset=[10, 30, 70])
    with spliced(tmp_path, places, Place("fill", 15, "", byte=255)) as source:
        want = bytearray(b"\xff" * 30)
        want[20:22], want[2:6] = CONTAINER[10:12], CONTAINER[12:16]
        want[10:14], want[25:30] = CONTAINER[30:34], CONTAINER[70:75]
        assert source.read(0, 30) == bytes(want)


def test_payloads_without_bytes_that_are_said_to_be_stored_are_nowhere(tmp_path: Path) -> None:
    builder = TableBuilder()
    for spans in ([(10, 4)], [(10, 0)], [], [(14, 0)], [(14, 3)]):
        builder.payload(spans)
    places = places_of([STORED] * 5, 5, container=[1] * 5, offset=[30, 90, 91, 92, 60])
    skeleton = Place("fill", 23, "", byte=255)
    with spliced(tmp_path, places, skeleton, builder.build()) as source:
        want = b"\xff" * 10 + CONTAINER[30:34] + CONTAINER[60:63] + b"\xff" * 13
        assert source.read(0, 30) == want
        assert [source.read(at, 1)[0] for at in range(30)] == list(want)


@pytest.mark.parametrize(
    ("places", "skeleton", "says"),
    [
        ({"kind": [9, 1, 1]}, Place("fill", 15, ""), "kind 9.*newer"),
        ({"container": [5, 1, 1]}, Place("fill", 15, ""), "container 5, the part has 2"),
        ({"offset": [251, 30, 70]}, Place("fill", 15, ""), "bytes 251 to 257 of c.h5"),
        ({"offset": [-1, 30, 70]}, Place("fill", 15, ""), "bytes -1 to 5"),
        ({"container": [1, 5, 1]}, Place("fill", 15, ""), "container 5, the part has 2"),
        ({"offset": [10, 253, 70]}, Place("fill", 15, ""), "bytes 253 to 257 of c.h5"),
        ({"offset": [10, 30, -1]}, Place("fill", 15, ""), "bytes -1 to 4"),
        ({"offset": [10, 2**63 - 2, 70]}, Place("fill", 15, ""), "bytes 9223372036854775806 to"),
        ({}, Place("fill", 14, ""), "does not make up its 30 bytes"),
        ({}, Place("fill", 16, ""), "does not make up its 30 bytes"),
        ({}, Place("delta", 15, ""), r"stored in a way \(delta\).*newer"),
        ({}, Place("parts", 15, "", parts=[(1, 0, 14)]), "does not make up"),
        (
            {"kind": [3, 1, 1], "offset": [0, 30, 70], "part_end": [1], "part_container": [1],
             "part_offset": [0], "part_nbytes": [5]},
            Place("fill", 15, ""), "parts of payload 0 have 5 bytes, expected 6",
        ),
    ],
)  # fmt: skip
def test_a_place_that_cannot_be_is_an_error_that_names_the_file(
    tmp_path: Path, places: dict[str, list[int]], skeleton: Place, says: str
) -> None:
    right = {"container": [1, 1, 1], "offset": [10, 30, 70], **places}
    kinds = right.pop("kind", [STORED] * 3)
    with pytest.raises(StoreDamagedError, match=says) as caught:
        spliced(tmp_path, places_of(kinds, 3, **right), skeleton)
    assert str(caught.value).startswith("f:")


def test_an_unknown_kind_of_place_fails_its_file_and_no_other(tmp_path: Path) -> None:
    """The index of one file is rewritten in place, with all digests that name it."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "b"):
        (source / name).write_bytes(record("w", "UInt8", [2048], body(ord(name), 2048)))
    store = tmp_path / "store"
    slim(source, store, min_saving=0)
    (part,) = Store(bytes(store)).parts()
    entry = next(e for e in part.files if e.file.path == b"a")
    index = Store(bytes(store)).index(part, entry)
    assert index is not None and entry.index is not None
    index.places.kind = np.array([77], np.uint8)
    data = index.pack()
    assert len(data) == entry.index.nbytes
    path = store / os.fsdecode(part.containers[entry.index.container].name)
    whole = bytearray(path.read_bytes())
    whole[entry.index.offset : entry.index.offset + len(data)] = data
    path.write_bytes(whole)

    def change(raw: dict[str, Any]) -> None:
        for found in raw["entries"]:
            if found["path"] == "a":
                found["index"]["digest"] = digest_of(data).hex()

    edit_parts(store, change)
    with pytest.raises(StoreDamagedError, match=r"^a: payload 0 is stored in a way"):
        restore(store, tmp_path / "back")
    restore(store, tmp_path / "back", files=["b"])
    assert contents(tmp_path / "back") == {b"b": (source / "b").read_bytes()}
    assert any(p.startswith("a: payload 0") for p in verify(store).problems)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.lists(st.integers(0, 9), min_size=13, max_size=13),
)
def test_where_payloads_lie_in_a_skeleton_is_the_source_less_what_is_stored_apart(
    kinds: list[int], spaces: list[int]
) -> None:
    builder, at, spans = TableBuilder(), spaces[0], []
    for number, _ in enumerate(kinds):
        nbytes = 1 + (number * 7) % 5
        spans.append((at, nbytes))
        builder.payload([spans[-1]])
        at += nbytes + spaces[number + 1]
    index = FileIndex(
        builder.build(), places_of([STORED if k else IN_SKELETON for k in kinds], len(kinds))
    )
    taken = {i for (o, n), k in zip(spans, kinds, strict=True) if k for i in range(o, o + n)}
    skeleton = [i for i in range(at) if i not in taken]
    assert [i for s in index.skeleton_spans(at) for i in range(s.offset, s.offset + s.nbytes)] == (
        skeleton
    )
    for row, ((offset, nbytes), kind) in enumerate(zip(spans, kinds, strict=True)):
        if not kind:
            (piece,) = index.pieces(row, "f")
            assert skeleton[piece.offset : piece.offset + piece.nbytes] == list(
                range(offset, offset + nbytes)
            )


def test_the_layout_of_an_index_does_not_depend_on_its_values() -> None:
    table = three_payloads()
    one = FileIndex(table, Places.none(3)).pack()
    other = places_of([1, 2, 3], 3, container=[2**32 - 1] * 3, offset=[2**62] * 3)
    other.digest[:] = 255
    assert len(FileIndex(table, other).pack()) == len(one)
    back = FileIndex.unpack(FileIndex(table, other).pack(), "f")
    assert back.places.offset.tolist() == [2**62] * 3
    assert back.places.container.tolist() == [2**32 - 1] * 3
    assert [back.table.tensor(row) for row in range(3)] == [table.tensor(row) for row in range(3)]
    assert back.table.spans(0) == (Span(20, 2), Span(2, 4))


@given(st.data())
def test_an_index_or_table_of_contents_that_is_damaged_is_an_error_of_ours_or_an_index(
    data: st.DataObject,
) -> None:
    packed = data.draw(
        st.sampled_from(
            [
                FileIndex(three_payloads(), Places.none(3)).pack(),
                Contents.of([1, 2], [3, 4], np.zeros(64, np.uint8), [b"", b""]).pack(),
            ]
        )
    )
    at = data.draw(st.integers(0, len(packed) - 1))
    changed = data.draw(
        st.sampled_from(
            [packed[:at], packed[:at] + bytes([packed[at] ^ 1 << at % 8]) + packed[at + 1 :]]
        )
    )
    for kind in (FileIndex, Contents):
        try:
            kind.unpack(changed, "the file")
        except StoreDamagedError as error:
            assert str(error).startswith("the file: ")


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.tuples(st.sampled_from(["<i8", "<u4", "<u2", "|u1"]), st.lists(st.integers(0, 255))),
        max_size=5,
    )
)
def test_packed_columns_come_back_at_multiples_of_eight(
    found: dict[str, tuple[str, list[int]]],
) -> None:
    packed = columns.pack({k: np.array(v, d) for k, (d, v) in found.items()}, {"later": [1]})
    back, header = columns.unpack(packed)
    assert header == {"later": [1]}
    assert {k: (v.dtype.str, v.tolist()) for k, v in back.items()} == found
    length = int.from_bytes(packed[8:12], "little")
    places = json.loads(packed[12 : 12 + length])["columns"]
    start = -(-(12 + length) // 8) * 8
    assert packed[:8] == b"SLIMCOL\0" and not any(packed[12 + length : start])
    for name, (offset, dtype, count) in places.items():
        assert offset % 8 == 0
        at = start + offset
        nbytes = np.dtype(dtype).itemsize * count
        assert packed[at : at + nbytes] == np.array(found[name][1], dtype).tobytes()


@given(
    st.lists(
        st.sampled_from([b"a", b"a/b", b"A", b"a/B/c", b"b.h5", b"b", b"x" * 300]), max_size=12
    )
)
def test_names_in_a_store_never_collide_and_never_stand_in_a_file(wanted: list[bytes]) -> None:
    names = Names()
    given_out = [names.take(b"own/" + name + b".h5") for name in wanted]
    given_out += [names.take(b"whole/" + name) for name in wanted]
    folded = [name.lower() for name in given_out]
    assert len(set(folded)) == len(folded)
    for name in folded:
        assert not any(other.startswith(name + b"/") for other in folded)
        assert len(name) <= MAX_PATH
        assert all(0 < len(part) <= MAX_COMPONENT for part in name.split(b"/"))
    for name, got in zip(wanted, given_out[: len(wanted)], strict=True):
        assert got.startswith(b"own/") and got.endswith(b".h5")
        if wanted.index(name) == 0 and len(name) < 200:
            assert given_out[0] == b"own/" + wanted[0] + b".h5"
