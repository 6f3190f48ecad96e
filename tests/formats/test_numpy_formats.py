"""npy and npz: what numpy writes, and headers that it would not."""

import io
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import BytesSource, Example, FormatTests, Truth, elements_of, truth_found
from sample_files import SAMPLES, expected
from zip_bytes import zip_file

from slimckpt.formats import Found, check, examine
from slimckpt.formats.npy import Npy, read_header
from slimckpt.formats.npz import Npz

FOLDER = SAMPLES / "numpy_arrays"
SPELLING = {
    **{f"<i{n}": f"I{8 * n}" for n in (2, 4, 8)},
    **{f"<u{n}": f"U{8 * n}" for n in (2, 4, 8)},
    **{f"<f{n}": f"F{8 * n}" for n in (2, 4, 8)},
    **{"|b1": "BOOL", "|i1": "I8", "|u1": "U8", "<c8": "C64", "<c16": "C128"},
}
ROWS = np.arange(12, dtype="<f4").reshape(3, 4)
OBJECTS = np.array([{"a": 1}, None], dtype=object)


def npy(array: Any, version: tuple[int, int] | None = None) -> bytes:
    memory = io.BytesIO()
    np.lib.format.write_array(memory, np.asanyarray(array), version)
    return memory.getvalue()


def by_hand(header: str, body: bytes = b"", version: int = 1) -> bytes:
    raw = header.encode()
    width = "<H" if version == 1 else "<I"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(width, len(raw)) + raw + body


def truth(name: str, array: Any, path: str = "") -> Truth:
    array = np.asanyarray(array)
    spelled = array.dtype.str.replace(">", "<")
    dtype = SPELLING.get(spelled)
    if array.dtype.hasobject:
        return Truth.of(name, "opaque:O", array.shape, _after_header(npy(array)), path)
    if dtype is None:
        dtype = "opaque:structured" if array.dtype.fields else f"opaque:{array.dtype.str}"
    return Truth.of(name, dtype, array.shape, array.tobytes(), path)


def _after_header(data: bytes) -> bytes:
    memory = io.BytesIO(data)
    version = np.lib.format.read_magic(memory)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
    assert read is not None
    read(memory)
    return memory.read()


CORNERS: dict[str, Any] = {
    "rows": ROWS,
    "fortran": np.asfortranarray(ROWS),
    "fortran of three": np.asfortranarray(np.arange(24, dtype="<i2").reshape(2, 3, 4)),
    "scalar": np.float64(2.5),
    "empty": np.zeros((0, 3), "<f2"),
    "flags": np.arange(9) % 2 == 0,
    "big": np.arange(5, dtype=">i4"),
    "complex": np.array([1 + 2j], "<c8"),
    "text": np.array(["a", "größe"]),
    "bytes": np.array([b"abc", b"d"]),
    "times": np.array(["2020-01-01"], "<M8[s]"),
    "void": np.zeros(3, "V2"),
    "fields": np.zeros(2, [("x", "<i4"), ("y", "<f8", (2,)), ("z", [("w", "|u1")])]),
    "long": np.zeros(2, np.longdouble),
}


class TestNpy(FormatTests):
    format = Npy()

    def examples(self) -> dict[str, Example]:
        found = {name: Example(npy(a), [truth("arr_0", a)]) for name, a in CORNERS.items()}
        for version in ((2, 0), (3, 0)):
            found[f"version {version}"] = Example(npy(ROWS, version), [truth("arr_0", ROWS)])
        pickled = npy(OBJECTS)
        # A pickle ends in a dot: where one was cut behind another dot is not to be seen.
        start = len(pickled) - len(_after_header(pickled))
        cuts = {n + 1 for n in range(start, len(pickled) - 1) if pickled[n : n + 1] == b"."}
        found["objects"] = Example(pickled, [truth("arr_0", OBJECTS)], frozenset(cuts))
        return found

    def samples(self) -> dict[str, Example]:
        return {
            name: Example((FOLDER / name).read_bytes(), [_of_sample(name, "arr_0", about)])
            for name, file in expected("numpy_arrays")["files"].items()
            if name.endswith(".npy")
            for about in file["params"].values()
        }

    def large(self, nbytes: int) -> tuple[bytes, int]:
        return npy(np.zeros(nbytes, np.uint8)), 1

    def claims(self, sample: Path) -> bool:
        return sample.suffix == ".npy"

    def magics(self) -> list[bytes]:
        return [b"\x93NUMPY\1\0", b"\x93NUMPY\2\0", npy(ROWS)[:30], npy(ROWS)[:80]]


def _of_sample(file: str, name: str, about: dict[str, Any], path: str = "") -> Truth:
    """The truth of ``expected.json``; of objects, whose pickle is not in it, the bytes as such."""
    if about["dtype"] == "object":
        if file.endswith(".npy"):
            data = (FOLDER / file).read_bytes()
        else:
            with zipfile.ZipFile(FOLDER / file) as archive:
                data = archive.read(path)
        return Truth.of(name, "opaque:O", about["shape"], _after_header(data), path)
    dtype = about["dtype"].replace(">", "<")
    spelled = SPELLING.get(dtype)
    if spelled is None:
        spelled = "opaque:structured" if dtype.startswith("[") else f"opaque:{dtype}"
    return Truth(
        name, spelled, tuple(about["shape"]), about["nbytes"], about["sha256"], path or name
    )


