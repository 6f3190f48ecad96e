"""MindSpore ``.ckpt`` files."""

import os
import time
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conformance import BytesSource, Example, FormatTests, Truth, body_of, truth_found
from hypothesis import given
from hypothesis import strategies as st
from mindspore_bytes import field, map_record, record, tensor_proto, varint, with_crc
from sample_files import SAMPLES, expected

from slimckpt.errors import DamagedFileError, NotUnderstoodError, RefusedFileError
from slimckpt.formats import Found, check, examine, mindspore
from slimckpt.formats.mindspore import MindSpore
from slimckpt.model import TableBuilder
from slimckpt.sources.positioned import FileSource

UNDERSTOOD = (
    "ms_chunked",
    "ms_crc",
    "ms_dp4_real_ckpt",
    "ms_dp4_real_dedup_ckpt",
    "ms_dp8_ckpt",
    "ms_dtypes",
    "ms_edge",
    "ms_opshard8_ckpt",
    "ms_reshard_8to4",
    "ms_uneven4_ckpt",
)
SPELLING = {
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
HUGE = 2**63 - 1


def truth_of(name: str, param: dict[str, Any]) -> Truth:
    """An entry of ``params`` in an ``expected.json``."""
    if param["dtype"] == "str":
        return Truth.of(name, "opaque:str", (), param["value"].encode("utf-32-le"))
    shape = tuple(param["shape"])
    return Truth(name, SPELLING[param["dtype"]], shape, param["nbytes"], param["sha256"], name)


def file_of(*records: bytes, tensors: list[Truth], cut: bool = True, crc: bool = False) -> Example:
    """``cut``: whether the file may end behind any record."""
    body = b"".join(records)
    ends = {sum(map(len, records[:n])) for n in range(1, len(records))} if cut else set()
    if crc:
        return Example(with_crc(body), tensors, frozenset({*ends, len(body)} - {0}))
    return Example(body, tensors, frozenset(ends))


def locate(data: bytes) -> Found:
    found = examine(BytesSource(data))
    assert found.format == "mindspore"
    return found


def damage(data: bytes) -> str:
    """The problem of a recognised but damaged file."""
    found = locate(data)
    assert (found.condition, found.table.n_payloads) == ("damaged", 0)
    assert found.problem is not None and found.problem.startswith("it: ")
    return found.problem


class TestMindSpore(FormatTests):
    format = MindSpore()

    def examples(self) -> dict[str, Example]:
        w = bytes(range(24))
        weight = record("w", "Float32", [2, 3], w)
        t_weight = Truth.of("w", "F32", (2, 3), w)
        text = "naïve 😀".encode("utf-32-le")
        halves = [record("big", "Int16", [3, 5], piece) for piece in (w[:7], w[7:12], w[:18])]
        big = w[:12] + w[:18]
        return {
            "one": file_of(weight, tensors=[t_weight]),
            "scalars": file_of(
                record("absent", "Float32", [], w[:4]),
                record("older", "Int64", [0], w[:8]),
                record("one", "Float16", [1], w[:2]),
                tensors=[
                    Truth.of("absent", "F32", (), w[:4]),
                    Truth.of("older", "I64", (), w[:8]),
                    Truth.of("one", "F16", (1,), w[:2]),
                ],
            ),
            "strings": file_of(
                record("s", "str", [0], text),
                record("empty", "str", [0], b""),
                tensors=[
                    Truth.of("s", "opaque:str", (), text),
                    Truth.of("empty", "opaque:str", (), b""),
                ],
            ),
            "cut tensor": file_of(
                *halves, tensors=[Truth.of("big", "I16", (3, 5), big)], cut=False
            ),
            "crc": file_of(weight, tensors=[t_weight], crc=True),
            "no elements": file_of(
                record("none", "Float32", [0], b""),
                record("plane", "Float64", [HUGE, 0, HUGE], b""),
                weight,
                tensors=[
                    Truth.of("none", "F32", (0,), b""),
                    Truth.of("plane", "F64", (HUGE, 0, HUGE), b""),
                    t_weight,
                ],
            ),
            "nibbles": file_of(
                record("q", "Int4", [2, 3], w[:6]), tensors=[Truth.of("q", "I4X2", (2, 3), w[:6])]
            ),
            "unknown type": file_of(
                record("h", "HiFloat8", [2, 5], w[:10]),
                tensors=[Truth.of("h", "opaque:HiFloat8", (2, 5), w[:10])],
            ),
            "map": file_of(
                map_record("m", [("int32", [2], w[:8]), ("float32", [2, 1], w[8:16])]),
                weight,
                tensors=[
                    Truth.of("m", "opaque:MapParameter", (2,), w[:8], "m#0.0"),
                    Truth.of("m", "opaque:MapParameter", (2, 1), w[8:16], "m#0.1"),
                    t_weight,
                ],
            ),
        }

    def samples(self) -> dict[str, Example]:
        found = {}
        for folder in UNDERSTOOD:
            for name, file in expected(folder)["files"].items():
                if name.endswith(".ckpt"):
                    data = (SAMPLES / folder / name).read_bytes()
                    tensors = [truth_of(param, file["params"][param]) for param in file["order"]]
                    found[f"{folder}/{name}"] = Example(data, tensors)
        return found

    def large(self, nbytes: int) -> tuple[bytes, int]:
        share = nbytes // 4
        return b"".join(record(f"w{n}", "UInt8", [share], bytes(share)) for n in range(4)), 4

    def claims(self, sample: Path) -> bool:
        # The .ckpt of other frameworks in the samples are zips.
        with sample.open("rb") as file:
            return sample.suffix == ".ckpt" and file.read(2) != b"PK"

    def magics(self) -> list[bytes]:
        whole = record("w", "Float32", [1], bytes(4))
        strategy = (SAMPLES / "ms_uneven4_ckpt/strategy.ckpt").read_bytes()
        return [b"\n", whole, whole + b"\n", whole[:9], map_record("m", [])[:5], strategy[:30]]


def test_a_crc_trailer_is_checked_against_the_bytes_before_it() -> None:
    body = record("w", "Float32", [1], b"abcd")
    data = with_crc(body)
    assert locate(data).facts == {"crc32": zlib.crc32(body)}
    assert check("mindspore", BytesSource(data)) is None
    for at in (len(body) - 1, len(data) - 1, len(data) - 10):
        damaged = bytearray(data)
        damaged[at] ^= 1
        problem = check("mindspore", BytesSource(bytes(damaged)))
        assert problem is not None and "CRC32" in problem and problem.startswith("it: ")


def test_a_file_without_a_trailer_has_no_checksum() -> None:
    data = record("w", "Float32", [1], b"abcd")
    assert locate(data).facts == {}
    assert check("mindspore", BytesSource(data)) is None


def test_the_trailer_of_the_real_writer_is_right() -> None:
    path = SAMPLES / "ms_crc/net_crc.ckpt"
    with FileSource(os.fsencode(path)) as source:
        assert examine(source).facts == {"crc32": zlib.crc32(path.read_bytes()[:-17])}
        assert check("mindspore", source) is None


def test_pieces_of_the_real_writers_are_joined_in_order() -> None:
    for name, chunks in expected("ms_chunked")["chunks"].items():
        found = locate((SAMPLES / "ms_chunked" / name).read_bytes())
        pieces = [
            [found.table.name(row), list(found.table.shape(row)), span.nbytes]
            for row in range(found.table.n_tensors)
            for span in found.table.spans(row)
        ]
        assert pieces == [[tag, shape, nbytes] for tag, shape, _, nbytes in chunks]


def test_a_complete_tensor_and_another_of_the_same_name_are_two() -> None:
    data = record("w", "Int8", [3], b"abc") + record("w", "Int8", [3], b"abc")
    found = locate(data)
    assert truth_found(data, found) == [Truth.of("w", "I8", (3,), b"abc")] * 2
    assert found.table.n_payloads == 2


def test_two_cut_tensors_of_the_same_name_are_two() -> None:
    data = b"".join(record("w", "Int8", [3], piece) for piece in (b"ab", b"c", b"d", b"ef"))
    found = locate(data)
    assert [body_of(data, found, n) for n in range(2)] == [b"abc", b"def"]


def test_pieces_of_an_unknown_type_are_joined() -> None:
    data = b"".join(record("h", "HiFloat8", [9], piece) for piece in (b"ab", b"", b"cd"))
    data += record("h", "HiFloat8", [8], b"ef") + record("i", "HiFloat8", [8], b"gh")
    assert truth_found(data, locate(data)) == [
        Truth.of("h", "opaque:HiFloat8", (9,), b"abcd"),
        Truth.of("h", "opaque:HiFloat8", (8,), b"ef"),
        Truth.of("i", "opaque:HiFloat8", (8,), b"gh"),
    ]


@given(st.binary(min_size=1, max_size=60), st.data())
def test_a_tensor_cut_anywhere_is_one_tensor(body: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(body) - 1), max_size=4).map(sorted))
    edges = [0, *cuts, len(body)]
    pieces = [body[a:b] for a, b in pairwise(edges)]
    file = b"".join(record("w", "UInt8", [len(body)], piece) for piece in pieces)
    assert truth_found(file, locate(file)) == [Truth.of("w", "U8", (len(body),), body)]


