"""numpy arrays inside pickles: where their bytes lie, and what they are.

numpy (1 and 2) writes ``_reconstruct(ndarray, (0,), b"b")`` with the state ``(version, shape,
dtype, is_fortran, bytes)``, and with protocol 5 ``_frombuffer(bytes, dtype, shape, order)``. Under
protocol 2 the bytes are text: ``_codecs.encode(text, "latin1")``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeGuard

from slimckpt.dtypes import OPAQUE
from slimckpt.formats.pickles import Call, Global, Stored
from slimckpt.model import RAW

LATIN_1 = "latin-1-as-utf-8"
Shape = tuple[int, ...]

_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_FROM_BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
_BYTES = ("__builtin__.bytes", "builtins.bytes", "__builtin__.bytearray", "builtins.bytearray")
_DTYPES = {
    "b1": "BOOL", "u1": "U8", "i1": "I8", "u2": "U16", "i2": "I16", "u4": "U32", "i4": "I32",
    "u8": "U64", "i8": "I64", "f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64", "c16": "C128",
}  # fmt: skip


class Array(NamedTuple):
    """An array. ``data`` is ``None`` where it has no bytes; ``strides`` are in elements, ``None``
    in C order."""

    dtype: str
    big_endian: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    nbytes: int
    data: Stored | None
    encoding: str


def array_of(node: Any) -> Array | None:
    """What ``node`` is as an array; ``None`` where it is none, or one of Python objects."""
    if type(node) is not Call:
        return None
    if node.is_a(*_RECONSTRUCT) and type(node.state) is tuple and len(node.state) == 5:
        _, shape, dtype, fortran, data = node.state
    elif node.is_a(*_FROM_BUFFER) and type(node.args) is tuple and len(node.args) == 4:
        data, dtype, shape, order = node.args
        fortran = order == "F"
    else:
        return None
    spelled = _dtype_of(dtype)
    if spelled is None or not is_shape(shape):
        return None
    name, big_endian, itemsize = spelled
    nbytes = math.prod(shape) * itemsize
    found = _stored(data, nbytes)
    if found is None:
        return None
    stored, encoding = found
    strides = _fortran(shape) if fortran is True and len(shape) > 1 else None
    return Array(name, big_endian, tuple(shape), strides, nbytes, stored, encoding)


def is_shape(shape: Any) -> TypeGuard[Shape]:
    """Whether it is a tuple of sizes that are no nonsense."""
    return (
        type(shape) is tuple
        and len(shape) <= 64
        and all(type(dim) is int and 0 <= dim < 2**62 for dim in shape)
        and math.prod(shape) < 2**62
    )


def _fortran(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[:axis]) for axis in range(len(shape)))


def _dtype_of(node: Any) -> tuple[str, bool, int] | None:
    """Our name, whether big-endian, and bytes an element; ``None`` for objects and nonsense."""
    if type(node) is not Call or str(node.what) != "numpy.dtype" or type(node.args) is not tuple:
        return None
    code = node.args[0] if node.args else None
    state = node.state
    if type(code) is not str or type(state) is not tuple or len(state) < 7:
        return None
    order, fields, itemsize = state[1], state[4], state[5]
    if code in _DTYPES:
        return _DTYPES[code], order == ">", int(code[1:])
    # Of objects there are no bytes, but a list.
    kind, digits = code[:1], code[1:]
    if kind not in tuple("SUVMmfc") or not (digits.isascii() and digits.isdecimal()):
        return None
    if kind in "SUV":
        if type(itemsize) is not int or not 0 <= itemsize < 2**31:
            return None
    else:
        itemsize = int(digits[:4])
    spelled = f"{order if order in ('<', '>') else '|'}{code[:16]}"
    return f"{OPAQUE}{'structured' if fields is not None else spelled}", False, itemsize


def _stored(data: Any, nbytes: int) -> tuple[Stored | None, str] | None:
    """Where the bytes lie and how they are encoded."""
    if type(data) is Stored and not data.text:
        return (data, RAW) if data.nbytes == nbytes else None
    if type(data) is not Call or type(data.args) is not tuple:
        return None
    if data.is_a(*_BYTES):
        if not data.args:
            return (None, RAW) if nbytes == 0 else None
        return _stored(data.args[0], nbytes)
    text = data.args[0] if data.args else None
    if data.what == Global("_codecs", "encode") and type(text) is Stored:
        if not nbytes <= text.nbytes <= 2 * nbytes:
            return None
        # Text that takes one byte a character is the bytes themselves.
        return (text, RAW) if text.nbytes == nbytes else (text, f"{LATIN_1}:{nbytes}")
    return None
