"""The object in a file that ``paddle.save`` wrote, as ``paddle.load`` gives it.

What is done is what ``load`` of Paddle 3.3.1 does (``paddle/framework/io.py``), with its own
functions where they are the same in 2.6, 3.0 and 3.3; but the pickle is read by constructors that
are allowed, and tensors lie in memory that is given.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from slimckpt.errors import DamagedFileError, NotUnderstoodError, SlimckptError
from slimckpt.formats.numpy_arrays import LATIN_1, is_shape
from slimckpt.formats.pickles import Stored
from slimckpt.frameworks.allowed import Allowed, UnfinishedArray
from slimckpt.frameworks.construct import Constructor
from slimckpt.frameworks.paddle_names import allowed_of_paddle
from slimckpt.frameworks.paddle_tensors import is_aligned, of_array
from slimckpt.model import FLOOR, RAW, Bytes
from slimckpt.sources.positioned import ByteSource
from slimckpt.views.arrays import Array

Memory = Callable[[int, int, str], Bytes]
"""Writable memory of stored bytes: offset in the file, length, encoding."""

_NAMES = "StructuredToParameterName@@"
_CUT = "UnpackBigParamInfor@@"
_SHARED = {code: np.dtype(code).name for code in ("?", *"bBhilefdFDq")} | {"H": "bfloat16"}
"""Paddle's names of dtypes that its loading takes, by numpy's character of native arrays."""
_MAX_AGAIN = 1 << 20


class Objects:
    """Makes the objects of one file.

    Parameters
    ----------
    paddle
        The module.
    memory
        Gives arrays their memory.
    allow
        Further classes and functions that the file may name.
    return_numpy, keep_name_table
        As of ``paddle.load``.
    """

    def __init__(
        self,
        paddle: Any,
        memory: Memory,
        allow: Iterable[Any],
        return_numpy: bool,
        keep_name_table: bool,
    ) -> None:
        self.paddle, self.memory = paddle, memory
        self.allowed = allowed_of_paddle(allow)
        self.return_numpy, self.keep_name_table = return_numpy, keep_name_table
        self.shares = paddle.in_dynamic_mode() and paddle.device.get_device() == "cpu"
        self.taken: set[int] = set()

    def of_file(self, source: ByteSource) -> Any:
        """The first object in a file, the only one that ``paddle.load`` reads."""
        found = _Reader(source, self.allowed, self.memory).read()
        try:
            if _paths(found, {}) > _MAX_AGAIN + 4 * source.size:
                raise NotUnderstoodError(
                    f"{source.label}: objects in its pickle are too often referred to"
                )
            return self._loaded(found, source.label)
        except (SlimckptError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever Paddle says of an odd object
            raise NotUnderstoodError(
                f"{source.label}: paddle.load refuses the object in it:"
                f" {type(error).__name__}: {error}"
            ) from None

    def _loaded(self, found: Any, label: str) -> Any:
        io = self.paddle.framework.io
        if isinstance(found, dict):
            _check_pieces(found, label)
            found = self.paddle.framework.io_utils._pack_loaded_dict(found)
            if _NAMES in found:
                for key, name in found[_NAMES].items():
                    if isinstance(found[key], np.ndarray):
                        found[key] = self._tensor(found[key], name)
                if not self.keep_name_table:
                    del found[_NAMES]
                return found
        if io._contain_x(found, io._transformed_from_varbase):
            return io._parse_every_object(
                found, io._transformed_from_varbase, lambda pair: self._tensor(pair[1], pair[0])
            )
        return io._parse_every_object(found, io._transformed_from_lodtensor, self._tensor)

    def _tensor(self, array: Array, name: str | None = None) -> Any:
        """What an array becomes; an array that is met again becomes a tensor of its own."""
        if self.return_numpy:
            return array
        dtype = _SHARED.get(array.dtype.char) if array.dtype.isnative else None
        address = array.ctypes.data
        suited = array.flags.c_contiguous and array.flags.writeable and is_aligned(array)
        if self.shares and suited and array.size and dtype and address not in self.taken:
            self.taken.add(address)
            found = of_array(self.paddle, array, dtype)
        else:
            found = self.paddle.framework.io._ndarray_to_tensor(array, False)
        if name is not None and hasattr(found, "name"):
            found.name = name
        return found


class _Reader(Constructor):
    """Reads pickles of Paddle.

    The elements of an array are never held as the text that they are under protocol 2. A state of
    Paddle's random generators, whose memory is anything until it is given one, is never left so.
    """

    def __init__(self, source: ByteSource, allowed: Allowed, memory: Memory) -> None:
        super().__init__(source, 0, source.size, allowed=allowed, encoding="latin1")
        self.decoded = memory
        self.memory = lambda at, nbytes: memory(at, nbytes, RAW)
        self.encode = allowed.find("_codecs", "encode", source.label)
        self.begun: dict[int, Any] = {}

    def read(self) -> Any:
        found = super().read()
        if self.begun:
            self.damaged("a GeneratorState was begun and never given its state")
        return found

    def text(self, nbytes: int) -> None:
        below = self.marks[-1][-1] if self.marks and self.marks[-1] else None
        if nbytes >= FLOOR and type(below) is UnfinishedArray and len(self.stack) == 5:
            self.stack.append(self.stored(nbytes, "utf-8"))
        else:
            super().text(nbytes)

    def call(self, what: Any, args: Any, kwargs: Any = None, new: bool = False) -> Any:
        if what is self.encode and type(args) is tuple and args and type(args[0]) is Stored:
            return args[0]
        found = super().call(what, args, kwargs, new)
        if type(found).__name__ == "GeneratorState":
            self.begun[id(found)] = found
        return found

    def build(self, state: Any) -> None:
        super().build(state)
        self.begun.pop(id(self.stack[-1]), None)

    def array(self, data: Any, dtype: Any, shape: Any, order: str) -> Any:
        encoding = RAW
        if type(data) is Stored and data.text and isinstance(dtype, np.dtype) and is_shape(shape):
            nbytes = dtype.itemsize * math.prod(shape)
            # Text that takes one byte a character is the bytes themselves.
            encoding = RAW if nbytes == data.nbytes else f"{LATIN_1}:{nbytes}"
        self.memory = lambda at, stored: self.decoded(at, stored, encoding)
        return super().array(data, dtype, shape, order)


def _check_pieces(found: dict[Any, Any], label: str) -> None:
    """That of few bytes no large array is asked for: each piece of a cut one is of one only."""
    entries = found.get(_CUT)
    names = [name for entry in entries.values() for name in entry["slices"]] if entries else []
    if len(set(names)) < len(names):
        raise DamagedFileError(f"{label}: the pieces of its tensors are not their own")


def _paths(node: Any, known: dict[int, int]) -> int:
    """Objects that a walk meets that does not know one again, which is how Paddle walks."""
    if type(node) not in (dict, OrderedDict, list, tuple, set):
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # also where it holds itself
        parts = node.values() if isinstance(node, dict) else node
        known[id(node)] = 1 + sum(_paths(part, known) for part in parts)
    return known[id(node)]