class TestNpz(FormatTests):
    format = Npz()

    def examples(self) -> dict[str, Example]:
        arrays = {
            "w": ROWS,
            "f": np.asfortranarray(ROWS),
            "e": np.zeros((0, 2)),
            "s": np.array(["x"]),
        }
        bodies = {f"{name}.npy": npy(array) for name, array in arrays.items()}
        tensors = [truth(name, array, f"{name}.npy") for name, array in arrays.items()]
        one, t_one = {"w.npy": npy(ROWS)}, [truth("w", ROWS, "w.npy")]
        other = {**one, "note.txt": b"text"}
        t_other = [*t_one, Truth.of("note.txt", "opaque:member", (), b"text")]
        return {
            "stored": Example(zip_file(bodies), tensors),
            "deflated": Example(zip_file(bodies, bodies), tensors),
            "zip64": Example(zip_file(one, zip64=True), t_one),
            "streamed": Example(zip_file(one, one, streamed=True), t_one),
            "another member": Example(zip_file(other, other), t_other),
            "none": Example(zip_file({}), []),
        }

    def samples(self) -> dict[str, Example]:
        found = {}
        for name, file in expected("numpy_arrays")["files"].items():
            if name.endswith(".npz"):
                tensors = [_of_sample(name, n, p, f"{n}.npy") for n, p in file["params"].items()]
                found[name] = Example((FOLDER / name).read_bytes(), tensors)
        return found

    def large(self, nbytes: int) -> tuple[bytes, int]:
        memory = io.BytesIO()
        np.savez(memory, a=np.zeros(nbytes // 2, np.uint8), b=np.zeros(nbytes // 2, np.uint8))
        return memory.getvalue(), 2

    def claims(self, sample: Path) -> bool:
        return sample.suffix == ".npz"

    def magics(self) -> list[bytes]:
        data = zip_file({"w.npy": npy(ROWS)})
        return [data[:40], data[:100]]


def locate(data: bytes) -> Found:
    return examine(BytesSource(data))


def problem(data: bytes) -> str:
    found = locate(data)
    assert found.format == "npy" and found.condition in ("damaged", "opaque")
    assert found.problem is not None and len(found.problem) < 600
    return found.problem


def test_big_endian_is_said_and_not_undone() -> None:
    data = npy(CORNERS["big"])
    tensor = locate(data).table.tensor(0)
    assert (tensor.dtype, tensor.big_endian) == ("I32", True)
    assert elements_of(data, locate(data), 0) == CORNERS["big"].tobytes()


def test_fortran_order_is_strides() -> None:
    tensor = locate(npy(CORNERS["fortran of three"])).table.tensor(0)
    assert (tensor.shape, tensor.strides) == ((2, 3, 4), (1, 2, 6))


def test_what_other_writers_put_into_a_header_is_read() -> None:
    body = ROWS.tobytes()
    for header in (
        "{'descr': '<f4', 'fortran_order': False, 'shape': (3L, 4L), }\n",
        '{"descr": "<f4", "fortran_order": False, "shape": (3, 4)}',
        "{'descr':'<f4','fortran_order':False,'shape':(3,4),}   \n",
        "{ 'descr': '<f4', 'fortran_order': False, 'shape': (3, 4,), }\n",
    ):
        for version in (1, 2, 3):
            data = by_hand(header, body, version)
            assert truth_found(data, locate(data)) == [truth("arr_0", ROWS)], header


PLAIN = "{'descr': %s, 'fortran_order': False, 'shape': %s, }\n"


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("", "descr"),
        ("{}", "descr"),
        ("{'descr': '<f4', 'shape': (3,), 'fortran_order': False}", "descr"),
        (PLAIN % ("'<f4'", "(3)"), "expected 12 bytes, found 48"),
        (PLAIN % ("'<f4'", "(3, -4)"), "descr"),
        (PLAIN % ("'<f4'", "(3,, 4)"), "shape"),
        (PLAIN % ("'<f4'", "(" + "9" * 5000 + ",)"), "shape"),
        (PLAIN % ("'<f4'", "(" + "1," * 65 + ")"), "shape"),
        (PLAIN % ("'<f4'", "(4294967296, 4294967296)"), "overflows"),
        (PLAIN % ("'<f4'", "(5, 4)"), "truncated"),
        (PLAIN % ("'<f4'", "(1, 4)"), "more follows"),
        (PLAIN % ("'<f3'", "(3,)"), "type"),
        (PLAIN % ("'f4,f4'", "(3,)"), "type"),
        (PLAIN % ("__import__('os').system('false')", "(3,)"), "type"),
        (PLAIN % ("[('x', __import__('os'))]", "(3,)"), "type"),
        (PLAIN % ("[" * 5000 + "]" * 5000, "(3,)"), "type"),
        (PLAIN % ("[" + "-" * 9000 + "1]", "(3,)"), "type"),
        (PLAIN % ("[('x', '<f4', -1)]", "(3,)"), "type"),
        (PLAIN % ("[('x', '<q4')]", "(3,)"), "type"),
        (PLAIN % ("[('x', '|a4')]", "(3,)"), "type"),
        (PLAIN % ("[('x', '<f4', (2147483647, 2147483647))]", "(3,)"), ""),
    ],
)
def test_a_header_that_numpy_would_not_write_is_told(header: str, why: str) -> None:
    for version in (1, 2):
        if version == 2 or len(header) < 65536:
            assert why in problem(by_hand(header, ROWS.tobytes(), version))


