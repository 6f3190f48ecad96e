"""HDF5: what h5py writes, at every file format bound, and what is hostile or damaged.

Truth is h5py on the same bytes, or the array that was written.
"""

import io
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from conformance import (
    BytesSource,
    Example,
    FormatTests,
    Truth,
    assert_never_silently_wrong,
    elements_of,
    truth_found,
)
from h5py import h5d, h5p, h5s, h5t
from hdf5_bytes import LIBVERS, hdf5_file, make
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_files import SAMPLES, expected

from slimckpt.errors import NotUnderstoodError
from slimckpt.formats import Found, examine
from slimckpt.formats.hdf5 import Hdf5
from slimckpt.formats.hdf5_file import lookup3
from slimckpt.sources.positioned import FileSource
from slimckpt.store.hdf5_types import hdf5_type

KERAS = SAMPLES / "keras_adam"
SPELLING = {
    **{f"int{8 * n}": f"I{8 * n}" for n in (1, 2, 4, 8)},
    **{f"uint{8 * n}": f"U{8 * n}" for n in (1, 2, 4, 8)},
    **{"float16": "F16", "float32": "F32", "float64": "F64", "bool": "BOOL"},
    **{"complex64": "C64", "complex128": "C128"},
}
W = np.arange(6, dtype="<f4").reshape(2, 3)
GRID = np.arange(35, dtype="<f8").reshape(5, 7)


def locate(data: bytes) -> Found:
    found = examine(BytesSource(data))
    assert found.format == "hdf5"
    return found


def understood(data: bytes) -> Found:
    found = locate(data)
    assert found.condition == "understood", found.problem
    return found


def tensors_of(data: bytes) -> dict[str, Any]:
    table = understood(data).table
    return {table.name(row): table.tensor(row) for row in range(table.n_tensors)}


def truth_of(name: str, array: Any) -> Truth:
    array = np.asarray(array)
    return Truth.of(name, SPELLING[array.dtype.name], array.shape, array.tobytes())


def truths(**arrays: Any) -> list[Truth]:
    return [truth_of(name, arrays[name]) for name in sorted(arrays)]


def agrees_with_h5py(data: bytes) -> int:
    """Assert that every tensor is what h5py reads under its name; how many there are."""
    found = understood(data)
    with h5py.File(io.BytesIO(data), "r") as file:
        for row in range(found.table.n_tensors):
            tensor = found.table.tensor(row)
            if tensor.dtype.startswith("opaque:"):
                continue
            array = file[tensor.name][()]
            assert tensor.dtype == SPELLING[array.dtype.name], tensor
            assert tensor.big_endian == (array.dtype.byteorder == ">"), tensor
            assert tensor.shape == array.shape, tensor
            assert elements_of(data, found, row) == array.tobytes(), tensor
    return found.table.n_tensors


def small(libver: str) -> Example:
    def write(file: h5py.File) -> None:
        file["w"] = W
        file["edge"] = np.arange(5, dtype=">i2")
        file["tied"] = h5py.SoftLink("/w")

    edge = Truth.of("edge", "I16", (5,), np.arange(5, dtype=">i2").tobytes())
    tensors = [edge, truth_of("tied", W), truth_of("w", W)]
    return Example(hdf5_file(write, libver), tensors)