@pytest.mark.parametrize(
    ("records", "expects", "finds"),
    [
        ([("w", "Float32", [2], bytes(4))], "8", "4"),
        ([("w", "Float32", [2], bytes(4)), ("v", "Float32", [2], bytes(8))], "8", "4"),
        ([("w", "Float32", [2], bytes(4)), ("w", "Float32", [1], bytes(4))], "8", "4"),
        ([("w", "Float32", [2], bytes(4)), ("w", "Int32", [2], bytes(4))], "8", "4"),
        ([("w", "Float32", [2], bytes(4)), ("w", "Float32", [2], bytes(8))], "8", "12"),
        ([("w", "Float32", [2], bytes(9))], "8", "9"),
        ([("w", "Float32", [], b"")], "4", "0"),
        ([("w", "Float32", [], bytes(8))], "4", "8"),
        ([("w", "Float32", [3, 0], bytes(4))], "0", "4"),
        ([("w", "Float32", [HUGE] * 3, bytes(4))], str(HUGE**3 * 4), "4"),
    ],
)
def test_a_tensor_of_the_wrong_size_is_damage_that_names_both_sizes(
    records: list[tuple[str, str, list[int], bytes]], expects: str, finds: str
) -> None:
    problem = damage(b"".join(record(*one) for one in records))
    assert "'w'" in problem
    assert f"takes {expects} bytes, found {finds}" in problem


