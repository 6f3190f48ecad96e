"""Decoders: exact, bounded, and honest about what they do not know."""

import io
import json
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.encodings import decoder, fletcher32
from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.model import Table, TableBuilder

BYTES = st.binary(max_size=300)


def decode(encoding: str, stored: bytes, *lengths: int) -> bytes:
    data = np.frombuffer(stored, np.uint8)
    return decoder(encoding)(data, lengths or (len(stored),)).tobytes()


def chunks(shape: list[int], chunk: list[int], itemsize: int = 1, **more: Any) -> str:
    told = {"shape": shape, "chunk": chunk, "itemsize": itemsize, **more}
    return "hdf5-chunks:" + json.dumps(told)


def deflated(body: bytes) -> bytes:
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    return stream.compress(body) + stream.flush()


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@given(BYTES)
def test_deflate_gives_back_what_was_deflated(body: bytes) -> None:
    assert decode(f"deflate:{len(body)}", deflated(body)) == body


@given(BYTES.filter(bool), st.integers(-3, 3).filter(bool))
def test_deflated_bytes_of_another_length_are_damage(body: bytes, off: int) -> None:
    with pytest.raises(DamagedFileError):
        decode(f"deflate:{max(len(body) + off, 0)}", deflated(body))


@given(BYTES, st.integers(0, 400), st.integers(0, 7))
def test_damaged_deflated_bytes_end_in_damage_or_in_the_length_declared(
    body: bytes, at: int, bit: int
) -> None:
    stored = bytearray(deflated(body))
    stored[at % len(stored)] ^= 1 << bit
    with suppress(DamagedFileError):
        assert len(decode(f"deflate:{len(body)}", bytes(stored))) == len(body)


def test_a_deflate_bomb_takes_no_more_memory_than_declared() -> None:
    bomb = deflated(bytes(100_000_000))
    with at_most(4_000_000), pytest.raises(DamagedFileError, match="do not end"):
        decode("deflate:1000000", bomb)


def test_a_length_that_deflate_cannot_reach_is_damage_before_memory_is_taken() -> None:
    with at_most(1_000_000), pytest.raises(DamagedFileError, match="cannot become"):
        decode("deflate:1000000000000", deflated(bytes(1000)))


def test_trailing_bytes_behind_a_deflated_stream_are_damage() -> None:
    with pytest.raises(DamagedFileError):
        decode("deflate:5", deflated(b"abcde") + b"x")


@pytest.mark.parametrize("encoding", ["zstd:3", "deflated:3", "", "hdf5", "hdf5-chunk:{}"])
def test_an_encoding_that_is_not_known_is_named(encoding: str) -> None:
    with pytest.raises(NotUnderstoodError, match="newer"):
        decoder(encoding)


def test_chunks_are_placed_by_their_number_and_cut_at_the_edge() -> None:
    body = np.arange(35, dtype=np.uint8).reshape(5, 7)
    padded = np.full((6, 9), 99, np.uint8)
    padded[:5, :7] = body
    stored = b"".join(padded[i : i + 2, j : j + 3].tobytes() for i in (0, 2, 4) for j in (0, 3, 6))
    assert decode(chunks([5, 7], [2, 3]), stored, *[6] * 9) == body.tobytes()


def test_chunks_that_are_missing_are_filled() -> None:
    found = decode(chunks([5], [2], 2, stored=[[1, 1]], fill="0102"), b"abcd", 4)
    assert found == b"\1\2\1\2abcd\1\2"
    assert decode(chunks([5], [2], stored=[[0, 1], [2, 1]]), b"abcd", 2, 2) == b"ab\0\0c"


def test_a_mask_names_the_filters_that_a_chunk_skipped() -> None:
    told = chunks([4], [2], filters=[[2, 1], [1, 6]], masks=[[1, 2]])
    packed = zlib.compress(b"ab")
    assert decode(told, packed + b"cd", len(packed), 2) == b"abcd"


@pytest.mark.parametrize(
    ("number", "name"),
    [(4, "szip"), (5, "nbit"), (6, "scaleoffset"), (32015, "zstd"), (9, "an unkn")],
)
def test_a_filter_that_is_not_undone_is_named(number: int, name: str) -> None:
    with pytest.raises(NotUnderstoodError, match=rf"filter {number} \({name}"):
        decode(chunks([2], [2], filters=[[number]]), b"ab")


@pytest.mark.parametrize("lengths", [(1,), (3,), (2, 2), ()])
def test_chunks_of_other_lengths_or_numbers_are_damage(lengths: tuple[int, ...]) -> None:
    with pytest.raises(DamagedFileError):
        decoder(chunks([2], [2]))(np.zeros(sum(lengths), np.uint8), lengths)


def test_a_shape_that_no_memory_holds_is_an_error_at_once() -> None:
    with pytest.raises((MemoryError, ValueError)):
        decode(chunks([2**50, 2**12], [1, 2**12], stored=[[0, 1]]), bytes(2**12))


def _stored(creation: Any, body: bytes) -> bytes:
    """What libhdf5 stores of one chunk."""
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        creation.set_chunk((len(body),))
        space = h5s.create_simple((len(body),))
        made = h5d.create(file.id, b"d", h5t.STD_U8LE, space, creation)
        made.write(h5s.ALL, h5s.ALL, np.frombuffer(body, np.uint8))
        file.flush()
        return made.read_direct_chunk((0,))[1]


