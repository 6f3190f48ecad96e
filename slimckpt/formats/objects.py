"""Walking the tree of a pickle: every object in it, with the path that leads there.

A name is the path as people say it (``optimizer.state.0.exp_avg``); beside it stands the exact
path as a Python subscript (``['optimizer']['state'][0]['exp_avg']``), in which keys that contain
dots and attributes cannot be mistaken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slimckpt.errors import NotUnderstoodError
from slimckpt.formats.pickles import Call, Dict, Persistent, Set, Stored

MAX_DEPTH = 512
MAX_AGAIN = 1 << 18
"""Objects that are met again by another path, with what they hold: an object that holds itself
twice over, many levels deep, has more paths than anybody can walk."""
MAX_TEXT = 1 << 16
"""Characters of a name and its path, or bytes of one row."""
_ROOM = 64 * 1024 * 1024
_MAX_SHOWN = 1 << 63


ITEM, ATTRIBUTE, ARGUMENT, MEMBER, STATE = "[{}]", ".{}", "({})", "{{{}}}", ".__setstate__"
"""How a key is written in an exact path."""


class Trail:
    """How an object was reached: from ``parent`` by ``key``. Texts are made when asked for."""

    __slots__ = ("key", "parent", "style", "texts")

    def __init__(self, parent: Trail | None, key: Any, style: str) -> None:
        self.parent, self.key, self.style = parent, key, style
        self.texts: tuple[str, str] | None = None


Part = tuple[Any, str, Any]
"""A key, its style (empty where the part stands for the whole), and an object."""
Visit = Callable[[Trail, Any], Iterable[Part] | None]
"""Gets a trail and an object; says what is to be walked of it, where it took it for itself."""


class Walk:
    """A walk through the objects of a file's pickles.

    Parameters
    ----------
    label : str
        What errors call the file.
    nbytes : int
        Bytes of the pickles: of few bytes no more can come than belongs to them.
    """

    def __init__(self, label: str, nbytes: int) -> None:
        self.label, self.room = label, 16 * nbytes + _ROOM

    def spend(self, nbytes: int) -> None:
        """Note that names, paths and shapes take memory.

        Raises
        ------
        NotUnderstoodError
            It is more than any sensible file needs.
        """
        self.room -= nbytes
        if self.room < 0 or nbytes > MAX_TEXT:
            raise NotUnderstoodError(
                f"{self.label}: the names in its pickle are too long; it is kept as a whole"
            )

    def texts(self, trail: Trail) -> tuple[str, str]:
        """Name and exact path; lone surrogates are escaped."""
        pending = []
        while trail.texts is None and trail.parent is not None:
            pending.append(trail)
            trail = trail.parent
        name, path = trail.texts or ("", "")
        for trail in reversed(pending):
            key = trail.key if type(trail.key) is str else _show(trail.key)
            exact = _show(trail.key) if trail.style == ITEM else key
            name = _encodable(f"{name}.{key}" if trail.parent and trail.parent.parent else key)
            path = _encodable(path + trail.style.format(exact))
            self.spend(len(name) + len(path))
            trail.texts = name, path
        return name, path

    def __call__(self, root: Any, visit: Visit, start: Iterable[tuple[Any, str]] = ()) -> None:
        """Show every object of a tree to ``visit``, in order; ``start`` are keys that lead to it.

        Raises
        ------
        NotUnderstoodError
            The tree is too deep, or has too many paths.
        """
        first = Trail(None, None, "")
        for key, style in start:
            first = Trail(first, key, style)
        seen: set[int] = set()
        inside: set[int] = set()
        barren: set[int] = set()
        again = taken = 0
        frames: list[tuple[Trail, Iterator[Part], int, int]] = []
        frames.append((first, iter([(None, "", root)]), 0, 0))
        while frames:
            parent, parts, number, before = frames[-1]
            part = next(parts, None)
            if part is None:
                frames.pop()
                inside.discard(number)
                if taken == before:
                    barren.add(number)
                continue
            key, style, node = part
            number = id(node)
            if number in barren or number in inside:
                continue
            again += 1 + _n_parts(node) if number in seen else 0
            if again > MAX_AGAIN or len(inside) >= MAX_DEPTH:
                what = "often referred to" if again > MAX_AGAIN else "deep"
                raise NotUnderstoodError(
                    f"{self.label}: its pickle has objects too {what}; it is kept as a whole"
                )
            trail = Trail(parent, key, style) if style else parent
            found = visit(trail, node)
            seen.add(number)
            if found is None and type(node) is Persistent:
                barren.add(number)
                continue
            before = taken
            taken += found is not None
            if found == ():
                continue
            inside.add(number)
            frames.append((trail, _parts(node) if found is None else iter(found), number, before))


def may_hold(value: Any) -> bool:
    """Whether it can hold a tensor, or be one."""
    return type(value) in (Dict, list, tuple, Call, Persistent, Set)


def _n_parts(node: Any) -> int:
    if type(node) is Call:
        return sum(map(_n_parts, (node.args, node.items, node.flat)))
    return len(node) if type(node) in (Dict, list, tuple) else 0


def _parts(node: Any) -> Iterator[Part]:
    """What an object holds: only what can hold a tensor, or be one."""
    if type(node) in (list, tuple):
        yield from _items(node, ITEM)
    elif type(node) is Dict:
        yield from _pairs(node.pairs, ITEM)
    elif type(node) is Set:
        yield from _items(node.items, MEMBER)
    elif type(node) is Call:
        if type(node.args) is tuple:
            yield from _items(node.args, ITEM if node.new and not node.items else ARGUMENT)
        if type(node.kwargs) is Dict:
            yield from _pairs(node.kwargs.pairs, ARGUMENT)
        yield from _items(node.items, ITEM)
        yield from _pairs(node.pairs, ITEM)
        for state in node.state if type(node.state) is tuple else (node.state,):
            if type(state) is Dict:
                yield from _pairs(state.pairs, ATTRIBUTE)
            elif may_hold(state):
                yield "state", STATE, state


def _items(items: Iterable[Any], style: str) -> Iterator[Part]:
    return ((number, style, item) for number, item in enumerate(items) if may_hold(item))


def _pairs(pairs: Iterable[tuple[Any, Any]], style: str) -> Iterator[Part]:
    return ((key, style, value) for key, value in pairs if may_hold(value))


def _show(key: Any, depth: int = 0) -> str:
    """A key as Python writes it."""
    if type(key) is tuple and depth < 2:
        inner = ", ".join(_show(item, depth + 1) for item in key[:16])
        return f"({inner},)" if len(key) == 1 else f"({inner})"
    if type(key) in (str, float, bool, type(None)):
        return repr(key)
    if type(key) is int and abs(key) < _MAX_SHOWN:
        return repr(key)
    if type(key) is Stored and key.data is not None:
        return repr(key.data)
    return f"<{type(key).__name__}>"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
