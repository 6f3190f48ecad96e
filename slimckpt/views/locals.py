"""The local tensors that layouts speak of, found in the files of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

from slimckpt.errors import (
    CheckFailedError,
    UnknownFileError,
    UnknownRankError,
    UnknownTensorError,
)
from slimckpt.layouts.covering import who
from slimckpt.layouts.layout import Holder, Shape, Shard
from slimckpt.model import Span
from slimckpt.views.arrays import Array, Arrays, digest_of, is_readable, packed_shape, tensor_of
from slimckpt.views.mapping import TensorView
from slimckpt.views.providers import Holding

Key = tuple[Holder, str, Span | None]


class Found(NamedTuple):
    """A local tensor: its file, its row there, and what it is."""

    holding: Holding
    row: int
    dtype: str
    shape: Shape


class Locals:
    """Local tensors by holder and name, each proved to be what the layout says.

    Parameters
    ----------
    view_of
        Gives the view of a rank or a file; asked once for each.
    arrays
        Makes arrays, read-only ones.
    origin
        What errors call the layout.
    """

    def __init__(
        self, view_of: Callable[[Holder], TensorView], arrays: Arrays, origin: str
    ) -> None:
        self._view_of, self._arrays, self.origin = view_of, arrays, origin
        self._views: dict[Holder, TensorView] = {}
        self._found: dict[Key, Found] = {}
        self._digests: dict[Key, bytes | None] = {}

    def view(self, holder: Holder) -> TensorView:
        """What a rank has, or what is in a file."""
        if holder not in self._views:
            self._views[holder] = self._view_of(holder)
        return self._views[holder]

    def find(self, name: str, dtype: str, shard: Shard) -> Found:
        """The file and row of a local tensor.

        Parameters
        ----------
        name, dtype
            Of the whole tensor.
        shard
            Its layout.

        Raises
        ------
        CheckFailedError
            There is none, or it is of another dtype or shape.
        """
        key = _key(name, shard)
        if key not in self._found:
            holding, row = self._look_up(name, key[1], shard)
            table = holding.table
            self._found[key] = Found(holding, row, table.dtype(row), table.shape(row))
        found = self._found[key]
        if (found.dtype, found.shape) != (dtype, shard.shape) or not is_readable(dtype):
            raise CheckFailedError(
                f"{found.holding.label}: {_which(name, shard)}: expected {dtype}"
                f" {list(shard.shape)}, as {self.origin} says, found {found.dtype}"
                f" {list(found.shape)}"
            )
        return found

    def array(
        self, name: str, dtype: str, shard: Shard, rows: tuple[int, int] | None = None
    ) -> Array:
        """The local tensor itself; with ``rows`` only those from the first to before the last."""
        found = self.find(name, dtype, shard)
        array = None
        if shard.within is None:
            array = self._views[shard.holder]._plain(shard.name or name)
        if array is None:
            tensor = tensor_of(found.holding, found.row)
            if rows is not None and packed_shape(tensor) == shard.shape:
                return self._arrays.rows(found.holding, found.row, *rows)
            array = self._arrays.array(found.holding, found.row)
            rows = None
        if array.shape != shard.shape:
            raise CheckFailedError(
                f"tensor {name!a} of {who(shard.holder)} is {dtype}, of less than a byte each; such"
                " are not read through a layout, only by rank or file"
            )
        return array if rows is None else array[slice(*rows)]

    def encoding(self, name: str, dtype: str, shard: Shard) -> str:
        """How the bytes of the local tensor are encoded."""
        found = self.find(name, dtype, shard)
        return tensor_of(found.holding, found.row).encoding

    def digest(self, name: str, dtype: str, shard: Shard) -> bytes | None:
        """The digest of the bytes of a local tensor, where it is known."""
        key = _key(name, shard)
        if key not in self._digests:
            found = self.find(name, dtype, shard)
            self._digests[key] = digest_of(found.holding, found.row)
        return self._digests[key]

    def stored(self, name: str, dtype: str, shard: Shard) -> Hashable | None:
        """Which elements of which payload the local tensor views; ``None`` where it has none."""
        found = self.find(name, dtype, shard)
        tensor = tensor_of(found.holding, found.row)
        if tensor.payload is None:
            return None
        return found.holding, tensor.payload, tensor.offset, tensor.strides

    def _look_up(self, name: str, local: str, shard: Shard) -> tuple[Holding, int]:
        try:
            view = self.view(shard.holder)
            if shard.within is not None:
                return self._inside(name, view, local, shard, shard.within)
            only = view._names.only(local)
            if only is not None:
                return view._members()[only[0]].holding, only[1]
            by_path = isinstance(shard.holder, str) and local not in view
            member, row = (view.by_path if by_path else view)._find(local)
        except (UnknownFileError, UnknownRankError, UnknownTensorError) as error:
            raise CheckFailedError(
                f"{_which(name, shard)} is not there, where {self.origin} says: {error}; a"
                " checkpoint of some of the ranks is not whole, take one that has all"
            ) from None
        return member.holding, row

    def _inside(
        self, name: str, view: TensorView, local: str, shard: Shard, span: Span
    ) -> tuple[Holding, int]:
        """Of the tensors of a name that whose bytes lie in ``span``, or, of an empty one, which has
        no bytes, whose shape is right."""
        for member, row in view._all(local):
            holding = member.holding
            tensor = tensor_of(holding, row)
            if tensor.payload is None:
                if tensor.shape == shard.shape and math.prod(shard.shape) == 0:
                    return holding, row
            else:
                start = holding.table.spans(tensor.payload)[0].offset
                if span.offset <= start < span.offset + span.nbytes:
                    return holding, row
        raise CheckFailedError(
            f"{_which(name, shard)} is not at byte {span.offset}, where {self.origin}"
            " says; that is of another save"
        )


def _key(name: str, shard: Shard) -> Key:
    return shard.holder, shard.name or name, shard.within


def _which(name: str, shard: Shard) -> str:
    called = f", there {shard.name!a}" if shard.name else ""
    return f"tensor {name!a} of {who(shard.holder)}{called}"
