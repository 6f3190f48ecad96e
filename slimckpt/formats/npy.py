"""numpy's ``.npy``: a header that describes one array, and its bytes.

NEP 1 and ``numpy/lib/format.py`` (2.2), versions 1.0 to 3.0. The header is a Python literal; it is
taken apart by a pattern, not parsed as Python. Object arrays are pickles: their bytes are kept and
never loaded.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from slimckpt.dtypes import OPAQUE
from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.formats.base import Format
from slimckpt.model import TableBuilder
from slimckpt.sources.positioned import ByteSource

MAGIC = b"\x93NUMPY"
MAX_HEADER = 1024 * 1024
_MAX_FIELDS = 10_000
"""Characters of a structured type; numpy's own limit on whole headers."""
_MAX_RANK = 64
_HEADER = re.compile(
    r"\{\s*['\"]descr['\"]\s*:(.+?),\s*['\"]fortran_order['\"]\s*:\s*(True|False)\s*,"
    r"\s*['\"]shape['\"]\s*:\s*\(([0-9L,\s]*)\)\s*(?:,\s*)?\}\s*",
    re.DOTALL,
)
"""No two runs of blanks meet in it: matching takes time in proportion to the header."""
_SIMPLE = re.compile(r"([<>|=]?)([?a-zA-Z])([0-9]{0,9})(\[[0-9A-Za-z/]{1,32}\])?")
_FIELDS = re.compile(r"\[[\w\s\[\]()'\"<>|=,./?-]*\]")
_NAMES = {
    **{f"{kind}{n}": f"{kind.upper()}{8 * n}" for kind in "iu" for n in (1, 2, 4, 8)},
    **{f"f{n}": f"F{8 * n}" for n in (2, 4, 8)},
    **{"b1": "BOOL", "?": "BOOL", "c8": "C64", "c16": "C128"},
}
_LONG = ("f12", "f16", "c24", "c32")
"""Floats of a width that depends on the machine."""


class Array(NamedTuple):
    """What a header says. ``nbytes`` are those of the elements, ``None`` for a pickle."""

    header_nbytes: int
    dtype: str
    big_endian: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements; nothing for C order."""
    nbytes: int | None

    def check(self, label: str, found: int) -> int:
        """Bytes of elements, where ``found`` bytes follow the header."""
        if self.nbytes not in (None, found):
            why = "it looks truncated" if found < (self.nbytes or 0) else "more follows it"
            raise DamagedFileError(f"{label}: expected {self.nbytes} bytes, found {found}; {why}")
        return found

    def add(self, table: TableBuilder, name: str, nbytes: int, **more: Any) -> None:
        """Add the array as a tensor; ``more`` says where its bytes are."""
        table.tensor(
            name,
            self.dtype,
            self.shape,
            nbytes,
            big_endian=self.big_endian,
            strides=self.strides,
            **more,
        )


class Npy(Format):
    """One array in a file. It has no name there; it gets numpy's for arrays without one, until the
    file's name is known."""

    name = "npy"
    tensor = "arr_0"

    def matches(self, head: bytes, size: int) -> bool:
        return head.startswith(MAGIC) and head[6:8] in (b"\1\0", b"\2\0", b"\3\0")

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        array = read_header(lambda nbytes: source.read(0, min(nbytes, source.size)), source.label)
        nbytes = array.check(source.label, source.size - array.header_nbytes)
        if array.nbytes is None and source.read(source.size - 1, 1) != b".":
            raise DamagedFileError(
                f"{source.label}: expected a pickle to end in '.'; it looks truncated"
            )
        payload = table.payload([(array.header_nbytes, nbytes)]) if nbytes else None
        array.add(table, self.tensor, nbytes, payload=payload)
        return {}


