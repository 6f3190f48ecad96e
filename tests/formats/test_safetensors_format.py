"""safetensors files, the reference's own attack list among them."""

import gc
import json
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import BytesSource, Example, FormatTests, Truth, truth_found
from hypothesis import given
from hypothesis import strategies as st
from safetensors_bytes import from_entries, from_header, safetensors_file
from sample_files import SAMPLES, expected

from slimckpt.errors import DamagedFileError
from slimckpt.formats import Found, check, examine, safetensors
from slimckpt.formats.safetensors import Safetensors, _crc32_of_zeros, _has_odd_numbers
from slimckpt.model import TableBuilder
from slimckpt.sources.positioned import FileSource

MINDSPORE = {
    "Int8": "I8",
    "UInt8": "U8",
    "Int16": "I16",
    "UInt16": "U16",
    "Int32": "I32",
    "UInt32": "U32",
    "Int64": "I64",
    "UInt64": "U64",
    "Float16": "F16",
    "Float32": "F32",
    "Float64": "F64",
    "BFloat16": "BF16",
    "Bool": "BOOL",
    "Int4": "I4X2",
}
TORCH = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.int64": "I64"}
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""``Dtype::bitsize`` of the reference, 0.8."""


def in_file_order(data: bytes, tensors: list[Truth]) -> list[Truth]:
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return sorted(tensors, key=lambda truth: header[truth.name]["data_offsets"])


def locate(data: bytes) -> Found:
    found = examine(BytesSource(data))
    assert found.format == "safetensors"
    return found


def damage(data: bytes) -> str:
    """The problem of a recognised but damaged file."""
    found = locate(data)
    assert (found.condition, found.table.n_payloads) == ("damaged", 0)
    assert found.problem is not None and found.problem.startswith("it: ")
    assert len(found.problem) < 1000
    return found.problem


def entry(dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class TestSafetensors(FormatTests):
    format = Safetensors()

    def examples(self) -> dict[str, Example]:
        body = bytes(range(240))

        def made(
            *tensors: tuple[str, str, list[int], bytes], metadata: dict[str, str] | None = None
        ) -> Example:
            truths = [Truth.of(*tensor) for tensor in tensors]
            return Example(safetensors_file(tensors, metadata), truths)

        backwards = {"b": entry("U8", [2], [3, 5]), "a": entry("I8", [3], [0, 3])}
        padded = json.dumps({"w": entry("F32", [1], [0, 4])}).encode() + b" " * 7
        return {
            "one": made(("w", "F32", [2, 3], body[:24])),
            "no tensors": Example(from_header(b"{}"), []),
            "no tensors but metadata": Example(
                from_header(b'{"__metadata__":{"format":"pt"}}'), []
            ),
            "null metadata": Example(from_header(b'{"__metadata__":null}'), []),
            "padded": Example(from_header(padded, b"abcd"), [Truth.of("w", "F32", [1], b"abcd")]),
            "spaces": Example(
                from_header(b'{\n "w": {"dtype":"U8","shape":[],"data_offsets":[0,1]} }\n', b"x"),
                [Truth.of("w", "U8", [], b"x")],
            ),
            "header not in file order": Example(
                from_entries(backwards, b"abcde"),
                [Truth.of("a", "I8", [3], b"abc"), Truth.of("b", "U8", [2], b"de")],
            ),
            "empty tensors": made(
                ("none", "F32", [0], b""),
                ("w", "I16", [2], b"abcd"),
                ("plane", "F64", [3, 0, 2], b""),
                ("huge", "F32", [0, 2**63 - 1], b""),
            ),
            "half bytes": made(("f", "F4", [3, 2], b"abc"), ("g", "F6_E2M3", [4], b"def")),
            "newer dtypes": Example(
                safetensors_file([("n", "F2_E1M0", [9], b"abc"), ("c", "C128", [1], body[:16])]),
                [
                    Truth.of("n", "opaque:F2_E1M0", [9], b"abc"),
                    Truth.of("c", "opaque:C128", [1], body[:16]),
                ],
            ),
            "metadata": made(("w", "U8", [1], b"x"), metadata={"format": "pt", "é": "😀"}),
        }

    def samples(self) -> dict[str, Example]:
        found = {}
        for folder in ("ms_crc", "ms_dtypes"):
            for name, file in expected(folder)["files"].items():
                if name.endswith(".safetensors"):
                    data = (SAMPLES / folder / name).read_bytes()
                    tensors = []
                    for key, p in file["params"].items():
                        shape = tuple(p["shape"])
                        kind = MINDSPORE[p["dtype"]]
                        tensors.append(Truth(key, kind, shape, p["nbytes"], p["sha256"], key))
                    found[f"{folder}/{name}"] = Example(data, in_file_order(data, tensors))
        for folder in ("lora_steps", "torch_corners"):
            for name, file in expected(folder)["files"].items():
                if name.endswith(".safetensors"):
                    data = (SAMPLES / folder / name).read_bytes()
                    tensors = []
                    for path, p in file["tensors"].items():
                        key = path.removeprefix("['").removesuffix("']")
                        shape = tuple(p["shape"])
                        kind = TORCH[p["dtype"]]
                        tensors.append(Truth(key, kind, shape, p["nbytes"], p["sha256"], key))
                    found[f"{folder}/{name}"] = Example(data, in_file_order(data, tensors))
        return found

    def large(self, nbytes: int) -> tuple[bytes, int]:
        share = nbytes // 4
        return safetensors_file([(f"w{n}", "U8", [share], bytes(share)) for n in range(4)]), 4

    def claims(self, sample: Path) -> bool:
        return sample.suffix == ".safetensors"

    def magics(self) -> list[bytes]:
        start = struct.pack("<Q", 120) + b'{"'
        return [start, start[:-1], start + b'w":{"dtype":"F32","shape":[', start + b"__metadata__"]


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_the_reference_is_located_by_its_width(dtype: str) -> None:
    nbytes = BITS[dtype]
    data = safetensors_file([("w", dtype, [2, 4], bytes(range(nbytes)))])
    assert truth_found(data, locate(data)) == [Truth.of("w", dtype, [2, 4], bytes(range(nbytes)))]
    problem = damage(safetensors_file([("w", dtype, [2, 4], bytes(nbytes + 1))]))
    assert f"takes {nbytes} bytes, found {nbytes + 1}" in problem and "'w'" in problem


@given(st.integers(0, 40), st.sampled_from(["F4", "F6_E2M3", "F6_E3M2"]), st.integers(0, 40))
def test_elements_of_less_than_a_byte_must_end_on_one(count: int, dtype: str, nbytes: int) -> None:
    data = safetensors_file([("w", dtype, [count], bytes(nbytes))])
    sound = count * BITS[dtype] == nbytes * 8
    assert (locate(data).condition == "understood") == sound


def test_mindspores_int4_is_two_elements_a_byte() -> None:
    data = safetensors_file(
        [("q", "I8", [2], b"ab"), ("i", "I8", [1], b"c"), ("u", "U8", [1], b"d")],
        {"format": "ms", "q": "Int4", "u": "Int4"},
    )
    found = locate(data)
    assert [found.table.dtype(row) for row in range(3)] == ["I4X2", "I8", "U8"]


def test_a_dtype_spelled_like_ours_that_the_format_does_not_have_is_opaque() -> None:
    data = safetensors_file([("w", "I4X2", [2], b"ab")])
    assert truth_found(data, locate(data)) == [Truth.of("w", "opaque:I4X2", [2], b"ab")]


def test_attack_1_a_header_longer_than_the_file() -> None:
    data = bytearray(safetensors_file([("weight", "F32", [2, 2], bytes(16))]))
    data[:8] = struct.pack("<Q", 1000)
    problem = damage(bytes(data))
    assert "1000" in problem and str(len(data)) in problem and "truncated" in problem


@pytest.mark.parametrize("shape", [[2, 2], [200, 200]])
def test_attacks_2_and_3_many_tensors_on_the_same_bytes(shape: list[int]) -> None:
    nbytes = shape[0] * shape[1] * 4
    entries = {f"weight_{n}": entry("F32", shape, [0, nbytes]) for n in range(5000)}
    assert "overlap" in damage(from_entries(entries, bytes(nbytes)))


@pytest.mark.parametrize("length", [100_000_001, 2**32, 2**63, 2**64 - 1])
def test_a_header_above_the_cap_is_not_read(length: int) -> None:
    data = struct.pack("<Q", length) + b'{"w":{}}' + bytes(100)
    assert examine(BytesSource(data)).format == "unknown"
    source = BytesSource(data)
    with pytest.raises(DamagedFileError, match=str(length)):
        Safetensors().locate(source, TableBuilder())
    assert source.nbytes_read == 8


@pytest.mark.parametrize("data", [b"", b"\x02", bytes(7), bytes(8), b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_safetensors_file_is_damaged_when_it_is_located_all_the_same(
    data: bytes,
) -> None:
    with pytest.raises(DamagedFileError):
        Safetensors().locate(BytesSource(data), TableBuilder())


W = '{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}'


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ('{"w":' + W, "delimiter"),
        ('{"w":' + W + "} x", "Extra data"),
        ('{"w":' + W + "}{}", "Extra data"),
        ('{"w":' + W + "}\0", "Extra data"),
        ('{"w":' + W + ',"w":' + W + "}", "'w' is there twice"),
        ('{"w":{"dtype":"F32","dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}', "twice"),
        ('{"__metadata__":{"a":"1","a":"2"},"w":' + W + "}", "'a' is there twice"),
        ('{"__metadata__":{},"__metadata__":{},"w":' + W + "}", "twice"),
        ('{"__metadata__":{"a":1},"w":' + W + "}", "__metadata__"),
        ('{"__metadata__":{"a":null},"w":' + W + "}", "__metadata__"),
        ('{"__metadata__":{"a":{"b":"c"}},"w":' + W + "}", "__metadata__"),
        ('{"__metadata__":[],"w":' + W + "}", "__metadata__"),
        ('{"__metadata__":"a","w":' + W + "}", "__metadata__"),
        ('{"__metadata__":false,"w":' + W + "}", "__metadata__"),
        ('{"w":[]}', "exactly"),
        ('{"w":null}', "exactly"),
        ('{"w":{}}', "exactly"),
        ('{"w":{"dtype":"F32","shape":[2,2]}}', "exactly"),
        ('{"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16],"strides":[2,1]}}', "exactly"),
        ('{"w":{"dtype":7,"shape":[2,2],"data_offsets":[0,16]}}', "dtype"),
        ('{"w":{"dtype":"","shape":[2,2],"data_offsets":[0,16]}}', "dtype"),
        ('{"w":{"dtype":"F32","shape":"22","data_offsets":[0,16]}}', "shape"),
        ('{"w":{"dtype":"F32","shape":[true,4],"data_offsets":[0,16]}}', "shape"),
        ('{"w":{"dtype":"F32","shape":[[4]],"data_offsets":[0,16]}}', "shape"),
        ('{"w":{"dtype":"F32","shape":[-2,-2],"data_offsets":[0,16]}}', "-2"),
        ('{"w":{"dtype":"F32","shape":[2.0,2],"data_offsets":[0,16]}}', "2.0"),
        ('{"w":{"dtype":"F32","shape":[2e0,2],"data_offsets":[0,16]}}', "2e0"),
        ('{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}', "NaN"),
        ('{"w":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,16]}}', "Infinity"),
        ('{"w":{"dtype":"F32","shape":[-Infinity],"data_offsets":[0,16]}}', "Infinity"),
        ('{"w":{"dtype":"F32","shape":[-0,4],"data_offsets":[0,16]}}', "-0"),
        ('{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16,16]}}', "data_offsets"),
        ('{"w":{"dtype":"F32","shape":[4],"data_offsets":[16]}}', "data_offsets"),
        ('{"w":{"dtype":"F32","shape":[4],"data_offsets":{"0":16}}}', "data_offsets"),
        ('{"w":{"dtype":"F32","shape":[4],"data_offsets":[false,16]}}', "data_offsets"),
        ('{"w":{"dtype":"F32","shape":[4],"data_offsets":[-16,0]}}', "-16"),
        ('{"w":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}', "end before they start"),
        ('{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}}', "takes 12 bytes, found 16"),
        ('{"w":{"dtype":"F32","shape":[],"data_offsets":[0,16]}}', "takes 4 bytes, found 16"),
        ('{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,16]}}', "takes 0 bytes, found 16"),
        ('{"w":{"dtype":"F32","shape":[3],"data_offsets":[4,16]}}', "hole"),
        ('{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}', "follow its last tensor"),
        ('{"w":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}}', "truncated"),
        ('{"w":{"dtype":"new","shape":[5],"data_offsets":[0,20]}}', "truncated"),
        ("{}", "follow its last tensor"),
        ('{"\\ud800":' + W + "}", "surrogates"),
        ('{"__metadata__":{"a":"\\udfff"},"w":' + W + "}", "surrogates"),
        ('{"__metadata__":{"\\udfff":"a"},"w":' + W + "}", "surrogates"),
        ('{"w":{"dtype":"\\ud800","shape":[2,2],"data_offsets":[0,16]}}', "surrogates"),
        ('{"w\n":' + W + "}", "control character"),
        ('{"w":' + W + ",}", "property name"),
        ("{'w':" + W + "}", ""),
    ],
)
def test_a_header_that_breaks_a_rule_is_damage_that_names_it(header: str, why: str) -> None:
    data = from_header(header.encode(), bytes(16))
    if not header.startswith(('{"', "{}")):
        assert examine(BytesSource(data)).condition == "opaque"
        return
    assert why in damage(data)


@pytest.mark.parametrize("dim", [2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30])
@pytest.mark.parametrize("dtype", ["F32", "F4", "unheard_of"])
def test_shapes_near_and_beyond_64_bits_do_not_overflow(dim: int, dtype: str) -> None:
    for shape in ([dim], [dim, dim], [dim] * 100, [0, dim], [dim, dim, 0]):
        found = locate(from_entries({"w": entry(dtype, shape, [0, 16])}, bytes(16)))
        sound = dtype == "unheard_of" and dim < 2**63
        assert (found.condition == "understood") == sound, shape


@pytest.mark.parametrize("offset", [2**31, 2**63 - 1, 2**63, 2**64 - 1, 10**20, 10**30])
def test_offsets_near_and_beyond_64_bits_do_not_overflow(offset: int) -> None:
    for offsets in ([0, offset], [offset, offset], [offset, offset + 16], [offset, 0]):
        for dtype in ("F32", "unheard_of"):
            damage(from_entries({"w": entry(dtype, [4], offsets)}, bytes(16)))


@pytest.mark.parametrize("dtype", ["U8", "F64", "F4"])
def test_an_empty_shape_that_overflows_on_the_way_is_damage_as_in_the_reference(
    dtype: str,
) -> None:
    assert "overflows" in damage(from_entries({"w": entry(dtype, [2**62, 2**62, 0], [0, 0])}))
    assert locate(from_entries({"w": entry(dtype, [0, 2**62, 2**62], [0, 0])})).table.n_tensors


def test_a_number_of_a_million_digits_is_damage_at_once() -> None:
    start = time.process_time()
    header = '{"w":{"dtype":"F32","shape":[' + "9" * 1_000_000 + '],"data_offsets":[0,16]}}'
    assert "999" in damage(from_header(header.encode(), bytes(16)))
    assert time.process_time() - start < 2


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deeply_nested_json_is_damage_not_a_crash(opening: str) -> None:
    for depth in (900, 100_000, 1_000_000):
        damage(from_header(b'{"w":' + opening.encode() * depth, bytes(16)))
        closing = "]" if opening == "[" else "}"
        whole = '{"w":' + opening * depth + "1" * (closing == "}") + closing * depth + "}"
        damage(from_header(whole.encode(), bytes(16)))


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"])
def test_a_header_that_is_not_utf8_is_damage(bad: bytes) -> None:
    assert "codec" in damage(from_header(b'{"' + bad + b'":' + W.encode() + b"}", bytes(16)))


def test_overlapping_tensors_are_damage_and_named() -> None:
    entries = {"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [2, 6])}
    problem = damage(from_entries(entries, bytes(6)))
    assert "'b' overlaps" in problem and "expected it at 4" in problem and "found 2" in problem


def test_a_hole_between_tensors_is_damage_and_named() -> None:
    entries = {"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [6, 10])}
    assert "'b' leaves a hole" in damage(from_entries(entries, bytes(10)))


def test_an_empty_tensor_inside_another_is_damage() -> None:
    entries = {"a": entry("U8", [4], [0, 4]), "b": entry("U8", [0], [2, 2])}
    assert "'b' overlaps" in damage(from_entries(entries, bytes(4)))


@pytest.mark.parametrize(
    "name",
    ["", "a\0b", "../../etc/passwd", "/abs", "a//b/./c", "名字", "😀.weight", "\n", "x" * 65536],
)
def test_an_odd_name_is_kept_as_it_is(name: str) -> None:
    data = safetensors_file([(name, "U8", [1], b"x"), ("after", "U8", [1], b"y")])
    assert truth_found(data, locate(data)) == [
        Truth(name, "U8", (1,), 1, Truth.of("", "U8", [1], b"x").sha256, name),
        Truth.of("after", "U8", [1], b"y"),
    ]


def test_an_escaped_surrogate_pair_is_one_character() -> None:
    data = from_header(b'{"\\ud83d\\ude00":' + W.encode() + b"}", bytes(16))
    assert locate(data).table.names() == ["😀"]


def test_thousands_of_unknown_dtypes_are_refused_before_they_fill_the_table() -> None:
    data = safetensors_file([(f"w{n}", f"T{n}", [1], b"x") for n in range(1100)])
    assert "1100 unknown dtypes" in damage(data)


def test_metadata_is_a_fact_and_bounded() -> None:
    assert locate(safetensors_file([], {"format": "pt"})).facts == {"metadata": {"format": "pt"}}
    assert locate(safetensors_file([])).facts == {}
    many = {f"k{n:03}": "v" for n in range(100)}
    facts = locate(safetensors_file([], many)).facts
    assert list(facts["metadata"]) == [f"k{n:03}" for n in range(64)]
    assert facts["metadata_left_out"] == 36
    long = {"a": "short", "b": "x" * 9000, "c": "short"}
    facts = locate(safetensors_file([], long)).facts
    assert facts == {"metadata": {"a": "short"}, "metadata_left_out": 2}


def mindspore_crc(tensors: dict[str, np.ndarray]) -> int:
    """As MindSpore does it: numpy arrays through ``bytes``, in the order of names."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(bytes(tensors[name]), crc)
    return crc


