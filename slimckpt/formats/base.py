"""What a container format is to the rest of the house."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from slimckpt.model import TableBuilder
from slimckpt.sources.positioned import ByteSource

DCP = "torch.distributed.checkpoint"
"""The fact ``describes`` of files that say where shards lie in whole tensors."""


class Format(ABC):
    """One container format: which tensors live in a file, and where do their bytes lie?

    A format locates; it never decodes, and never reads more of a payload than it must to find
    the next header.
    """

    name: ClassVar[str]
    """What reports call it."""

    @abstractmethod
    def matches(self, head: bytes, size: int) -> bool:
        """Whether a file of ``size`` bytes that starts with ``head`` (up to 4 KiB) is of this
        format: cheap, and true also for a damaged or encrypted one that is recognisable."""

    def found_inside(self, source: ByteSource) -> bool:
        """Whether a file that no format matched is of this one after all, seen further inside.

        Reads little; what cannot be read is none.
        """
        return False

    @abstractmethod
    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        """Add every payload and tensor of the file to ``table``.

        Returns
        -------
        dict
            Facts worth showing, plain JSON values (``{"metadata": {...}, "crc32": ...}``).

        Raises
        ------
        DamagedFileError
            The file breaks a rule of the format. Names file, tensor, expected, found.
        RefusedFileError
            The tensors cannot be reached (encrypted).
        NotUnderstoodError
            The file is something else that only looks alike (a strategy file).
        """

    def check(self, source: ByteSource) -> str | None:
        """Check the file against checksums of its own, reading all it needs.

        Returns
        -------
        str or None
            What is wrong, in one sentence; ``None`` when sound, or when it has no checksum.
        """
        return None
