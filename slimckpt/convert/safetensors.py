"""safetensors, in as many files as transformers would write, with its index.

In a file wide dtypes come first, so that every tensor is aligned, as the reference writer has it
(safetensors 0.8, ``tensor.rs``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from slimckpt.convert.blueprint import Blueprint
from slimckpt.convert.entries import Contents, Entry, LeftOut
from slimckpt.dtypes import BY_NAME
from slimckpt.errors import UsageError
from slimckpt.formats.safetensors import MAX_HEADER

DTYPES = frozenset(BY_NAME) - {"C128"}
_METADATA = "__metadata__"
INDEX = "model.safetensors.index.json"


def plan(contents: Contents, max_shard_nbytes: int | None = None) -> dict[str, Blueprint]:
    """The files by name: one, or shards of at most so many bytes of tensors and their index.

    A tensor with more bytes is in a shard of its own. The first file has the texts, in its
    ``__metadata__``.

    Raises
    ------
    UsageError
        The header would have more bytes than the format allows.
    """
    for name in (name for name in ("format", _METADATA) if name in contents.texts):
        contents.failed.append(LeftOut(name, "safetensors has a use of its own for that name"))
        del contents.texts[name]
    shards = _shards(contents.entries, max_shard_nbytes)
    if len(shards) == 1:
        return {"model.safetensors": _file(shards[0], contents.texts)}
    found: dict[str, Blueprint] = {}
    weight_map: dict[str, str] = {}
    for number, entries in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        found[name] = _file(entries, contents.texts if number == 1 else {})
        weight_map |= dict.fromkeys((entry.name for entry in entries), name)
    total = sum(entry.nbytes for entry in contents.entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    found[INDEX] = Blueprint()
    found[INDEX].put((json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
    return found


def _shards(entries: Sequence[Entry], most: int | None) -> list[list[Entry]]:
    """Entries in order, as ``split_torch_state_dict_into_shards`` of huggingface_hub cuts them."""
    shards: list[list[Entry]] = []
    current: list[Entry] = []
    filled = 0
    for entry in entries:
        if most is not None and entry.nbytes > most:
            shards.append([entry])
            continue
        if most is not None and filled + entry.nbytes > most:
            shards.append(current)
            current, filled = [], 0
        current.append(entry)
        filled += entry.nbytes
    return [*shards, current] if current or not shards else shards


def _file(entries: Sequence[Entry], texts: dict[str, str]) -> Blueprint:
    metadata = {"format": "pt", **texts}
    header: dict[str, object] = {_METADATA: metadata}
    ordered = sorted(entries, key=lambda entry: (-BY_NAME[entry.dtype].bits, entry.name))
    at = 0
    for entry in ordered:
        dtype = entry.dtype
        if entry.name == _METADATA:
            raise UsageError(f"safetensors cannot hold a tensor that is named {_METADATA}")
        if dtype == "I4X2":  # as MindSpore writes it
            dtype, metadata[entry.name] = "I8", "Int4"
        header[entry.name] = {
            "dtype": dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER:
        raise UsageError(
            f"the header of {len(entries)} tensors has {len(raw)} bytes, and safetensors allows"
            f" {MAX_HEADER}; write smaller shards (max_shard_size)"
        )
    blueprint = Blueprint()
    blueprint.put(len(raw).to_bytes(8, "little") + raw)
    for entry in ordered:
        blueprint.put_body(entry)
    return blueprint
