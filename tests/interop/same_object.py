"""Whether two objects that torch could have loaded are the same, down to what they share."""

from __future__ import annotations

import collections
import enum
import math
from typing import Any

import numpy as np
import torch


def require_same(one: Any, other: Any) -> None:
    """Types, keys and their order, values, bits of tensors and arrays, strides, gradients,
    attributes, and aliasing: what shares a storage, or is one object, in the one does so in the
    other, and nothing else does."""
    _Comparison().same(one, other, "")


class _Comparison:
    def __init__(self) -> None:
        self.pairs: dict[tuple[str, int], int] = {}
        self.kept: list[Any] = []

    def one_to_one(self, kind: str, one: int, other: int, path: str) -> bool:
        """Note that two things stand for each other; whether that was known."""
        forth, back = (f"{kind} forth", one), (f"{kind} back", other)
        known = self.pairs.get(forth)
        assert known in (None, other), f"{path}: what is one {kind} here is two there"
        assert self.pairs.get(back) in (None, one), f"{path}: what is two {kind}s here is one there"
        self.pairs[forth], self.pairs[back] = other, one
        return known is not None

    def same(self, one: Any, other: Any, path: str) -> None:
        assert type(one) is type(other), f"{path}: {type(one)} and {type(other)}"
        if isinstance(one, torch.Tensor):
            self.tensors(one, other, path)
        elif isinstance(one, (torch.storage.TypedStorage, torch.UntypedStorage)):
            self.storages(one, other, path)
        elif isinstance(one, np.ndarray) and one.dtype != object:
            about = [(a.dtype, a.shape, a.flags.f_contiguous, a.tobytes()) for a in (one, other)]
            assert about[0] == about[1], path
        elif isinstance(one, np.ndarray):
            assert one.shape == other.shape, path
            self.same(one.tolist(), other.tolist(), path)
        elif one is other or isinstance(one, (type, enum.Enum, torch.dtype, torch.device)):
            assert one == other, f"{path}: {one!r} and {other!r}"
        elif isinstance(one, float) and math.isnan(one):
            assert math.isnan(other), path
        elif isinstance(one, (str, bytes, int, float, complex, np.generic, torch.Size)):
            assert one == other, f"{path}: {one!r} and {other!r}"
        else:
            self.kept += [one, other]  # lest an id is used twice
            if not self.one_to_one("object", id(one), id(other), path):
                self.contents(one, other, path)

    def contents(self, one: Any, other: Any, path: str) -> None:
        if isinstance(one, dict):
            assert list(map(repr, one)) == list(map(repr, other)), f"{path}: keys or their order"
            for (key, value), (_, value_2) in zip(one.items(), other.items(), strict=True):
                self.same(value, value_2, f"{path}[{key!r}]")
            if isinstance(one, collections.defaultdict):
                assert one.default_factory is other.default_factory, path
        elif isinstance(one, (list, tuple, collections.deque)):
            assert len(one) == len(other), path
            for number, (item, item_2) in enumerate(zip(one, other, strict=True)):
                self.same(item, item_2, f"{path}[{number}]")
        elif isinstance(one, (set, frozenset)):
            assert sorted(map(repr, one)) == sorted(map(repr, other)), path
        elif not hasattr(one, "__dict__"):
            assert one == other, f"{path}: {one!r} and {other!r}"
        if hasattr(one, "__dict__"):
            self.same(one.__dict__, other.__dict__, f"{path}.__dict__")

    def tensors(self, one: torch.Tensor, other: torch.Tensor, path: str) -> None:
        about = [
            (t.dtype, t.shape, t.layout, t.device, t.requires_grad, t.is_conj(), t.is_neg())
            for t in (one, other)
        ]
        assert about[0] == about[1], f"{path}: {about}"
        self.kept += [one, other]
        if self.one_to_one("tensor", id(one), id(other), path):
            return
        self.same(one.__dict__, other.__dict__, f"{path}.__dict__")
        if hasattr(one, "_local_tensor"):
            assert (one._spec, one.placements) == (other._spec, other.placements), path
            self.same(one._local_tensor, other._local_tensor, f"{path}._local_tensor")
        elif one.layout == torch.sparse_coo:
            assert one.is_coalesced() == other.is_coalesced(), path
            self.same(one._indices(), other._indices(), f"{path}.indices")
            self.same(one._values(), other._values(), f"{path}.values")
        elif one.layout in (torch.sparse_csr, torch.sparse_bsr):
            for part in ("crow_indices", "col_indices", "values"):
                self.same(getattr(one, part)(), getattr(other, part)(), f"{path}.{part}")
        elif one.layout in (torch.sparse_csc, torch.sparse_bsc):
            for part in ("ccol_indices", "row_indices", "values"):
                self.same(getattr(one, part)(), getattr(other, part)(), f"{path}.{part}")
        elif one.is_nested:
            self.same(one.values(), other.values(), f"{path}.values")
            self.same(list(one.unbind()), list(other.unbind()), f"{path}.unbind")
        elif not one.is_meta:
            places = [(t.stride(), t.storage_offset()) for t in (one, other)]
            assert places[0] == places[1], f"{path}: {places}"
            self.storages(one.untyped_storage(), other.untyped_storage(), path)
            if one.is_quantized:
                assert one.qscheme() == other.qscheme(), path
                assert repr(one) == repr(other), path

    def storages(self, one: Any, other: Any, path: str) -> None:
        if isinstance(one, torch.storage.TypedStorage):
            assert one.dtype == other.dtype, path
            one, other = one._untyped_storage, other._untyped_storage
        assert one.nbytes() == other.nbytes(), f"{path}: {one.nbytes()} and {other.nbytes()} bytes"
        if not one.nbytes():
            return
        self.kept += [one, other]
        if not self.one_to_one("storage", one._cdata, other._cdata, path):
            bits = [torch.tensor([], dtype=torch.uint8).set_(s).numpy() for s in (one, other)]
            assert bits[0].tobytes() == bits[1].tobytes(), f"{path}: other bytes"