def test_the_sizes_of_a_cut_tensor_are_those_of_all_its_pieces() -> None:
    problem = damage(record("w", "Int8", [9], b"abc") + record("w", "Int8", [9], b"de"))
    assert "tensor 'w': Int8 [9] takes 9 bytes, found 5" in problem


def test_a_truncated_file_names_the_tensor_that_is_cut() -> None:
    data = record("first", "Int8", [3], b"abc") + record("second", "Int8", [200], bytes(200))
    problem = damage(data[:-1])
    assert "'second'" in problem and "truncated" in problem
    assert str(len(data)) in problem and str(len(data) - 1) in problem


def test_a_negative_dimension_is_damage() -> None:
    good = record("w", "Float32", [1], bytes(4))
    assert "2^63" in damage(good + record("v", "Float32", [-1], bytes(4)))


def test_a_cut_off_content_of_the_first_record_is_damage_not_another_format() -> None:
    data = record("w", "Float32", [1000], bytes(4000))
    for length in (30, 100, 3999):
        assert "truncated" in damage(data[:length])


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        (b"\x0b\x00", "0x0b"),
        (b"\x0a\x02\x12\x00", "0x12"),
        (b"\x0a" + b"\xff" * 11, "2^63"),
        (b"\x0a" + varint(2**64 - 1), "2^63"),
        (field(0x0A, field(0x0A, b"v") + field(0x22, b"xx")), "0x22"),
        (field(0x0A, field(0x0A, b"v")), "does not fit"),
        (field(0x0A, b"\x0a\x7fv\x12\x00"), "does not fit"),
        (field(0x0A, field(0x0A, b"v") + field(0x12, b"\x0a\x01x")), "type"),
        (field(0x0A, field(0x0A, b"v") + field(0x12, b"\x12\x7fInt8")), "does not fit"),
        (field(0x0A, field(0x0A, b"v") + field(0x12, b"\x08\x01")), "type"),
        (field(0x0A, field(0x0A, b"v") + field(0x12, field(0x12, b""))), "type of 0 bytes"),
        (
            field(0x0A, field(0x0A, b"v") + field(0x12, field(0x12, b"Int8") + field(0x22, b"x"))),
            "0x22",
        ),
        (
            field(0x0A, field(0x0A, b"v") + field(0x12, field(0x12, b"Int8") + b"\x1a\x7fx")),
            "do not fill",
        ),
        (
            field(0x0A, field(0x0A, b"v") + field(0x12, tensor_proto("Int8", [1], b"x")) + b"\0"),
            "does not fill its record",
        ),
        (
            field(0x0A, field(0x0A, b"v") + b"\x12\x08" + tensor_proto("Int8", [1], b"x")),
            "does not fill its record",
        ),
        (field(0x0A, field(0x0A, b"v") + field(0x1A, b"\x0a\x7fxyz")), "does not fit"),
        (field(0x0A, field(0x0A, b"v") + field(0x1A, b"\x0b\x00")), "0x0b"),
        (field(0x0A, field(0x0A, b"v") + field(0x1A, b"\x0a\x03\x12\x7fx")), "does not fit"),
        (record(b"\xff\xfe", "Int8", [1], b"x"), "UTF-8"),
        (record("v", "Int8", [1] * 1025, b"x"), "1024 dimensions"),
        (record("v", "T" * 257, [1], b"x"), "257 bytes"),
        (record("v" * (1024 * 1024 + 1), "Int8", [1], b"x"), "1048577 bytes"),
    ],
)
def test_a_record_that_breaks_a_rule_is_damage_that_names_it(tail: bytes, why: str) -> None:
    assert why in damage(record("w", "Float32", [1], bytes(4)) + tail)


