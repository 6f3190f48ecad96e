"""Pickles as data: a reader that builds a tree of what a pickle says and runs none of it.

Every GLOBAL is a :class:`Global`, a symbol; every call that unpickling would make is a
:class:`Call`, a node. Long byte strings are not read: a :class:`Stored` says where they lie, so
that a file whose arrays are inside the pickle is walked by seeking past them. Opcodes and their
meaning are those of CPython's ``pickletools`` (protocols 0 to 5).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from slimckpt.errors import DamagedFileError, NotUnderstoodError, SlimckptError
from slimckpt.formats.collector import uncollected
from slimckpt.sources.positioned import ByteSource

MAX_NODES = 32_000_000
"""Objects in one file's pickles: those of 200 MB of pure metadata, which take 1 to 2 GB."""
_MAX_LINE = 1 << 16
_MAX_INT = 1 << 10
_SHORT = 256
"""Byte strings of fewer bytes are kept as they are too, since they can be numbers or names."""
_CHUNK = 1 << 16
_ARGUMENT = 8
"""Bytes that an opcode's fixed argument has at most."""
_MAX_HOLES = 1 << 16
_GETS, _PUTS = b"hj", b"qr"
"""BINGET and LONG_BINGET, BINPUT and LONG_BINPUT."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name that unpickling would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Call:
    """An object that unpickling would make by calling ``what`` with ``args``.

    ``new`` where it would be ``cls.__new__``. ``state`` is what its ``__setstate__`` or
    ``__dict__`` would get, ``items`` what would be appended, ``flat`` keys and values in turn.
    """

    __slots__ = ("args", "flat", "items", "kwargs", "new", "state", "what")

    def __init__(self, what: Any, args: Any, new: bool = False, kwargs: Any = None) -> None:
        self.what, self.args, self.new, self.kwargs = what, args, new, kwargs
        self.state: Any = None
        # Most have none, and there are millions.
        self.items: list[Any] | tuple[()] = ()
        self.flat: list[Any] | tuple[()] = ()

    @property
    def pairs(self) -> Iterable[tuple[Any, Any]]:
        return zip(self.flat[::2], self.flat[1::2], strict=True)

    def is_a(self, *names: str) -> bool:
        """Whether it is made by a global of one of these dotted names."""
        return type(self.what) is Global and str(self.what) in names


class Dict(list[Any]):
    """A dict as it was set: keys and values in turn."""

    __slots__ = ()

    @property
    def pairs(self) -> Iterable[tuple[Any, Any]]:
        return zip(self[::2], self[1::2], strict=True)


class Set:
    """A set or frozenset."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any]) -> None:
        self.items = items


class Persistent:
    """An object that is elsewhere, by its persistent id."""

    __slots__ = ("id",)

    def __init__(self, pid: Any) -> None:
        self.id = pid


class Stored:
    """A byte string, or text, that lies in the file: ``nbytes`` at ``offset``.

    ``text`` is ``"utf-8"`` where the bytes are text in that encoding, else empty. ``data`` is what
    they are, where they are few.
    """

    __slots__ = ("data", "nbytes", "offset", "text")

    def __init__(self, offset: int, nbytes: int, text: str = "", data: bytes | None = None) -> None:
        self.offset, self.nbytes, self.text, self.data = offset, nbytes, text, data


_ENCODE = Global("_codecs", "encode")
_MISSING = object()


def keys_of(node: Any) -> list[Any]:
    """The keys of a dict, or of an object that is one; none of anything else."""
    return list((node if type(node) is Dict else node.flat)[::2]) if _has_pairs(node) else []


def _has_pairs(node: Any) -> bool:
    return type(node) in (Dict, Call)


def pairs_of(node: Any) -> list[tuple[Any, Any]]:
    """The pairs of a dict, or of an object that is one; none of anything else."""
    return list(node.pairs) if _has_pairs(node) else []


def fields_of(node: Any) -> dict[str, Any]:
    """The attributes that an object's state gives it."""
    state = node.state if type(node) is Call else None
    return {key: value for key, value in pairs_of(state) if type(key) is str}


def read_pickle(source: ByteSource, offset: int, end: int) -> tuple[Any, int]:
    """The tree of the pickle at ``offset``, and where it ends.

    Raises
    ------
    DamagedFileError
        It breaks a rule of pickles, or reaches behind ``end``.
    NotUnderstoodError
        It has more objects than this reader will hold.
    """
    reader = PickleReader(source, offset, end)
    with uncollected():
        return reader.read(), reader.at


