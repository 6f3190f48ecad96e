"""The local tensors that layouts speak of, found in the files of a step."""

from __future__ import annotations

import math
from collections.abc import Callable

from slimckpt.errors import (
    CheckFailedError,
    UnknownFileError,
    UnknownRankError,
    UnknownTensorError,
)
from slimckpt.layouts.covering import who
from slimckpt.layouts.layout import Holder, Shard
from slimckpt.model import Span
from slimckpt.views.arrays import (
    Array,
    Arrays,
    is_readable,
    packed_shape,
    same_digest,
    tensor_of,
)
from slimckpt.views.mapping import TensorView
from slimckpt.views.providers import Holding

Found = tuple[Holding, int]


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
        self._found: dict[tuple[Holder, str, Span | None], Found] = {}

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
        local = shard.name or name
        key = shard.holder, local, shard.within
        if key not in self._found:
            self._found[key] = self._look_up(name, local, shard)
        holding, row = self._found[key]
        tensor = tensor_of(holding, row)
        if (tensor.dtype, tensor.shape) != (dtype, shard.shape) or not is_readable(tensor.dtype):
            raise CheckFailedError(
                f"{holding.label}: {self._which(name, local, shard)}: expected {dtype}"
                f" {list(shard.shape)}, as {self.origin} says, found {tensor.dtype}"
                f" {list(tensor.shape)}"
            )
        return holding, row

    def array(
        self, name: str, dtype: str, shard: Shard, rows: tuple[int, int] | None = None
    ) -> Array:
        """The local tensor itself; with ``rows`` only those from the first to before the last."""
        holding, row = self.find(name, dtype, shard)
        if packed_shape(tensor_of(holding, row)) != shard.shape:
            raise CheckFailedError(
                f"tensor {name!a} of {who(shard.holder)} is {dtype}, of less than a byte each; such"
                " are not read through a layout, only by rank or file"
            )
        if rows is None:
            return self._arrays.array(holding, row)
        return self._arrays.rows(holding, row, *rows)

    def encoding(self, name: str, dtype: str, shard: Shard) -> str:
        """How the bytes of the local tensor are encoded."""
        return tensor_of(*self.find(name, dtype, shard)).encoding

    def same(self, name: str, dtype: str, one: Shard, other: Shard) -> bool | None:
        """Whether two local tensors of one shape are equal, as far as digests tell."""
        return same_digest(self.find(name, dtype, one), self.find(name, dtype, other))

    def _look_up(self, name: str, local: str, shard: Shard) -> Found:
        try:
            view = self.view(shard.holder)
            if shard.within is not None:
                return self._inside(name, view, local, shard, shard.within)
            by_path = isinstance(shard.holder, str) and local not in view
            member, row = (view.by_path if by_path else view)._find(local)
        except (UnknownFileError, UnknownRankError, UnknownTensorError) as error:
            raise CheckFailedError(
                f"{self._which(name, local, shard)} is not there, where {self.origin} says: {error}"
            ) from None
        return member.holding, row

    def _inside(self, name: str, view: TensorView, local: str, shard: Shard, span: Span) -> Found:
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
            f"{self._which(name, local, shard)} is not at byte {span.offset}, where {self.origin}"
            " says; that is of another save"
        )

    def _which(self, name: str, local: str, shard: Shard) -> str:
        called = "" if local == name else f", there {local!a}"
        return f"tensor {name!a} of {who(shard.holder)}{called}"