ARRAYS = {
    "b.scalar": np.array(1.5, np.float32),
    "a.step": np.array(70_000, np.int64),
    "epoch": np.array(3, np.int32),
    "c": np.arange(12, dtype=np.int16).reshape(3, 4),
    "one": np.array([5], np.int32),
    "flag": np.array(True),
    "half": np.array([1, 2], np.float16),
}
NAMES = {
    "float32": "F32",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "float16": "F16",
    "bool": "BOOL",
}


def crc_file(crc: str, arrays: dict[str, np.ndarray], **metadata: str) -> bytes:
    return safetensors_file(
        [(name, NAMES[str(a.dtype)], list(a.shape), a.tobytes()) for name, a in arrays.items()],
        {"crc_num": crc, **metadata},
    )


def test_the_checksum_of_the_real_writer_is_right_and_guards_every_byte() -> None:
    data = (SAMPLES / "ms_crc/net_crc.safetensors").read_bytes()
    assert check("safetensors", BytesSource(data)) is None
    (length,) = struct.unpack("<Q", data[:8])
    for at in (*range(8 + length, len(data), 97), len(data) - 1, 8 + length + 7):
        damaged = bytearray(data)
        damaged[at] ^= 0x40
        problem = check("safetensors", BytesSource(bytes(damaged)))
        assert problem is not None and "935719937" in problem and problem.startswith("it: ")


