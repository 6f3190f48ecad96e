"""What readers of layouts see of the files of a step; :class:`slimckpt.views.providers.Member` is
one such file."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from slimckpt.model import Role, SourceFile, Table
from slimckpt.sources.positioned import ByteSource


class Contents(Protocol):
    """What a file holds, read when it is asked for."""

    @property
    def label(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def file(self) -> SourceFile:
        """The file, its condition known."""

    @property
    def table(self) -> Table:
        """Its tensors; only of a file that is understood."""

    def require(self) -> Table:
        """Its tensors, or the error that says why they cannot be read."""

    def source(self) -> AbstractContextManager[ByteSource]:
        """Its bytes."""


class File(Protocol):
    """A path of the tree and what the file holds."""

    @property
    def path(self) -> bytes: ...

    @property
    def role(self) -> Role: ...

    @property
    def holding(self) -> Contents: ...
