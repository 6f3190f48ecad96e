"""The table of dtypes against numpy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.dtypes import BY_MINDSPORE, BY_NAME, nbytes_of, numpy_dtype, unpack

PLAIN = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "C64": np.complex64,
    "C128": np.complex128,
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
PACKED = {
    "F4": (4, ml_dtypes.float4_e2m1fn),
    "F6_E2M3": (6, ml_dtypes.float6_e2m3fn),
    "F6_E3M2": (6, ml_dtypes.float6_e3m2fn),
}


def test_the_two_tables_here_name_every_dtype() -> None:
    assert {*PLAIN, *PACKED, "I4X2"} == set(BY_NAME)


@pytest.mark.parametrize("name", PLAIN)
def test_an_unpacked_dtype_is_the_numpy_dtype_of_its_width(name: str) -> None:
    dtype = np.dtype(PLAIN[name])
    assert numpy_dtype(name) == dtype
    assert BY_NAME[name].bits == 8 * dtype.itemsize
    assert nbytes_of(name, 7) == 7 * dtype.itemsize


@pytest.mark.parametrize("name", ["U16", "I64", "F32", "C64"])
def test_a_big_endian_dtype_reads_big_endian_bytes(name: str) -> None:
    dtype = numpy_dtype(name, True)
    raw = np.arange(6).astype(PLAIN[name]).byteswap().tobytes()
    assert np.array_equal(np.frombuffer(raw, dtype), np.arange(6))


@pytest.mark.parametrize("name", [*PACKED, "I4X2"])
def test_a_packed_dtype_comes_as_bytes(name: str) -> None:
    assert numpy_dtype(name) == np.uint8
    assert BY_NAME[name].packed


def test_elements_that_do_not_end_on_a_byte_have_no_size() -> None:
    assert [nbytes_of("F4", n) for n in range(4)] == [0, None, 1, None]
    assert [nbytes_of("F6_E2M3", n) for n in range(5)] == [0, None, None, None, 3]
    assert nbytes_of("I4X2", 3) == 3


def test_absurd_counts_do_not_overflow() -> None:
    assert nbytes_of("F64", 2**63) == 2**66


@pytest.mark.parametrize("name", PACKED)
@given(data=st.data())
def test_unpacking_undoes_packing_by_arithmetic(name: str, data: st.DataObject) -> None:
    width, dtype = PACKED[name]
    rows = data.draw(st.integers(0, 5))
    codes = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=4 * rows, max_size=4 * rows))
    number = sum(code << (width * at) for at, code in enumerate(codes))
    packed = np.frombuffer(number.to_bytes(rows * width // 2, "little"), np.uint8)
    found = unpack(packed, name, (rows, 4))
    assert found.dtype == dtype and found.shape == (rows, 4)
    assert found.reshape(-1).view(np.uint8).tolist() == codes


def test_the_values_of_f4_are_those_of_the_standard() -> None:
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    packed = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)
    found = unpack(packed, "F4", (16,)).astype(np.float32)
    assert found.tolist() == [*magnitudes, *(-m for m in magnitudes)]


@given(st.lists(st.tuples(st.integers(-8, 7), st.integers(-8, 7)), min_size=1, max_size=9))
def test_unpacking_int4_gives_the_low_nibble_first(pairs: list[tuple[int, int]]) -> None:
    packed = np.array([(low & 15) | (high & 15) << 4 for low, high in pairs], np.uint8)
    found = unpack(packed, "I4X2", (1, len(pairs)))
    assert found.dtype == ml_dtypes.int4 and found.shape == (1, 2 * len(pairs))
    assert found.astype(np.int64).reshape(-1, 2).tolist() == [list(pair) for pair in pairs]


def test_unpacking_one_int4_byte_of_no_shape_gives_two_elements() -> None:
    assert unpack(np.array([0xF1], np.uint8), "I4X2", ()).astype(int).tolist() == [1, -1]


def test_unpacking_what_is_not_packed_is_an_error() -> None:
    with pytest.raises(ValueError, match="F32"):
        unpack(np.zeros(4, np.uint8), "F32", (1,))


def test_unpacking_takes_arrays_of_any_layout() -> None:
    packed = np.arange(12, dtype=np.uint8).reshape(3, 4)
    expected = unpack(np.ascontiguousarray(packed.T), "F4", (4, 6))
    assert np.array_equal(unpack(packed.T, "F4", (4, 6)).view(np.uint8), expected.view(np.uint8))


def test_mindspores_names_are_the_types_its_checkpoints_state() -> None:
    spelled = (
        "Int8 UInt8 Int16 UInt16 Int32 UInt32 Int64 UInt64 Float16 Float32 Float64 BFloat16 Bool"
        " Complex64 Complex128 Int4"
    )
    assert set(BY_MINDSPORE) == set(spelled.split())
    assert BY_MINDSPORE["Int4"].bits == 8
