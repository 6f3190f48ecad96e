"""MindSpore's ``.ckpt``, as MindSpore 2.10 writes it (``serialization.py``, ``checkpoint.proto``).

What :mod:`slimckpt.formats.mindspore` reads: a record for each tensor, several for one of more than
512 MiB, each with all dims.
"""

from __future__ import annotations

from slimckpt.convert.blueprint import Blueprint
from slimckpt.convert.entries import Contents, LeftOut
from slimckpt.dtypes import BY_NAME

DTYPES = frozenset(name for name, row in BY_NAME.items() if row.mindspore)
RECORD = 512 * 1024 * 1024
"""Bytes of a tensor in one record (``SLICE_SIZE``, in KiB there)."""


def plan(contents: Contents) -> dict[str, Blueprint]:
    """The file by name. Tensors without elements cannot be said: MindSpore drops them too."""
    blueprint = Blueprint()
    for entry in contents.entries:
        if not entry.nbytes:
            contents.failed.append(
                LeftOut(entry.name, "MindSpore's format has no tensors without elements")
            )
        for start in range(0, entry.nbytes, RECORD):
            stop = min(start + RECORD, entry.nbytes)
            spelled = BY_NAME[entry.dtype].mindspore
            assert spelled is not None
            head = _head(entry.name, entry.shape, spelled, stop - start)
            blueprint.put(head)
            blueprint.put_body(entry, start, stop)
    for name, text in contents.texts.items():
        # numpy has no text without characters; MindSpore writes four zeros for it.
        raw = (text or "\0").encode("utf-32-le")
        blueprint.put(_head(name, (0,), "str", len(raw)) + raw)
    contents.entries = [entry for entry in contents.entries if entry.nbytes]
    return {"model.ckpt": blueprint}


def _head(name: str, dims: tuple[int, ...], kind: str, nbytes: int) -> bytes:
    """A record up to the ``nbytes`` of its tensor."""
    tensor = b"".join(b"\x08" + _varint(dim) for dim in dims)
    tensor += _field(0x12, kind.encode()) + b"\x1a" + _varint(nbytes)
    value = _field(0x0A, name.encode()) + b"\x12" + _varint(len(tensor) + nbytes) + tensor
    return b"\x0a" + _varint(len(value) + nbytes) + value


def _field(key: int, raw: bytes) -> bytes:
    return bytes([key]) + _varint(len(raw)) + raw


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
