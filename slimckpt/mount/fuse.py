"""The mount as libfuse calls it; importing this needs mfusepy and libfuse.

Tried with mfusepy 3.1.1 on libfuse 2.9.9 and 3.14.0.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

import mfusepy

from slimckpt.model import decode_path, encode_path
from slimckpt.mount.bodies import Bodies
from slimckpt.mount.tree import Node, Tree

_FOREVER = 10**9
"""Seconds for which the kernel may believe what it was told: a store never changes."""
_THREADS = 10


class _Operations(mfusepy.Operations):  # type: ignore[misc]
    """What the kernel may ask. All that would write it refuses itself: the mount is read-only."""

    use_ns = True

    def __init__(self, tree: Tree, bodies: Bodies, on_start: Callable[[], None]) -> None:
        self._tree, self._bodies, self._on_start = tree, bodies, on_start

    def init_with_config(self, *_: Any) -> None:
        self._on_start()

    def getattr(self, path: str, info: Any = None) -> dict[str, int]:
        return self._node(path).attributes

    def readlink(self, path: str) -> str:
        return encode_path(self._node(path).target or b"")

    def readdir(self, path: str, handle: int) -> list[str | tuple[str, dict[str, int], int]]:
        inside = self._node(path).children.items()
        return [".", "..", *((encode_path(name), node.attributes, 0) for name, node in inside)]

    def open(self, path: str, info: Any) -> int:
        body = self._node(path).body
        assert body is not None
        self._bodies.open(body)
        info.fh = body
        info.keep_cache = True
        # Through the page cache, a page that is dropped in part could not be read at all.
        info.direct_io = not self._bodies.whole(body)
        return 0

    def read(self, path: str, buffer: memoryview, offset: int, body: int) -> int:
        return self._bodies.read_into(body, offset, buffer)

    def release(self, path: str, info: Any) -> int:
        self._bodies.release(info.fh)
        return 0

    def _node(self, path: str) -> Node:
        node = self._tree.node(decode_path(path[1:]))
        if node is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        return node


class _Session(mfusepy.FUSE):  # type: ignore[misc]
    """Reads into libfuse's own buffer; mfusepy would have ``bytes`` made and copied."""

    def read(self, path: bytes, buffer: Any, size: int, offset: int, info: Any) -> int:
        room = (ctypes.c_ubyte * size).from_address(ctypes.addressof(buffer.contents))
        found: int = self.operations.read("", memoryview(room).cast("B"), offset, info.contents.fh)
        return found


def run(
    tree: Tree,
    bodies: Bodies,
    mountpoint: bytes,
    on_start: Callable[[], None],
    *,
    allow_other: bool = False,
) -> None:
    """Mount and serve until it is unmounted; ``on_start`` is called when the kernel is there.

    Raises
    ------
    RuntimeError
        libfuse could not mount; it says why on stderr.
    """
    options: dict[str, Any] = {"allow_other": True, "default_permissions": True}
    if not allow_other:
        options.clear()
    if mfusepy.fuse_version_major == 3:
        options["max_idle_threads"] = _THREADS  # 3.14 warns of its own default
    _Session(
        _Operations(tree, bodies, on_start),
        encode_path(mountpoint),
        raw_fi=True,
        foreground=True,
        ro=True,
        fsname="slimckpt",
        subtype="slimckpt",
        use_ino=True,
        kernel_cache=True,
        attr_timeout=_FOREVER,
        entry_timeout=_FOREVER,
        negative_timeout=_FOREVER,
        **options,
    )