class PickleReader:
    """Reads pickles that follow each other from ``at`` to ``end``.

    Parameters
    ----------
    max_nodes : int
        Objects that all of them may have.

    Attributes
    ----------
    nbytes : int
        Bytes from ``at`` to ``end`` at first.
    at : int
        Where the pickle that was read last ends.
    symbols : dict
        The globals that were met, by module and name.
    persistent : list
        The persistent ids that were met.
    opcodes : list
        What each opcode does; of the class.
    """

    opcodes: list[Callable[[PickleReader], Any] | None]

    def __init__(self, source: ByteSource, at: int, end: int, max_nodes: int | None = None) -> None:
        self.source, self.start, self.end = source, at, end
        self.nbytes = end - at
        self.max_nodes = MAX_NODES if max_nodes is None else max_nodes
        self.nodes = 0
        self.persistent: list[Persistent] = []
        self.symbols = {("_codecs", "encode"): _ENCODE}
        # ``buffer`` holds ``size`` bytes of the file from ``base`` on, and ``i`` is a place in it.
        # From ``safe`` on it is filled again, so that no argument is cut; at ``end`` zeros follow.
        self.buffer, self.base, self.size, self.safe, self.i = b"", at, 0, 0, 0
        self._fresh()

    def _fresh(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []
        self.holes = 0

    @property
    def at(self) -> int:
        return self.base + self.i

    def read(self) -> Any:
        """The tree of the next pickle.

        Raises
        ------
        DamagedFileError, NotUnderstoodError
            As in :func:`read_pickle`.
        """
        self._fresh()
        self.start = self.at
        try:
            self._run()
            root = self.stack[0]
            self._fresh()
            return root
        except SlimckptError:
            raise
        except (IndexError, TypeError, AttributeError, UnicodeDecodeError, struct.error) as error:
            self.damaged(f"what it does makes no sense ({type(error).__name__})")
        except ValueError as error:
            self.damaged(str(error)[:200])

    def _run(self) -> None:
        """Everything up to STOP. The opcodes that pickles mostly consist of are done here, the
        others by :data:`OPCODES`."""
        table, memo = self.opcodes, self.memo
        signed, unsigned = struct.Struct("<i").unpack_from, struct.Struct("<I").unpack_from
        buffer, at, safe, stack, nodes = self.buffer, self.i, self.safe, self.stack, 0
        while True:
            if at >= safe:
                self.i = at
                self.count(nodes)
                self._fill(1)
                buffer, at, safe, nodes = self.buffer, self.i, self.safe, 0
            code = buffer[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                if self.holes:
                    self.remember(len(memo) - self.holes)
                else:
                    memo.append(stack[-1])
            elif code in _GETS:
                index, at = (
                    (buffer[at], at + 1) if code == 0x68 else (unsigned(buffer, at)[0], at + 4)
                )
                value = memo[index]
                if value is _MISSING:
                    self.damaged("what it gets from its memo was never put there")
                stack.append(value)
            elif code in _PUTS:
                index, at = (
                    (buffer[at], at + 1) if code == 0x71 else (unsigned(buffer, at)[0], at + 4)
                )
                if index == len(memo):
                    memo.append(stack[-1])
                else:
                    self.remember(index)
            elif code == 0x4B:  # BININT1
                stack.append(buffer[at])
                at += 1
            elif code == 0x28:  # MARK
                self.marks.append(stack)
                self.stack = stack = []
                nodes += 1
            elif code == 0x4A:  # BININT
                stack.append(signed(buffer, at)[0])
                at += 4
                nodes += 1
            elif code == 0x2E:  # STOP
                self.i = at
                self.count(nodes)
                if self.marks or len(stack) != 1:
                    self.damaged("it ends with other than one object on its stack")
                return
            else:
                work = table[code]
                self.i = at
                if work is None:
                    self.damaged(f"{code:#04x} is no opcode")
                work(self)
                buffer, at, safe, stack = self.buffer, self.i, self.safe, self.stack

    def damaged(self, why: str) -> NoReturn:
        raise DamagedFileError(
            f"{self.source.label}: the pickle at {self.start}, byte {self.at}: {why}"
        )

    def count(self, nodes: int = 1) -> None:
        """Count objects that take memory."""
        self.nodes += nodes
        if self.nodes > self.max_nodes:
            raise NotUnderstoodError(
                f"{self.source.label}: its pickle has more than {self.max_nodes} objects; it is"
                " kept as a whole"
            )

    def _fill(self, nbytes: int) -> None:
        at = self.at
        if at + nbytes > self.end:
            self.damaged(f"expected {nbytes} more bytes, found {self.end - at}; it was cut")
        self.size = min(max(_CHUNK, nbytes), self.end - at)
        self.buffer = self.source.read(at, self.size)
        self.base, self.i = at, 0
        if at + self.size == self.end:
            self.buffer += bytes(_ARGUMENT)
            self.safe = self.size
        else:
            self.safe = self.size - _ARGUMENT

    def take(self, nbytes: int) -> bytes:
        start = self.i
        if start + nbytes > self.size:
            self._fill(nbytes)
            start = 0
        self.i = start + nbytes
        return self.buffer[start : start + nbytes]

    def line(self) -> bytes:
        """Up to a newline, which is taken too."""
        found = b""
        while True:
            if self.i >= self.size:
                self._fill(1)
            stop = self.buffer.find(b"\n", self.i, self.size)
            piece = self.buffer[self.i : stop if stop >= 0 else self.size]
            found += piece
            self.i += len(piece) + (stop >= 0)
            if len(found) > _MAX_LINE:
                self.damaged("a line is too long")
            if stop >= 0:
                return found

    def stored(self, nbytes: int, text: str = "") -> Stored:
        """A string of ``nbytes`` from here on, which is skipped."""
        offset = self.at
        if offset + nbytes > self.end:
            self.damaged(
                f"a string of {nbytes} bytes where {self.end - offset} are left; it was cut"
            )
        self.count()
        if nbytes < _SHORT:
            return Stored(offset, nbytes, text, self.take(nbytes))
        if self.i + nbytes <= self.size:
            self.i += nbytes
        else:
            self.base, self.i, self.size, self.safe = offset + nbytes, 0, 0, 0
        return Stored(offset, nbytes, text)

    def text(self, nbytes: int) -> None:
        # Under protocol 2 the bytes of an array are text, given to this function.
        if nbytes > _MAX_LINE or (self.stack and self.stack[-1] is _ENCODE):
            self.stack.append(self.stored(nbytes, "utf-8"))
        else:
            self.count()
            self.stack.append(str(self.take(nbytes), "utf-8", "surrogatepass"))

    def made(self, value: Any) -> None:
        self.count()
        self.stack.append(value)

    def popped(self) -> list[Any]:
        """What lies above the last mark."""
        found = self.stack
        self.stack = self.marks.pop()
        return found

    def symbol(self, module: Any, name: Any) -> Global:
        if not (type(module) is str and type(name) is str):
            self.damaged("the name of a global is no text")
        found = self.symbols.get((module, name))
        if found is None:
            self.count()
            found = self.symbols[module, name] = Global(module, name)
        return found

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) not in (Call, Set):
            self.damaged(f"appends to a {type(target).__name__}")
        elif target.items:
            target.items.extend(items)
        else:
            target.items = items

    def set_pairs(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if len(flat) % 2:
            self.damaged("a key without a value")
        if type(target) is Dict:
            target.extend(flat)
        elif type(target) is not Call:
            self.damaged(f"sets items of a {type(target).__name__}")
        elif target.flat:
            target.flat.extend(flat)
        else:
            target.flat = flat

    def remember(self, index: int) -> None:
        """Put into the memo: a list, since writers count from 0."""
        value, memo = self.stack[-1], self.memo
        if index < 0 or index - len(memo) + self.holes > _MAX_HOLES:
            self.damaged(f"puts into place {index:#x} of a memo of {len(memo)}")
        if index >= len(memo):
            self.holes += index + 1 - len(memo)
            memo.extend([_MISSING] * (index + 1 - len(memo)))
        self.holes -= memo[index] is _MISSING
        memo[index] = value

    def recall(self, index: int) -> None:
        value = self.memo[index] if index >= 0 else _MISSING
        if value is _MISSING:
            self.damaged("what it gets from its memo was never put there")
        self.stack.append(value)


def _number(layout: str) -> Callable[[PickleReader], int]:
    unpack, nbytes = struct.Struct(layout).unpack, struct.calcsize(layout)

    def read(reader: PickleReader) -> int:
        found: int = unpack(reader.take(nbytes))[0]
        return found

    return read


_u1, _u2, _i4, _u4, _u8 = map(_number, ("<B", "<H", "<i", "<I", "<Q"))
_f8 = struct.Struct(">d").unpack


def _int_line(reader: PickleReader, line: bytes) -> int:
    if len(line) > _MAX_INT:
        reader.damaged("an integer of too many digits")
    return int(line)


def _op_int(reader: PickleReader) -> None:
    line = reader.line()
    reader.made(line == b"01" if line in (b"00", b"01") else _int_line(reader, line))


def _op_long(reader: PickleReader) -> None:
    reader.made(_int_line(reader, reader.line().removesuffix(b"L")))


def _op_long_binary(reader: PickleReader, nbytes: int) -> None:
    if not 0 <= nbytes <= _MAX_LINE:
        reader.damaged(f"an integer of {nbytes} bytes")
    reader.made(int.from_bytes(reader.take(nbytes), "little", signed=True))


def _op_float(reader: PickleReader) -> None:
    line = reader.line()
    if len(line) > _MAX_INT:
        reader.damaged("a number of too many digits")
    reader.made(float(line))


def _op_string(reader: PickleReader) -> None:
    line = reader.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        reader.damaged("a string without quotes")
    # Escapes of Python 2; nothing that slimckpt reads has any.
    reader.made(line[1:-1].decode("latin-1"))


def _op_binstring(reader: PickleReader, nbytes: int) -> None:
    """Bytes of Python 2: text where they are short and plain, else a place in the file."""
    if nbytes < 0:
        reader.damaged("a string of negative length")
    found = reader.stored(nbytes)
    plain = found.data is not None and found.data.isascii() and found.data.decode().isprintable()
    reader.stack.append(found.data.decode() if plain and found.data is not None else found)


def _op_pop(reader: PickleReader) -> None:
    if reader.stack:
        reader.stack.pop()
    else:
        reader.popped()


def _op_tuple(reader: PickleReader, count: int) -> None:
    stack = reader.stack
    if len(stack) < count:
        reader.damaged("a tuple of more than there is")
    reader.count()
    stack[-count:] = [tuple(stack[-count:])]


def _op_mark_dict(reader: PickleReader) -> None:
    flat = reader.popped()
    reader.made(Dict())
    reader.set_pairs(flat)


def _op_append(reader: PickleReader) -> None:
    reader.append([reader.stack.pop()])


def _op_setitem(reader: PickleReader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    reader.set_pairs([key, value])


def _op_additems(reader: PickleReader) -> None:
    items = reader.popped()
    if type(reader.stack[-1]) not in (Set, Call):
        reader.damaged("adds to what is no set")
    reader.append(items)


def _op_global(reader: PickleReader) -> None:
    module, name = reader.line().decode(), reader.line().decode()
    reader.stack.append(reader.symbol(module, name))


def _op_stack_global(reader: PickleReader) -> None:
    name, module = reader.stack.pop(), reader.stack.pop()
    reader.stack.append(reader.symbol(module, name))


def _op_reduce(reader: PickleReader) -> None:
    args, what = reader.stack.pop(), reader.stack.pop()
    reader.made(Call(what, args))


def _op_newobj(reader: PickleReader) -> None:
    args, what = reader.stack.pop(), reader.stack.pop()
    reader.made(Call(what, args, new=True))


def _op_newobj_ex(reader: PickleReader) -> None:
    kwargs, args, what = reader.stack.pop(), reader.stack.pop(), reader.stack.pop()
    reader.made(Call(what, args, new=True, kwargs=kwargs))


def _op_inst(reader: PickleReader) -> None:
    what = reader.symbol(reader.line().decode(), reader.line().decode())
    reader.made(Call(what, tuple(reader.popped())))


def _op_obj(reader: PickleReader) -> None:
    what, *args = reader.popped()
    reader.made(Call(what, tuple(args)))


def _op_build(reader: PickleReader) -> None:
    state = reader.stack.pop()
    target = reader.stack[-1]
    if type(target) is not Call:
        reader.damaged(f"gives a state to a {type(target).__name__}")
    target.state = state


def _op_persistent(reader: PickleReader, pid: Any) -> None:
    reader.made(Persistent(pid))
    reader.persistent.append(reader.stack[-1])


def _op_extension(reader: PickleReader, code: int) -> None:
    reader.stack.append(reader.symbol("copyreg", f"extension {code}"))


def _op_proto(reader: PickleReader) -> None:
    version = _u1(reader)
    if version > 5:
        reader.damaged(f"protocol {version}, expected 0 to 5")


def _op_frame(reader: PickleReader) -> None:
    nbytes = _u8(reader)
    if reader.at + nbytes > reader.end:
        reader.damaged(f"a frame of {nbytes} bytes where {reader.end - reader.at} are left")


_WORK: dict[str, Callable[[PickleReader], Any]] = {
    "(": lambda r: None,
    "0": _op_pop,
    "1": PickleReader.popped,
    "2": lambda r: r.stack.append(r.stack[-1]),
    "F": _op_float,
    "I": _op_int,
    "J": lambda r: None,
    "K": lambda r: None,
    "L": _op_long,
    "M": lambda r: r.made(_u2(r)),
    "N": lambda r: r.stack.append(None),
    "P": lambda r: _op_persistent(r, r.line().decode()),
    "Q": lambda r: _op_persistent(r, r.stack.pop()),
    "R": _op_reduce,
    "S": _op_string,
    "T": lambda r: _op_binstring(r, _i4(r)),
    "U": lambda r: _op_binstring(r, _u1(r)),
    "V": lambda r: r.made(r.line().decode("raw-unicode-escape")),
    "X": lambda r: r.text(_u4(r)),
    "a": _op_append,
    "b": _op_build,
    "c": _op_global,
    "d": _op_mark_dict,
    "}": lambda r: r.made(Dict()),
    "e": lambda r: r.append(r.popped()),
    "g": lambda r: r.recall(_int_line(r, r.line())),
    "h": lambda r: None,
    "i": _op_inst,
    "j": lambda r: None,
    "l": lambda r: r.made(r.popped()),
    "]": lambda r: r.made([]),
    "o": _op_obj,
    "p": lambda r: r.remember(_int_line(r, r.line())),
    "q": lambda r: None,
    "r": lambda r: None,
    "s": _op_setitem,
    "t": lambda r: r.made(tuple(r.popped())),
    ")": lambda r: r.stack.append(()),
    "u": lambda r: r.set_pairs(r.popped()),
    "G": lambda r: r.made(_f8(r.take(8))[0]),
    "B": lambda r: r.stack.append(r.stored(_u4(r))),
    "C": lambda r: r.stack.append(r.stored(_u1(r))),
    ".": lambda r: None,
    "\x80": _op_proto,
    "\x81": _op_newobj,
    "\x82": lambda r: _op_extension(r, _u1(r)),
    "\x83": lambda r: _op_extension(r, _u2(r)),
    "\x84": lambda r: _op_extension(r, _i4(r)),
    "\x85": lambda r: _op_tuple(r, 1),
    "\x86": lambda r: _op_tuple(r, 2),
    "\x87": lambda r: _op_tuple(r, 3),
    "\x88": lambda r: r.stack.append(True),
    "\x89": lambda r: r.stack.append(False),
    "\x8a": lambda r: _op_long_binary(r, _u1(r)),
    "\x8b": lambda r: _op_long_binary(r, _i4(r)),
    "\x8c": lambda r: r.text(_u1(r)),
    "\x8d": lambda r: r.text(_u8(r)),
    "\x8e": lambda r: r.stack.append(r.stored(_u8(r))),
    "\x8f": lambda r: r.made(Set([])),
    "\x90": _op_additems,
    "\x91": lambda r: r.made(Set(r.popped())),
    "\x92": _op_newobj_ex,
    "\x93": _op_stack_global,
    "\x94": lambda r: None,
    "\x95": _op_frame,
    "\x96": lambda r: r.stack.append(r.stored(_u8(r))),
    "\x97": lambda r: _op_persistent(r, "an out-of-band buffer"),
    "\x98": lambda r: None,
}
OPCODES = [_WORK.get(chr(code)) for code in range(256)]
"""What each opcode does, but for those that :class:`PickleReader` does itself (``None`` returned);
``None`` for what is no opcode."""

PickleReader.opcodes = OPCODES
