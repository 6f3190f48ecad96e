"""HDF5 types for payloads: only where HDF5's meaning is exactly the dtype's."""

from __future__ import annotations

from functools import cache
from typing import Any

from slimckpt import dtypes


@cache
def hdf5_type(name: str, big_endian: bool) -> Any:
    """The ``h5py.h5t`` type of a dtype, or ``None`` where HDF5 cannot say it.

    bfloat16 and float8_e5m2 are IEEE-like floats of other widths, which every libhdf5 converts;
    float8_e4m3fn is not, since its highest exponent holds numbers.
    """
    from h5py import h5t

    row = dtypes.BY_NAME.get(name)
    if row is None or not row.hdf5:
        return None
    if name == "BF16":
        kind = _float(bits=16, exponent=8, bias=127)
    elif name == "F8_E5M2":
        kind = _float(bits=8, exponent=5, bias=15)
    else:
        return h5t.py_create(dtypes.numpy_dtype(name, big_endian), logical=False)
    if big_endian:
        kind.set_order(h5t.ORDER_BE)
    return kind


def _float(bits: int, exponent: int, bias: int) -> Any:
    from h5py import h5t

    kind = h5t.IEEE_F16LE.copy()
    mantissa = bits - 1 - exponent
    kind.set_fields(bits - 1, mantissa, exponent, 0, mantissa)
    kind.set_ebias(bias)
    kind.set_precision(bits)
    kind.set_size(bits // 8)
    return kind
