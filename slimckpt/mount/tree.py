"""What a mount shows: directories, files and links with the attributes they had."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from slimckpt.errors import StoreDamagedError
from slimckpt.model import Stat, show_path
from slimckpt.rewrite.select import Chosen

_BLOCK = 512
"""Bytes that ``st_blocks`` counts in."""


@dataclass(slots=True)
class Node:
    """An inode: names that are hard links of each other share one.

    ``attributes`` are named as in ``os.stat_result``, times in nanoseconds. ``body`` is a row of
    the files of the :class:`~slimckpt.rewrite.select.Chosen` that the tree was made of, ``target``
    where a symbolic link points to, ``children`` what a directory holds.
    """

    attributes: dict[str, int]
    body: int | None = None
    target: bytes | None = None
    children: dict[bytes, Node] = field(default_factory=dict)


class Tree:
    """All that was chosen, by path; the empty path is the root.

    Raises
    ------
    StoreDamagedError
        A path is listed twice, or lies in a directory that is not listed.
    """

    def __init__(self, chosen: Chosen) -> None:
        self._nodes: dict[bytes, Node] = {}
        numbers = count(1)
        inside = Counter(os.path.dirname(d.path) for d in chosen.directories if d.path)
        for directory in chosen.directories:
            links = 2 + inside[directory.path]
            found = _attributes(stat.S_IFDIR, directory.stat, next(numbers), links, 0)
            self._add(directory.path, Node(found))
        for body, (_, entry, names) in enumerate(chosen.files):
            file = entry.file
            found = _attributes(stat.S_IFREG, file.stat, next(numbers), len(names), file.size)
            node = Node(found, body=body)
            for name in names:
                self._add(name, node)
        for link in chosen.symlinks:
            assert link.target is not None
            found = _attributes(stat.S_IFLNK, link.stat, next(numbers), 1, len(link.target))
            self._add(link.path, Node(found, target=link.target))

    def node(self, path: bytes) -> Node | None:
        """What is at a path, if anything is."""
        return self._nodes.get(path)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._nodes)

    def _add(self, path: bytes, node: Node) -> None:
        if path in self._nodes:
            raise StoreDamagedError(f"{show_path(path)} is listed twice in the store")
        self._nodes[path] = node
        if not path:
            return
        parent = self._nodes.get(os.path.dirname(path))
        if parent is None or not stat.S_ISDIR(parent.attributes["st_mode"]):
            raise StoreDamagedError(f"{show_path(path)}: the store does not list its directory")
        parent.children[os.path.basename(path)] = node


def _attributes(kind: int, found: Stat, number: int, links: int, nbytes: int) -> dict[str, int]:
    return {
        # What a symbolic link permits is not recorded and not asked for: Linux shows it so.
        "st_mode": kind | (0o777 if kind == stat.S_IFLNK else found.mode),
        "st_ino": number,
        "st_nlink": links,
        "st_uid": found.uid,
        "st_gid": found.gid,
        "st_size": nbytes,
        "st_blocks": -(-nbytes // _BLOCK),
        "st_atime": found.mtime,
        "st_mtime": found.mtime,
        "st_ctime": found.mtime,
    }
