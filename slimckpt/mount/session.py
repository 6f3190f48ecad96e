"""Answering the kernel: one question at a time, from as many threads as there are."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence
from typing import Any

from slimckpt import effects
from slimckpt.mount import protocol
from slimckpt.mount.bodies import Bodies
from slimckpt.mount.protocol import Request
from slimckpt.mount.tree import Node

log = logging.getLogger(__name__)

_GONE = (errno.ENODEV, errno.ECONNABORTED)
_NOT_ANY_MORE = (errno.ENOENT, errno.EAGAIN)
"""Who asked was interrupted."""


class Session:
    """A mount that is served on the descriptor ``device``.

    The kernel itself refuses whatever would write, since the mount is read-only, and keeps what it
    was told: nothing is asked twice as long as there is memory for it.
    """

    def __init__(self, device: int, nodes: dict[int, Node], bodies: Bodies) -> None:
        self._device, self._nodes, self._bodies = device, nodes, bodies

    def serve(self) -> None:
        """Answer until the mount is gone."""
        room = memoryview(bytearray(protocol.LARGEST_REQUEST))
        while True:
            try:
                nbytes = os.readv(self._device, [room])
            except OSError as error:
                if error.errno in _GONE:
                    return
                if error.errno in _NOT_ANY_MORE:
                    continue
                raise
            request = protocol.request_of(room[:nbytes])
            if request.opcode not in protocol.UNANSWERED:
                self._answer(request)

    def _answer(self, request: Request) -> None:
        parts: Sequence[Any] = ()
        failed = 0
        try:
            parts = self._found(request)
        except OSError as error:
            failed = error.errno or errno.EIO
        except Exception:  # who asked would wait for ever
            log.exception("slimckpt mount: %s", request[:3])
            failed = errno.EIO
        nbytes = sum(len(part) for part in parts)
        try:
            effects.send(self._device, [protocol.reply(request.unique, nbytes, failed), *parts])
        except OSError as error:
            if error.errno == errno.EFAULT:  # the kernel has answered for us: EIO
                self._bodies.explain(*protocol.read_of(request.body))
            elif error.errno not in (*_GONE, *_NOT_ANY_MORE):
                raise

    def _found(self, request: Request) -> Sequence[Any]:
        opcode, body = request.opcode, request.body
        if opcode == protocol.READ:
            return self._bodies.buffers(*protocol.read_of(body))
        if opcode == protocol.INIT:
            return [protocol.init(body)]
        if opcode == protocol.STATFS:
            sizes = [node.nbytes for node in self._nodes.values() if node.body >= 0]
            return [protocol.statfs(sum(sizes), len(self._nodes))]
        if opcode == protocol.RELEASE:
            self._bodies.release(protocol.released(body))
            return []
        if opcode in (protocol.RELEASEDIR, protocol.DESTROY):
            return []
        node = self._nodes[request.node]
        if opcode == protocol.LOOKUP:
            number = node.inside.get(bytes(body).rstrip(b"\0"), 0)
            return [protocol.entry(number, self._nodes.get(number))]
        if opcode == protocol.GETATTR:
            return [protocol.attributes(request.node, node)]
        if opcode == protocol.OPEN:
            self._bodies.open(node.body)
            # Through the page cache, a page that is dropped in part could not be read at all.
            return [protocol.opened(node.body, cached=self._bodies.whole(node.body))]
        if opcode == protocol.OPENDIR:
            return [protocol.opened_directory()]
        if opcode == protocol.READDIR:
            _, offset, nbytes = protocol.read_of(body)
            return [protocol.listing(self._entries(request.node, node), offset, nbytes)]
        if opcode == protocol.READLINK:
            return [node.target]
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    def _entries(self, number: int, node: Node) -> list[tuple[bytes, int, int]]:
        found = [(b".", number, stat.S_IFDIR), (b"..", number, stat.S_IFDIR)]
        return found + [(name, n, self._nodes[n].kind) for name, n in node.inside.items()]
