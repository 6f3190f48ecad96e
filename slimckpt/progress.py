"""How long work reports how far it is; the silent default."""

from __future__ import annotations


class Progress:
    """Told of phases and of work done in them. This one ignores it; the command line shows it."""

    def start(self, phase: str, total: int) -> None:
        """A phase of ``total`` bytes (or files) begins."""

    def advance(self, amount: int) -> None:
        """So much of it is done."""

    def finish(self) -> None:
        """The work is over, well or not."""


SILENT = Progress()
