"""From objects found in a pickle to rows of a table: tensors of torch and arrays of numpy alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.formats.numpy_arrays import LATIN_1, Array, Shape, array_of
from slimckpt.formats.objects import Part, Trail, Walk
from slimckpt.formats.pickles import PickleReader, Stored
from slimckpt.formats.torch_tensors import (
    Storage,
    TorchTensor,
    archive_of,
    decoding,
    is_contiguous,
    is_dtensor,
    itemsize_of,
    makes_tensors,
    rebuilt,
    storage_of,
)
from slimckpt.model import RAW, TableBuilder
from slimckpt.sources.positioned import ByteSource


class Home(NamedTuple):
    """Where a storage lives: a payload row (``None``: it is empty), the length of its decoded
    stream, where in it the storage begins, and the encoding."""

    payload: int | None
    nbytes: int
    offset: int = 0
    encoding: str = RAW


class Inside:
    """Bytes that lie inside pickles, as payloads: those that two arrays share are one.

    Parameters
    ----------
    source : ByteSource
        What offsets are relative to; it begins at byte ``start`` of the file.
    """

    def __init__(self, table: TableBuilder, source: ByteSource, start: int = 0) -> None:
        self.table, self.source, self.start = table, source, start
        self.homes: dict[int, Home] = {}

    def __call__(self, stored: Stored) -> Home:
        found = self.homes.get(stored.offset)
        if found is None:
            found = self.homes[stored.offset] = self.home(stored.offset, stored.nbytes)
        return found

    def home(self, offset: int, nbytes: int) -> Home:
        """The home of a new payload."""
        if not nbytes:
            return Home(None, 0)
        return Home(self.table.payload([(self.start + offset, nbytes)]), nbytes)


class Located:
    """Adds what pickles hold to a table.

    Parameters
    ----------
    reader
        Of the pickles, which it has read.
    storages
        Gives the home of a storage of torch by its key.
    inside
        Gives the home of bytes that lie inside the pickle.
    archived
        Gives the storage, and its home, of an archive of torch that lies inside the pickle.
    big_endian : bool
        Whether torch's storages are.
    arrays
        What an object is as an array, if it is one.

    Attributes
    ----------
    dtensors : int
        How many of the tensors are local parts of DTensors.
    """

    def __init__(
        self,
        table: TableBuilder,
        reader: PickleReader,
        storages: Callable[[Storage], Home],
        inside: Callable[[Stored], Home],
        archived: Callable[[Stored], tuple[Storage, Home] | None],
        big_endian: bool = False,
        arrays: Callable[[Any], Array | None] = array_of,
    ) -> None:
        self.table, self.reader, self.label = table, reader, reader.source.label
        self.storages, self.inside, self.archived = storages, inside, archived
        self.big_endian, self.arrays = big_endian, arrays
        self.walk = Walk(self.label, reader.nbytes)
        self.dtensors = 0

    def add(self, root: Any, start: Iterable[tuple[Any, str]] = ()) -> None:
        """Add every tensor and array of an object; ``start`` are the keys that lead to it."""
        if self.reader.persistent or any(map(makes_tensors, self.reader.symbols.values())):
            self.walk(root, self._visit, start)

    def _visit(self, trail: Trail, node: Any) -> Iterable[Part] | None:
        tensor, parts = rebuilt(node)
        self.dtensors += is_dtensor(node)
        if tensor is not None:
            self._tensor(*self.walk.texts(trail), tensor)
        if tensor is not None or parts:
            return parts
        if (array := self.arrays(node)) is not None:
            self.add_array(*self.walk.texts(trail), array)
            return ()
        storage = storage_of(node) or archive_of(node)
        if storage is not None:
            place = self._home(storage)
            if place is not None:
                self._storage(*self.walk.texts(trail), *place)
            return ()
        return None

    def _home(self, storage: Storage | Stored) -> tuple[Storage, Home] | None:
        """The home of the part of a storage that is meant."""
        place = (
            (storage, self.storages(storage))
            if isinstance(storage, Storage)
            else self.archived(storage)
        )
        if place is None:
            return None
        storage, home = place
        itemsize = storage.nbytes // max(storage.elements, 1)
        return storage, home._replace(offset=home.offset + storage.view[0] * itemsize)

    def _tensor(self, name: str, path: str, tensor: TorchTensor) -> None:
        if tensor.storage is None:
            self._row(name, path, Home(None, 0), tensor.dtype, tensor.shape, (), 0)
            return
        if isinstance(tensor.storage, Array):
            self.add_array(name, path, tensor.storage)
            return
        place = self._home(tensor.storage)
        if place is None:
            return
        storage, home = place
        dtype = tensor.dtype or storage.dtype
        itemsize = itemsize_of(dtype)
        if itemsize is None:
            return
        named, encoding = decoding(dtype, tensor.marks)
        if encoding != RAW:
            if home.encoding != RAW or self.big_endian:
                raise NotUnderstoodError(
                    f"{self.label}: tensor {name[:200]!a} is marked {encoding} in a storage that is"
                    " itself encoded; the file is kept as a whole"
                )
            home = home._replace(encoding=encoding)
        strides = () if is_contiguous(tensor.shape, tensor.strides) else tensor.strides
        self._row(
            name, path, home, named, tensor.shape, strides, itemsize, tensor.offset * itemsize,
            self.big_endian,
        )  # fmt: skip

    def add_array(self, name: str, path: str, array: Array) -> None:
        """Add one array under a name and an exact path."""
        home = Home(None, 0)
        if array.data is not None and array.nbytes:
            home = self.inside(array.data)
            if array.encoding != RAW and home.encoding == RAW:
                home = home._replace(nbytes=array.nbytes, encoding=array.encoding)
            elif array.encoding != RAW and not home.encoding.startswith(LATIN_1):
                raise NotUnderstoodError(
                    f"{self.label}: array {name[:200]!a} is text in a pickle that is itself"
                    " encoded; the file is kept as a whole"
                )
        itemsize = array.nbytes // max(math.prod(array.shape), 1)
        self._row(
            name, path, home, array.dtype, array.shape, array.strides or (), itemsize, 0,
            array.big_endian,
        )  # fmt: skip

    def _storage(self, name: str, path: str, storage: Storage, home: Home) -> None:
        itemsize = storage.nbytes // max(storage.elements, 1) or 1
        self._row(name, path, home, "U8", (storage.view[1] * itemsize,), (), 1)

    def _row(
        self,
        name: str,
        path: str,
        home: Home,
        dtype: str,
        shape: Shape,
        strides: Shape,
        itemsize: int,
        offset: int = 0,
        big_endian: bool = False,
    ) -> None:
        """Add a tensor; ``offset`` is in bytes from where its storage begins."""
        self.walk.spend(16 * len(shape) + 128)
        nbytes = math.prod(shape) * itemsize
        low, high = 0, nbytes
        if nbytes and strides:
            reach = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
            low = sum(min(part, 0) for part in reach) * itemsize
            high = (sum(max(part, 0) for part in reach) + 1) * itemsize
        start = home.offset + offset
        if nbytes and (offset + low < 0 or start + high > home.nbytes):
            raise DamagedFileError(
                f"{self.label}: tensor {name[:200]!a} takes bytes {offset + low} to {offset + high}"
                f" of a storage of {home.nbytes - home.offset}; the file looks damaged"
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
            offset=start if nbytes else 0,
            encoding=home.encoding if nbytes else RAW,
        )