def test_mindspores_checksum_takes_an_integer_scalar_for_a_number_of_zeros() -> None:
    crc = mindspore_crc(ARRAYS)
    plain = 0
    for name in sorted(ARRAYS):
        plain = zlib.crc32(ARRAYS[name].tobytes(), zlib.crc32(name.encode(), plain))
    assert crc != plain
    for right in (crc, plain):
        source = BytesSource(crc_file(str(right), ARRAYS, format="ms"))
        assert check("safetensors", source) is None
    wrong = crc_file(str(crc ^ 1), ARRAYS, format="ms")
    assert "CRC32" in (check("safetensors", BytesSource(wrong)) or "")


def test_a_negative_or_huge_integer_scalar_does_not_stop_the_check() -> None:
    for number in (-1, 2**62):
        data = crc_file("1", {"n": np.array(number)}, format="ms")
        assert "CRC32" in (check("safetensors", BytesSource(data)) or "")


def test_only_mindspores_own_checksum_is_checked() -> None:
    assert check("safetensors", BytesSource(crc_file("1", ARRAYS))) is None
    assert check("safetensors", BytesSource(crc_file("1", ARRAYS, format="pt"))) is None
    for stated in ("", "-1", "x", "9" * 5000):
        problem = check("safetensors", BytesSource(crc_file(stated, ARRAYS, format="ms")))
        assert problem is not None and len(problem) < 300