def read_header(first: Callable[[int], bytes], label: str) -> Array:
    """Take a header apart; ``first`` gives that many bytes of the file, or all there are.

    Raises
    ------
    DamagedFileError
        It breaks the rules, or is not all there.
    NotUnderstoodError
        It is longer than any real one, or written in a way that numpy does not write.
    """
    head = first(12)
    if not head.startswith(MAGIC) or head[7:8] != b"\0" or head[6] not in (1, 2, 3):
        raise DamagedFileError(f"{label}: expected a header of numpy, found {head[:8]!r}")
    width = 2 if head[6] == 1 else 4
    total = 8 + width + int.from_bytes(head[8 : 8 + width], "little")
    if total > MAX_HEADER:
        raise NotUnderstoodError(f"{label}: a header of {total} bytes, more than {MAX_HEADER}")
    head = first(total)
    if len(head) < total:
        raise DamagedFileError(f"{label}: expected a header of {total} bytes; it looks truncated")
    try:
        text = head[8 + width : total].decode("utf-8" if head[6] == 3 else "latin1")
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"{label}: {error}") from None
    found = _HEADER.fullmatch(text)
    if found is None:
        raise DamagedFileError(f"{label}: expected descr, fortran_order and shape: {text[:200]!a}")
    shape = _shape(found[3], label)
    name, big_endian, itemsize = _type(found[1].strip(), label)
    count = math.prod(shape)
    if count * (itemsize or 1) >= 2**63:
        raise DamagedFileError(f"{label}: its shape {list(shape)} overflows 64 bits")
    strides: list[int] = []
    if found[2] == "True" and len(shape) > 1:
        for dim in (1, *shape[:-1]):
            strides.append(strides[-1] * dim if strides else dim)
    nbytes = None if itemsize is None else count * itemsize
    return Array(total, name, big_endian, shape, tuple(strides), nbytes)


def _shape(text: str, label: str) -> tuple[int, ...]:
    # Python 2 wrote 3L.
    dims = [part.strip().removesuffix("L") for part in text.split(",")]
    if dims[-1] == "":
        dims.pop()
    if len(dims) > _MAX_RANK or not all(d.isdigit() and len(d) < 20 for d in dims):
        raise DamagedFileError(f"{label}: expected a shape, found {text[:200]!a}")
    return tuple(map(int, dims))


def _type(descr: str, label: str) -> tuple[str, bool, int | None]:
    """Our name of a type, whether it is big endian, and bytes of an element if there are any."""
    simple = len(descr) <= _MAX_FIELDS and descr[:1] in ("'", '"') and descr[1:-1]
    fields = len(descr) <= _MAX_FIELDS and _FIELDS.fullmatch(descr)
    try:
        if simple:
            order, kind, digits, _ = _simple(simple)
            name = _NAMES.get(kind + digits)
            nbytes = _itemsize(simple)
            if name is None:
                return OPAQUE + (kind if nbytes is None else simple), False, nbytes
            return name, order == ">" and nbytes != 1, nbytes
        if fields:
            # A literal of strings, numbers and brackets only.
            return OPAQUE + "structured", False, _itemsize(ast.literal_eval(descr))
        why = "expected a type of numpy"
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        why = str(error)
    raise DamagedFileError(f"{label}: type {descr[:200]!a}: {why[:200]}")


def _simple(descr: str) -> tuple[str, ...]:
    """Byte order, kind, digits and unit."""
    found = _SIMPLE.fullmatch(descr)
    if found is None:
        raise ValueError("expected a byte order, a letter and a number")
    return tuple(part or "" for part in found.groups())


def _itemsize(descr: Any) -> int | None:
    """Bytes of an element; ``None`` where it holds pickled objects."""
    if isinstance(descr, str):
        _, kind, digits, unit = _simple(descr)
        if kind == "O":
            return None
        if kind in "Mm" and digits == "8":
            return 8
        if kind in "SVU" and digits and not unit:
            return int(digits) * (4 if kind == "U" else 1)
        if kind + digits in _NAMES or (kind + digits in _LONG and not unit):
            return int(digits or 1)
        raise ValueError("expected a type that numpy writes")
    if isinstance(descr, tuple):
        inner, shape = descr
        return _times(_itemsize(inner), shape)
    sizes = [
        _times(_itemsize(field[1]), field[2] if len(field) == 3 else ()) for field in _listed(descr)
    ]
    return None if None in sizes else sum(filter(None, sizes))


def _listed(descr: Any) -> list[Any]:
    if not isinstance(descr, list) or not all(
        isinstance(field, tuple) and len(field) in (2, 3) for field in descr
    ):
        raise ValueError("expected a list of fields")
    return descr


def _times(nbytes: int | None, shape: Any) -> int | None:
    dims = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(dim) is int and dim >= 0 for dim in dims):
        raise ValueError("expected the shape of a field")
    return None if nbytes is None else nbytes * math.prod(dims)
