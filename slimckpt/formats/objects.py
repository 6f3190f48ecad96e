"""Walking the tree of a pickle: every object in it, with the path that leads there.

A name is the path as people say it (``optimizer.state.0.exp_avg``); beside it stands the exact
path as a Python subscript (``['optimizer']['state'][0]['exp_avg']``), in which keys that contain
dots and attributes cannot be mistaken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from slimckpt.errors import NotUnderstoodError
from slimckpt.formats.pickles import Call, Dict, Persistent, Set, Stored

MAX_DEPTH = 512
MAX_SEEN_AGAIN = 1 << 17
"""How often containers may be met again by another path: an object that holds itself twice over,
many levels deep, has more paths than anybody can walk."""
MAX_NAMES = 1 << 28
"""Bytes of all names and paths."""

Visit = Callable[[str, str, Any], bool]
"""Gets name, exact path and object, and says whether it took the object for itself."""


def walk(root: Any, visit: Visit, label: str) -> None:
    """Show every object of a tree to ``visit``, in order; what it takes is not walked into.

    Raises
    ------
    NotUnderstoodError
        The tree is too deep, or has too many paths.
    """
    seen: set[int] = set()
    again = names = 0
    inside: set[int] = set()
    pending: list[tuple[str, str, Any] | int] = [("", "", root)]
    while pending:
        entry = pending.pop()
        if type(entry) is int:
            inside.discard(entry)
            continue
        assert not isinstance(entry, int)
        name, path, node = entry
        names += len(path)
        if names > MAX_NAMES:
            raise NotUnderstoodError(
                f"{label}: the paths in its pickle are too long; kept as a whole"
            )
        if visit(name, path, node):
            continue
        if id(node) in inside:
            continue
        again += id(node) in seen
        if again > MAX_SEEN_AGAIN or len(inside) >= MAX_DEPTH:
            what = "deep" if len(inside) >= MAX_DEPTH else "often referred to"
            raise NotUnderstoodError(f"{label}: its pickle has objects too {what}; kept as a whole")
        seen.add(id(node))
        inside.add(id(node))
        pending.append(id(node))
        pending += reversed(list(_children(name, path, node)))


def _children(name: str, path: str, node: Any) -> Iterator[tuple[str, str, Any]]:
    """What an object holds: only what can hold a tensor, or be one."""
    prefix = f"{name}." if name else ""
    if type(node) in (list, tuple):
        yield from _items(prefix, path, node)
    elif type(node) is Dict:
        yield from _pairs(prefix, path, node.pairs)
    elif type(node) is Set:
        for number, item in enumerate(node.items):
            if _may_hold(item):
                yield f"{prefix}{number}", f"{path}{{{number}}}", item
    elif type(node) is Call:
        if type(node.args) is tuple:
            brackets = "[]" if node.new else "()"
            yield from _items(prefix, path, node.args, brackets)
        yield from _items(prefix, path, node.items)
        yield from _pairs(prefix, path, node.pairs)
        states = node.state if type(node.state) is tuple else (node.state,)
        for state in states:
            if type(state) is Dict:
                for key, value in state.pairs:
                    if type(key) is str and _may_hold(value):
                        yield f"{prefix}{key}", f"{path}.{key}", value
            elif _may_hold(state):
                yield f"{prefix}state", f"{path}.__setstate__", state


def _items(
    prefix: str, path: str, items: Any, brackets: str = "[]"
) -> Iterator[tuple[str, str, Any]]:
    for number, item in enumerate(items):
        if _may_hold(item):
            yield f"{prefix}{number}", f"{path}{brackets[0]}{number}{brackets[1]}", item


def _pairs(prefix: str, path: str, pairs: Any) -> Iterator[tuple[str, str, Any]]:
    for key, value in pairs:
        if _may_hold(value):
            text = key if type(key) is str else _show(key)
            yield f"{prefix}{text}", f"{path}[{_show(key)}]", value


def _may_hold(value: Any) -> bool:
    return type(value) in (Dict, list, tuple, Call, Persistent, Set) or (
        type(value) is Stored and not value.text
    )


def _show(key: Any, depth: int = 0) -> str:
    """A key as Python writes it."""
    if type(key) is tuple and depth < 4:
        inner = ", ".join(_show(item, depth + 1) for item in key[:64])
        return f"({inner},)" if len(key) == 1 else f"({inner})"
    if type(key) in (str, int, float, bool, type(None)):
        return repr(key)
    return f"<{type(key).__name__}>"
