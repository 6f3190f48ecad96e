"""Plain pickles: Paddle's ``.pdparams``, ``.pdopt``, ``.distcp`` and ``.metadata``, torch's
``.metadata``, and any other pickle that holds numpy arrays.

Paddle (2.6 to 3.3, ``framework/io.py``) writes a state dict as plain arrays and adds the key
``StructuredToParameterName@@``; in any other object a tensor is ``tuple((name, array))``, and a
static one ``eval("data", {"data": array})``, which is never run. It has no uint16: such an array
is BF16.
"""

from __future__ import annotations

import math
from typing import Any

from slimckpt.errors import DamagedFileError
from slimckpt.formats.base import DCP, Format
from slimckpt.formats.collector import uncollected
from slimckpt.formats.dcp_metadata import is_metadata
from slimckpt.formats.located import Home, Inside, Located
from slimckpt.formats.numpy_arrays import LATIN_1, Array, Shape, array_of, is_shape
from slimckpt.formats.objects import ITEM
from slimckpt.formats.paddle_metadata import PADDLE, is_paddle_metadata
from slimckpt.formats.pickles import (
    OPCODES,
    Call,
    Dict,
    PickleReader,
    keys_of,
    pairs_of,
)
from slimckpt.formats.torch_files import archived, is_legacy
from slimckpt.formats.torch_tensors import Storage
from slimckpt.model import RAW, TableBuilder
from slimckpt.sources.positioned import ByteSource

_NAMES = "StructuredToParameterName@@"
_CUT = "UnpackBigParamInfor@@"
_TUPLE = ("builtins.tuple", "__builtin__.tuple")
_EVAL = ("builtins.eval", "__builtin__.eval")
_MAX_PICKLES = 1 << 16


class PlainPickle(Format):
    """A pickle, or several one after another, of protocol 2 or later."""

    name = "pickle"

    def matches(self, head: bytes, size: int) -> bool:
        return (
            len(head) > 2
            and head[0] == 0x80
            and 2 <= head[1] <= 5
            and OPCODES[head[2]] is not None
            and not is_legacy(head)
        )

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        with uncollected():
            return _locate(source, table)


def _locate(source: ByteSource, table: TableBuilder) -> dict[str, Any]:
    reader = PickleReader(source, 0, source.size)
    roots: list[Any] = []
    while reader.at < source.size:
        if source.read(reader.at, 1) != b"\x80" or len(roots) >= _MAX_PICKLES:
            raise DamagedFileError(
                f"{source.label}: expected the end of the file, or another of up to"
                f" {_MAX_PICKLES} pickles at byte {reader.at}"
            )
        roots.append(reader.read())
    inside, finder = Inside(table, source), _Arrays()
    located = Located(
        table, reader, _no_storage(source), inside, archived(inside), arrays=finder.array_of
    )
    for number, root in enumerate(roots):
        finder.state_dict = _NAMES in keys_of(root)
        joined = _joined(root, finder, inside)
        located.add(root, [(number, ITEM)] if len(roots) > 1 else [])
        for name, shape, first in joined:
            located.add_array(name, f"[{name!r}]", first._replace(shape=shape))
    if any(map(is_metadata, roots)):
        return {"describes": DCP}
    if any(map(is_paddle_metadata, roots)):
        return {"describes": PADDLE}
    return {"writer": "paddle"} if finder.paddle else {}


class _Arrays:
    """Finds arrays as numpy and as Paddle write them, and notes whether it was Paddle."""

    def __init__(self) -> None:
        self.state_dict = self.paddle = False

    def array_of(self, node: Any) -> Array | None:
        inner = _wrapped(node)
        found = array_of(node if inner is None else inner)
        if found is None:
            return None
        self.paddle |= self.state_dict or inner is not None
        if found.dtype == "U16" and (self.state_dict or inner is not None):
            return found._replace(dtype="BF16")
        return found


def _joined(root: Any, finder: _Arrays, inside: Inside) -> list[tuple[str, Shape, Array]]:
    """Arrays that Paddle cut, since pickles of protocol 3 and before hold no more than 4 GiB.

    Their pieces become one payload: each is a tensor of it, and so is the whole. Returns name,
    shape and first piece of each, all bytes of the whole counted to that.
    """
    if _CUT not in keys_of(root):
        return []
    pairs = {key: value for key, value in pairs_of(root) if type(key) is str}
    found, used = [], set()
    for name, entry in pairs_of(pairs.get(_CUT)):
        fields = {key: value for key, value in pairs_of(entry) if type(key) is str}
        shape, names = fields.get("OriginShape"), fields.get("slices")
        if type(name) is not str or not is_shape(shape) or type(names) is not list:
            continue
        for piece in names:
            if type(piece) is not str or piece in used:
                raise DamagedFileError(
                    f"{inside.source.label}: the pieces of tensor {name[:64]!a} are not its own"
                )
            used.add(piece)
        pieces = [finder.array_of(pairs.get(piece)) for piece in names]
        whole = [piece for piece in pieces if piece is not None]
        if not whole or len(whole) < len(pieces):
            continue
        first = whole[0]
        nbytes = sum(piece.nbytes for piece in whole)
        if math.prod(shape) * first.nbytes != nbytes * math.prod(first.shape):
            continue
        spans = [piece.data for piece in whole if piece.data is not None]
        if len(spans) < len(whole):
            continue
        row = inside.table.payload([(span.offset, span.nbytes) for span in spans])
        raw = all(piece.encoding == RAW for piece in whole)
        encoding = RAW if raw else f"{LATIN_1}:{nbytes}"
        at = 0
        for piece, span in zip(whole, spans, strict=True):
            inside.homes[span.offset] = Home(row, nbytes, at, encoding)
            at += piece.nbytes
        found.append((name, shape, first._replace(nbytes=nbytes)))
    return found


def _wrapped(node: Any) -> Any:
    """The array that Paddle wrapped as a tensor; ``None`` for anything else."""
    if type(node) is not Call or type(node.args) is not tuple:
        return None
    if node.is_a(*_TUPLE) and len(node.args) == 1:
        pair = node.args[0]
        if type(pair) in (tuple, list) and len(pair) == 2 and type(pair[0]) is str:
            return pair[1]
    if node.is_a(*_EVAL) and len(node.args) == 2 and type(node.args[1]) is Dict:
        return next((value for key, value in node.args[1].pairs if key == "data"), None)
    return None


def _no_storage(source: ByteSource) -> Any:
    def refuse(storage: Storage) -> Home:
        raise DamagedFileError(
            f"{source.label}: refers to storage {storage.key[:64]!a} of torch, which a plain pickle"
            " does not hold"
        )

    return refuse
