"""The object in a file of torch, its tensors in memory that is given.

What is made is what ``torch.load(..., weights_only=False, map_location="cpu")`` of torch 2.13
makes (``torch/serialization.py``, ``_load`` and ``_legacy_load``).
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np

from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.formats.torch_files import Archive, read_archive, read_legacy
from slimckpt.formats.zips import STORED
from slimckpt.frameworks.allowed import Allowed
from slimckpt.frameworks.construct import Constructor
from slimckpt.frameworks.torch_names import allowed_of_torch
from slimckpt.frameworks.torch_tensors import ALIGNMENT
from slimckpt.model import RAW, Bytes
from slimckpt.sources.positioned import ByteSource, Section

Memory = Callable[[int, int, str], Bytes]
"""Writable memory of stored bytes: offset in the file, length, encoding."""


class _Place(NamedTuple):
    """Stored bytes: offset in the file, length there, encoding, and length decoded."""

    offset: int
    stored: int
    encoding: str
    nbytes: int


class Objects:
    """Makes the objects of one file.

    Parameters
    ----------
    torch
        The module.
    memory
        Gives storages their memory.
    allow
        Further classes and functions that the file may name.
    """

    def __init__(self, torch: Any, memory: Memory, allow: Any) -> None:
        self.torch, self.memory = torch, memory
        self.allowed: Allowed = allowed_of_torch(torch, self._from_bytes, allow)

    def of_archive(self, source: Section) -> Any:
        """The object in an archive, one of torch's zip files."""
        archive = read_archive(source)
        if "constants.pkl" in archive.members:
            raise NotUnderstoodError(
                f"{source.label}: it is a program of TorchScript, not an object; restore it, and"
                " load it with torch.jit.load"
            )
        places = {
            key: _Place(
                source.start + member.offset,
                member.stored_nbytes,
                RAW if member.method == STORED else f"deflate:{member.nbytes}",
                member.nbytes,
            )
            for key, member in archive.storages.items()
        }
        storages = _Storages(self.torch, self.memory, places, source.label, archive.big_endian)
        return self._read(Constructor(*archive.opened(), **self._how(archive, storages)))

    def _how(self, archive: Archive, storages: _Storages) -> dict[str, Any]:
        start = archive.source.start
        inside = archive.pickle.method == STORED
        memory = (lambda at, nbytes: self.memory(start + at, nbytes, RAW)) if inside else None
        return {"allowed": self.allowed, "persistent": storages, "memory": memory}

    def of_legacy(self, source: ByteSource) -> Any:
        """The object in a file as torch wrote them before 1.6."""
        found = read_legacy(source)
        places = {key: _Place(at, nbytes, RAW, nbytes) for key, (at, nbytes) in found.spans.items()}
        storages = _Storages(self.torch, self.memory, places, source.label, False)
        return self._read(
            Constructor(
                source,
                found.start,
                source.size,
                allowed=self.allowed,
                persistent=storages,
                memory=lambda at, nbytes: self.memory(at, nbytes, RAW),
            )
        )

    def _read(self, constructor: Constructor) -> Any:
        with _on_cpu(self.torch):
            found = constructor.read()
        self.torch._utils._validate_loaded_sparse_tensors()
        return found

    def _from_bytes(self, data: Any) -> Any:
        """``torch.storage._load_from_bytes``: a storage in a file of its own inside a pickle."""
        if type(data) is not bytes:
            raise TypeError("no bytes")
        source = _InMemory(data)
        inner = Objects(self.torch, source.memory, ())
        inner.allowed = self.allowed
        if data[:2] == b"PK":
            return inner.of_archive(Section(source, 0, source.size))
        return inner.of_legacy(source)


class _InMemory:
    """Bytes as a source, and as memory of their own."""

    label = "a storage inside a pickle"

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DamagedFileError(f"{self.label}: it was cut")
        return self.data[offset : offset + nbytes]

    def memory(self, offset: int, nbytes: int, encoding: str) -> Bytes:
        if encoding != RAW:
            raise NotUnderstoodError(f"{self.label}: it is compressed")
        return np.array(np.frombuffer(self.read(offset, nbytes), np.uint8))


class _Storages:
    """Storages of torch by the persistent ids that name them; each key is one storage."""

    def __init__(
        self, torch: Any, memory: Memory, places: dict[str, _Place], label: str, big_endian: bool
    ) -> None:
        self.torch, self.memory, self.places, self.label = torch, memory, places, label
        self.swapped = big_endian != (sys.byteorder == "big")
        self.found: dict[Any, Any] = {}

    def __call__(self, pid: Any) -> Any:
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module":
            return pid[1]  # a class, and its source, which is of no use
        if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
            self._damaged(f"{reprlib.repr(pid)} names no storage")
        _, cls, key, _, count, *view = pid
        dtype = (
            self.torch.uint8 if cls is self.torch.UntypedStorage else getattr(cls, "dtype", None)
        )
        if not isinstance(dtype, self.torch.dtype) or type(key) is not str:
            self._damaged(f"{reprlib.repr(pid)} names no storage")
        if type(count) is not int or count < 0:
            self._damaged(f"storage {key[:64]!a} has {reprlib.repr(count)} elements")
        if key not in self.found:
            self.found[key] = self._storage(key, dtype, count * dtype.itemsize)
        found = self.found[key]
        return found if not view or view[0] is None else self._part(found, dtype, view[0])

    def _storage(self, key: str, dtype: Any, nbytes: int) -> Any:
        place = self.places.get(key)
        if place is None or place.nbytes < nbytes:
            has = "is not there" if place is None else f"has {place.nbytes} bytes"
            self._damaged(f"storage {key[:64]!a} {has}, expected {nbytes} bytes")
        if nbytes:
            memory = self.memory(place.offset, place.stored, place.encoding)[:nbytes]
            if memory.ctypes.data % ALIGNMENT:
                memory = memory.copy()
            storage = self.torch.from_numpy(memory).untyped_storage()
        else:
            storage = self.torch.UntypedStorage(0)
        if self.swapped:
            storage.byteswap(dtype)
        return self._typed(storage, dtype)

    def _part(self, storage: Any, dtype: Any, view: Any) -> Any:
        """A storage that is a part of another, as torch before 0.4 wrote them."""
        key, first, count = view
        if ("view", key) not in self.found:
            start = first * dtype.itemsize
            part = storage._untyped_storage[start : start + count * dtype.itemsize]
            self.found["view", key] = self._typed(part, dtype)
        return self.found["view", key]

    def _typed(self, storage: Any, dtype: Any) -> Any:
        return self.torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def _damaged(self, why: str) -> NoReturn:
        raise DamagedFileError(f"{self.label}: {why}; the file looks damaged")


@contextmanager
def _on_cpu(torch: Any) -> Iterator[None]:
    """As under ``map_location="cpu"``, for tensors that have no storage to tell their device."""
    local = getattr(torch.serialization, "_serialization_tls", None)
    if local is None:  # before 2.5, where it is set during a load alone
        local = torch._utils._thread_local_state
    before, local.map_location = getattr(local, "map_location", None), "cpu"
    try:
        yield
    finally:
        local.map_location = before