def test_the_check_of_a_damaged_file_says_what_is_wrong() -> None:
    data = crc_file("1", ARRAYS, format="ms")[:-1]
    assert "truncated" in (check("safetensors", BytesSource(data)) or "")


@given(st.integers(0, 3000), st.binary(max_size=20))
def test_the_crc_of_zeros_is_that_of_zlib(count: int, before: bytes) -> None:
    assert _crc32_of_zeros(count, zlib.crc32(before)) == zlib.crc32(before + bytes(count))


def test_twenty_thousand_tensors_are_located_in_half_a_second(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    body = bytes(64)
    path.write_bytes(safetensors_file([(f"layer.{n}.w", "F32", [16], body) for n in range(20000)]))
    fastest = 9.0
    for _ in range(3):
        with FileSource(os.fsencode(path)) as source:
            start = time.process_time()
            found = examine(source)
            fastest = min(fastest, time.process_time() - start)
    assert found.table.n_tensors == 20000
    assert fastest < 0.5


_WORD = st.sampled_from(["w", "dtype", "shape", "data_offsets", "__metadata__", "-1", '\\"', "é"])
_VALUE = st.recursive(
    _WORD.map(lambda word: f'"{word}"')
    | st.sampled_from(["0", "4", "-1", "null", "1.5", "9" * 25]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.lists(st.tuples(_WORD, inner), max_size=4).map(
            lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
        )
    ),
    max_leaves=12,
)
_ENTRY = st.sampled_from(
    [
        '{"dtype":"U8","shape":[4],"data_offsets":[0,4]}',
        '{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}',
        '{"dtype":"U8","shape":[-4],"shape":[4],"data_offsets":[0,4]}',
    ]
)


@given(st.lists(st.tuples(_WORD, _VALUE | _ENTRY), max_size=4))
def test_the_quick_look_at_a_header_sees_what_the_careful_one_does(
    pairs: list[tuple[str, str]],
) -> None:
    header = ("{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}").encode()
    source = BytesSource(from_header(header, bytes(4)))
    found = []
    for odd in (lambda raw: True, _has_odd_numbers):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("slimckpt.formats.safetensors._has_odd_numbers", odd)
            found.append(examine(source))
    careful, quick = found
    assert (careful.condition, careful.facts) == (quick.condition, quick.facts)
    assert truth_found(source.data, careful) == truth_found(source.data, quick)


_NUMBER = st.sampled_from([0, 1, 2, 4, 6, 8, 12, -1, 2**31, 2**61, 2**63, 2**64, 1.5, True, None])
_SOUND = st.tuples(st.sampled_from(["U8", "I8", "F32"]), st.lists(st.integers(1, 3), max_size=3))


@given(
    st.lists(_SOUND, min_size=1, max_size=5),
    st.permutations(range(5)),
    st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from(["dtype", "shape", "data_offsets", "more"]),
                  st.sampled_from(["Q9", "F64", 3]) | st.lists(_NUMBER, max_size=3)),
        max_size=1,
    ),
    st.sampled_from([0, 0, 0, 1, -1]),
)  # fmt: skip
def test_entries_checked_all_at_once_are_as_those_checked_one_by_one(
    tensors: list[tuple[str, list[int]]],
    order: list[int],
    changes: list[tuple[int, str, Any]],
    more: int,
) -> None:
    header, end = {}, 0
    for number, (dtype, shape) in enumerate(tensors):
        start, end = end, end + int(np.prod(shape, dtype=int)) * BITS[dtype] // 8
        header[f"t{number}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    header = {f"t{n}": header[f"t{n}"] for n in order if n < len(tensors)}
    for number, field, value in changes:
        header.get(f"t{number}", {})[field] = value
    source = BytesSource(from_header(json.dumps(header).encode(), bytes(max(end + more, 0))))
    quick = examine(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "_plain_entries", lambda header, nbytes: None)
        careful = examine(source)
    assert quick[:4] == careful[:4]
    assert truth_found(source.data, quick) == truth_found(source.data, careful)
    if not changes and not more:
        assert quick.condition == "understood"
        assert safetensors._plain_entries(header, end) is not None


def test_a_shape_of_very_many_huge_dimensions_is_damage_at_once() -> None:
    entry = {"dtype": "U8", "shape": [2**62] * 100_000, "data_offsets": [0, 4]}
    found = examine(BytesSource(from_entries({"t": entry}, bytes(4))))
    assert found.condition == "damaged"
    assert "overflows 64 bits" in str(found.problem)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("header", [b'{"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"{"])
def test_the_garbage_collector_is_left_as_it_was(header: bytes, enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        examine(BytesSource(from_header(header, bytes(4))))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
