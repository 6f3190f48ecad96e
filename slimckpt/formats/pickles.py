"""Pickles as data: a reader that builds a tree of what a pickle says and runs none of it.

Every GLOBAL is a :class:`Global`, a symbol; every call that unpickling would make is a
:class:`Call`, a node. Long byte strings are not read: a :class:`Stored` says where they lie, so
that a file whose arrays are inside the pickle is walked by seeking past them. Opcodes and their
meaning are those of CPython's ``pickletools`` (protocols 0 to 5).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.sources.positioned import ByteSource

MAX_NODES = 1 << 22
"""Objects in one pickle: what a hundred million bytes of pure metadata have, in 2 GB at most."""
_MAX_LINE = 1 << 16
_MAX_INT = 1 << 10
_SHORT = 256
"""Byte strings of fewer bytes are kept as they are too, since they can be numbers or names."""
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Global:
    """A name that unpickling would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Call:
    """An object that unpickling would make by calling ``what`` with ``args``.

    ``new`` where it would be ``cls.__new__``. ``state`` is what its ``__setstate__`` or
    ``__dict__`` would get, ``items`` and ``pairs`` what would be appended or set.
    """

    what: Any
    args: Any
    new: bool = False
    kwargs: Any = None
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def is_a(self, *names: str) -> bool:
        """Whether it is made by a global of one of these dotted names."""
        return type(self.what) is Global and str(self.what) in names


@dataclass(slots=True, eq=False)
class Dict:
    """A dict: its pairs in order, as set."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Set:
    """A set or frozenset."""

    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """An object that is elsewhere, by its persistent id."""

    id: Any


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A byte string, or text, that lies in the file: ``nbytes`` at ``offset``.

    ``text`` is ``"utf-8"`` where the bytes are text in that encoding, else empty. ``data`` is what
    they are, where they are few.
    """

    offset: int
    nbytes: int
    text: str = ""
    data: bytes | None = None


_MARK = object()
_ENCODE = Global("_codecs", "encode")


def pairs_of(node: Any) -> list[tuple[Any, Any]]:
    """The pairs of a dict, or of an object that is one; none of anything else."""
    return node.pairs if type(node) in (Dict, Call) else []


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
    return _Machine(source, offset, end).run()


