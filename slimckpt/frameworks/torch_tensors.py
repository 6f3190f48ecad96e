"""Tensors of files of any format as torch has them, without a copy where that can be."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimckpt.dtypes import OPAQUE
from slimckpt.formats.torch_tensors import DTYPES, c_order
from slimckpt.model import RAW
from slimckpt.views.arrays import Array, Arrays, tensor_of
from slimckpt.views.checkpoint import Checkpoint
from slimckpt.views.mapping import TensorView
from slimckpt.views.providers import Holding

ALIGNMENT = 16
"""What the widest dtype wants."""
_SPELLED = {ours: spelled for spelled, ours in reversed(DTYPES.items())}


class Tensors:
    """Makes tensors of torch; those of one payload are views of one storage.

    Parameters
    ----------
    torch
        The module.
    checkpoint
        Whose files they are in.
    """

    def __init__(self, torch: Any, checkpoint: Checkpoint) -> None:
        self._torch = torch
        self._arrays = Arrays(checkpoint._backend, True)
        self._storages: dict[tuple[Holding, int], Any] = {}

    def named(self, view: TensorView) -> dict[str, Any]:
        """All tensors of a view, and what only torch takes for one; errors are those of reading
        them."""
        ours = [name for name in view.opaque if self._dtype(view.info(name).dtype) is not None]
        return {name: self.tensor(*view.located(name)) for name in (*view, *ours)}

    def tensor(self, holding: Holding, row: int) -> Any:
        """One tensor, by its row."""
        tensor = tensor_of(holding, row)
        dtype = self._dtype(tensor.dtype)
        if dtype is not None and tensor.payload is not None and tensor.encoding == RAW:
            strides = c_order(tensor.shape) if tensor.strides is None else tensor.strides
            start, odd = divmod(tensor.offset, dtype.itemsize)
            swapped = tensor.big_endian and dtype.itemsize > 1
            memory = self._arrays.stream(holding, tensor)
            reach = sum((dim - 1) * step for dim, step in zip(tensor.shape, strides, strict=True))
            inside = start >= 0 and (start + reach + 1) * dtype.itemsize <= len(memory)
            if not (odd or swapped or min(strides, default=0) < 0) and inside:
                storage = self._storage((holding, tensor.payload), memory)
                return self._torch.empty(0, dtype=dtype).set_(storage, start, tensor.shape, strides)
        if tensor.dtype.startswith(OPAQUE):
            if tensor.nbytes:
                return self._of_array(
                    np.frombuffer(self._arrays.raw(holding, row), np.uint8), dtype
                )
            return self._torch.empty(tensor.shape, dtype=dtype)
        return self._of_array(self._arrays.array(holding, row), dtype)

    def _dtype(self, ours: str) -> Any:
        """Torch's dtype of a name of ours, also where only torch has it; ``None`` if it has none,
        or one that takes more than its numbers."""
        found = getattr(self._torch, _SPELLED.get(ours, ours.removeprefix(OPAQUE)), None)
        quantized = ours.startswith((f"{OPAQUE}q", f"{OPAQUE}bits1x", f"{OPAQUE}bits2x"))
        return found if isinstance(found, self._torch.dtype) and not quantized else None

    def _storage(self, key: tuple[Holding, int], memory: Array) -> Any:
        if key not in self._storages:
            # Copied once where it has to be, so that what is tied stays so.
            suited = memory if memory.ctypes.data % ALIGNMENT == 0 else memory.copy()
            self._storages[key] = self._torch.from_numpy(suited).untyped_storage()
        return self._storages[key]

    def _of_array(self, array: Array, dtype: Any) -> Any:
        """A copy where it has to be one: of other byte order, or not where its dtype wants it."""
        native = np.array(array, array.dtype.newbyteorder("="), order="C", copy=True)
        if dtype is None:
            return self._torch.from_numpy(native)
        bits = self._torch.from_numpy(native.reshape(-1).view(np.uint8))
        return bits.view(dtype).reshape(array.shape)