@pytest.mark.parametrize(
    "name",
    ["a\0b", "../../etc/passwd", "/abs", "a//b/./c", "名字", "😀.weight", " ", "\n", "x" * 65536],
)
def test_an_odd_name_is_kept_as_it_is(name: str) -> None:
    data = record(name, "Int8", [1], b"x") + record("after", "Int8", [1], b"y")
    assert truth_found(data, locate(data)) == [
        Truth.of(name, "I8", (1,), b"x"),
        Truth.of("after", "I8", (1,), b"y"),
    ]


def test_an_empty_name_is_a_name() -> None:
    data = record("", "Int8", [1], b"x")
    assert truth_found(data, locate(data)) == [Truth.of("", "I8", (1,), b"x")]


def test_a_long_name_across_windows_is_found() -> None:
    names = [f"n{n}" * 9000 for n in range(12)]
    data = b"".join(record(name, "Int8", [2], b"xy") for name in names)
    assert locate(data).table.names() == names


def test_a_tensor_may_have_more_than_64_dimensions() -> None:
    data = record("w", "Int8", [1] * 100, b"x")
    assert truth_found(data, locate(data)) == [Truth.of("w", "I8", (1,) * 100, b"x")]


def test_lengths_need_not_be_written_minimally() -> None:
    inner = b"\x08\x81\x00\x12\x04Int8\x1a\x81\x00x"
    data = b"\x0a\x81\x80\x00w\x12" + bytes([0x80 | len(inner), 0x00]) + inner
    data = b"\x0a" + bytes([0x80 | len(data), 0x80, 0x00]) + data
    assert truth_found(data, locate(data)) == [Truth.of("w", "I8", (1,), b"x")]


def test_thousands_of_unknown_types_are_refused_before_they_fill_the_table() -> None:
    data = b"".join(record("w", f"T{n}", [1], b"x") for n in range(1100))
    assert "unknown tensor types" in damage(data)


def test_an_empty_map_has_no_tensors() -> None:
    data = record("w", "Int8", [1], b"x") + map_record("m", [])
    assert truth_found(data, locate(data)) == [Truth.of("w", "I8", (1,), b"x")]


def test_a_map_ends_a_cut_tensor() -> None:
    data = record("w", "Int8", [2], b"x") + map_record("m", [("int32", [1], bytes(4))])
    assert "takes 2 bytes, found 1" in damage(data)
    assert "takes 2 bytes, found 1" in damage(data + record("w", "Int8", [2], b"y"))