class TestHdf5(FormatTests):
    format = Hdf5()

    def examples(self) -> dict[str, Example]:
        def chunked(file: h5py.File) -> None:
            file.create_dataset("c", data=GRID, chunks=(2, 3), compression="gzip", shuffle=True)
            file.create_dataset("f", (5,), "<i4", chunks=(2,), fillvalue=7)[4] = 1

        filled = np.array([7, 7, 7, 7, 1], "<i4")
        return {
            "old": small("earliest"),
            "new": small("latest"),
            "chunked": Example(hdf5_file(chunked, "latest"), truths(c=GRID, f=filled)),
            "empty": Example(hdf5_file(lambda file: None, "latest"), []),
        }

    def samples(self) -> dict[str, Example]:
        return {
            name: Example(
                (KERAS / name).read_bytes(),
                [
                    Truth(n, SPELLING[p["dtype"]], tuple(p["shape"]), p["nbytes"], p["sha256"], n)
                    for n, p in sorted(file["params"].items())
                ],
            )
            for name, file in expected("keras_adam")["files"].items()
            if name.endswith(".h5")
        }

    def large(self, nbytes: int) -> tuple[bytes, int]:
        return hdf5_file(lambda file: file.update({"w": np.ones(nbytes, np.uint8)})), 1

    def claims(self, sample: Path) -> bool:
        return sample.suffix == ".h5"

    def magics(self) -> list[bytes]:
        data = small("earliest").data
        return [data[:9], data[:24], data[:96], small("latest").data[:48]]

    def test_trailing_bytes_are_not_silently_accepted(self) -> None:
        """HDF5 states where it ends, and allows more: what follows is told, and kept."""
        for name, example in self._all():
            for tail in (b"\0", b"\n", bytes(100), b"tail" * 9):
                found = understood(example.data + tail)
                assert found.facts["trailing"] == len(tail), name
                assert truth_found(example.data + tail, found) == example.tensors, name


@pytest.mark.parametrize("user_block", [0, 512, 1024, 2048, 4096, 1 << 20])
@pytest.mark.parametrize("libver", LIBVERS)
def test_every_file_format_bound_is_read_as_h5py_reads_it(libver: str, user_block: int) -> None:
    random = np.random.default_rng(1)

    def write(file: h5py.File) -> None:
        for name, dtype in enumerate(SPELLING):
            numbers = random.integers(0, 2, (3, 5)).astype(dtype)
            file[f"plain/{name}"] = numbers
            if np.dtype(dtype).itemsize > 1:
                file[f"big/{name}"] = numbers.astype(np.dtype(dtype).newbyteorder(">"))
        file["scalar"] = np.float32(2.5)
        file["empty"] = np.zeros((0, 3), np.float32)
        make(file, "compact", random.random((3, 4)), compact=True)
        make(file, "early", np.zeros((9, 9)), early=True)
        file.create_dataset("never", (4, 5), "<f4", fillvalue=1.5)
        file["kind"] = np.dtype("<f4")
        file.create_dataset("committed", data=W, dtype=file["kind"])
        for n in range(40):
            file[f"many/{n}"] = np.int16(n)
        ordered = file.create_group("ordered", track_order=True)
        for n in range(20):
            ordered[f"layer.{n}.weight"] = np.int16(n)
        file.attrs["note"] = "x" * 1000

    data = hdf5_file(write, libver, userblock_size=user_block)
    assert agrees_with_h5py(data) == 2 * len(SPELLING) - 3 + 66
    facts = understood(data).facts
    assert facts.get("user_block", 0) == user_block


def test_a_signature_far_inside_is_looked_for_where_it_may_be_and_little_is_read() -> None:
    data = hdf5_file(lambda file: file.update({"w": W}))
    far = BytesSource(bytes(1 << 20) + data)
    assert truth_found(far.data, examine(far)) == [truth_of("w", W)]
    for before in (4095, 3 * 4096, (1 << 20) - 512):
        none = BytesSource(bytes(before) + data)
        assert examine(none).format == "unknown"
        assert none.nbytes_read < 5000
    assert examine(BytesSource(bytes(4096) + data[:8])).format == "unknown"
    assert examine(BytesSource(bytes(4096) + data[:8] + bytes(99))).format == "unknown"


CHUNKS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "fixed": ((5, 7), (2, 3), None),
    "one": ((5, 7), (5, 7), None),
    "larger": ((5, 7), (50, 70), (50, 70)),
    "grows": ((5,), (2,), (None,)),
    "grows first": ((9, 4, 5), (2, 3, 5), (None, 7, 20)),
    "grows last": ((5, 7), (2, 3), (9, None)),
    "grows in the middle": ((3, 9, 4), (2, 2, 3), (8, None, 9)),
    "grows twice": ((5, 7), (2, 3), (None, None)),
    "room to grow": ((5, 7), (2, 3), (50, 70)),
    "rows": ((6, 7), (1, 7), None),
    "rows in rest": ((2, 5, 3), (1, 2, 3), None),
    "deep": ((2, 2, 2, 2, 2), (1, 2, 1, 2, 1), None),
}
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "shuffle": {"shuffle": True},
    "checksum": {"fletcher32": True},
    "all": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf"},
    "lzf and all": {"compression": "lzf", "shuffle": True, "fletcher32": True},
}


