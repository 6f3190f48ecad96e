"""The object that a pickle stands for, made by constructors that are allowed and by no others.

:class:`Constructor` reads a pickle as :class:`~slimckpt.formats.pickles.PickleReader` does, but
makes objects where that makes nodes. What may be called is what an :class:`Allowed` resolves;
containers are Python's own, and arrays of numpy are made here, of memory that the caller gives.
"""

from __future__ import annotations

import reprlib
import sys
from collections import deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from slimckpt.errors import NotUnderstoodError, SlimckptError, UnknownGlobalError
from slimckpt.formats.pickles import OPCODES, PickleReader, Stored
from slimckpt.frameworks.allowed import FROM_BUFFER, Allowed, UnfinishedArray
from slimckpt.model import FLOOR
from slimckpt.sources.positioned import ByteSource

Memory = Callable[[int, int], npt.NDArray[np.uint8]]
"""Writable memory of bytes of the file: offset and length, as the pickle's source counts."""
Persistent = Callable[[Any], Any]

_MAX_AXES = 64
_MAX_DEPTH = 500
"""Of tuples in tuples: Python has no limit where it hashes one, but for the stack."""
_MAX_AGAIN = 1 << 20


class Constructor(PickleReader):
    """Reads pickles and makes their objects.

    Parameters
    ----------
    source, at, end, max_nodes
        As of :class:`~slimckpt.formats.pickles.PickleReader`.
    allowed
        Resolves globals.
    memory
        Gives arrays their memory; ``None`` where their bytes are to be read from ``source``.
    persistent
        Gives the object of a persistent id.
    encoding : str
        Of strings of Python 2.
    """

    def __init__(
        self,
        source: ByteSource,
        at: int,
        end: int,
        max_nodes: int | None = None,
        *,
        allowed: Allowed,
        memory: Memory | None = None,
        persistent: Persistent | None = None,
        encoding: str = "utf-8",
    ) -> None:
        super().__init__(source, at, end, max_nodes)
        self.allowed, self.memory = allowed, memory
        self.give, self.encoding = persistent, encoding
        self.unfinished = 0
        self.nests: dict[int, tuple[int, int]] = {}

    def read(self) -> Any:
        """The next object.

        Raises
        ------
        DamagedFileError, NotUnderstoodError
            As of the inert reader; also where a constructor refuses its arguments.
        UnknownGlobalError
            It needs something that is not allowed.
        """
        try:
            found = super().read()
        except RecursionError:
            self.damaged("its objects lie too deep in each other")
        if self.unfinished:
            self.damaged("an array was begun and never given its elements")
        return found

    def find(self, module: Any, name: Any) -> Any:
        self.symbol(module, name)
        return self.allowed.find(module, name, self.source.label)

    def made(self, value: Any) -> None:
        if isinstance(value, tuple):
            self._measure(value, value)
        elif type(value) is slice:
            self._measure(value, (value.start, value.stop, value.step))
        super().made(value)

    def _measure(self, value: Any, parts: Iterable[Any]) -> None:
        """Refuse what Python's own code would walk too deep or too long, without a limit: to hash
        a tuple or to let go of it."""
        depth = paths = 1
        for part in parts:
            if isinstance(part, (tuple, slice, np.ndarray)):
                below, more = self.nests.get(id(part), (1, 1))
                depth, paths = max(depth, below + 1), paths + more
        if depth > _MAX_DEPTH:
            self.damaged("its objects lie too deep in each other")
        if paths > _MAX_AGAIN + 4 * self.nbytes:
            self.damaged("objects in it are too often referred to")
        if depth > 1:
            self.nests[id(value)] = depth, paths
        else:
            self.nests.pop(id(value), None)  # of another that was there before

    def call(self, what: Any, args: Any, kwargs: Any = None, new: bool = False) -> Any:
        """What an allowed constructor makes."""
        if type(args) is not tuple or not (kwargs is None or type(kwargs) is dict):
            self.damaged("the arguments of a call are no tuple")
        if not self.allowed.may_call(what, new):
            if self.allowed.may_call(what, new=True):
                raise UnknownGlobalError(
                    f"{self.source.label}: it calls {what.__module__}.{what.__qualname__}, of which"
                    " slimckpt makes objects, but does not run what creates them anew. If you trust"
                    f" it, pass allow=[{what.__name__}]"
                )
            self.damaged(f"it calls a {type(what).__name__}, which is no constructor")
        if _is_bomb(what, args):
            self.damaged("it asks for an object that is larger than what it gives")
        try:
            if new:
                found = what.__new__(what, *args, **(kwargs or {}))
            else:
                found = what(*args, **(kwargs or {}))
        except (SlimckptError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a constructor says of bad arguments
            name = f"{what.__module__}.{what.__qualname__}"
            raise NotUnderstoodError(
                f"{self.source.label}: {name} refused what the file gives it:"
                f" {type(error).__name__}: {error}"
            ) from None
        if type(found) is UnfinishedArray:
            found.born = len(self.memo)
            self.unfinished += 1
        return found

    def build(self, state: Any) -> None:
        """Give the object on the stack its state."""
        target = self.stack[-1]
        if type(target) is UnfinishedArray:
            self._finish(target, self._array(state))
        elif isinstance(target, np.dtype):
            self._set_dtype(target, state)
        elif self.allowed.may_build(type(target)):
            try:
                _set_state(target, state)
            except (SlimckptError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - as above
                raise NotUnderstoodError(
                    f"{self.source.label}: a {type(target).__module__}.{type(target).__qualname__}"
                    f" refused the state the file gives it: {type(error).__name__}: {error}"
                ) from None
        else:
            self.damaged(f"gives a state to a {type(target).__name__}")

    def text(self, nbytes: int) -> None:
        self.made(str(self.take(nbytes), "utf-8", "surrogatepass"))

    def raw(self, nbytes: int) -> bytes | Stored:
        """A byte string; where it becomes the elements of an array, only its place."""
        if self.memory is not None and nbytes >= FLOOR and self.marks:
            below = self.marks[-1][-1] if self.marks[-1] else None
            if (type(below) is UnfinishedArray and len(self.stack) == 4) or (
                below is FROM_BUFFER and not self.stack
            ):
                return self.stored(nbytes)
        self.count()
        return self.take(nbytes)

    def string(self, nbytes: int) -> Any:
        """A string of Python 2: text, or, as the elements of an array, bytes."""
        if nbytes < 0:
            self.damaged("a string of negative length")
        found = self.raw(nbytes)
        below = self.marks[-1][-1] if self.marks and self.marks[-1] else None
        if type(found) is not bytes or type(below) is UnfinishedArray:
            return found
        return found.decode(self.encoding)

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, (list, deque)):
            target.extend(items)
        else:
            self.damaged(f"appends to a {type(target).__name__}")

    def set_pairs(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if len(flat) % 2:
            self.damaged("a key without a value")
        if not isinstance(target, dict):
            self.damaged(f"sets items of a {type(target).__name__}")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            target[key] = value

    def persist(self, pid: Any) -> Any:
        if self.give is None:
            self.damaged("it refers to an object outside of it")
        return self.give(pid)

    def _finish(self, target: UnfinishedArray, found: Any) -> None:
        """Put an array where its placeholder is: on the stack and in the memo."""
        self.unfinished -= 1
        self.stack[-1] = found
        for index in range(target.born, len(self.memo)):
            if self.memo[index] is target:
                self.memo[index] = found

    def _array(self, state: Any) -> Any:
        """An array of the state ``(version, shape, dtype, is_fortran, elements)``."""
        if type(state) is not tuple or len(state) != 5:
            self.damaged("the state of an array is none")
        _, shape, dtype, fortran, data = state
        found = self.array(data, dtype, shape, "F" if fortran else "C")
        if dtype.isnative or dtype.fields is not None:
            return found
        # So does numpy, where it is given a state.
        return found.astype(dtype.newbyteorder("="))

    def array(self, data: Any, dtype: Any, shape: Any, order: str) -> Any:
        if not isinstance(dtype, np.dtype) or type(shape) is not tuple or len(shape) > _MAX_AXES:
            self.damaged("an array without dtype or shape")
        if dtype.hasobject:
            return self._of_objects(data, shape, order)
        if type(data) is Stored:
            assert self.memory is not None
            stream: Any = self.memory(data.offset, data.nbytes)
            if stream.ctypes.data % dtype.alignment:
                stream = stream.copy()
        elif type(data) in (bytes, bytearray):
            stream = np.frombuffer(data, np.uint8).copy()
        else:
            self.damaged(f"the elements of an array are a {type(data).__name__}")
        try:
            found = np.ndarray(shape, dtype, stream, order="F" if order == "F" else "C")
        except (TypeError, ValueError) as error:
            self.damaged(f"{len(stream)} bytes for an array {dtype} {shape}: {error}")
        if found.nbytes != len(stream):
            self.damaged(f"{len(stream)} bytes for an array {dtype} {shape}")
        return found

    def _of_objects(self, data: Any, shape: tuple[int, ...], order: str) -> Any:
        if type(data) is not list or any(type(item) is UnfinishedArray for item in data):
            self.damaged("an array of objects without a list of them")
        found = np.empty(len(data), object)
        found[:] = data
        shaped = found.reshape(shape, order="F" if order == "F" else "C")
        self._measure(shaped, data)
        return shaped

    def _set_dtype(self, dtype: Any, state: Any) -> None:
        """Byte order and fields of a dtype, checked before numpy takes them."""
        if type(state) is not tuple or len(state) not in (8, 9):
            self.damaged("the state of a dtype is none")
        _, order, subarray, names, fields, nbytes, alignment, _ = state[:8]
        known = type(order) is str and order in "<>=|" and subarray is None
        if names is not None:
            known = known and type(nbytes) is int and _fits(names, fields, nbytes)
        if not known or type(alignment) is not int or not _is_unit(dtype, state[8:]):
            raise NotUnderstoodError(
                f"{self.source.label}: a dtype of numpy that slimckpt does not make:"
                f" {reprlib.repr(state)}"
            )
        dtype.__setstate__(state)


def _is_bomb(what: Any, args: tuple[Any, ...]) -> bool:
    """Whether few bytes of a pickle would make an object of many."""
    if what is str:  # also of a list that holds a list twice, that holds another twice, …
        return not all(isinstance(arg, (str, bytes, int, float)) for arg in args)
    if what is Fraction:  # of "1e9999999"
        return any(type(arg) is not int and "e" in str(arg).lower() for arg in args)
    return any(
        type(arg) is range
        or (what in (bytes, bytearray) and type(arg) is int)
        or (what is int and type(arg) is Decimal)
        for arg in args
    )


def _fits(names: Any, fields: Any, nbytes: int) -> bool:
    """Whether every named field is a dtype that lies inside of so many bytes."""
    return (
        type(names) is tuple
        and type(fields) is dict
        and set(names) == set(fields)
        and all(
            type(field) is tuple
            and len(field) == 2
            and isinstance(field[0], np.dtype)
            and type(field[1]) is int
            and 0 <= field[1] <= nbytes - field[0].itemsize
            for field in fields.values()
        )
    )


def _is_unit(dtype: np.dtype[Any], more: tuple[Any, ...]) -> bool:
    """Whether a dtype's state may end in it: for times ``(metadata, (unit, count, …))``."""
    if more in ((), (None,)):
        return True
    (pair,) = more
    return (
        dtype.kind in "mM"
        and type(pair) is tuple
        and len(pair) == 2
        and pair[0] in (None, {})
        and type(pair[1]) is tuple
        and len(pair[1]) == 4
        and type(pair[1][0]) is bytes
        and all(type(number) is int for number in pair[1][1:])
    )


def _set_state(target: Any, state: Any) -> None:
    """As unpickling does: ``__setstate__``, else attributes of ``__dict__`` and slots."""
    setstate = getattr(target, "__setstate__", None)
    if setstate is not None:
        setstate(state)
        return
    slots = None
    if type(state) is tuple and len(state) == 2:
        state, slots = state
    if state:
        attributes = target.__dict__
        for key, value in state.items():
            attributes[sys.intern(key) if type(key) is str else key] = value
    for key, value in (slots or {}).items():
        setattr(target, key, value)


def _mark_dict(reader: Constructor) -> None:
    flat = reader.popped()
    reader.made({})
    reader.set_pairs(flat)


def _set_item(reader: Constructor) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    reader.set_pairs([key, value])


def _add_items(reader: Constructor) -> None:
    items = reader.popped()
    if not isinstance(reader.stack[-1], set):
        reader.damaged("adds to what is no set")
    reader.stack[-1].update(items)


def _tuple(reader: Constructor, count: int) -> None:
    items = reader.stack[-count:]
    if len(items) < count:
        reader.damaged("a tuple of more than there is")
    del reader.stack[-count:]
    reader.made(tuple(items))


def _reduce(reader: Constructor) -> None:
    args, what = reader.stack.pop(), reader.stack.pop()
    if what is FROM_BUFFER and type(args) is tuple and len(args) == 4:
        reader.made(reader.array(*args))
    else:
        reader.made(reader.call(what, args))


def _new(reader: Constructor, with_names: bool) -> None:
    kwargs = reader.stack.pop() if with_names else None
    args, what = reader.stack.pop(), reader.stack.pop()
    if not isinstance(what, type):
        reader.damaged(f"makes an object of a {type(what).__name__}, which is no class")
    reader.made(reader.call(what, args, kwargs, new=True))


def _instance(reader: Constructor) -> None:
    what = reader.find(reader.line().decode(), reader.line().decode())
    reader.made(reader.call(what, tuple(reader.popped())))


def _object(reader: Constructor) -> None:
    what, *args = reader.popped()
    reader.made(reader.call(what, tuple(args)))


def _global(reader: Constructor) -> None:
    module, name = reader.line().decode(), reader.line().decode()
    reader.stack.append(reader.find(module, name))


def _stack_global(reader: Constructor) -> None:
    name, module = reader.stack.pop(), reader.stack.pop()
    reader.stack.append(reader.find(module, name))


def _bytearray(reader: Constructor, nbytes: int) -> None:
    found = reader.raw(nbytes)
    reader.made(bytearray(found) if type(found) is bytes else found)


def _unsigned(reader: Constructor, nbytes: int) -> int:
    return int.from_bytes(reader.take(nbytes), "little")


def _extension(reader: Constructor, nbytes: int) -> None:
    reader.damaged(f"extension {_unsigned(reader, nbytes)} of copyreg, which names no class")


_WORK: dict[str, Callable[[Any], Any]] = {
    "d": _mark_dict,
    "}": lambda r: r.made({}),
    "s": _set_item,
    "R": _reduce,
    "b": lambda r: r.build(r.stack.pop()),
    "c": _global,
    "\x93": _stack_global,
    "i": _instance,
    "o": _object,
    "\x81": lambda r: _new(r, False),
    "\x92": lambda r: _new(r, True),
    "\x85": lambda r: _tuple(r, 1),
    "\x86": lambda r: _tuple(r, 2),
    "\x87": lambda r: _tuple(r, 3),
    "B": lambda r: r.stack.append(r.raw(_unsigned(r, 4))),
    "C": lambda r: r.stack.append(r.raw(_unsigned(r, 1))),
    "\x8e": lambda r: r.stack.append(r.raw(_unsigned(r, 8))),
    "\x96": lambda r: _bytearray(r, _unsigned(r, 8)),
    "T": lambda r: r.made(r.string(int.from_bytes(r.take(4), "little", signed=True))),
    "U": lambda r: r.made(r.string(_unsigned(r, 1))),
    "P": lambda r: r.made(r.persist(r.line().decode())),
    "Q": lambda r: r.made(r.persist(r.stack.pop())),
    "\x82": lambda r: _extension(r, 1),
    "\x83": lambda r: _extension(r, 2),
    "\x84": lambda r: _extension(r, 4),
    "\x8f": lambda r: r.made(set()),
    "\x90": _add_items,
    "\x91": lambda r: r.made(frozenset(r.popped())),
    "\x97": lambda r: r.damaged("its buffers are outside of it"),
}
Constructor.opcodes = [_WORK.get(chr(code), work) for code, work in enumerate(OPCODES)]
