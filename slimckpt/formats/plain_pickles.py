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
from slimckpt.formats.base import Format
from slimckpt.formats.dcp_metadata import DCP, is_metadata
from slimckpt.formats.located import Home, Located
from slimckpt.formats.numpy_arrays import LATIN_1, Array, Shape, array_of, is_shape
from slimckpt.formats.paddle_metadata import PADDLE, is_paddle_metadata
from slimckpt.formats.pickles import OPCODES, Call, Dict, Stored, pairs_of, read_pickle
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
            and not head.startswith(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
        )

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        roots, at = [], 0
        while at < source.size:
            root, at = read_pickle(source, at, source.size)
            roots.append(root)
            if len(roots) > _MAX_PICKLES:
                raise DamagedFileError(f"{source.label}: more than {_MAX_PICKLES} pickles")
        homes: dict[int, Home] = {}

        def inside(stored: Stored) -> Home:
            if stored.offset not in homes:
                row = table.payload([(stored.offset, stored.nbytes)])
                homes[stored.offset] = Home(row, stored.nbytes)
            return homes[stored.offset]

        paddle = False
        for number, root in enumerate(roots):
            where = (str(number), f"[{number}]") if len(roots) > 1 else ("", "")
            finder = _Arrays(_is_state_dict(root))
            located = Located(
                table, source.label, _no_storage(source), inside, arrays=finder.array_of
            )
            joined = _joined(root, finder, table, homes)
            located.add(root, *where)
            for name, shape, first in joined:
                located.add_array(name, f"['{name}']", first._replace(shape=shape))
            paddle |= finder.paddle
        if any(map(is_metadata, roots)):
            return {"describes": DCP}
        if any(map(is_paddle_metadata, roots)):
            return {"describes": PADDLE}
        return {"writer": "paddle"} if paddle else {}


class _Arrays:
    """Finds arrays as numpy and as Paddle write them, and notes whether it was Paddle."""

    def __init__(self, state_dict: bool) -> None:
        self.state_dict = self.paddle = state_dict

    def array_of(self, node: Any) -> Array | None:
        inner = _wrapped(node)
        found = array_of(node if inner is None else inner)
        if found is None:
            return None
        self.paddle |= inner is not None
        if found.dtype == "U16" and (self.state_dict or inner is not None):
            return found._replace(dtype="BF16")
        return found


def _joined(
    root: Any, finder: _Arrays, table: TableBuilder, homes: dict[int, Home]
) -> list[tuple[str, Shape, Array]]:
    """Arrays that Paddle cut, since pickles of protocol 3 and before hold no more than 4 GiB.

    Their pieces become one payload: each is a tensor of it, and so is the whole. Returns name,
    shape and first piece of each, all bytes of the whole counted to that.
    """
    pairs = {key: value for key, value in pairs_of(root) if type(key) is str}
    found = []
    for name, entry in pairs_of(pairs.get(_CUT)):
        fields = dict(pair for pair in pairs_of(entry) if type(pair[0]) is str)
        shape, names = fields.get("OriginShape"), fields.get("slices")
        if type(name) is not str or not is_shape(shape) or type(names) is not list:
            continue
        pieces = [finder.array_of(pairs.get(piece)) for piece in names if type(piece) is str]
        first = pieces[0] if pieces else None
        if first is None or None in pieces or any(p.data is None for p in pieces if p):
            continue
        whole = [piece for piece in pieces if piece is not None]
        nbytes = sum(piece.nbytes for piece in whole)
        if math.prod(shape) * first.nbytes != nbytes * math.prod(first.shape):
            continue
        spans = [piece.data for piece in whole if piece.data is not None]
        row = table.payload([(span.offset, span.nbytes) for span in spans])
        raw = all(piece.encoding == RAW for piece in whole)
        encoding = RAW if raw else f"{LATIN_1}:{nbytes}"
        at = 0
        for piece, span in zip(whole, spans, strict=True):
            homes[span.offset] = Home(row, nbytes, at, encoding)
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


def _is_state_dict(root: Any) -> bool:
    pairs = root.pairs if type(root) in (Dict, Call) else []
    return any(key == _NAMES for key, _ in pairs if type(key) is str)


def _no_storage(source: ByteSource) -> Any:
    def refuse(storage: Storage) -> Home:
        raise DamagedFileError(
            f"{source.label}: refers to storage {storage.key} of torch, which a plain pickle"
            " does not hold"
        )

    return refuse
