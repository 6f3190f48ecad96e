"""Tensors of Paddle that lie in the memory of numpy arrays.

Found in Paddle 3.0 and 3.3.1 on a CPU: ``from_dlpack`` shares the memory of an array of any dtype
but ``uint16`` (3.0 refuses it, 3.3 takes it for ``bfloat16``), ``Tensor.view(dtype)`` shares too;
``to_tensor`` copies. Paddle 2.6 copies in ``from_dlpack`` as well. A tensor keeps the array's
memory, and lets go of it when the last view of it is gone; but Paddle finds what to let go of by
its address, so that memory given to it twice is never freed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slimckpt.errors import NotUnderstoodError
from slimckpt.formats.torch_tensors import c_order
from slimckpt.frameworks.installed import version_of
from slimckpt.views.arrays import Array, Arrays, tensor_of
from slimckpt.views.checkpoint import Checkpoint
from slimckpt.views.mapping import TensorView

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "U32": "uint32", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "C128": "complex128", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""Paddle's names of our dtypes; it has no U16. U32 and U64 came with 3.3."""
_THROUGH = {
    "bfloat16": "int16",
    "float8_e4m3fn": "int8",
    "float8_e5m2": "int8",
    "uint32": "int32",
    "uint64": "int64",
}
"""Dtypes that tensors get by a view of integers, since versions differ in what they share."""
_SHARES = (3, 0)
ALIGNMENT = 16
"""What the widest dtype wants."""


def is_aligned(array: Array) -> bool:
    return array.ctypes.data % ALIGNMENT == 0


def of_array(paddle: Any, array: Array, dtype: str) -> Any:
    """A tensor on the CPU that shares the memory of an array where Paddle can, else a copy.

    Parameters
    ----------
    array
        Writable, in C order, in the byte order of the machine.
    dtype : str
        Paddle's name of the dtype, of the width of the array's.
    """
    through = _THROUGH.get(dtype)
    bits = array if through is None else array.view(through)
    if array.size and version_of(paddle) >= _SHARES:
        # As a capsule, which is what all versions take.
        found = paddle.utils.dlpack.from_dlpack(bits.__dlpack__())
    else:
        found = paddle.to_tensor(bits, place="cpu")
    if through is None:
        return found
    name, found = found.name, found.view(getattr(paddle, dtype))
    found.name = name
    return found


class Tensors:
    """Makes tensors of Paddle; those that are views of one memory in the file are so here.

    Parameters
    ----------
    paddle
        The module.
    checkpoint
        Whose files they are in.
    dtypes
        Paddle's names of our dtypes.

    Notes
    -----
    Tensors in other than C order are copies, as are, of those that begin at one byte, all that
    have another dtype than the largest.
    """

    def __init__(self, paddle: Any, checkpoint: Checkpoint, dtypes: dict[str, str]) -> None:
        self._paddle = paddle
        self._arrays = Arrays(checkpoint._backend, True)
        self._dtypes = {ours: name for ours, name in dtypes.items() if hasattr(paddle, name)}
        self._copies: dict[tuple[Any, ...], Array] = {}
        self._made: dict[int, tuple[str, Any]] = {}

    def named(self, view: TensorView) -> dict[str, Any]:
        """All tensors of a view; errors are those of reading them."""
        arrays = self.arrays(view)
        made = {}
        # The largest first: others that begin where it does are views of it.
        for name in sorted(arrays, key=lambda name: -arrays[name].nbytes):
            member, row = view._find(name)
            try:
                made[name] = self._tensor(arrays[name], tensor_of(member.holding, row).dtype)
            except (OSError, RuntimeError, ValueError) as error:
                found = arrays[name]
                raise NotUnderstoodError(
                    f"{member.holding.label}: tensor {name!a}: Paddle takes no {found.dtype} of"
                    f" shape {list(found.shape)}: {error}"
                ) from None
        return {name: made[name] for name in arrays}

    def arrays(self, view: TensorView) -> dict[str, Array]:
        """The same as arrays, writable, aligned, in C order and the machine's byte order."""
        found = ((name, *view._find(name)) for name in view)
        return {
            name: self._suited(self._arrays.array(member.holding, row))
            for name, member, row in found
        }

    def _suited(self, array: Array) -> Array:
        """An array as Paddle takes them, or a copy: one for all that are the same view."""
        native = array.dtype.newbyteorder("=")
        if array.flags.c_contiguous and array.dtype == native and is_aligned(array):
            return array
        key = (array.ctypes.data, array.shape, array.strides, array.dtype.str)
        if key not in self._copies:
            self._copies[key] = np.array(array, native, order="C")
        return self._copies[key]

    def _tensor(self, array: Array, ours: str) -> Any:
        dtype = self._dtypes.get(ours, "uint8")
        if dtype == "uint8" and array.dtype != np.uint8:
            array = (array[..., np.newaxis] if array.dtype.itemsize > 1 else array).view(np.uint8)
        address = array.ctypes.data
        first, found = self._made.get(address, (dtype, None))
        if first != dtype:
            return of_array(self._paddle, array.copy(), dtype)
        if found is not None:
            return self._paddle.as_strided(found, list(array.shape), list(c_order(array.shape)))
        found = of_array(self._paddle, array, dtype)
        if array.size:
            self._made[address] = dtype, found
        return found
