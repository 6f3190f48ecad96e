"""The tensors of a checkpoint as other ranks would hold them, read lazily through two layouts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

import numpy as np

from slimckpt.dtypes import numpy_dtype
from slimckpt.errors import (
    CheckFailedError,
    SlimckptError,
    UnknownRankError,
    UnknownTensorError,
    UsageError,
)
from slimckpt.layouts.covering import Coverings
from slimckpt.layouts.dcp import require_movable
from slimckpt.layouts.layout import Layout, Shard, TensorLayout
from slimckpt.layouts.placement import Rules, Typed
from slimckpt.layouts.slicing import fill, local_of
from slimckpt.model import Bytes, Tensor, compact_ranks
from slimckpt.views.arrays import Array
from slimckpt.views.bound import Bound
from slimckpt.views.mapping import TensorView
from slimckpt.views.whole import Wholes

Parts = list[tuple[str, Shard]]
"""What a local tensor is made of: names of whole tensors, and its parts of them."""


class Resharded(Mapping[int, "ReshardedRank"]):
    """What each rank has by a new layout.

    Made by :meth:`Step.reshard` and :meth:`Checkpoint.reshard`.

    Attributes
    ----------
    layout
        The new one.
    wholes
        All whole tensors, by name, through the layout of the checkpoint.
    unused
        Patterns of rules for the new layout that match no tensor: misspelt, perhaps.
    """

    def __init__(
        self, wholes: Wholes, bound: Bound, target: Layout | Rules, skip: Sequence[str]
    ) -> None:
        self.wholes, self._bound = wholes, bound
        names = [name for name in wholes if not any(fnmatchcase(name, glob) for glob in skip)]
        require_movable(names, wholes.layout.origin)
        self.unused: list[str] = []
        if isinstance(target, Rules):
            self.unused = target.unused(wholes)
            tensors = wholes.layout.tensors
            typed = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
            target = target.place(typed)
        self.layout = target
        self._names = dict.fromkeys(names)
        self._outside = self._check()
        shards = {}
        for name in wholes:
            with suppress(SlimckptError):  # what is skipped may be refused
                old = wholes.layout.tensors[name]
                shards[id(old.shards)] = old.shards
        local = {shard.name for same in shards.values() for shard in same if shard.name}
        self._known = ({*wholes} | local | wholes.layout.local) - self._outside
        self._shards: dict[int, dict[int, list[Shard]]] = {}
        self._ranks: dict[int, ReshardedRank] = {}

    def __repr__(self) -> str:
        return f"<Resharded to {self.layout.origin}, ranks {compact_ranks(self.layout.ranks)}>"

    def __len__(self) -> int:
        return len(self.layout.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.layout.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.layout.ranks

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getitem__(self, rank: int) -> ReshardedRank:
        if rank not in self.layout.ranks:
            raise UnknownRankError(
                f"{self.layout.origin} has no rank {rank}; there are"
                f" {compact_ranks(self.layout.ranks)}"
            )
        if rank not in self._ranks:
            self._ranks[rank] = self._make(rank)
        return self._ranks[rank]

    @property
    def placed(self) -> tuple[str, ...]:
        """Names of the whole tensors that the new layout places."""
        return tuple(name for name in self._names if name not in self._outside)

    def _make(self, rank: int) -> ReshardedRank:
        local: dict[str, Parts] = {}
        for name in self.placed:
            for shard in self._held(self.layout.tensors[name]).get(rank, ()):
                local.setdefault(shard.name or name, []).append((name, shard))
        own = None
        if self._bound.ranks:
            own = self._bound.view_of(rank if rank in self._bound.ranks else self._bound.ranks[0])
        carried = [name for name in own or () if name not in local and name not in self._known]
        return ReshardedRank(rank, self, local, own, carried)

    def _held(self, tensor: TensorLayout) -> dict[int, list[Shard]]:
        """The shards of each rank; of tensors that share their shards once."""
        key = id(tensor.shards)
        if key not in self._shards:
            by_rank: dict[int, list[Shard]] = {}
            for shard in tensor.shards:
                if isinstance(shard.holder, int):
                    by_rank.setdefault(shard.holder, []).append(shard)
            self._shards[key] = by_rank
        return self._shards[key]

    def _check(self) -> set[str]:
        """Both layouts are of the same tensors; the names of those that the new one leaves out,
        which must be whole on every rank, so that each can keep its own."""
        source, wanted = self.wholes.layout, self.layout
        missing = next((name for name in wanted.tensors if name not in source.tensors), None)
        if missing is not None:
            raise CheckFailedError(
                f"{wanted.origin} has a tensor {missing!a}, which {source.origin} has not; they are"
                " layouts of different models"
            )
        outside = set()
        proved = Coverings()
        for name in self._names:
            old = source.tensors[name]
            if name not in wanted.tensors:
                if any(shard.shape != old.shape for shard in old.shards):
                    raise UsageError(
                        f"tensor {name!a} is in parts by {source.origin}, and {wanted.origin} does"
                        " not say how it is wanted; add it there, or leave it out (skip=[…],"
                        " --skip)"
                    )
                outside.add(name)
                continue
            new = wanted.tensors[name]
            if (new.dtype, new.shape) != (old.dtype, old.shape):
                raise CheckFailedError(
                    f"tensor {name!a} is {old.dtype} {list(old.shape)} by {source.origin} and"
                    f" {new.dtype} {list(new.shape)} by {wanted.origin}; they are layouts of"
                    " different models"
                )
            proved.of(name, new, wanted.origin)
        return outside


class ReshardedRank(Mapping[str, Array]):
    """What one rank has by a new layout: a lazy, read-only mapping from names to arrays.

    An array is a view of mapped memory where one box of what was saved is all of it, else it is
    put together when it is asked for, and not kept.
    """

    def __init__(
        self,
        rank: int,
        resharded: Resharded,
        local: dict[str, Parts],
        own: TensorView | None,
        carried: Sequence[str],
    ) -> None:
        self._rank, self._resharded, self._local, self._own = rank, resharded, local, own
        self._carried = dict.fromkeys(carried)

    def __repr__(self) -> str:
        return f"<ReshardedRank {self._rank} of {self._resharded!r}>"

    def __len__(self) -> int:
        return len(self._local) + len(self._carried)

    def __iter__(self) -> Iterator[str]:
        yield from self._local
        yield from self._carried

    def __contains__(self, name: object) -> bool:
        return name in self._local or name in self._carried

    def __getitem__(self, name: str) -> Array:
        parts = self._local.get(name)
        if parts is None:
            return self._from(name)[name]
        dtype, shape = self.info(name)
        wholes = self._resharded.wholes
        if len(parts) == 1:
            found = local_of(wholes[parts[0][0]], parts[0][1], numpy_dtype(dtype))
        else:
            found = np.zeros(shape, numpy_dtype(dtype))
            for whole, shard in parts:
                fill(found, wholes[whole], shard)
        found.flags.writeable = False
        return found

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Identity: comparing all arrays is for the caller to ask for."""
        return self is other

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def carried(self) -> tuple[str, ...]:
        """Names outside the layouts (learning rates, steps, states of generators): those of the
        rank of the same number where there is one, else of the first rank."""
        return tuple(self._carried)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Names of carried entries that are not arrays: strings, say. See :meth:`raw`."""
        return () if self._own is None else self._own.opaque

    def info(self, name: str) -> Typed:
        """Dtype (as safetensors spells it) and shape, without touching bytes."""
        parts = self._local.get(name)
        if parts is None:
            tensor = self._from(name).info(name)
            return tensor.dtype, tensor.shape
        whole, shard = parts[0]
        return self._resharded.layout.tensors[whole].dtype, shard.shape

    def carried_tensor(self, name: str) -> Tensor:
        """All that is known of a carried entry."""
        return self._from(name).info(name)

    def parts(self, name: str) -> tuple[tuple[str, Shard], ...]:
        """Which whole tensors a local tensor has parts of; none for a carried one. What is in none
        of them is zero."""
        return tuple(self._local.get(name, ()))

    def stretches(self, name: str, nbytes: int = 8 * 2**20) -> Iterator[Array]:
        """The elements of a tensor in C order, a stretch of one axis at a time: for writing tensors
        that are put together, without holding one as a whole.

        Parameters
        ----------
        name
            Of the tensor.
        nbytes
            Of a stretch, at most (but at least one element).
        """
        dtype, shape = self.info(name)
        parts = self._local.get(name)
        step = max(nbytes // numpy_dtype(dtype).itemsize, 1)
        if parts is None:
            flat = self._from(name)[name].reshape(-1)
            yield from (flat[at : at + step] for at in range(0, flat.size, step))
            return
        wholes = [(self._resharded.wholes[whole], shard) for whole, shard in parts]
        size = math.prod(shape)
        for at in range(0, size, step):
            out = np.zeros(min(step, size - at), numpy_dtype(dtype))
            for whole, shard in wholes:
                fill(out, whole, shard, at)
            yield out

    def content(self, name: str) -> Hashable:
        """What decides the bytes of a local tensor: where it is equal, they are."""
        parts = self._local.get(name)
        if parts is None:
            return id(self._from(name)), name
        shape = parts[0][1].shape
        return shape, tuple((whole, shard.pieces) for whole, shard in parts)

    def pieces(self, name: str) -> Iterator[Bytes]:
        """The bytes of an entry of any type in C order, a few MiB at a time."""
        if name not in self:
            return iter([np.frombuffer(self._from(name).raw(name), np.uint8)])
        return (part.view(np.uint8) for part in self.stretches(name))

    def raw(self, name: str) -> bytes:
        """The bytes of an entry of any type, in C order."""
        return self[name].tobytes() if name in self._local else self._from(name).raw(name)

    def _from(self, name: str) -> TensorView:
        if self._own is None or not (name in self._carried or name in self._own.opaque):
            raise UnknownTensorError(f"{self!r} has no tensor {name!a}; it has {len(self)}")
        return self._own