def test_a_header_of_megabytes_is_not_read() -> None:
    data = b"\x93NUMPY\2\0" + struct.pack("<I", 1 << 24) + bytes(1 << 25)
    for source in (BytesSource(data), BytesSource(zip_file({"w.npy": data}))):
        assert "more than" in (examine(source).problem or "")
        assert source.nbytes_read < 200_000


def test_a_header_that_would_take_a_pattern_for_ever_does_not() -> None:
    for middle in (" ," * 400_000, "'descr':" * 100_000, ",  " * 300_000):
        assert problem(by_hand("{'descr':" + middle + "}", version=2))


@pytest.mark.parametrize("end", ["()", "(),"])
def test_a_header_that_ends_in_blanks_takes_time_in_proportion_to_them(end: str) -> None:
    data = by_hand(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {end}{' ' * 10**6}", b"", 2)
    start = time.process_time()
    assert locate(data).condition == "damaged"
    assert time.process_time() - start < 2


@pytest.mark.parametrize("head", [b"", b"\x93NUMPY", b"\x93NUMPY\1\0", b"\x93NUMPY\1\0v\0{"])
def test_what_is_shorter_than_its_header_is_damaged(head: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        read_header(lambda nbytes: head[:nbytes], "it")


# npz.


def test_a_stored_array_is_its_own_bytes_and_a_deflated_one_the_member() -> None:
    data = zip_file({"w.npy": npy(ROWS)})
    table = locate(data).table
    (span,) = table.spans(0)
    assert data[span.offset : span.offset + span.nbytes] == ROWS.tobytes()
    data = zip_file({"w.npy": npy(ROWS)}, ["w.npy"])
    table = locate(data).table
    (span,) = table.spans(0)
    stored = data[span.offset : span.offset + span.nbytes]
    assert zlib.decompress(stored, -15) == npy(ROWS)
    assert table.tensor(0).encoding == f"deflate:{len(npy(ROWS))}"


def test_members_whose_headers_are_a_thousand_times_the_file_end_at_a_bound() -> None:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }}{' ' * 10**6}"
    members = {f"{n}.npy": by_hand(head, b"", 2) for n in range(40)}
    found = locate(zip_file(members, members))
    assert found.condition == "opaque" and "headers of numpy" in (found.problem or "")
    few = dict(list(members.items())[:10])
    assert locate(zip_file(few, few)).table.n_tensors == 10


def test_a_deflated_header_that_says_gigabytes_is_not_decoded() -> None:
    memory = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(memory, "w", kind) as archive, archive.open("w.npy", "w") as member:
        member.write(b"\x93NUMPY\2\0" + struct.pack("<I", 3 << 30))
        for _ in range(16):
            member.write(b" " * 2**22)
    tracemalloc.start()
    found = locate(memory.getvalue())
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()
    assert found.condition == "opaque" and "a header of 3221225484 bytes" in (found.problem or "")


def test_an_archive_may_start_with_its_directories() -> None:
    data = zip_file({"layer/": b"", "layer/w.npy": npy(ROWS)})
    found = locate(data)
    assert found.format == "npz"
    assert truth_found(data, found) == [truth("layer/w", ROWS, "layer/w.npy")]


def test_a_member_of_another_compression_is_kept_as_it_is() -> None:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("w.npy", npy(ROWS))
        archive.writestr("x.npy", npy(ROWS), zipfile.ZIP_BZIP2)
    data = memory.getvalue()
    found = locate(data)
    kinds = [found.table.dtype(row) for row in range(2)]
    assert (found.condition, kinds) == ("understood", ["F32", "opaque:member"])


def test_a_member_whose_array_is_damaged_is_named() -> None:
    found = locate(zip_file({"w.npy": npy(ROWS), "x.npy": npy(ROWS)[:-1]}))
    assert found.condition == "damaged" and "member 'x.npy'" in (found.problem or "")


def test_the_checksums_of_members_are_checked() -> None:
    for deflated in ((), ("w.npy",)):
        data = bytearray(zip_file({"w.npy": npy(ROWS)}, deflated))
        assert check("npz", BytesSource(bytes(data))) is None
        at = locate(bytes(data)).table.spans(0)[0].offset + 20
        data[at] ^= 1
        told = check("npz", BytesSource(bytes(data)))
        assert told is not None and "'w.npy'" in told
