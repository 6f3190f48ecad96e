"""Whole tensors, assembled lazily of what ranks or files hold of them, as a layout says."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from slimckpt.dtypes import numpy_dtype
from slimckpt.errors import CheckFailedError, SlimckptError, UnknownTensorError
from slimckpt.layouts.covering import Covering, Coverings, Held, show_box, who
from slimckpt.layouts.layout import Box, Holder, Layout, Shape, Shard, TensorLayout
from slimckpt.layouts.slicing import block_in
from slimckpt.model import RAW
from slimckpt.views.arrays import Array, equal_bytes
from slimckpt.views.locals import Locals

log = logging.getLogger(__name__)


class WholeTensor:
    """One tensor as training knows it, in the shape it has over all ranks.

    Slicing it reads only the boxes that the slice touches: a view of mapped memory where one box
    has it all, else a new array. ``numpy.asarray`` gives all of it. What is read was found equal
    in all that hold it: by their digests, or, where there are none (an original directory), by the
    bytes of what is read.

    Attributes
    ----------
    name, dtype : str
        ``dtype`` as safetensors spells it.
    shape : tuple of int
    layout : TensorLayout
        Who holds which part of it.
    """

    def __init__(
        self,
        name: str,
        layout: TensorLayout,
        covering: Covering,
        local: Locals,
        allow_drift: bool = False,
    ) -> None:
        self.name, self.dtype, self.shape, self.layout = name, layout.dtype, layout.shape, layout
        self._covering, self._locals = covering, local
        self._allow_drift = allow_drift
        self._agreed: set[int] = set()

    def __repr__(self) -> str:
        return f"<WholeTensor {self.name!a} {self.dtype} {list(self.shape)}>"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of shape () has no length")
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self._read((0,) * self.ndim, self.shape)
        if dtype is not None and found.dtype != dtype:
            return found.astype(dtype)
        return found.copy() if copy else found

    def __getitem__(self, key: Any) -> Array:
        """Part of the tensor, by integers, slices and ``...``, as numpy has it."""
        keys = _expanded(key, self.shape)
        wanted = [_range(part, dim) for part, dim in zip(keys, self.shape, strict=True)]
        part = self._read(tuple(low for low, _, _ in wanted), tuple(high for _, high, _ in wanted))
        steps = tuple(step for _, _, step in wanted)
        # With an ellipsis numpy gives an array, without one a number, where no axis is left.
        found: Array = part[_key(steps)] if _has_ellipsis(key) else part[steps]
        return found

    def require(self) -> None:
        """Every local tensor is there, of the dtype and shape that the layout says.

        Raises
        ------
        CheckFailedError
            One is not.
        """
        for shard in self.layout.shards:
            self._locals.find(self.name, self.dtype, shard)

    @property
    def is_encoded(self) -> bool:
        """Whether some of it has to be decoded, all of a local tensor at a time, whatever part is
        read."""
        return any(
            self._locals.encoding(self.name, self.dtype, shard) != RAW
            for shard in self.layout.shards
        )

    @property
    def held(self) -> list[tuple[Box, Holder]]:
        """Its parts, none of them empty: each, and the lowest of those that have it. None where
        parts overlap each other."""
        covering = self._covering
        if covering.overlap is not None:
            return []
        pairs = zip(covering.boxes, covering.held, strict=True)
        return [(box, held[0].shard.holder) for box, held in pairs]

    def stored(self) -> Hashable:
        """Where its elements lie in the files that have them: equal for tensors that are tied."""
        found: list[Hashable] = []
        for box, (first, *_) in zip(self._covering.boxes, self._covering.held, strict=True):
            place = self._locals.stored(self.name, self.dtype, first.shard)
            if place is None:
                return self.name
            found.append((box, first.at, first.shard.shape, place))
        return tuple(found) or self.name

    def _read(self, low: Shape, high: Shape) -> Array:
        """The elements of a box of the whole tensor."""
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        if 0 in shape:
            return np.empty(shape, numpy_dtype(self.dtype))
        touching = self._covering.touching(low, high)
        if len(touching) == 1:
            return self._part(touching[0], low, high)
        out: Array | None = None
        painted = np.zeros(shape, np.bool_) if self._covering.overlap else None
        for row in touching:
            box = self._covering.boxes[row]
            first, last = tuple(map(max, low, box.offsets)), tuple(map(min, high, _ends(box)))
            part = self._part(row, first, last)
            if out is None:
                out = np.empty(shape, part.dtype)
            spans = zip(first, last, low, strict=True)
            key = _key(slice(a - start, b - start) for a, b, start in spans)
            if painted is None:
                out[key] = part
            else:
                self._paint(row, part, out[key], painted[key])
        assert out is not None, "the boxes cover the whole tensor"
        return out

    def _part(self, row: int, low: Shape, high: Shape) -> Array:
        """Part of a distinct box, on which all who hold it agree."""
        first, *others = self._covering.held[row]
        part = self._held(row, first, low, high)
        if others and row not in self._agreed:
            box = self._covering.boxes[row]
            known = [self._agree(row, first, other, part, low, high) for other in others]
            if all(known) or (low, high) == (box.offsets, _ends(box)):
                self._agreed.add(row)
        return part

    def _held(self, row: int, held: Held, low: Shape, high: Shape) -> Array:
        offsets, lengths = self._covering.boxes[row]
        spans = [(a - start, b - start) for a, b, start in zip(low, high, offsets, strict=True)]
        at, rows = held.at, None
        if isinstance(at, tuple) and spans and len(at) == len(spans):
            # Only these rows: what lies in several pieces is large, and is copied.
            first, last = spans[0]
            rows = at[0] + first, at[0] + last
            at, lengths, spans[0] = (0, *at[1:]), (last - first, *lengths[1:]), (0, last - first)
        local = self._locals.array(self.name, self.dtype, held.shard, rows)
        found: Array = block_in(local, lengths, at)[_key(slice(*span) for span in spans)]
        return found

    def _agree(
        self, row: int, one: Held, other: Held, part: Array, low: Shape, high: Shape
    ) -> bool:
        """Refuse two holders that differ in a part; whether they agree in all of the box."""
        digest = None
        if (one.at, one.shard.shape) == (other.at, other.shard.shape):
            digest = self._locals.digest(self.name, self.dtype, one.shard)
        if digest is not None:
            there = self._locals.digest(self.name, self.dtype, other.shard)
            if digest == there:
                return True
            # Where there is padding, digests may differ and the tensors agree.
            padded = math.prod(self._covering.boxes[row].lengths) < math.prod(one.shard.shape)
            digest = None if padded else there
        if digest is None:
            held = self._held(row, other, low, high)
            if equal_bytes(part, held.astype(part.dtype, copy=False)):
                return False
        self._drifted(row, one.shard, other.shard)
        return False

    def _paint(self, row: int, part: Array, out: Array, painted: Array) -> None:
        """Add a part of a box that overlaps others; what is there is of lower ranks and stays."""
        if not equal_bytes(part[painted], out[painted]):
            seen = self._covering.overlap
            assert seen is not None
            shards = [
                held[0].shard
                for box, held in zip(self._covering.boxes, self._covering.held, strict=True)
                if _overlaps(box, self._covering.boxes[row])
            ]
            self._drifted(row, shards[0], self._covering.held[row][0].shard)
        np.copyto(out, part, where=~painted)
        painted[...] = True

    def _drifted(self, row: int, one: Shard, other: Shard) -> None:
        text = (
            f"tensor {self.name!a} differs between {who(one.holder)} (shape {list(one.shape)}) and"
            f" {who(other.holder)} (shape {list(other.shape)}) in"
            f" {show_box(self._covering.boxes[row])} of the whole {list(self.shape)}, which both"
            f" hold by {self._locals.origin}"
        )
        if not self._allow_drift:
            raise CheckFailedError(
                f"{text}; the layout is of another save, or the ranks have drifted"
                " (allow_drift=True, --allow-drift, takes the lowest)"
            )
        log.warning("%s; taken from %s", text, who(one.holder))


class Wholes(Mapping[str, WholeTensor]):
    """The whole tensors of one saved state, by name, each proved when it is asked for."""

    def __init__(self, layout: Layout, local: Locals, allow_drift: bool = False) -> None:
        self.layout = layout
        self._locals, self._allow_drift = local, allow_drift
        self._coverings = Coverings()

    def __len__(self) -> int:
        return len(self.layout.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.tensors

    def __getitem__(self, name: str) -> WholeTensor:
        try:
            tensor = self.layout.tensors[name]
        except KeyError as error:
            if isinstance(error, SlimckptError):
                raise
            near = ", ".join(map(ascii, islice(self.layout.tensors, 5)))
            raise UnknownTensorError(
                f"{self.layout.origin} places no tensor {name!a}, but {len(self)}, such as {near};"
                " what it does not place each rank has for itself: rank(r)[name] gives it"
            ) from None
        covering = self._coverings.of(name, tensor, self.layout.origin)
        return WholeTensor(name, tensor, covering, self._locals, self._allow_drift)


def _key(parts: Iterable[Any]) -> tuple[Any, ...]:
    """A key that gives an array always."""
    return (*parts, ...)


def _ends(box: Box) -> Shape:
    return tuple(map(sum, zip(*box, strict=True)))


def _overlaps(one: Box, other: Box) -> bool:
    low, high = map(max, one.offsets, other.offsets), map(min, _ends(one), _ends(other))
    return all(a < b for a, b in zip(low, high, strict=True))


def _expanded(key: Any, shape: Shape) -> tuple[Any, ...]:
    """One key for each axis."""
    keys = key if type(key) is tuple else (key,)
    if sum(part is Ellipsis for part in keys) > 1:
        raise IndexError("an index can only have one ellipsis")
    if not all(part is Ellipsis or isinstance(part, slice) or _is_index(part) for part in keys):
        raise IndexError("whole tensors are indexed by integers, slices and ...")
    if Ellipsis not in keys:
        keys = (*keys, Ellipsis)
    at = keys.index(Ellipsis)
    missing = len(shape) - (len(keys) - 1)
    if missing < 0:
        raise IndexError(f"too many indices for a tensor of {len(shape)} dimensions")
    return (*keys[:at], *[slice(None)] * missing, *keys[at + 1 :])


def _has_ellipsis(key: Any) -> bool:
    return key is Ellipsis or (type(key) is tuple and Ellipsis in key)


def _is_index(part: Any) -> bool:
    return hasattr(part, "__index__") and not isinstance(part, bool | np.ndarray)


def _range(part: Any, dim: int) -> tuple[int, int, Any]:
    """First and last element that are needed of an axis, and the key that is left to apply."""
    if not isinstance(part, slice):
        at = part.__index__()
        if not -dim <= at < dim:
            raise IndexError(f"index {at} is out of bounds for an axis of size {dim}")
        at %= dim
        return at, at + 1, 0
    wanted = range(dim)[part]
    if not wanted:
        return 0, 0, slice(None)
    low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1
    return low, high, slice(None, None, wanted.step)
