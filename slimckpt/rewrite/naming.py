"""Names inside a slim checkpoint: taken and over-long ones get a number."""

from __future__ import annotations

import os

MAX_COMPONENT = 240
MAX_PATH = 2048


class Names:
    """Hands out names that collide neither with each other nor with directories of others."""

    def __init__(self) -> None:
        self._files: set[bytes] = set()
        self._directories: set[bytes] = set()

    def take(self, wanted: bytes) -> bytes:
        """``wanted``, or a numbered name in its top directory."""
        name = wanted
        number = 0
        while not self._free(name):
            number += 1
            suffix = os.path.splitext(wanted)[1][:16] if wanted.endswith(b".h5") else b""
            name = wanted.split(b"/", 1)[0] + b"/" + b"%06d" % number + suffix
        self._files.add(name.lower())
        parent = os.path.dirname(name)
        while parent:
            self._directories.add(parent.lower())
            parent = os.path.dirname(parent)
        return name

    def _free(self, name: bytes) -> bool:
        parts = name.split(b"/")
        if len(name) > MAX_PATH or max(map(len, parts)) > MAX_COMPONENT:
            return False
        folded = name.lower()
        above = os.path.dirname(folded)
        while above:
            if above in self._files:
                return False
            above = os.path.dirname(above)
        return folded not in self._files and folded not in self._directories