class _Machine:
    def __init__(self, source: ByteSource, offset: int, end: int) -> None:
        self.source, self.at, self.end = source, offset, end
        self.start = offset
        self.buffer, self.buffer_at = b"", offset
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.nodes = 0
        self.globals: dict[tuple[str, str], Global] = {}

    def run(self) -> tuple[Any, int]:
        table = OPCODES
        try:
            while True:
                if not 0 <= self.at - self.buffer_at < len(self.buffer):
                    self._fill(1)
                code = self.buffer[self.at - self.buffer_at]
                self.at += 1
                if code == 0x2E:  # STOP
                    if self.marks or len(self.stack) != 1:
                        self.damaged("it ends with other than one object on its stack")
                    return self.stack[0], self.at
                work = table[code]
                if work is None:
                    self.damaged(f"{code:#04x} is no opcode")
                work(self)
        except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            self.damaged(f"what it does makes no sense ({type(error).__name__})")
        except ValueError as error:
            if isinstance(error, (DamagedFileError, NotUnderstoodError)):
                raise
            self.damaged(str(error)[:200])

    def damaged(self, why: str) -> NoReturn:
        raise DamagedFileError(
            f"{self.source.label}: the pickle at {self.start}, byte {self.at}: {why}"
        )

    def node(self) -> None:
        """Count an object that takes memory."""
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise NotUnderstoodError(
                f"{self.source.label}: its pickle has more than {MAX_NODES} objects; it is kept as"
                " a whole"
            )

    def _fill(self, nbytes: int) -> None:
        if self.at + nbytes > self.end:
            self.damaged(f"expected {nbytes} more bytes, found {self.end - self.at}; it was cut")
        self.buffer = self.source.read(self.at, min(max(_CHUNK, nbytes), self.end - self.at))
        self.buffer_at = self.at

    def take(self, nbytes: int) -> bytes:
        start = self.at - self.buffer_at
        if start < 0 or start + nbytes > len(self.buffer):
            self._fill(nbytes)
            start = 0
        self.at += nbytes
        return self.buffer[start : start + nbytes]

    def line(self) -> bytes:
        """Up to a newline, which is taken too."""
        found = b""
        while True:
            start = self.at - self.buffer_at
            if not 0 <= start < len(self.buffer):
                self._fill(1)
                start = 0
            stop = self.buffer.find(b"\n", start)
            piece = self.buffer[start : stop if stop >= 0 else None]
            found += piece
            self.at += len(piece) + (stop >= 0)
            if len(found) > _MAX_LINE:
                self.damaged("a line is too long")
            if stop >= 0:
                return found

    def stored(self, nbytes: int, text: str = "") -> Stored:
        """A string of ``nbytes`` from here on, which is skipped."""
        if self.at + nbytes > self.end:
            self.damaged(
                f"a string of {nbytes} bytes where {self.end - self.at} are left; it was cut"
            )
        self.node()
        offset = self.at
        if nbytes < _SHORT:
            return Stored(offset, nbytes, text, self.take(nbytes))
        self.at += nbytes
        return Stored(offset, nbytes, text)

    def text(self, nbytes: int) -> None:
        # Under protocol 2 the bytes of an array are text, given to this function.
        encoded = type(self.stack[-1]) is Global and self.stack[-1] == _ENCODE if self.stack else 0
        if encoded or nbytes > _MAX_LINE:
            self.push(self.stored(nbytes, "utf-8"))
        else:
            self.node()
            self.push(self.take(nbytes).decode("utf-8", "surrogatepass"))

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []
        if len(self.marks) > MAX_NODES:
            self.node()

    def popped(self) -> list[Any]:
        """What lies above the last mark."""
        found = self.stack
        self.stack = self.marks.pop()
        return found

    def symbol(self, module: Any, name: Any) -> Global:
        if not (isinstance(module, str) and isinstance(name, str)):
            self.damaged("the name of a global is no text")
        found = self.globals.get((module, name))
        if found is None:
            self.node()
            found = self.globals[module, name] = Global(module, name)
        return found

    def call(self, what: Any, args: Any, *, new: bool = False, kwargs: Any = None) -> None:
        self.node()
        self.push(Call(what, args, new, kwargs))

    def append(self, target: Any, items: list[Any]) -> None:
        if type(target) is list:
            target.extend(items)
        elif type(target) in (Call, Set):
            target.items.extend(items)
        else:
            self.damaged(f"appends to a {type(target).__name__}")

    def set_pairs(self, target: Any, flat: list[Any]) -> None:
        if len(flat) % 2:
            self.damaged("a key without a value")
        if type(target) not in (Call, Dict):
            self.damaged(f"sets items of a {type(target).__name__}")
        target.pairs.extend(zip(flat[::2], flat[1::2], strict=True))

    def remember(self, index: int) -> None:
        if index not in self.memo:
            self.node()
        self.memo[index] = self.stack[-1]


def _number(layout: str) -> Callable[[_Machine], int]:
    unpack, nbytes = struct.Struct(layout).unpack, struct.calcsize(layout)

    def read(machine: _Machine) -> int:
        found: int = unpack(machine.take(nbytes))[0]
        return found

    return read


_u1, _u2, _i4, _u4, _u8 = map(_number, ("<B", "<H", "<i", "<I", "<Q"))
_f8 = struct.Struct(">d").unpack


def _int_line(machine: _Machine, line: bytes) -> int:
    if len(line) > _MAX_INT:
        machine.damaged("an integer of too many digits")
    return int(line)


def _op_int(machine: _Machine) -> None:
    line = machine.line()
    machine.push(line == b"01" if line in (b"00", b"01") else _int_line(machine, line))


