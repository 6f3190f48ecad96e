"""From objects found in a pickle to rows of a table: tensors of torch and arrays of numpy alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.formats.numpy_arrays import Array, array_of
from slimckpt.formats.objects import walk
from slimckpt.formats.pickles import Stored
from slimckpt.formats.torch_tensors import (
    Storage,
    TorchTensor,
    is_contiguous,
    storage_of,
    tensors_of,
)
from slimckpt.model import RAW, TableBuilder


class Home(NamedTuple):
    """Where a storage lives: a payload row (``None``: it is empty), the length of its decoded
    stream, where in it the storage begins, and the encoding."""

    payload: int | None
    nbytes: int
    offset: int = 0
    encoding: str = RAW


class Located:
    """Adds what a pickle holds to a table.

    Parameters
    ----------
    storages
        Gives the home of a storage of torch by its key.
    inside
        Gives the home of bytes that lie inside the pickle.
    big_endian : bool
        Whether torch's storages are.
    arrays
        What an object is as an array, if it is one.
    """

    def __init__(
        self,
        table: TableBuilder,
        label: str,
        storages: Callable[[Storage], Home],
        inside: Callable[[Stored], Home],
        big_endian: bool = False,
        arrays: Callable[[Any], Array | None] = array_of,
    ) -> None:
        self.table, self.label = table, label
        self.storages, self.inside = storages, inside
        self.big_endian, self.arrays = big_endian, arrays

    def add(self, root: Any, name: str = "", path: str = "") -> None:
        """Add every tensor and array of an object."""

        def visit(below: str, where: str, node: Any) -> bool:
            full = f"{name}.{below}" if name and below else name or below
            return self._visit(full, path + where, node)

        walk(root, visit, self.label)

    def _visit(self, name: str, path: str, node: Any) -> bool:
        tensors = tensors_of(node)
        if tensors is not None:
            for tensor in tensors:
                suffix = tensor.suffix if name else tensor.suffix.removeprefix(".")
                self._tensor(name + suffix, path + tensor.suffix, tensor)
            return True
        array = self.arrays(node)
        if array is not None:
            self.add_array(name, path, array)
            return True
        storage = storage_of(node)
        if storage is not None:
            self._storage(name, path, storage)
            return True
        return False

    def _tensor(self, name: str, path: str, tensor: TorchTensor) -> None:
        if tensor.storage is None:
            self.table.tensor(name, tensor.dtype, tensor.shape, 0, path=path)
            return
        if isinstance(tensor.storage, Array):
            self.add_array(name, path, tensor.storage)
            return
        home = self.storages(tensor.storage)
        if tensor.encoding != RAW:
            if home.encoding != RAW or self.big_endian:
                raise NotUnderstoodError(
                    f"{self.label}: tensor {name!a} is marked {tensor.encoding} in a storage that"
                    " is itself encoded; the file is kept as a whole"
                )
            home = home._replace(encoding=tensor.encoding)
        nbytes = math.prod(tensor.shape) * tensor.itemsize
        strides = () if is_contiguous(tensor.shape, tensor.strides) else tensor.strides
        self._row(
            name, path, home, tensor.dtype, tensor.shape, strides, nbytes, tensor.itemsize,
            tensor.offset * tensor.itemsize, self.big_endian,
        )  # fmt: skip

    def add_array(self, name: str, path: str, array: Array) -> None:
        """Add one array under a name and an exact path."""
        home = Home(None, 0)
        if array.data is not None and array.nbytes:
            home = self.inside(array.data)
            if array.encoding != RAW and home.encoding == RAW:
                home = home._replace(nbytes=array.nbytes, encoding=array.encoding)
        itemsize = array.nbytes // max(math.prod(array.shape), 1)
        self._row(
            name, path, home, array.dtype, array.shape, array.strides or (), array.nbytes, itemsize,
            0, array.big_endian,
        )  # fmt: skip

    def _storage(self, name: str, path: str, storage: Storage) -> None:
        home = self.storages(storage)
        shape = (storage.nbytes,)
        self._row(name, path, home, "U8", shape, (), storage.nbytes, 1, 0, False)

    def _row(
        self,
        name: str,
        path: str,
        home: Home,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        nbytes: int,
        itemsize: int,
        offset: int,
        big_endian: bool,
    ) -> None:
        low = high = 0
        if nbytes and strides:
            reach = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
            low = sum(min(part, 0) for part in reach) * itemsize
            high = (sum(max(part, 0) for part in reach) + 1) * itemsize
        elif nbytes:
            high = nbytes
        if nbytes and (offset + low < 0 or home.offset + offset + high > home.nbytes):
            raise DamagedFileError(
                f"{self.label}: tensor {name!a} takes bytes {offset + low} to {offset + high} of a"
                f" storage of {home.nbytes - home.offset}; the file looks damaged"
            )
        self.table.tensor(
            name,
            dtype,
            shape,
            nbytes,
            payload=home.payload if nbytes else None,
            path=path,
            big_endian=big_endian and itemsize > 1,
            strides=strides if nbytes else (),
            offset=home.offset + offset if nbytes else 0,
            encoding=home.encoding if nbytes else RAW,
        )
