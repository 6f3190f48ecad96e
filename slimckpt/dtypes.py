"""The one table of dtypes: our name, its width, how numpy, HDF5 and each format spell it.

Names are those of safetensors (its ``Dtype`` enum, 0.8) with three more: ``F64``'s complex
``C128``, and ``I4X2``, MindSpore's ``qint4x2`` (two signed 4-bit integers a byte, the shape
counting bytes).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

OPAQUE = "opaque:"
"""Prefix of the dtype of entries that are bytes to us: ``opaque:str``, ``opaque:HiFloat8``."""


@dataclass(frozen=True, slots=True)
class Dtype:
    """One row.

    ``bits`` is the width of one element of the shape. ``numpy`` is a numpy name, or a name of
    ``ml_dtypes``; for packed dtypes it is what :func:`unpack` gives, and arrays come as ``uint8``.
    """

    name: str
    bits: int
    numpy: str
    mindspore: str | None = None
    hdf5: bool = False
    """Whether HDF5 has a type with exactly this meaning."""
    packed: bool = False


_TABLE = (
    Dtype("BOOL", 8, "bool", "Bool", hdf5=True),
    Dtype("U8", 8, "uint8", "UInt8", hdf5=True),
    Dtype("I8", 8, "int8", "Int8", hdf5=True),
    Dtype("U16", 16, "uint16", "UInt16", hdf5=True),
    Dtype("I16", 16, "int16", "Int16", hdf5=True),
    Dtype("U32", 32, "uint32", "UInt32", hdf5=True),
    Dtype("I32", 32, "int32", "Int32", hdf5=True),
    Dtype("U64", 64, "uint64", "UInt64", hdf5=True),
    Dtype("I64", 64, "int64", "Int64", hdf5=True),
    Dtype("F16", 16, "float16", "Float16", hdf5=True),
    Dtype("BF16", 16, "bfloat16", "BFloat16", hdf5=True),
    Dtype("F32", 32, "float32", "Float32", hdf5=True),
    Dtype("F64", 64, "float64", "Float64", hdf5=True),
    Dtype("C64", 64, "complex64", "Complex64", hdf5=True),
    Dtype("C128", 128, "complex128", "Complex128", hdf5=True),
    Dtype("F8_E5M2", 8, "float8_e5m2", hdf5=True),
    Dtype("F8_E4M3", 8, "float8_e4m3fn"),
    Dtype("F8_E8M0", 8, "float8_e8m0fnu"),
    Dtype("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    Dtype("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    Dtype("F4", 4, "float4_e2m1fn", packed=True),
    Dtype("F6_E2M3", 6, "float6_e2m3fn", packed=True),
    Dtype("F6_E3M2", 6, "float6_e3m2fn", packed=True),
    Dtype("I4X2", 8, "int4", "Int4", packed=True),
)

BY_NAME = {row.name: row for row in _TABLE}
BY_MINDSPORE = {row.mindspore: row for row in _TABLE if row.mindspore}


@cache
def numpy_dtype(name: str, big_endian: bool = False) -> np.dtype[Any]:
    """The numpy dtype in which bytes of dtype ``name`` are viewed; ``uint8`` when packed."""
    row = BY_NAME[name]
    if row.packed:
        return np.dtype(np.uint8)
    # A single byte has no order, and the one-byte dtypes of ml_dtypes must not be given one.
    swapped = big_endian and row.bits > 8
    found: np.dtype[Any] = _element(row.numpy).newbyteorder(">" if swapped else "<")
    return found


def _element(spelling: str) -> np.dtype[Any]:
    try:
        return np.dtype(spelling)
    except TypeError:
        import ml_dtypes  # 27 ms; only where a dtype needs it

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, spelling))
        return found


def nbytes_of(name: str, count: int) -> int | None:
    """Bytes of ``count`` elements, or ``None`` where they do not end on a byte."""
    bits = BY_NAME[name].bits * count
    return bits // 8 if bits % 8 == 0 else None


def unpack(packed: np.ndarray, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements of a packed dtype, one each.

    Parameters
    ----------
    packed : uint8 array
        The bytes as stored, any shape.
    name : str
        ``F4``, ``F6_E2M3``, ``F6_E3M2`` or ``I4X2``.
    shape : tuple of int
        The shape the file declares.

    Returns
    -------
    array of ``float4_e2m1fn``, ``float6_*`` or ``int4``
        Of ``shape``; for ``I4X2`` the last axis is doubled, since its shape counts bytes.

    Notes
    -----
    Element 0 lies in the lowest bits of byte 0 (as torch's ``float4_e2m1fn_x2`` and MindSpore's
    ``qint4x2`` do); six-bit elements follow each other without gaps, lowest bits first.
    """
    row = BY_NAME[name]
    if not row.packed:
        raise ValueError(f"{name} is not a packed dtype")
    width = 4 if name == "I4X2" else row.bits
    if name == "I4X2":
        shape = (*shape[:-1], shape[-1] * 2) if shape else (2,)
    bits = np.unpackbits(np.ascontiguousarray(packed).reshape(-1), bitorder="little")
    elements = bits.reshape(-1, width)
    codes = np.packbits(elements, axis=1, bitorder="little").reshape(shape)
    if name == "I4X2":
        codes = codes.view(np.int8)
        return np.where(codes > 7, codes - 16, codes).astype(_element(row.numpy))
    return codes.view(_element(row.numpy))