@given(st.binary(min_size=1, max_size=2000))
def test_fletchers_checksum_is_that_of_libhdf5(body: bytes) -> None:
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_fletcher32()
    stored = _stored(creation, body)
    assert int.from_bytes(stored[-4:], "little") == fletcher32(np.frombuffer(body, np.uint8))
    assert decode(chunks([len(body)], [len(body)], filters=[[3]]), stored) == body


@pytest.mark.parametrize(
    "body", [b"\xff" * 400_001, b"\0" * 300_000, b"\xff\xff", b"\0\1" * 65_535]
)
def test_fletchers_checksum_of_long_and_extreme_bodies_is_that_of_libhdf5(body: bytes) -> None:
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_fletcher32()
    assert decode(chunks([len(body)], [len(body)], filters=[[3]]), _stored(creation, body)) == body


@given(st.lists(st.sampled_from([b"a", b"bc", b"\0" * 40, b"xyz" * 90]), min_size=1, max_size=60))
def test_lzf_gives_back_what_h5py_made_of_it(parts: list[bytes]) -> None:
    body = b"".join(parts)
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        data = np.frombuffer(body, np.uint8)
        made = file.create_dataset("d", data=data, chunks=data.shape, compression="lzf")
        file.flush()
        mask, stored = made.id.read_direct_chunk((0,))
    if not mask:
        assert decode(chunks([len(body)], [len(body)], filters=[[32000]]), stored) == body


@given(BYTES, st.integers(1, 500))
def test_hostile_lzf_is_damage_or_of_the_length_declared(stored: bytes, nbytes: int) -> None:
    with suppress(DamagedFileError):
        assert len(decode(chunks([nbytes], [nbytes], filters=[[32000]]), stored)) == nbytes


@given(st.binary(max_size=64), st.integers(0, 9))
def test_shuffled_bytes_are_put_back(body: bytes, itemsize: int) -> None:
    count = len(body) // max(itemsize, 1)
    whole = body[: count * itemsize]
    shuffled = body
    if itemsize > 1 and count:
        columns = [whole[n::itemsize] for n in range(itemsize)]
        shuffled = b"".join(columns) + body[len(whole) :]
    if body:
        told = chunks([len(body)], [len(body)], filters=[[2, itemsize]])
        assert decode(told, shuffled) == body


def test_more_encodings_than_16_bits_count_survive_a_merge() -> None:
    tables = []
    for first in (0, 50_000):
        builder = TableBuilder()
        for n in range(first, first + 50_000):
            row = builder.payload([(n, 1)])
            builder.tensor("w", "U8", [n], n, payload=row, encoding=f"deflate:{n}")
        tables.append(builder.build())
    table = Table.concatenate(tables)
    for row in (0, 49_999, 50_000, 70_000, 99_999):
        assert table.tensor(row).encoding == f"deflate:{row}"


@given(BYTES)
def test_bytes_that_a_pickle_holds_as_text_come_back(body: bytes) -> None:
    text = body.decode("latin-1").encode("utf-8")
    assert decode(f"latin-1-as-utf-8:{len(body)}", text) == body


@given(BYTES, st.integers(-3, 3).filter(bool))
def test_text_of_another_length_is_damage(body: bytes, off: int) -> None:
    text = body.decode("latin-1").encode("utf-8")
    with pytest.raises(DamagedFileError, match=f"{len(body)} characters, expected"):
        decode(f"latin-1-as-utf-8:{len(body) + off}", text)


@pytest.mark.parametrize("text", [b"\xff", b"\xc3", "Ā".encode(), b"\xed\xa0\x80"])
def test_text_that_is_no_bytes_is_damage(text: bytes) -> None:
    with pytest.raises(DamagedFileError, match="its bytes, which are text, are damaged"):
        decode("latin-1-as-utf-8:1", text)


@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8"])
@given(st.lists(st.floats(width=16), max_size=20))
def test_marked_numbers_are_negated_bit_by_bit(dtype: str, values: list[float]) -> None:
    numbers = np.array(values, dtype)
    before = numbers.tobytes()
    assert decode(f"neg:{numbers.itemsize}", before) == np.negative(numbers).tobytes()
    assert numbers.tobytes() == before


@pytest.mark.parametrize("dtype", ["<c8", "<c16"])
@given(st.lists(st.complex_numbers(max_magnitude=1e30), max_size=20))
def test_marked_numbers_are_conjugated_or_negated(dtype: str, values: list[complex]) -> None:
    numbers = np.array(values, dtype)
    width = numbers.itemsize // 2
    assert decode(f"conj:{width}", numbers.tobytes()) == np.conjugate(numbers).tobytes()
    assert decode(f"neg:{width}", numbers.tobytes()) == np.negative(numbers).tobytes()


def test_numbers_that_are_read_only_are_not_changed_where_they_lie() -> None:
    data = np.arange(4, dtype="<f4").view(np.uint8)
    data.flags.writeable = False
    found = decoder("neg:4")(data, (16,))
    assert found.view("<f4").tolist() == [0, -1, -2, -3]
    assert data.view("<f4").tolist() == [0, 1, 2, 3]
