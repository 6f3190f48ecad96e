"""The nouns of layouts: plain data, no I/O.

A :class:`Layout` names whole tensors. Each is held in :class:`Shard` s: a local tensor of a rank
(or of a file) and, as :class:`Piece` s, which of its elements are which of the whole tensor.

How what frameworks do sits in it:

- a replica: another shard with equal pieces. All of them must agree;
- fused tensors (``[gate_r; up_r]``, qkv interleaved by group): several pieces in one shard;
- padding of a local tensor: elements that no piece names; they never enter the whole;
- ZeRO, Paddle's ``flattened_range``: a piece with ``flat``, a run of elements of its box;
- flat groups (DeepSpeed): shards of many tensors that name one local tensor, each with ``at`` as
  the number of an element in it;
- local names (numbers of a pipeline stage, tied embeddings under another key): ``Shard.name``;
- stacked layers (Megatron's ``torch_dist``): ``at`` with more axes than the box.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from slimckpt.model import Span

Shape = tuple[int, ...]

Holder = int | str
"""A global rank, or the path of a file in the tree, as ``ckpt.files`` spells it."""


class Box(NamedTuple):
    """A block of a tensor: where it starts and how far it goes on each axis. May be empty."""

    offsets: Shape
    lengths: Shape


class Piece(NamedTuple):
    """Elements of a whole tensor, and where they lie in a local one.

    Attributes
    ----------
    box
        Of the whole tensor.
    at
        Offsets in the local tensor, of a block of the lengths of ``box``; where they are more than
        the axes of the box, the first ones pick an index each. Or an int: the elements follow each
        other, in C order, from this element of the local tensor on, it too counted in C order.
    flat
        Of the box only elements ``start`` to ``stop``, counted in C order inside it; then ``at`` is
        an int. ``None``: all.
    """

    box: Box
    at: Shape | int
    flat: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """What one holder has of a tensor, in one local tensor.

    Attributes
    ----------
    holder
        Whose view has the local tensor, as ``view[name]``; where a file has none of that name, as
        ``view.by_path[name]``.
    shape
        Of the local tensor, padding included. The tensor must have it.
    pieces
        In any order; none where it holds nothing.
    name
        Of the local tensor; ``None``: that of the whole tensor.
    within
        Bytes of the file in which the local tensor must lie, where the record says so; of several
        of that name it is the one there (an item of a ``.distcp`` file).
    """

    holder: Holder
    shape: Shape
    pieces: tuple[Piece, ...]
    name: str | None = None
    within: Span | None = None


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One whole tensor: dtype (as safetensors spells it), whole shape, and all that hold it.

    Tensors that lie alike should share one ``shards`` tuple: what is worked out of it, and proved
    of it, then is so once.
    """

    dtype: str
    shape: Shape
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where all tensors of one saved state lie, or are wanted.

    Attributes
    ----------
    tensors
        By name. May be a lazy mapping that makes an entry (once), or raises what is wrong with it,
        when it is asked for. Tensors that are not in it are outside the layout: each rank has its
        own.
    ranks
        The ranks it is for, in order; those that hold nothing too. Empty where files hold
        everything and no rank is known.
    origin
        Where it is from, as errors name it: ``strategy.ckpt``.
    weights
        Where the record says which whole tensors are the model's weights: by the names to give
        them, which one each is, and the dtype to give it in.
    local
        Names of local tensors that are parts of whole ones, where ``tensors`` may refuse to say so.
    """

    tensors: Mapping[str, TensorLayout]
    ranks: tuple[int, ...]
    origin: str
    weights: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    local: frozenset[str] = frozenset()


def whole_box(shape: Shape) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(shape), shape)