@pytest.mark.parametrize("libver", ["earliest", "v110", "latest"])
@pytest.mark.parametrize("filters", FILTERS)
def test_chunks_of_every_index_and_filter_are_read_as_h5py_reads_them(
    filters: str, libver: str
) -> None:
    random = np.random.default_rng(2)

    def write(file: h5py.File) -> None:
        for name, (shape, chunk, most) in CHUNKS.items():
            options = {"chunks": chunk, "maxshape": most, **FILTERS[filters]}
            numbers = random.integers(0, 9, shape).astype("<f8")
            file.create_dataset(name, data=numbers, **options)
            some = file.create_dataset(f"part of {name}", shape, "<i4", fillvalue=-3, **options)
            some[tuple(dim // 2 for dim in shape)] = 5
            some[tuple(dim - 1 for dim in shape)] = 6
            file.create_dataset(f"none of {name}", shape, "<i4", fillvalue=-3, **options)

    assert agrees_with_h5py(hdf5_file(write, libver)) == 3 * len(CHUNKS)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_indexes_of_thousands_of_chunks_are_read_as_h5py_reads_them(libver: str) -> None:
    """B-trees of several levels; paged arrays; super blocks; pages that are not there."""

    def write(file: h5py.File) -> None:
        numbers = np.arange(20_000, dtype="<i4")
        for name, most in (("fixed", None), ("grows", (None,))):
            file.create_dataset(name, data=numbers, chunks=(1,), maxshape=most)
            some = file.create_dataset(f"some {name}", (9000,), "<i4", chunks=(1,), maxshape=most)
            some[8000:8003] = 5
        wide = np.arange(6000, dtype="<i4").reshape(60, 100)
        file.create_dataset("twice", data=wide, chunks=(1, 1), maxshape=(None, None))

    assert agrees_with_h5py(hdf5_file(write, libver)) == 5


def test_a_dataset_that_was_resized_is_read_at_its_last_shape() -> None:
    for libver in ("earliest", "latest"):

        def write(file: h5py.File) -> None:
            made = file.create_dataset("d", data=GRID, chunks=(2, 3), maxshape=(None, 40))
            made.resize((9, 20))
            made[8, 19] = 3
            made.resize((3, 11))

        assert agrees_with_h5py(hdf5_file(write, libver)) == 1


def test_a_chunk_that_skipped_its_filters_is_read() -> None:
    def write(file: h5py.File) -> None:
        creation = h5p.create(h5p.DATASET_CREATE)
        creation.set_chunk((2, 3))
        creation.set_deflate(6)
        made = h5d.create(file.id, b"d", h5t.IEEE_F64LE, h5s.create_simple((4, 6)), creation)
        for at in ((0, 0), (0, 3), (2, 0), (2, 3)):
            body = np.arange(6, dtype="<f8").tobytes()
            plain = at == (2, 0)
            made.write_direct_chunk(at, body if plain else zlib.compress(body), int(plain))

    data = hdf5_file(write)
    assert agrees_with_h5py(data) == 1
    assert '"masks":[[2,1]]' in tensors_of(data)["d"].encoding


def test_edge_chunks_that_a_dataset_leaves_unfiltered_are_read() -> None:
    """``H5Pset_chunk_opts`` is not in h5py, so its flag is set in the bytes of the layout."""
    whole = np.arange(24, dtype="<f8").reshape(4, 6)

    def write(file: h5py.File) -> None:
        made = file.create_dataset("d", (4, 5), "<f8", chunks=(2, 3), compression="gzip")
        for i, j in ((0, 0), (0, 3), (2, 0), (2, 3)):
            body = whole[i : i + 2, j : j + 3].tobytes()
            made.id.write_direct_chunk((i, j), body if j else zlib.compress(body))

    data = bytearray(hdf5_file(write, "v110"))
    layout = data.index(b"\x04\x02\x00\x03\x01\x02\x03\x08")
    start = data.rindex(b"OHDR", 0, layout)
    (end,) = (
        at
        for at in range(layout, layout + 500)
        if data[at : at + 4] == lookup3(bytes(data[start:at])).to_bytes(4, "little")
    )
    data[layout + 2] = 1
    data[end : end + 4] = lookup3(bytes(data[start:end])).to_bytes(4, "little")
    assert agrees_with_h5py(bytes(data)) == 1
    assert elements_of(bytes(data), understood(bytes(data)), 0) == whole[:, :5].tobytes()


def test_chunks_that_lie_as_the_dataset_does_are_raw() -> None:
    def write(file: h5py.File) -> None:
        for name, shape, chunk in (
            ("one", (4, 6), (4, 6)),
            ("rows", (4, 6), (2, 6)),
            ("rest", (5, 6), (2, 6)),
            ("columns", (4, 6), (4, 2)),
            ("planes", (2, 4, 6), (1, 2, 6)),
            ("planes' rest", (2, 3, 6), (1, 2, 6)),
        ):
            file.create_dataset(name, data=np.arange(np.prod(shape)).reshape(shape), chunks=chunk)

    data = hdf5_file(write)
    assert agrees_with_h5py(data) == 6
    raw = {name for name, tensor in tensors_of(data).items() if tensor.encoding == "raw"}
    assert raw == {"one", "rows", "rest", "planes"}


def test_encodings_are_few_whatever_the_lengths_of_chunks() -> None:
    random = np.random.default_rng(3)

    def write(file: h5py.File) -> None:
        for n in range(50):
            numbers = random.integers(0, 2**n, (8, 8))
            file.create_dataset(f"{n}", data=numbers, chunks=(3, 3), compression="gzip")

    assert len(understood(hdf5_file(write)).table.encodings) == 1


def test_every_path_to_a_dataset_is_a_tensor_on_one_payload_and_circles_end() -> None:
    def write(file: h5py.File) -> None:
        file["w"] = W
        file["hard"] = file["w"]
        file["g/again"] = file["w"]
        file["soft"] = h5py.SoftLink("/w")
        file["g/relative"] = h5py.SoftLink("again")
        file["g/up"] = file["/"]
        file["g/self"] = file["g"]
        file["twin"] = file["g"]
        file["by soft"] = h5py.SoftLink("g")
        file["dangling"] = h5py.SoftLink("/nowhere/at/all")
        file["circle"] = h5py.SoftLink("/circle")
        file["through a dataset"] = h5py.SoftLink("/w/x")

    for libver in LIBVERS:
        data = hdf5_file(write, libver)
        found = understood(data)
        names = [
            *("by soft/again", "by soft/relative", "g/again", "g/relative", "hard", "soft"),
            *("twin/again", "twin/relative", "w"),
        ]
        assert found.table.names() == names
        assert found.table.n_payloads == 1
        assert truth_found(data, found) == [truth_of(name, W) for name in names]
        assert found.facts["dangling_links"] == 3


def fan_of_links(link: Callable[[h5py.Group, str], Any]) -> bytes:
    """2 ** 36 paths to one dataset, through 36 groups that name the next one twice."""

    def write(file: h5py.File) -> None:
        group = file.create_group("0")
        for n in range(1, 37):
            file.create_group(f"{n}")
            group["a"], group["b"] = link(file, f"/{n}"), link(file, f"/{n}")
            group = file[f"{n}"]
        group["w"] = W

    return hdf5_file(write)


@pytest.mark.parametrize("hard", [True, False])
def test_groups_that_fan_out_through_links_end_at_a_bound(hard: bool) -> None:
    data = fan_of_links(lambda file, path: file[path] if hard else h5py.SoftLink(path))
    start = time.process_time()
    found = locate(data)
    assert time.process_time() - start < 4
    assert found.condition == "opaque" and "by more than 100156 paths" in (found.problem or "")


def test_paths_of_many_bytes_end_at_a_bound() -> None:
    def write(file: h5py.File) -> None:
        group = file
        for _ in range(40):
            group = group.create_group("g" * 60_000)
        for n in range(20):
            group[f"{n}"] = W

    found = locate(hdf5_file(write))
    assert found.condition == "opaque" and "bytes" in (found.problem or "")


def test_soft_links_of_many_names_are_followed_once() -> None:
    def write(file: h5py.File) -> None:
        group = file.create_group("0")
        for n in range(1, 15):
            below = file.create_group(f"{n}")
            group["a"], group["b"] = below, below
            group = below
        file["w"] = W
        group["soft"] = h5py.SoftLink("/" + "./" * 30_000 + "w")

    start = time.process_time()
    found = understood(hdf5_file(write))
    assert time.process_time() - start < 4
    assert found.table.n_tensors == 2**15 and found.table.n_payloads == 1


def test_soft_links_on_soft_links_of_many_names_end_at_a_bound() -> None:
    def write(file: h5py.File) -> None:
        for n in range(10):
            file[f"{n}"] = h5py.SoftLink(f"{n + 1}/" * 5_000)
        file["10"] = h5py.SoftLink(".")

    start = time.process_time()
    found = locate(hdf5_file(write))
    assert time.process_time() - start < 4
    assert found.condition == "opaque" and "soft links" in (found.problem or "")


def test_a_file_may_have_several_paths_to_each_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(file: h5py.File) -> None:
        for n in range(300):
            file[f"0/{n}"] = np.float32(n)
        for n in range(1, 4):
            file[f"{n}"] = file["0"]

    monkeypatch.setattr("slimckpt.formats.hdf5._MAX_PATHS", 10)
    assert understood(hdf5_file(write)).table.n_tensors == 1200


def test_chunks_that_lie_on_each_other_many_times_end_at_a_bound() -> None:
    """Of thirty datasets with chunks of a byte each says that it has all bytes of the file."""
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_chunk((1,))
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)

    def write(file: h5py.File) -> None:
        for n in range(30):
            h5d.create(file.id, b"%d" % n, h5t.STD_U8LE, h5s.create_simple((1001,)), creation)

    data = bytearray(hdf5_file(write, "latest"))
    assert understood(bytes(data)).table.n_tensors == 30
    with h5py.File(io.BytesIO(bytes(data)), "r") as file:
        places = [
            (h5py.h5o.get_info(dataset.id).addr, dataset.id.get_chunk_info(0).byte_offset)
            for dataset in file.values()
        ]
    for header, start in places:
        flags = data[header + 5]
        at = header + 6 + (16 if flags & 0x20 else 0)
        width = 1 << (flags & 3)
        end = at + width + int.from_bytes(data[at : at + width], "little")
        for old, new in ((1001, len(data)), (start, 0)):
            body = data[header:end].replace(struct.pack("<Q", old), struct.pack("<Q", new))
            data[header:end] = body
        data[end : end + 4] = lookup3(bytes(data[header:end])).to_bytes(4, "little")
    found = locate(bytes(data))
    assert found.condition == "damaged" and "more bytes than the file" in (found.problem or "")


def test_headers_that_are_continued_on_each_other_for_ever_end_at_a_bound() -> None:
    """A thousand links to an object header whose thousand continuations overlap."""
    data = bytearray(hdf5_file(lambda file: file.create_group("g")))
    with h5py.File(io.BytesIO(bytes(data)), "r") as file:
        header = h5py.h5o.get_info(file["g"].id).addr
    at = len(data)
    body = 2_000_000
    blocks = [(at + 24 * n, body - 24 * n) for n in range(1, 20_001)]
    messages = [struct.pack("<HHB3xQQ", 16, 16, 0, *block) for block in blocks]
    data += b"".join(messages)[: 24 * 20_000].ljust(body, b"\0")
    data[header : header + 16] = struct.pack("<BxHII4x", 1, 1, 1, 24)
    data[header + 16 : header + 40] = struct.pack("<HHB3xQQ", 16, 16, 0, at, body)
    struct.pack_into("<Q", data, 40, len(data))
    found = locate(bytes(data))
    assert found.condition == "damaged" and "many times over" in (found.problem or "")


@pytest.mark.parametrize("libver", LIBVERS)
def test_a_long_header_that_many_datasets_share_is_read_once(libver: str) -> None:
    def write(file: h5py.File) -> None:
        file["kind"] = np.dtype("<f4")
        file["kind"].attrs["note"] = "x" * 60_000
        for n in range(100):
            file.create_dataset(f"{n}", data=W, dtype=file["kind"])

    source = BytesSource(hdf5_file(write, libver))
    assert examine(source).table.n_tensors == 100
    assert source.nbytes_read < 3 * source.size


def test_groups_thousands_deep_are_left_alone() -> None:
    def write(file: h5py.File) -> None:
        group = file
        for _ in range(1100):
            group = group.create_group("g")
        group["w"] = W

    found = locate(hdf5_file(write, "latest"))
    assert found.condition == "opaque" and "1000 deep" in (found.problem or "")


@pytest.mark.parametrize("libver", LIBVERS)
def test_names_are_kept_whatever_they_are(libver: str) -> None:
    names = ["a.b.c", "..", "名字", "😀", " ", "\n", "x" * 3000, "w:0", "%2F", "-"]

    def write(file: h5py.File) -> None:
        for name in names:
            file[name] = W
        file[b"\xff\xfe"] = W

    data = hdf5_file(write, libver)
    found = understood(data)
    assert set(found.table.names()) == {*names, "\\xff\\xfe"}
    assert {t.sha256 for t in truth_found(data, found)} == {truth_of("", W).sha256}


def test_types_that_are_no_arrays_are_opaque_and_their_bytes_are_those_in_the_file() -> None:
    fields = np.zeros(3, [("x", "<i4"), ("y", "S3")])
    fields["x"] = 1, 2, 3

    def write(file: h5py.File) -> None:
        file["compound"] = fields
        file["string"] = np.array([b"abc", b"de"])
        file["text"] = "größe"
        file["enum"] = np.array([1, 2], h5py.enum_dtype({"A": 1, "B": 2}, "i4"))
        file["opaque"] = np.zeros(2, "V5")
        file["array"] = np.zeros(2, [("a", "<f4", (2, 2))])
        file.create_dataset("vlen", (2,), h5py.vlen_dtype("<i4"))[0] = [1, 2]
        file["w"] = W
        file["reference"] = file["w"].ref
        file["null"] = h5py.Empty("<f4")
        file["extended"] = np.zeros(3, np.longdouble)
        file.create_dataset("blank", (3,), "S4")

    for libver in ("earliest", "latest"):
        data = hdf5_file(write, libver)
        found = understood(data)
        kinds = {name: tensor.dtype for name, tensor in tensors_of(data).items()}
        assert kinds.pop("w") == "F32"
        assert kinds == {
            "array": "opaque:compound",
            "blank": "opaque:string",
            "compound": "opaque:compound",
            "enum": "opaque:enum",
            "extended": "opaque:float128",
            "null": "opaque:null",
            "opaque": "opaque:opaque",
            "reference": "opaque:reference",
            "string": "opaque:string",
            "text": "opaque:vlen",
            "vlen": "opaque:vlen",
        }
        rows = {found.table.name(row): row for row in range(found.table.n_tensors)}
        assert elements_of(data, found, rows["compound"]) == fields.tobytes()
        assert elements_of(data, found, rows["string"]) == b"abcde\0"
        assert elements_of(data, found, rows["blank"]) == bytes(12)
        assert len(elements_of(data, found, rows["vlen"])) == 32


def test_odd_integers_and_floats_are_opaque() -> None:
    def write(file: h5py.File) -> None:
        narrow = h5t.STD_I32LE.copy()
        narrow.set_precision(20)
        shifted = h5t.STD_I32LE.copy()
        shifted.set_precision(16)
        shifted.set_offset(8)
        moved = h5t.IEEE_F32LE.copy()
        moved.set_ebias(126)
        for name, kind in ((b"a", narrow), (b"b", shifted), (b"c", moved), (b"d", h5t.STD_B16LE)):
            h5d.create(file.id, name, kind, h5s.create_simple((3,)))

    kinds = [tensor.dtype for tensor in tensors_of(hdf5_file(write)).values()]
    assert kinds == ["opaque:int32", "opaque:int32", "opaque:float32", "opaque:bitfield"]


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("name", ["BF16", "F8_E5M2", "F16", "BOOL", "C64", "U64"])
def test_the_types_of_our_own_containers_are_read_back(name: str, big_endian: bool) -> None:
    body = bytes(range(64))

    def write(file: h5py.File) -> None:
        kind = hdf5_type(name, big_endian)
        count = 64 // kind.get_size()
        made = h5d.create(file.id, b"w", kind, h5s.create_simple((count,)))
        made.write(h5s.ALL, h5s.ALL, np.frombuffer(body, f"V{kind.get_size()}"), mtype=kind)

    data = hdf5_file(write)
    found, tensor = understood(data), tensors_of(data)["w"]
    assert tensor.dtype == name
    assert tensor.big_endian == (big_endian and name != "BOOL") or name == "F8_E5M2"
    assert elements_of(data, found, 0) == body


def test_a_compact_dataset_is_pinned_and_lies_in_its_header() -> None:
    body = np.random.default_rng(4).random(500)
    for libver in LIBVERS:
        data = hdf5_file(lambda file: make(file, "w", body, compact=True), libver)
        table = understood(data).table
        (span,) = table.spans(0)
        assert data[span.offset : span.offset + span.nbytes] == body.tobytes()
        assert table.payload(0).pinned and not table.stored_apart.any()


def test_links_and_bytes_outside_the_file_refuse_it_and_are_not_opened(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    os.mkfifo(canary)  # opening it would wait for ever
    name = str(canary)

    def link(file: h5py.File) -> None:
        file["w"] = W
        file["out"] = h5py.ExternalLink(name, "/w")

    def storage(file: h5py.File) -> None:
        file["w"] = W
        file.create_dataset("out", (4,), "<f4", external=[(name, 0, 16)])

    def virtual(file: h5py.File) -> None:
        layout = h5py.VirtualLayout((4,), "<f4")
        layout[:] = h5py.VirtualSource(name, "w", (4,))
        file.create_virtual_dataset("out", layout)

    def through(file: h5py.File) -> None:
        file["a/out"] = h5py.ExternalLink(name, "/w")
        file["soft"] = h5py.SoftLink("/a/out/w")

    for write, why in (
        (link, "external link"),
        (storage, "external storage"),
        (virtual, "virtual layout"),
        (through, "external link"),
    ):
        for libver in ("earliest", "latest"):
            found = locate(hdf5_file(write, libver))
            assert found.condition == "refused" and found.table.n_tensors == 0
            assert why in (found.problem or "") and "out" in (found.problem or "")


@pytest.mark.parametrize("number", [4, 5, 6])
def test_filters_that_are_not_undone_fail_their_tensor_by_name_and_no_plugin_is_loaded(
    number: int,
) -> None:
    def write(file: h5py.File) -> None:
        creation = h5p.create(h5p.DATASET_CREATE)
        creation.set_chunk((8,))
        {
            4: lambda: creation.set_szip(h5py.h5z.SZIP_NN_OPTION_MASK, 8),
            5: lambda: creation.set_filter(5, 1),
            6: lambda: creation.set_scaleoffset(2, 4),
        }[number]()
        made = h5d.create(file.id, b"d", h5t.STD_I32LE, h5s.create_simple((16,)), creation)
        made.write(h5s.ALL, h5s.ALL, np.arange(16, dtype="<i4"))

    if number == 4 and not h5py.h5z.filter_avail(4):
        pytest.skip("this libhdf5 has no szip")
    data = hdf5_file(write)
    found = understood(data)
    with pytest.raises(NotUnderstoodError, match=f"filter {number}"):
        elements_of(data, found, 0)


def test_a_file_that_was_not_closed_is_damaged() -> None:
    data = bytearray(hdf5_file(lambda file: file.update({"w": W}), "latest"))
    data[11] = 1
    data[44:48] = lookup3(bytes(data[:44])).to_bytes(4, "little")
    found = locate(bytes(data))
    assert found.condition == "damaged" and "not closed" in (found.problem or "")


def test_every_flipped_bit_of_the_new_structures_is_noticed() -> None:
    """They have checksums: nothing of them may change what is found without an error."""
    example = small("latest")
    found = understood(example.data)
    taken = {
        at
        for row in range(found.table.n_payloads)
        for span in found.table.spans(row)
        for at in range(span.offset, span.offset + span.nbytes)
    }
    for at in range(len(example.data)):
        if at in taken:
            continue
        damaged = bytearray(example.data)
        damaged[at] ^= 0x10
        again = examine(BytesSource(bytes(damaged)))
        if again.condition == "understood":
            assert truth_found(bytes(damaged), again) == example.tensors, at


def test_damage_names_the_dataset() -> None:
    data = bytearray(
        hdf5_file(
            lambda file: (
                make(file, "some/w", W, compact=True)
                if "some" in file
                else (file.create_group("some"), make(file, "some/w", W))[1]
            )
        )
    )
    at = data.index(b"\x11\x20\x1f\x00")  # the datatype: a 4-byte float
    data[at] = 0xF1
    found = locate(bytes(data))
    assert found.condition == "damaged" and "'some/w'" in (found.problem or "")


def test_lookup3_is_that_of_libhdf5_for_every_length() -> None:
    """Each superblock of the new kind carries one of 44 bytes; attributes give other lengths."""
    for length in range(1, 60):
        data = hdf5_file(lambda file, n=length: file.create_group("x" * n), "latest")
        assert understood(data).table.n_tensors == 0


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=200)
def test_random_patches_of_rich_files_never_crash_or_hang(seed: int, patches: int) -> None:
    random = np.random.default_rng(seed)
    data = bytearray(RICH[seed % len(RICH)])
    for _ in range(patches):
        at = int(random.integers(len(data)))
        data[at : at + 8] = random.bytes(int(random.integers(1, 9)))
    start = time.process_time()
    assert_never_silently_wrong(bytes(data), [Hdf5()])
    assert time.process_time() - start < 5


def _rich(file: h5py.File) -> None:
    for name, (shape, chunk, most) in CHUNKS.items():
        file.create_dataset(
            name, data=np.ones(shape), chunks=chunk, maxshape=most, compression="gzip"
        )
    for n in range(30):
        file[f"many/{n}"] = np.int16(n)
    make(file, "compact", W, compact=True)
    file["soft"] = h5py.SoftLink("/many/3")
    file["flag"] = np.array([True])


RICH = [hdf5_file(_rich, libver) for libver in ("earliest", "latest")]


def test_a_group_of_a_hundred_thousand_links_is_walked_in_seconds(tmp_path: Path) -> None:
    for libver in ("earliest", "latest"):
        path = tmp_path / libver
        with h5py.File(path, "w", libver=(libver, "latest")) as file:
            file["w"] = W
            many, root = file.create_group("many").id, file["/"].id
            for n in range(100_000):
                many.links.create_hard(b"layer.%d.weight" % n, root, b"w")
        start = time.process_time()
        with FileSource(os.fsencode(path)) as source:
            found = examine(source)
        assert time.process_time() - start < 8
        assert (found.table.n_tensors, found.table.n_payloads) == (100_001, 1)


def test_a_chunk_that_would_inflate_to_more_than_it_may_is_damage_and_takes_no_memory() -> None:
    import tracemalloc

    def write(file: h5py.File) -> None:
        creation = h5p.create(h5p.DATASET_CREATE)
        creation.set_chunk((1000,))
        creation.set_deflate(6)
        made = h5d.create(file.id, b"d", h5t.STD_U8LE, h5s.create_simple((1000,)), creation)
        made.write_direct_chunk((0,), zlib.compress(bytes(200_000_000)), 0)

    data = hdf5_file(write)
    found = understood(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="do not end after 1000 bytes"):
            elements_of(data, found, 0)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_damaged_chunk_is_found_by_its_own_checksum() -> None:
    numbers = np.random.default_rng(5).integers(0, 255, 2001).astype(np.uint8)

    def write(file: h5py.File) -> None:
        file.create_dataset("d", data=numbers, chunks=(1001,), fletcher32=True)

    data = bytearray(hdf5_file(write))
    found = understood(bytes(data))
    assert elements_of(bytes(data), found, 0) == numbers.tobytes()
    data[found.table.spans(0)[1].offset + 17] ^= 4
    with pytest.raises(ValueError, match="checksum of a chunk"):
        elements_of(bytes(data), found, 0)
