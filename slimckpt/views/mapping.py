"""The mapping from names to arrays that ranks and files have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from slimckpt import dtypes
from slimckpt.errors import (
    AmbiguousTensorError,
    DroppedTensorError,
    OpaqueTensorError,
    SlimckptError,
    UnknownTensorError,
)
from slimckpt.model import Tensor, encode_path
from slimckpt.views.arrays import Array, Arrays, alike, tensor_of
from slimckpt.views.copying import LARGE, copy_tensor, room
from slimckpt.views.names import Names
from slimckpt.views.plain import PlainTensors
from slimckpt.views.prefetch import Prefetch
from slimckpt.views.providers import Holding, Member, Stretch

Found = tuple[Member, int]
"""A tensor: its file, and its row there."""


class TensorView(Mapping[str, Array]):
    """Tensors by name: a lazy mapping to arrays, made when they are asked for.

    Iteration is in file order, each name once, names of arrays only. Arrays are read-only unless
    the view is writable, and no copies where they need not be; they stay valid when the checkpoint
    is closed. A tensor of less than 1 KiB whose bytes do not lie as its dtype wants them is
    copied, a larger one has ``flags.aligned`` false.

    Reading a tensor raises, besides what its file may deserve:

    UnknownTensorError
        There is none of that name. (A ``KeyError``.)
    AmbiguousTensorError
        Two have the name, and differ.
    OpaqueTensorError
        It is not an array.
    DroppedTensorError
        It was left out when the checkpoint was slimmed. (A ``KeyError``.)
    ClosedError
        The checkpoint was closed.
    """

    _keyed_by_path = False

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._built: Names | None = None
        self._agreed: dict[str, bool] = {}
        self._plains: dict[int, PlainTensors] = {}

    @abstractmethod
    def _members(self) -> list[Member]:
        """The files whose tensors these are; an error where they cannot be read."""

    @abstractmethod
    def _what(self) -> str:
        """What errors call this view."""

    @property
    def _names(self) -> Names:
        self._arrays.backend.require_open()
        if self._built is None:
            holdings = [member.holding for member in self._members()]
            tables = [holding.require() for holding in holdings]
            dropped = [holding.dropped() for holding in holdings]
            self._built = Names(tables, dropped, self._keyed_by_path)
        return self._built

    def __getitem__(self, name: str) -> Array:
        plain = self._plain(name)
        if plain is not None:
            return plain
        member, row = self._find(name)
        return self._arrays.array(member.holding, row)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Identity: comparing all arrays is for the caller to ask for."""
        return self is other

    @property
    def arrays(self) -> Arrays:
        """What makes its arrays."""
        return self._arrays

    def located(self, name: str) -> tuple[Holding, int]:
        """The file that has the tensor of a name, or the entry that is no array, and its row
        there."""
        member, row = self._find(name, opaque=True)
        return member.holding, row

    @property
    def opaque(self) -> tuple[str, ...]:
        """Names of entries that are not arrays: strings, unknown types. See :meth:`raw`."""
        return tuple(self._names.opaque)

    @property
    def dropped(self) -> tuple[str, ...]:
        """Names of tensors that were left out when it was slimmed (``--drop``): they are not in
        the mapping, but :meth:`info` still tells what they were."""
        return tuple(reversed(self._names.dropped))

    def info(self, name: str) -> Tensor:
        """What is known of a tensor without touching its bytes: dtype, shape and the like.

        Dtypes are spelled as safetensors does (``BF16``). Entries that are not arrays have one
        that starts with ``opaque:``.
        """
        found = self._all(name)
        tensors = [tensor_of(member.holding, row) for member, row in found]
        if not all(alike(tensors[0], tensor) for tensor in tensors[1:]):
            raise self._ambiguous(name, found)
        return tensors[0]

    def raw(self, name: str) -> bytes:
        """The bytes of a tensor of any type, also of one that is not an array.

        Of an array, in C order; of any, as they are stored: writing to a writable view does not
        change them.
        """
        member, row = self._find(name, opaque=True)
        return self._arrays.raw(member.holding, row)

    def unpack(self, name: str) -> Array:
        """The elements of a tensor of a packed dtype (``F4``, ``F6_E2M3``, ``I4X2``), one each.

        The array itself (``view[name]``) is the packed bytes. See
        :func:`slimckpt.dtypes.unpack`.
        """
        member, row = self._find(name)
        tensor = tensor_of(member.holding, row)
        return dtypes.unpack(self._arrays.array(member.holding, row), tensor.dtype, tensor.shape)

    def copy_into(self, name: str, out: Any) -> None:
        """Copy a tensor into memory of the caller's: ``numpy.copyto(out, view[name])``, but large
        ones are read from the file straight into it, by several threads.

        Parameters
        ----------
        name
            Of the tensor.
        out
            A numpy array of the dtype and shape of ``view[name]``, with any strides; or any
            writable, contiguous buffer (``bytearray``, ``memoryview``, a one-dimensional
            ``uint8`` array) of exactly its bytes, which are put there in C order, as they are
            stored. Of a (pinned) torch tensor, ``tensor.numpy()`` or, where numpy has no such
            dtype, ``tensor.view(torch.uint8).flatten().numpy()``.

        Raises
        ------
        UsageError
            ``out`` has another dtype, shape or size, or cannot be written to. (A ``ValueError``.)

        Notes
        -----
        What was copied when an error is raised midway stays in ``out``. A writable view gives what
        its array holds now.
        """
        what = f"{self._what()}: tensor {name!a}"
        plain = self._plain(name)
        if plain is not None and plain.nbytes < LARGE:
            return np.copyto(room(out, plain.dtype, plain.shape, what), plain)
        member, row = self._find(name)
        return copy_tensor(self._arrays, member.holding, row, out, what)

    def prefetch(self, names: str | Iterable[str] | None = None) -> Prefetch:
        """Bring the pages of tensors into the page cache, in the background.

        Parameters
        ----------
        names
            Of the tensors; by default all.

        Returns
        -------
        Prefetch
            At once. Its ``wait()`` returns when all is read, or raises what went wrong;
            ``cancel()`` stops it. It keeps no process from ending.

        Raises
        ------
        UnknownTensorError, OpaqueTensorError, DroppedTensorError
            For the first of ``names`` that is no array here.

        Notes
        -----
        Files are read in order, by large reads of four threads, and tensors near each other
        together. All processes of the node profit, and either backend: ``"pread"`` still copies
        what it reads, but from memory. A checkpoint with a stage brings the files there. A file
        larger than the free memory pushes its own first pages out again: then prefetch what is
        read next.
        """
        if names is None:
            wanted = list(self)
        else:
            wanted = [names] if isinstance(names, str) else list(names)
            for name in wanted:
                if name not in self:
                    self._find(name)
        return Prefetch(self._arrays.backend, wanted, self._pieces)

    def in_storage_order(self) -> list[str]:
        """The names of this view, each once, in the order in which their bytes lie: by file, then
        by offset. Reading them in this order reads each file from front to end.

        Tensors without bytes of their own (empty, or one value throughout) come last, and so do
        damaged ones.
        """

        def key(name: str) -> tuple[bool, bytes, int]:
            try:
                pieces = self._pieces(name)
            except SlimckptError:
                pieces = []
            for path, offset, _, _ in pieces:
                if path is not None:
                    return False, path, offset
            return True, b"", 0

        return sorted(self, key=key)

    @property
    def by_path(self) -> TensorView:
        """The same tensors by their exact path inside their file."""
        return _ByPath(self)

    def _all(self, name: str) -> list[Found]:
        members = self._members()
        found = [(members[table], row) for table, row in self._names.rows(name)]
        if not found:
            raise UnknownTensorError(f"{self._what()} has no tensor {name!a}; it has {len(self)}")
        return found

    def _plain(self, name: str) -> Array | None:
        """The array of a name that one plain tensor has."""
        found = None if self._arrays.writable else self._names.only(name)
        if found is None:
            return None
        table, row = found
        return (self._plains.get(table) or self._plain_tensors(table)).array(row)

    def _plain_tensors(self, table: int) -> PlainTensors:
        if table not in self._plains:
            holding = self._members()[table].holding
            self._plains[table] = PlainTensors(holding, self._arrays.backend)
        return self._plains[table]

    def _pieces(self, name: str) -> list[Stretch]:
        """Where the bytes of all tensors of a name are, in stream order."""
        found = self._names.only(name)
        if found is not None:
            place = self._plain_tensors(found[0]).place(found[1])
            if place is not None:
                return [place]
        pieces = []
        for member, row in self._all(name):
            pieces += self._arrays.pieces(member.holding, row, check=False)
        return pieces

    def _find(self, name: str, opaque: bool = False) -> Found:
        """The one tensor of that name, or one of several that do not differ."""
        found = self._all(name)
        if name in self._names.dropped:
            raise DroppedTensorError(
                f"{found[0][0].holding.label}: {name!a} was left out when it was slimmed (--drop);"
                " its bytes are not in the slim checkpoint"
            )
        if not opaque and name in self._names.opaque:
            holding, row = found[0][0].holding, found[0][1]
            raise OpaqueTensorError(
                f"{holding.label}: {name!a} is of type {holding.table.dtype(row)}, not an"
                " array; raw(name) gives its bytes"
            )
        if len(found) > 1 and name not in self._agreed:
            first, *others = [(member.holding, row) for member, row in found]
            self._agreed[name] = all(self._arrays.same(first, other) for other in others)
        if len(found) > 1 and not self._agreed[name]:
            raise self._ambiguous(name, found)
        return found[0]

    def _ambiguous(self, name: str, found: list[Found]) -> AmbiguousTensorError:
        first = found[0]
        other = next((f for f in found[1:] if self._differs(first, f)), found[1])
        files = [member.holding.label for member, _ in (first, other)]
        paths = [member.holding.table.path(row) for member, row in (first, other)]
        key = encode_path(first[0].path)
        if files[0] != files[1]:
            which = f"in {files[0]} and in {files[1]}"
            way = f".files[{key!r}] of the checkpoint has one"
        elif paths[0] != paths[1]:
            which = f"in {files[0]}, at {paths[0]!a} and at {paths[1]!a}"
            way = f".files[{key!r}].by_path[{paths[0]!a}] of the checkpoint is one"
        else:
            which = f"in {files[0]}, entries {first[1]} and {other[1]}"
            way = "the file itself does not tell them apart"
        return AmbiguousTensorError(f"two tensors named {name!a} differ: {which}; {way}")

    def _differs(self, one: Found, other: Found) -> bool:
        return not self._arrays.same((one[0].holding, one[1]), (other[0].holding, other[1]))


class _ByPath(TensorView):
    """A view's tensors by exact path; shares its arrays."""

    _keyed_by_path = True

    def __init__(self, view: TensorView) -> None:
        super().__init__(view._arrays)
        self._view = view

    def __reduce__(self) -> tuple[Any, ...]:
        return attrgetter("by_path"), (self._view,)

    def _members(self) -> list[Member]:
        return self._view._members()

    def _what(self) -> str:
        return self._view._what()
