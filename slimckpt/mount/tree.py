"""What a mount shows: directories, files and links with the attributes they had."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field

from slimckpt.errors import StoreDamagedError
from slimckpt.model import Stat, show_path
from slimckpt.rewrite.select import Chosen


@dataclass(slots=True)
class Node:
    """An inode: names that are hard links of each other share one.

    ``kind`` is of ``S_IFMT``, ``links`` how many names there are. ``body`` is a row of the files of
    the :class:`~slimckpt.rewrite.select.Chosen` that the tree was made of, ``target`` where a
    symbolic link points to, ``inside`` what a directory holds: names and numbers of nodes.
    """

    kind: int
    stat: Stat
    links: int
    nbytes: int = 0
    body: int = -1
    target: bytes = b""
    inside: dict[bytes, int] = field(default_factory=dict)

    @property
    def mode(self) -> int:
        # What a symbolic link permits means nothing: Linux shows it so.
        return self.kind | (0o777 if self.kind == stat.S_IFLNK else self.stat.mode)


def tree_of(chosen: Chosen) -> dict[int, Node]:
    """Nodes by their numbers; the root is 1, as the kernel has it.

    Raises
    ------
    StoreDamagedError
        A path is listed twice, or lies in a directory that is not listed.
    """
    nodes: dict[int, Node] = {}
    numbers: dict[bytes, int] = {}

    def add(node: Node, names: list[bytes]) -> None:
        number = len(nodes) + 1
        nodes[number] = node
        for name in names:
            if name in numbers:
                raise StoreDamagedError(f"{show_path(name)} is listed twice in the store")
            numbers[name] = number
            if not name:
                continue
            above = nodes.get(numbers.get(os.path.dirname(name), 0))
            if above is None or above.kind != stat.S_IFDIR:
                raise StoreDamagedError(f"{show_path(name)}: the store does not list its directory")
            above.inside[os.path.basename(name)] = number

    directories = Counter(os.path.dirname(d.path) for d in chosen.directories if d.path)
    for directory in chosen.directories:  # sorted: the root is the first
        add(Node(stat.S_IFDIR, directory.stat, 2 + directories[directory.path]), [directory.path])
    for body, (_, entry, names) in enumerate(chosen.files):
        file = entry.file
        add(Node(stat.S_IFREG, file.stat, len(names), file.size, body), names)
    for link in chosen.symlinks:
        target = link.target or b""
        add(Node(stat.S_IFLNK, link.stat, 1, len(target), target=target), [link.path])
    return nodes
