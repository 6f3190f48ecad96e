"""Who may read what: no container is more readable than the strictest source in it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from slimckpt import effects
from slimckpt.model import Stat

_READ_WRITE = 0o666


@dataclass(frozen=True, slots=True)
class Access:
    """Mode, owner and group of a file of the store; ``None`` where the sources disagree."""

    mode: int
    uid: int | None
    gid: int | None


class Guard:
    """Knows the directories of a source tree, and so who can reach a file in it."""

    def __init__(self, directories: Iterable[tuple[bytes, Stat]]) -> None:
        self._own = {path: stat.mode for path, stat in directories}
        self._masks: dict[bytes, int] = {}

    def _mask(self, directory: bytes) -> int:
        """The bits of a mode that mean anything below ``directory``."""
        above = [directory]
        while above[-1] and above[-1] not in self._masks:
            above.append(os.path.dirname(above[-1]))
        mask = 0o7777
        for path in reversed(above):
            if path not in self._masks:
                mode = self._own.get(path, 0o777)
                mask &= 0o7700 | (0o070 if mode & 0o010 else 0) | (0o007 if mode & 0o001 else 0)
                self._masks[path] = mask
            mask = self._masks[path]
        return mask

    def mode(self, path: bytes, stat: Stat) -> int:
        """The permission bits with which a file can really be used."""
        return stat.mode & self._mask(os.path.dirname(path)) & 0o777

    def strictest(self, files: Iterable[tuple[bytes, Stat]]) -> Access:
        """What a container of these files' bytes may be."""
        mode, uids, gids = _READ_WRITE, set(), set()
        for path, stat in files:
            mode &= self.mode(path, stat)
            uids.add(stat.uid)
            gids.add(stat.gid)
        return Access(
            mode,
            uids.pop() if len(uids) == 1 else None,
            gids.pop() if len(gids) == 1 else None,
        )


def protect(path: bytes, access: Access) -> None:
    """Give a new file of the store its owner, group and mode, never looser than meant."""
    now = os.lstat(path)
    if access.uid is not None or access.gid is not None:
        effects.change_owner(
            path,
            now.st_uid if access.uid is None else access.uid,
            now.st_gid if access.gid is None else access.gid,
        )
    mode, found = access.mode, os.lstat(path)
    if access.gid is None or found.st_gid != access.gid:
        # The group is not the sources' group: it may do what everybody may.
        mode &= ~0o070 | (mode & 0o007) << 3
    effects.change_mode(path, mode)