@pytest.mark.parametrize("cipher", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_an_encrypted_file_is_refused_by_the_name_of_its_cipher(cipher: str) -> None:
    data = (SAMPLES / f"ms_encrypted/net_{cipher}.ckpt").read_bytes()
    with pytest.raises(RefusedFileError, match=cipher):
        MindSpore().locate(BytesSource(data), TableBuilder())
    found = locate(data)
    assert (found.condition, found.table.n_tensors) == ("refused", 0)


def test_strategy_and_group_files_are_not_taken_for_checkpoints() -> None:
    paths = [*SAMPLES.glob("ms_strategies/*.ckpt"), *SAMPLES.glob("ms_*/*strategy.ckpt")]
    assert len(paths) == 17
    for path in paths:
        data = path.read_bytes()
        kind = "group" if "group" in path.name else "strategy"
        with pytest.raises(NotUnderstoodError, match=f"{kind} file, not a checkpoint"):
            MindSpore().locate(BytesSource(data), TableBuilder())
        assert locate(data).condition == "opaque"


def test_what_is_no_checkpoint_at_all_is_damaged_when_it_is_located_all_the_same() -> None:
    for data in (b"hello", b"\x08\x01", b"\x0a", b"\nHello", bytes(40)):
        with pytest.raises(DamagedFileError):
            MindSpore().locate(BytesSource(data), TableBuilder())


def test_other_protobuf_files_are_not_claimed() -> None:
    vocabulary = b"".join(
        field(0x0A, field(0x0A, piece) + b"\x15" + bytes(4) + b"\x18\x01") for piece in (b"a", b"b")
    )
    program = field(0x0A, b"\x08\x00\x10\x00" + field(0x1A, field(0x0A, b"feed")))
    onnx = b"\x08\x0a" + field(0x12, b"pytorch") + field(0x3A, field(0x0A, b"x") * 3)
    saved_model = b"\x08\x01" + field(0x12, field(0x0A, b"\x22\x05serve") + field(0x12, b"\n\0"))
    for data in (vocabulary, program, onnx, saved_model):
        assert not MindSpore().matches(data, len(data))


def test_twenty_thousand_small_records_are_located_in_well_under_half_a_second(
    tmp_path: Path,
) -> None:
    path = tmp_path / "many.ckpt"
    body = bytes(64)
    path.write_bytes(b"".join(record(f"layer.{n}.w", "Float32", [16], body) for n in range(20000)))
    fastest = 9.0
    for _ in range(3):
        with FileSource(os.fsencode(path)) as source:
            start = time.process_time()
            found = examine(source)
            fastest = min(fastest, time.process_time() - start)
    assert found.table.n_tensors == 20000
    assert fastest < 0.5


NAMES = st.sampled_from(["a", "layers.0.weight", "\u00e9", "n" * 130, b"\xff\xfe", ""])
KINDS = st.sampled_from(["Float32", "Int8", "Int4", "String", "Str", "Float8"])
RECORDS = st.one_of(
    # Whole tensors of few shapes, as nearly all are.
    st.builds(
        lambda name, n: record(name, "Float32", [2, n], bytes(8 * n)), NAMES, st.integers(0, 3)
    ),
    # Anything: pieces, wrong lengths, the shape [0].
    st.builds(
        lambda name, kind, dims, n: record(name, kind, dims, bytes(n)),
        NAMES,
        KINDS,
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([0, 1, 4, 8, 12, 300]),
    ),
    st.builds(lambda n: map_record("map", [("Int32", [n], bytes(4 * n))] * 3), st.integers(0, 2)),
)


@given(
    st.lists(RECORDS, min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2),
    st.integers(0, 3),
)
def test_the_quick_way_through_ordinary_records_finds_what_the_careful_one_does(
    records: list[bytes], changes: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(b"".join(records))
    for at, byte in changes:
        if at < len(data):
            data[at] = byte
    source = BytesSource(bytes(data[: len(data) - cut]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mindspore._Walk, "_ordinary", lambda self, window, i, base: (i, 0))
        careful = examine(source)
    quick = examine(source)
    assert quick[:4] == careful[:4]
    for name, column in careful.table.columns.items():
        assert quick.table.columns[name].tolist() == column.tolist(), name
    for name in ("dtypes", "encodings", "fills"):
        assert getattr(quick.table, name) == getattr(careful.table, name)


def test_of_ordinary_records_only_the_heads_are_read_and_one_of_each_kind_with_care(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = record("w", "Int8", [100_000], bytes(100_000))
    (tmp_path / "a.ckpt").write_bytes(one * 100)
    careful: list[bytes] = []
    header = mindspore._tensor_header

    def counted(data: bytes, i: int, stop: int) -> tuple[tuple[int, ...], bytes, int, int]:
        careful.append(data)
        return header(data, i, stop)

    monkeypatch.setattr(mindspore, "_tensor_header", counted)
    reads: list[int] = []
    with FileSource(bytes(tmp_path / "a.ckpt")) as source:
        exactly = source._exactly

        def read(offset: int, nbytes: int) -> bytes:
            reads.append(nbytes)
            return exactly(offset, nbytes)

        monkeypatch.setattr(source, "_exactly", read)
        assert examine(source).table.n_tensors == 100
    assert len(careful) <= 3
    assert sum(reads) < 100 * 6000
