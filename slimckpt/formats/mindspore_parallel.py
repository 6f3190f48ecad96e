"""MindSpore's strategy and group files, which have the suffix of its checkpoints.

Here they are only told from checkpoints. Both are runs of named messages
(``node_strategy.proto``, MindSpore 2.10)::

    strategy   08 <counter>   12 { 0A name, 12 strategies }...   1A { 0A name, 12 layout }...
    groups     0A { 0A name, 12 ranks }...   12 ranks            where ranks is  08 <rank>...
"""

from __future__ import annotations

from collections.abc import Callable

from slimckpt.formats.protobuf import Broken, is_text, keys_of, varint


def is_strategy(head: bytes, size: int) -> bool:
    """Whether ``head`` is of a ``ParallelStrategyMap`` (``node_strategy.proto``)."""
    if not head.startswith(b"\x08"):
        return False
    return _all_named(head, size, {0x12: _is_node_strategy, 0x1A: _is_layout})


def is_group_map(head: bytes, size: int) -> bool:
    """Whether ``head`` is of a ``ParallelGroupMap``: names with ranks, then more ranks."""
    if not head.startswith(b"\x0a"):
        return False
    return _all_named(head, size, {0x0A: _is_numbers})


def _all_named(head: bytes, size: int, bodies: dict[int, Callable[[bytes], bool]]) -> bool:
    """Whether every field that lies in ``head``, and one at least, is a name with a body."""
    named = 0
    try:
        i = 0
        if head[0] == 0x08:
            stage, i = varint(head, 1)
            if stage >= 2**32:
                return False
        while i < len(head):
            field = head[i]
            length, i = varint(head, i + 1)
            stop = i + length
            if stop > size:
                return False
            if stop > len(head):
                break
            if field == 0x12 and field not in bodies:
                if not _is_numbers(head[i:stop]):
                    return False
            else:
                if field not in bodies or head[i] != 0x0A:
                    return False
                length, i = varint(head, i + 1)
                name, i = head[i : i + length], i + length
                if not name or not is_text(name) or i >= stop or head[i] != 0x12:
                    return False
                length, i = varint(head, i + 1)
                if i + length != stop or not bodies[field](head[i:stop]):
                    return False
                named += 1
            i = stop
    except IndexError:
        # Only the last field of a longer file may be cut off by the end of the head.
        return named > 0 and size > len(head)
    except Broken:
        return False
    return named > 0


def _is_numbers(body: bytes) -> bool:
    """``08 <number>``, once or more."""
    return bool(body) and keys_of(body) == {0x08}


def _is_node_strategy(body: bytes) -> bool:
    return body.startswith(b"\x08") and keys_of(body) <= {0x08, 0x12}


def _is_layout(body: bytes) -> bool:
    return body.startswith(b"\x0a") and keys_of(body) <= {0x0A, 0x12, 0x1A, 0x22, 0x28, 0x30, 0x38}
