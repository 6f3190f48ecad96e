"""Places, homes and encodings that a reader must know, in stores made by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from slimckpt import encodings, views
from slimckpt.errors import (
    AmbiguousTensorError,
    NotUnderstoodError,
    OpaqueTensorError,
    StoreDamagedError,
)
from slimckpt.model import Bytes, Role, SourceFile, Stat, TableBuilder
from slimckpt.sources.digest import digest_of
from slimckpt.store.index import FILL, IN_SKELETON, PARTS, STORED, FileIndex, Places
from slimckpt.store.manifest import Container, FileEntry, IndexPlace, Part, PartName, Place, Root
from slimckpt.views import Checkpoint, RankView

BLOB = np.random.default_rng(3).bytes(200_000)
OTHER = np.random.default_rng(4).bytes(200_000)
SIZE = 1_000_000
"""Of every source file: what its payloads must fit in."""


@dataclass
class FileByHand:
    """A source file: its tensors, and where each of its payloads is."""

    table: TableBuilder = field(default_factory=TableBuilder)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    """Kind, container, offset; for ``PARTS`` the number in ``parts``."""
    parts: list[list[tuple[int, int, int]]] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    at: int = 0

    def payload(
        self, nbytes: int, kind: int, container: int = 0, offset: int = 0, digest: bytes = bytes(32)
    ) -> int:
        self.places.append((kind, container, offset))
        self.digests.append(digest)
        self.at += nbytes
        return self.table.payload([(self.at - nbytes, nbytes)])

    def stored(self, offset: int, nbytes: int, container: int = 0, **more: Any) -> int:
        return self.payload(nbytes, STORED, container, offset, **more)

    def filled(self, byte: int, nbytes: int) -> int:
        return self.payload(nbytes, FILL, 0, byte)

    def in_parts(self, *parts: tuple[int, int, int]) -> int:
        self.parts.append(list(parts))
        return self.payload(sum(n for _, _, n in parts), PARTS, 0, len(self.parts) - 1)

    def index(self) -> FileIndex:
        kinds, containers, offsets = zip(*self.places, strict=True) if self.places else ((),) * 3
        flat = [part for parts in self.parts for part in parts]
        columns = zip(*flat, strict=True) if flat else iter(((), (), ()))
        container, offset, nbytes = columns
        return FileIndex(
            self.table.build(),
            Places(
                np.array(kinds, np.uint8),
                np.array(containers, np.uint32),
                np.array(offsets, np.int64),
                np.frombuffer(b"".join(self.digests), np.uint8).reshape(-1, 32),
                np.cumsum([len(parts) for parts in self.parts], dtype=np.int64),
                np.array(container, np.uint32),
                np.array(offset, np.int64),
                np.array(nbytes, np.int64),
            ),
        )


def write_store(root: Path, files: dict[str, FileByHand]) -> Path:
    """A store whose containers 0 and 1 are BLOB and OTHER, and 2 holds the indexes.

    The skeleton of every file starts where BLOB does.
    """
    root.mkdir()
    (root / "shared").mkdir()
    (root / "parts").mkdir()
    part, indexes = Part("", None), b""
    for name, made in files.items():
        data = made.index().pack()
        stat = Stat(0o600, 0, os.getuid(), os.getgid())
        source = SourceFile(os.fsencode(name), SIZE, stat, Role(), "made", "understood")
        place = IndexPlace(2, len(indexes), len(data), digest_of(data).hex())
        skeleton = Place("stored", 10_000, "", 0, 0)
        part.files.append(FileEntry(source, skeleton, place))
        indexes += data
    for number, data in enumerate((BLOB, OTHER, indexes)):
        (root / "shared" / f"{number}").write_bytes(data)
        part.containers.append(Container(b"shared/%d" % number, len(data)))
    packed = part.pack()
    (root / "parts" / "0000.json").write_bytes(packed)
    named = PartName("parts/0000.json", "", None, len(packed), digest_of(packed).hex())
    (root / "slimckpt.json").write_bytes(Root([named], {}, {}).pack())
    return root


Open = Callable[..., Checkpoint]
View = Callable[..., RankView]


@pytest.fixture(params=["mmap", "pread"])
def open_by_hand(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[Checkpoint] = []

    def opener(**files: FileByHand) -> Checkpoint:
        root = write_store(tmp_path / f"store-{len(opened)}", files)
        opened.append(views.open(root, request.param))
        return opened[-1]

    yield opener
    for checkpoint in opened:
        checkpoint.close()


@pytest.fixture
def view_of(open_by_hand: Open) -> View:
    def opener(made: FileByHand, writable: bool = False) -> RankView:
        return open_by_hand(m=made).rank(writable=writable)

    return opener


def f32(data: bytes, offset: int = 0, count: int = -1) -> np.ndarray:
    return np.frombuffer(data, "<f4", count, offset)


# Places.


def test_stored_bytes_are_found_in_any_container(view_of: View) -> None:
    made = FileByHand()
    made.table.tensor("a", "F32", [10, 50], 2000, payload=made.stored(64, 2000))
    made.table.tensor("b", "F32", [500], 2000, payload=made.stored(128, 2000, 1))
    view = view_of(made)
    assert np.array_equal(view["a"].reshape(-1), f32(BLOB, 64, 500), equal_nan=True)
    assert view["b"].tobytes() == OTHER[128:2128]


def test_a_fill_is_that_byte_everywhere_and_takes_no_memory(view_of: View) -> None:
    made = FileByHand()
    made.table.tensor("zeros", "F32", [500], 2000, payload=made.filled(0, 2000))
    made.table.tensor("ones", "I16", [5, 200], 2000, payload=made.filled(0xFF, 2000))
    made.table.tensor("big", "U16", [1000], 2000, payload=made.filled(1, 2000), big_endian=True)
    made.table.tensor("part", "U16", [3], 6, payload=made.filled(7, 2000), offset=100, strides=[20])
    view = view_of(made)
    assert np.array_equal(view["zeros"], np.zeros(500, np.float32))
    assert np.array_equal(view["ones"], np.full((5, 200), -1, np.int16))
    assert (view["big"].dtype.str, int(view["big"][999])) == (">u2", 257)
    assert view["part"].tolist() == [0x0707] * 3
    assert set(view["ones"].strides) == {0}
    assert view.raw("ones") == b"\xff" * 2000
    assert not any(array.flags.writeable for array in view.values())


def test_a_fill_can_be_written_to_in_a_writable_view(view_of: View) -> None:
    made = FileByHand()
    for name in ("a", "b"):
        made.table.tensor(name, "I16", [1000], 2000, payload=made.filled(1, 2000))
    view = view_of(made, writable=True)
    view["a"][3] = 5
    assert view["a"][2:5].tolist() == [257, 5, 257]
    assert (view["b"] == 257).all()


def test_a_tensor_inside_one_part_is_a_view_and_one_across_parts_a_copy(view_of: View) -> None:
    made = FileByHand()
    parts = made.in_parts((0, 4000, 1600), (1, 800, 1600), (0, 8000, 1600))
    made.table.tensor("all", "F32", [1200], 4800, payload=parts)
    made.table.tensor("second", "F32", [400], 1600, payload=parts, offset=1600)
    made.table.tensor("inside", "F32", [300], 1200, payload=parts, offset=3400)
    made.table.tensor("across", "F32", [300], 1200, payload=parts, offset=1000)
    view = view_of(made)
    whole = BLOB[4000:5600] + OTHER[800:2400] + BLOB[8000:9600]
    assert view["all"].tobytes() == whole
    assert view["second"].tobytes() == whole[1600:3200]
    assert view["inside"].tobytes() == whole[3400:4600]
    assert view["across"].tobytes() == whole[1000:2200]
    assert not any(array.flags.writeable for array in view.values())
    mapped = type(view._arrays.backend).__name__ == "MmapBackend"
    assert np.shares_memory(view["second"], view["second"]) == mapped
    assert np.shares_memory(view["inside"], view["inside"]) == mapped
    assert not np.shares_memory(view["across"], view["across"])


def test_parts_that_lie_one_behind_the_other_are_one(view_of: View) -> None:
    made = FileByHand()
    parts = made.in_parts((0, 4000, 1000), (0, 5000, 1000), (0, 6000, 10))
    made.table.tensor("w", "F32", [500], 2000, payload=parts, offset=4)
    view = view_of(made)
    assert view["w"].tobytes() == BLOB[4004:6004]
    mapped = type(view._arrays.backend).__name__ == "MmapBackend"
    assert np.shares_memory(view["w"], view["w"]) == mapped


def test_parts_can_be_written_to_in_a_writable_view(view_of: View) -> None:
    made = FileByHand()
    parts = made.in_parts((0, 4000, 1000), (1, 0, 1000))
    made.table.tensor("w", "U8", [2000], 2000, payload=parts)
    made.table.tensor("tail", "U8", [10], 10, payload=parts, offset=1990)
    view = view_of(made, writable=True)
    view["w"][1995] = 0
    view["w"][0] = 1
    truth = bytearray(BLOB[4000:5000] + OTHER[:1000])
    truth[1995], truth[0] = 0, 1
    assert view["w"].tobytes() == truth
    assert view["tail"].tobytes() == truth[1990:]


def test_a_payload_in_the_skeleton_lies_behind_what_was_taken_out_before_it(view_of: View) -> None:
    made = FileByHand()
    made.table.tensor("s", "U8", [100], 100, payload=made.payload(100, IN_SKELETON))
    made.table.tensor("w", "U8", [2000], 2000, payload=made.stored(7, 2000))
    made.table.tensor("t", "U8", [50], 50, payload=made.payload(50, IN_SKELETON))
    view = view_of(made)
    assert view["s"].tobytes() == BLOB[:100]
    assert view["t"].tobytes() == BLOB[100:150]
    assert view["w"].tobytes() == BLOB[7:2007]


def test_an_unknown_kind_of_place_fails_its_tensors_alone_and_names_them(view_of: View) -> None:
    made = FileByHand()
    made.table.tensor("new", "F32", [500], 2000, payload=made.payload(2000, 9))
    made.table.tensor("old", "F32", [500], 2000, payload=made.stored(0, 2000))
    for writable in (False, True):
        view = view_of(made, writable)
        assert list(view) == ["new", "old"]
        assert view.info("new").shape == (500,)
        for ask in (view.__getitem__, view.raw):
            with pytest.raises(StoreDamagedError, match=r"tensor 'new'.*kind 9.*newer"):
                ask("new")
        assert view["old"].tobytes() == BLOB[:2000]


@pytest.mark.parametrize(
    ("kind", "container", "offset"),
    [(STORED, 0, 199_000), (STORED, 9, 0), (STORED, 0, -1), (FILL, 0, 256), (PARTS, 0, 5)],
)
def test_a_place_that_is_not_there_fails_its_tensors_alone_and_names_them(
    view_of: View, kind: int, container: int, offset: int
) -> None:
    made = FileByHand()
    made.in_parts((0, 0, 10), (0, 0, 20))
    made.table.tensor(
        "bad", "U8", [2000], 2000, payload=made.payload(2000, kind, container, offset)
    )
    made.table.tensor("good", "U8", [2000], 2000, payload=made.stored(0, 2000))
    for writable in (False, True):
        view = view_of(made, writable)
        with pytest.raises(StoreDamagedError, match="tensor 'bad'"):
            view["bad"]
        assert view["good"].tobytes() == BLOB[:2000]


def test_parts_of_another_length_than_the_payload_are_damage(view_of: View) -> None:
    made = FileByHand()
    made.parts.append([(0, 0, 1000), (1, 0, 999)])
    made.table.tensor("w", "U8", [2000], 2000, payload=made.payload(2000, PARTS, 0, 0))
    with pytest.raises(StoreDamagedError, match=r"tensor 'w'.*1999 bytes, expected 2000"):
        view_of(made)["w"]


def test_a_payload_longer_than_its_file_is_damage_and_not_a_memory_error(view_of: View) -> None:
    made = FileByHand()
    huge = 2**50
    made.parts.append([(0, 0, 1), (0, 1, 1)])
    made.table.tensor("w", "U8", [huge], huge, payload=made.payload(huge, FILL, 0, 0))
    for writable in (False, True):
        with pytest.raises(StoreDamagedError, match=f"tensor 'w'.*{huge} bytes, its file {SIZE}"):
            view_of(made, writable)["w"]


# Tensors on payloads.


def test_offsets_and_strides_are_honoured(view_of: View) -> None:
    made = FileByHand()
    payload = made.stored(64, 4000)
    made.table.tensor("slice", "F32", [10], 40, payload=payload, offset=400)
    made.table.tensor("transposed", "F32", [20, 50], 4000, payload=payload, strides=[1, 20])
    made.table.tensor("steps", "F32", [5, 3], 60, payload=payload, offset=8, strides=[100, 7])
    made.table.tensor("backwards", "F32", [1000], 4000, payload=payload, offset=3996, strides=[-1])
    made.table.tensor("one", "F32", [4, 4], 64, payload=payload, offset=80, strides=[0, 0])
    made.table.tensor("none", "F32", [0, 9], 0, payload=payload, offset=80, strides=[999, 9999])
    view = view_of(made)
    stream = np.frombuffer(BLOB[64:4064], "<u4")
    truth = {
        "slice": stream[100:110],
        "transposed": stream.reshape(50, 20).T,
        "steps": np.array([[stream[2 + 100 * i + 7 * j] for j in range(3)] for i in range(5)]),
        "backwards": stream[::-1],
        "one": np.full((4, 4), stream[20]),
        "none": np.zeros((0, 9), np.uint32),
    }
    for name, expected in truth.items():
        assert view[name].shape == expected.shape
        assert view[name].tobytes() == expected.tobytes(), name
        assert view.raw(name) == expected.tobytes(), name


@pytest.mark.parametrize(
    ("shape", "offset", "strides"),
    [
        ([501], 0, []),
        ([500], 4, []),
        ([500], -4, []),
        ([2], 0, [500]),
        ([2], 0, [-1]),
        ([2, 2], 0, [2**62, 1]),
        ([1], 2**62, []),
        ([3], 1996, [-250]),
        ([2, 2], 0, [1]),
    ],
)
def test_a_tensor_that_reaches_outside_its_payload_is_damage_that_names_it(
    view_of: View, shape: list[int], offset: int, strides: list[int]
) -> None:
    made = FileByHand()
    payload = made.stored(64, 2000)
    nbytes = 4 * int(np.prod(shape))
    made.table.tensor("w", "F32", shape, nbytes, payload=payload, offset=offset, strides=strides)
    for writable in (False, True):
        view = view_of(made, writable)
        with pytest.raises(StoreDamagedError, match="m: tensor 'w'"):
            view["w"]


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("F32", [3], 11), ("F32", [2**62, 4], 16), ("F32", [-1], 4), ("F32", [-2, -2], 16)],
)
def test_a_shape_that_does_not_take_the_recorded_bytes_is_damage(
    view_of: View, dtype: str, shape: list[int], nbytes: int
) -> None:
    made = FileByHand()
    made.table.tensor("w", dtype, shape, nbytes, payload=made.stored(0, 2000))
    with pytest.raises(StoreDamagedError, match=r"tensor 'w'.* does not take"):
        view_of(made)["w"]


@pytest.mark.parametrize("row", [-1, 1, 2**40])
def test_a_payload_that_is_not_there_is_damage(view_of: View, row: int) -> None:
    made = FileByHand()
    made.stored(0, 2000)
    made.table.tensor("w", "U8", [2000], 2000, payload=row)
    with pytest.raises(StoreDamagedError, match=f"tensor 'w': there is no payload {row}"):
        view_of(made)["w"]


def test_elements_without_bytes_are_damage(view_of: View) -> None:
    made = FileByHand()
    made.table.tensor("w", "F32", [3], 12)
    made.table.tensor("e", "F32", [3, 0], 0)
    view = view_of(made)
    with pytest.raises(StoreDamagedError, match="tensor 'w' has elements but no bytes"):
        view["w"]
    assert view["e"].shape == (3, 0)


def test_a_fill_value_is_every_element_and_can_be_written_to_in_a_writable_view(
    view_of: View,
) -> None:
    made = FileByHand()
    half = np.float32(0.5).tobytes()
    made.table.tensor("half", "F32", [30, 40], 4800, fill=half)
    made.table.tensor("other", "F32", [30, 40], 4800, fill=half)
    made.table.tensor("swapped", "I16", [9], 18, fill=b"\x01\x02", big_endian=True)
    made.table.tensor("scalar", "BF16", [], 2, fill=b"\x80\x3f")
    made.table.tensor("wrong", "F32", [9], 36, fill=b"\x00")
    view = view_of(made)
    assert np.array_equal(view["half"], np.full((30, 40), 0.5, np.float32))
    assert view["swapped"].tolist() == [0x0102] * 9
    assert view["swapped"].tobytes() == view.raw("swapped") == b"\x01\x02" * 9
    assert (view["scalar"].shape, float(view["scalar"])) == ((), 1.0)
    assert not any(view[name].flags.writeable for name in ("half", "swapped", "scalar"))
    with pytest.raises(StoreDamagedError, match="tensor 'wrong': its fill value has 1 bytes"):
        view["wrong"]
    writable = view_of(made, writable=True)
    writable["half"][3, 4] = 9
    assert writable["half"][3, 4] == 9
    assert (writable["other"] == 0.5).all()


def test_big_endian_tensors_have_their_values(view_of: View) -> None:
    made = FileByHand()
    payload = made.stored(64, 2000)
    for dtype, count in (
        ("F32", 500),
        ("I64", 250),
        ("BF16", 1000),
        ("U8", 2000),
        ("F8_E4M3", 2000),
    ):
        made.table.tensor(dtype, dtype, [count], 2000, payload=payload, big_endian=True)
    view = view_of(made)
    body = BLOB[64:2064]
    assert np.array_equal(view["F32"], np.frombuffer(body, ">f4"), equal_nan=True)
    assert np.array_equal(view["I64"], np.frombuffer(body, ">i8"))
    swapped = np.frombuffer(body, ">u2").astype("<u2").view(ml_dtypes.bfloat16)
    assert np.array_equal(
        view["BF16"].astype(np.float32), swapped.astype(np.float32), equal_nan=True
    )
    assert view["F8_E4M3"].dtype == ml_dtypes.float8_e4m3fn
    assert view["U8"].tobytes() == body


def test_tied_tensors_stay_tied_and_equal_ones_apart_in_a_writable_view(view_of: View) -> None:
    made = FileByHand()
    tied = made.stored(64, 8000)
    made.table.tensor("head", "F32", [2000], 8000, payload=tied)
    made.table.tensor("embed", "F32", [40, 50], 8000, payload=tied)
    made.table.tensor("slice", "F32", [10], 40, payload=tied, offset=4000)
    made.table.tensor("twin", "F32", [2000], 8000, payload=made.stored(64, 8000))
    view = view_of(made, writable=True)
    view["head"][1003] = 7
    assert view["embed"].reshape(-1)[1003] == 7
    assert view["slice"][3] == 7
    assert view["twin"].tobytes() == BLOB[64:8064]
    view["slice"][3] = 8
    assert view["head"][1003] == 8
    assert np.shares_memory(view["head"], view["embed"])
    assert not np.shares_memory(view["head"], view["twin"])


# Encodings and dtypes.


def test_an_unknown_encoding_fails_its_tensors_alone_and_names_it(view_of: View) -> None:
    made = FileByHand()
    made.table.tensor("new", "F32", [500], 2000, payload=made.stored(0, 900), encoding="zstd:{}")
    made.table.tensor("old", "F32", [500], 2000, payload=made.stored(0, 2000))
    for writable in (False, True):
        view = view_of(made, writable)
        for ask in (view.__getitem__, view.raw):
            with pytest.raises(NotUnderstoodError, match=r"m: tensor 'new'.*'zstd:\{\}'"):
                ask("new")
        assert view["old"].tobytes() == BLOB[:2000]


def test_a_known_encoding_is_decoded_before_the_tensor_is_cut_out(
    view_of: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(stored: Bytes, parameters: str, lengths: Sequence[int]) -> Bytes:
        return np.repeat(stored ^ np.uint8(int(parameters)), 2)

    monkeypatch.setitem(encodings.DECODERS, "flip", flip)
    made = FileByHand()
    payload = made.in_parts((0, 0, 1000), (1, 0, 1000))
    for name, offset in (("w", 0), ("tied", 100)):
        nbytes = 4000 - offset
        made.table.tensor(
            name, "U8", [nbytes], nbytes, payload=payload, offset=offset, encoding="flip:255"
        )
    made.table.tensor("far", "U8", [9], 9, payload=payload, offset=3992, encoding="flip:255")
    truth = np.repeat(~np.frombuffer(BLOB[:1000] + OTHER[:1000], np.uint8), 2)
    view = view_of(made)
    assert np.array_equal(view["w"], truth)
    assert np.array_equal(view["tied"], truth[100:])
    assert view.raw("tied") == truth[100:].tobytes()
    assert not view["w"].flags.writeable
    with pytest.raises(StoreDamagedError, match="tensor 'far' takes bytes 3992 to 4001"):
        view["far"]
    writable = view_of(made, writable=True)
    writable["w"][100] = 3
    assert writable["tied"][0] == 3


def test_a_dtype_of_a_newer_slimckpt_is_no_array_but_raw(view_of: View) -> None:
    made = FileByHand()
    made.table.tensor("w", "F3_NEW", [2000], 2000, payload=made.stored(0, 2000))
    view = view_of(made)
    assert (list(view), view.opaque) == ([], ("w",))
    with pytest.raises(OpaqueTensorError, match="F3_NEW"):
        view["w"]
    assert view.raw("w") == BLOB[:2000]


# Names.


def test_two_paths_of_one_name_are_ambiguous_unless_they_agree(open_by_hand: Open) -> None:
    made = FileByHand()
    for name, offsets in (("w", (0, 64)), ("v", (0, 0))):
        for key, offset in zip("ab", offsets, strict=True):
            payload = made.stored(offset, 2000)
            made.table.tensor(name, "U8", [2000], 2000, payload=payload, path=f"{key}.{name}")
    ckpt = open_by_hand(m=made)
    view = ckpt.rank()
    assert list(view) == ["w", "v"]
    assert view["v"].tobytes() == BLOB[:2000]
    with pytest.raises(AmbiguousTensorError, match=r"'w' differ: in m, at 'a\.w' and at 'b\.w'"):
        view["w"]
    for paths in (view.by_path, ckpt.files["m"].by_path):
        assert list(paths) == ["a.w", "b.w", "a.v", "b.v"]
        assert paths["b.w"].tobytes() == BLOB[64:2064]


def test_a_name_that_is_an_array_and_something_else_is_ambiguous(view_of: View) -> None:
    made = FileByHand()
    payload = made.stored(0, 2000)
    made.table.tensor("w", "opaque:str", [], 2000, payload=payload, path="a")
    made.table.tensor("w", "U8", [2000], 2000, payload=payload, path="b")
    view = view_of(made)
    assert (list(view), view.opaque) == (["w"], ())
    for ask in (view.__getitem__, view.info, view.raw):
        with pytest.raises(AmbiguousTensorError):
            ask("w")


def test_where_digests_are_known_duplicates_are_compared_by_them(
    open_by_hand: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {}
    for name, offset, digest in (("a", 0, 1), ("b", 0, 1), ("c", 0, 2)):
        files[name] = made = FileByHand()
        payload = made.stored(offset, 2000, digest=bytes([digest]) * 32)
        made.table.tensor("w" if name != "c" else "v", "U8", [2000], 2000, payload=payload)
        made.table.tensor("v", "U8", [2000], 2000, payload=payload, path="x")
    ckpt = open_by_hand(**files)
    view = ckpt.rank()
    real = type(ckpt._backend).view
    asked: list[int] = []

    def spy(self: Any, *args: Any) -> Any:
        asked.append(args[2])
        return real(self, *args)

    monkeypatch.setattr(type(ckpt._backend), "view", spy)
    view.raw("w")
    assert asked == [2000]
    with pytest.raises(AmbiguousTensorError, match="'v' differ: in a and in c"):
        view["v"]
    assert asked == [2000]


def test_different_shapes_of_equal_bytes_are_ambiguous_and_named(open_by_hand: Open) -> None:
    files = {}
    for name, shape, swapped in (("a", [500], False), ("b", [500], True), ("c", [20, 25], False)):
        files[name] = made = FileByHand()
        payload = made.stored(0, 2000)
        made.table.tensor("w", "F32", shape, 2000, payload=payload, big_endian=swapped)
    ckpt = open_by_hand(**files)
    with pytest.raises(AmbiguousTensorError, match="in a and in b"):
        ckpt.rank()["w"]
    with pytest.raises(AmbiguousTensorError, match="in a and in b"):
        ckpt.rank().info("w")


def test_strided_duplicates_are_compared_by_their_elements(open_by_hand: Open) -> None:
    a, b = FileByHand(), FileByHand()
    a.table.tensor("w", "U8", [3], 3, payload=a.stored(10, 2000), strides=[2])
    parts = b.in_parts((0, 10, 1), (0, 12, 1), (0, 14, 1))
    b.table.tensor("w", "U8", [3], 3, payload=parts)
    assert open_by_hand(a=a, b=b).rank()["w"].tobytes() == BLOB[10:16:2]