def _op_long(machine: _Machine) -> None:
    machine.push(_int_line(machine, machine.line().rstrip(b"L")))


def _op_long_binary(machine: _Machine, nbytes: int) -> None:
    if not 0 <= nbytes <= _MAX_LINE:
        machine.damaged(f"an integer of {nbytes} bytes")
    machine.node()
    machine.push(int.from_bytes(machine.take(nbytes), "little", signed=True))


def _op_string(machine: _Machine) -> None:
    line = machine.line()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
        machine.damaged("a string without quotes")
    machine.node()
    # Escapes of Python 2; nothing that slimckpt reads has any.
    machine.push(line[1:-1].decode("latin-1"))


def _op_binstring(machine: _Machine, nbytes: int) -> None:
    """Bytes of Python 2: text where they are short and plain, else a place in the file."""
    if nbytes < 0:
        machine.damaged("a string of negative length")
    found = machine.stored(nbytes)
    plain = found.data is not None and found.data.isascii() and found.data.decode().isprintable()
    machine.push(found.data.decode() if plain and found.data else found)


def _op_unicode(machine: _Machine) -> None:
    machine.node()
    machine.push(machine.line().decode("raw-unicode-escape"))


def _op_pop(machine: _Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.popped()


def _op_tuple(machine: _Machine, count: int) -> None:
    if len(machine.stack) < count:
        machine.damaged("a tuple of more than there is")
    machine.node()
    found = tuple(machine.stack[len(machine.stack) - count :])
    del machine.stack[len(machine.stack) - count :]
    machine.push(found)


def _made(machine: _Machine, value: Any) -> None:
    machine.node()
    machine.push(value)


def _op_mark_dict(machine: _Machine) -> None:
    flat, found = machine.popped(), Dict()
    machine.set_pairs(found, flat)
    _made(machine, found)


def _op_append(machine: _Machine) -> None:
    value = machine.stack.pop()
    machine.append(machine.stack[-1], [value])


def _op_appends(machine: _Machine) -> None:
    items = machine.popped()
    machine.append(machine.stack[-1], items)


def _op_setitem(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_pairs(machine.stack[-1], [key, value])


def _op_setitems(machine: _Machine) -> None:
    flat = machine.popped()
    machine.set_pairs(machine.stack[-1], flat)


def _op_additems(machine: _Machine) -> None:
    items = machine.popped()
    if type(machine.stack[-1]) not in (Set, Call):
        machine.damaged("adds to what is no set")
    machine.append(machine.stack[-1], items)


def _op_global(machine: _Machine) -> None:
    module, name = machine.line().decode(), machine.line().decode()
    machine.push(machine.symbol(module, name))


def _op_stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.push(machine.symbol(module, name))


def _op_reduce(machine: _Machine) -> None:
    args, what = machine.stack.pop(), machine.stack.pop()
    machine.call(what, args)


def _op_newobj(machine: _Machine) -> None:
    args, what = machine.stack.pop(), machine.stack.pop()
    machine.call(what, args, new=True)


def _op_newobj_ex(machine: _Machine) -> None:
    kwargs, args, what = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.call(what, args, new=True, kwargs=kwargs)


def _op_inst(machine: _Machine) -> None:
    what = machine.symbol(machine.line().decode(), machine.line().decode())
    machine.call(what, tuple(machine.popped()))


def _op_obj(machine: _Machine) -> None:
    what, *args = machine.popped()
    machine.call(what, tuple(args))


def _op_build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is not Call:
        machine.damaged(f"gives a state to a {type(target).__name__}")
    target.state = state


def _op_persid(machine: _Machine) -> None:
    _made(machine, Persistent(machine.line().decode()))


def _op_binpersid(machine: _Machine) -> None:
    _made(machine, Persistent(machine.stack.pop()))


def _op_extension(machine: _Machine, code: int) -> None:
    machine.push(machine.symbol("copyreg", f"extension {code}"))


def _op_proto(machine: _Machine) -> None:
    version = _u1(machine)
    if version > 5:
        machine.damaged(f"protocol {version}, expected 0 to 5")


def _op_frame(machine: _Machine) -> None:
    nbytes = _u8(machine)
    if machine.at + nbytes > machine.end:
        machine.damaged(f"a frame of {nbytes} bytes where {machine.end - machine.at} are left")


def _op_float(machine: _Machine) -> None:
    line = machine.line()
    if len(line) > _MAX_INT:
        machine.damaged("a number of too many digits")
    machine.push(float(line))


_WORK: dict[str, Callable[[_Machine], Any]] = {
    "(": _Machine.mark,
    "0": _op_pop,
    "1": _Machine.popped,
    "2": lambda m: m.push(m.stack[-1]),
    "F": _op_float,
    "I": _op_int,
    "J": lambda m: m.push(_i4(m)),
    "K": lambda m: m.push(_u1(m)),
    "L": _op_long,
    "M": lambda m: m.push(_u2(m)),
    "N": lambda m: m.push(None),
    "P": _op_persid,
    "Q": _op_binpersid,
    "R": _op_reduce,
    "S": _op_string,
    "T": lambda m: _op_binstring(m, _i4(m)),
    "U": lambda m: _op_binstring(m, _u1(m)),
    "V": _op_unicode,
    "X": lambda m: m.text(_u4(m)),
    "a": _op_append,
    "b": _op_build,
    "c": _op_global,
    "d": _op_mark_dict,
    "}": lambda m: _made(m, Dict()),
    "e": _op_appends,
    "g": lambda m: m.push(m.memo[_int_line(m, m.line())]),
    "h": lambda m: m.push(m.memo[_u1(m)]),
    "i": _op_inst,
    "j": lambda m: m.push(m.memo[_u4(m)]),
    "l": lambda m: _made(m, m.popped()),
    "]": lambda m: _made(m, []),
    "o": _op_obj,
    "p": lambda m: m.remember(_int_line(m, m.line())),
    "q": lambda m: m.remember(_u1(m)),
    "r": lambda m: m.remember(_u4(m)),
    "s": _op_setitem,
    "t": lambda m: _made(m, tuple(m.popped())),
    ")": lambda m: m.push(()),
    "u": _op_setitems,
    "G": lambda m: m.push(_f8(m.take(8))[0]),
    "B": lambda m: m.push(m.stored(_u4(m))),
    "C": lambda m: m.push(m.stored(_u1(m))),
    "\x80": _op_proto,
    "\x81": _op_newobj,
    "\x82": lambda m: _op_extension(m, _u1(m)),
    "\x83": lambda m: _op_extension(m, _u2(m)),
    "\x84": lambda m: _op_extension(m, _i4(m)),
    "\x85": lambda m: _op_tuple(m, 1),
    "\x86": lambda m: _op_tuple(m, 2),
    "\x87": lambda m: _op_tuple(m, 3),
    "\x88": lambda m: m.push(True),
    "\x89": lambda m: m.push(False),
    "\x8a": lambda m: _op_long_binary(m, _u1(m)),
    "\x8b": lambda m: _op_long_binary(m, _i4(m)),
    "\x8c": lambda m: m.text(_u1(m)),
    "\x8d": lambda m: m.text(_u8(m)),
    "\x8e": lambda m: m.push(m.stored(_u8(m))),
    "\x8f": lambda m: _made(m, Set()),
    "\x90": _op_additems,
    "\x91": lambda m: _made(m, Set(m.popped())),
    "\x92": _op_newobj_ex,
    "\x93": _op_stack_global,
    "\x94": lambda m: m.remember(len(m.memo)),
    "\x95": _op_frame,
    "\x96": lambda m: m.push(m.stored(_u8(m))),
    "\x97": lambda m: _made(m, Persistent("an out-of-band buffer")),
    "\x98": lambda m: None,
}
OPCODES = [_WORK.get(chr(code)) for code in range(256)]
"""What each opcode does; ``None`` for what is no opcode."""
