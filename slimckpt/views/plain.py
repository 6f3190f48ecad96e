"""The common case, prepared for all tensors of a file at once: one run of bytes of one mapped file.

:class:`~slimckpt.views.arrays.Arrays` can do everything and takes some 25 microseconds a tensor;
this takes two. What is not plain (encoded, strided, in several pieces, packed, damaged) is left to
it, and so is every error.
"""

from __future__ import annotations

import math

import numpy as np

from slimckpt.dtypes import BY_NAME, numpy_dtype
from slimckpt.errors import SlimckptError
from slimckpt.model import FLOOR, HOME_PAYLOAD, RAW, Bytes
from slimckpt.sources.backends import Backend
from slimckpt.views.arrays import Array
from slimckpt.views.providers import Holding, Stretch

_NOT_PLAIN = -1


class PlainTensors:
    """Read-only arrays of the plain tensors of one file, by row."""

    def __init__(self, holding: Holding, backend: Backend) -> None:
        table, columns = holding.table, holding.table.columns
        self._backend = backend
        self._files, file, start = holding.places()
        self._mapped: dict[int, Bytes | None] = {}
        dtypes = [
            numpy_dtype(name, bool(swapped))
            if name in BY_NAME and not BY_NAME[name].packed
            else None
            for name in table.dtypes
            for swapped in (0, 1)
        ]
        codes = columns["dtype"].astype(np.int64) * 2 + (columns["big_endian"] != 0)
        alignment = np.array([dtype.alignment if dtype else 0 for dtype in dtypes], np.int64)[codes]
        homes = np.where(columns["home"] == HOME_PAYLOAD, columns["home_row"], 0)
        plain = (columns["home"] == HOME_PAYLOAD) & (alignment > 0) & (columns["nbytes"] > 0)
        plain &= (homes >= 0) & (homes < table.n_payloads)
        if not table.n_payloads:
            plain[:] = False
            file, start = np.full(1, _NOT_PLAIN), np.zeros(1, np.int64)
            sizes = start
        else:
            sizes = table.payload_nbytes
        homes = np.where(plain, homes, 0)
        raw = np.array([encoding == RAW for encoding in table.encodings], np.bool_)
        plain &= raw[columns["encoding"]] & (np.diff(columns["stride_end"], prepend=0) == 0)
        at, nbytes = columns["offset"], columns["nbytes"]
        plain &= (at >= 0) & (at <= sizes[homes] - nbytes)
        offset = start[homes] + at
        plain &= (nbytes >= FLOOR) | (offset % np.maximum(alignment, 1) == 0)
        self._file = np.where(plain, file[homes], _NOT_PLAIN).tolist()
        self._offset = offset.tolist()
        self._nbytes = nbytes.tolist()
        self._dtype = [dtypes[code] for code in codes.tolist()]
        self._dims, self._dim_end = columns["dims"].tolist(), [*columns["dim_end"].tolist(), 0]

    def array(self, row: int) -> Array | None:
        """The tensor, or ``None`` where it is not plain."""
        number = self._file[row]
        if number == _NOT_PLAIN:
            return None
        mapped = self._mapped[number] if number in self._mapped else self._map(number)
        if mapped is None:
            return None
        # The end of the row before the first is behind the last.
        shape = tuple(self._dims[self._dim_end[row - 1] : self._dim_end[row]])
        dtype = self._dtype[row]
        assert dtype is not None
        if math.prod(shape) * dtype.itemsize != self._nbytes[row]:
            return None
        try:
            found: Array = np.ndarray(shape, dtype, mapped, self._offset[row])
        except ValueError:
            return None
        return found

    def place(self, row: int) -> Stretch | None:
        """Where the tensor lies, or ``None`` where it is not plain."""
        if self._file[row] == _NOT_PLAIN:
            return None
        path, size = self._files[self._file[row]]
        return Stretch(path, self._offset[row], self._nbytes[row], size)

    def _map(self, number: int) -> Bytes | None:
        path, size = self._files[number]
        try:
            self._mapped[number] = self._backend.mapped(path, size)
        except SlimckptError:
            return None
        return self._mapped[number]
