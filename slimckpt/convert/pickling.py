"""Pickles written from data, by opcodes: the opposite of :mod:`slimckpt.formats.pickles`.

Protocol 2, which torch's own reader of weights takes too. Symbols are named, never imported.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from slimckpt.formats.pickles import Call, Global, Persistent

_PROTO, _STOP, _MARK = b"\x80\x02", b".", b"("
_NONE, _TRUE, _FALSE = b"N", b"\x88", b"\x89"
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
"""Of none to three items; of more, all behind a mark are one."""
_TUPLE, _EMPTY_LIST, _APPENDS, _EMPTY_DICT, _SETITEMS = b"t", b"]", b"e", b"}", b"u"
_REDUCE, _NEWOBJ, _BUILD, _BINPERSID = b"R", b"\x81", b"b", b"Q"


def pickled(value: Any) -> bytes:
    """A pickle of a value.

    Parameters
    ----------
    value
        ``None``, bools, ints, floats, texts, tuples, lists and dicts of such, and nodes:
        :class:`Global`, :class:`Call` (with ``args``, ``new`` and ``state``), :class:`Persistent`.
        Nothing may hold itself.

    Raises
    ------
    TypeError
        There is something else in it.
    """
    writer = _Writer()
    writer.put(value)
    return b"".join([_PROTO, *writer.out, _STOP])


class _Writer:
    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._memo: dict[Global | str, int] = {}

    def put(self, value: Any) -> None:
        out = self.out
        if value is None:
            out.append(_NONE)
        elif value is True or value is False:
            out.append(_TRUE if value else _FALSE)
        elif type(value) is int:
            out.append(_integer(value))
        elif type(value) is float:
            out.append(b"G" + struct.pack(">d", value))
        elif type(value) in (str, Global):
            self._once(value)
        elif type(value) is tuple:
            few = len(value) < len(_TUPLES)
            self._all(value, b"" if few else _MARK, _TUPLES[len(value)] if few else _TUPLE)
        elif type(value) is list:
            out.append(_EMPTY_LIST)
            self._all(value, _MARK, _APPENDS)
        elif type(value) is dict:
            out.append(_EMPTY_DICT)
            self._all([part for pair in value.items() for part in pair], _MARK, _SETITEMS)
        elif type(value) is Call:
            self._all([value.what, value.args], b"", _NEWOBJ if value.new else _REDUCE)
            if value.state is not None:
                self._all([value.state], b"", _BUILD)
        elif type(value) is Persistent:
            self._all([value.id], b"", _BINPERSID)
        else:
            raise TypeError(f"a {type(value).__name__} is not pickled")

    def _all(self, values: Sequence[Any], before: bytes, after: bytes) -> None:
        self.out.append(before)
        for value in values:
            self.put(value)
        self.out.append(after)

    def _once(self, value: Global | str) -> None:
        """A text or a symbol; where it comes again, only a reference to the first."""
        if value in self._memo:
            self.out.append(_numbered(b"hj", self._memo[value]))
            return
        if type(value) is Global:
            self.out.append(f"c{value.module}\n{value.name}\n".encode())
        else:
            raw = str(value).encode("utf-8", "surrogatepass")
            self.out.append(b"X" + struct.pack("<I", len(raw)) + raw)
        self._memo[value] = len(self._memo)
        self.out.append(_numbered(b"qr", self._memo[value]))


def _numbered(codes: bytes, number: int) -> bytes:
    short = number < 256
    return codes[:1] + bytes([number]) if short else codes[1:] + struct.pack("<I", number)


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw
