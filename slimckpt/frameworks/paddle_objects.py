"""The object in a file that ``paddle.save`` wrote, as ``paddle.load`` gives it.

What is done is what ``load`` of Paddle 3.3.1 does (``paddle/framework/io.py``), with its own
functions where they are the same in 2.6, 3.0 and 3.3; but the pickle is read by constructors that
are allowed, and tensors lie in memory that is given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from slimckpt.errors import DamagedFileError, NotUnderstoodError, SlimckptError
from slimckpt.frameworks.construct import Constructor
from slimckpt.frameworks.paddle_names import allowed_of_paddle
from slimckpt.frameworks.paddle_tensors import is_aligned, of_array
from slimckpt.model import Bytes
from slimckpt.sources.positioned import ByteSource
from slimckpt.views.arrays import Array

Memory = Callable[[int, int], Bytes]
"""Writable memory of stored bytes: offset in the file, and length."""

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
        reader = _Reader(
            source, 0, source.size, allowed=self.allowed, memory=self.memory, encoding="latin1"
        )
        found = reader.read()
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
    """Reads pickles of Paddle; a state of its random generators, whose memory is anything until it
    is given a state, is never left without."""

    def read(self) -> Any:
        self.begun: dict[int, Any] = {}
        found = super().read()
        if self.begun:
            self.damaged("a GeneratorState was begun and never given its state")
        return found

    def call(self, what: Any, args: Any, kwargs: Any = None, new: bool = False) -> Any:
        found = super().call(what, args, kwargs, new)
        if type(found).__name__ == "GeneratorState":
            self.begun[id(found)] = found
        return found

    def build(self, state: Any) -> None:
        super().build(state)
        self.begun.pop(id(self.stack[-1]), None)


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
