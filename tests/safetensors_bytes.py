"""safetensors files made by hand, also such as no writer would make."""

import json
import struct
from collections.abc import Sequence
from typing import Any


def from_header(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def from_entries(entries: dict[str, Any], data: bytes = b"") -> bytes:
    """Any header that JSON can say."""
    return from_header(json.dumps(entries).encode(), data)


def safetensors_file(
    tensors: Sequence[tuple[str, str, Sequence[int], bytes]],
    metadata: dict[str, str] | None = None,
) -> bytes:
    """``(name, dtype, shape, bytes)`` in file order."""
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, body in tensors:
        offsets = [at, at + len(body)]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        at += len(body)
    return from_entries(entries, b"".join(tensor[3] for tensor in tensors))
