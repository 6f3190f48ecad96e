"""From names to rows, for all tensors of some files at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from slimckpt.model import Table
from slimckpt.views.arrays import is_readable


class Names:
    """The names (or exact paths) in some tables, in file order, each once.

    Twenty thousand names take a few milliseconds; no object is made for a tensor.
    """

    def __init__(
        self, tables: Sequence[Table], dropped: Sequence[Sequence[int]], by_path: bool = False
    ) -> None:
        counts = [table.n_tensors for table in tables]
        self._starts = [0, *accumulate(counts)]
        labels = [
            label for table in tables for label in (_paths(table) if by_path else table.names())
        ]
        self._rows: dict[str, int] = {}
        self._more: dict[str, list[int]] = {}
        gone = {
            row + start for rows, start in zip(dropped, self._starts, strict=False) for row in rows
        }
        if gone:
            for row, label in enumerate(labels):
                if row not in gone and self._rows.setdefault(label, row) != row:
                    self._more.setdefault(label, []).append(row)
        elif len(dict.fromkeys(labels)) == len(labels):
            self._rows = dict(zip(labels, range(len(labels)), strict=True))
        else:
            for row, label in enumerate(labels):
                if self._rows.setdefault(label, row) != row:
                    self._more.setdefault(label, []).append(row)
        self.dropped = {
            labels[row]: row for row in sorted(gone, reverse=True) if labels[row] not in self._rows
        }
        """Names of nothing but tensors that were left out."""
        self.opaque: dict[str, None] = {}
        """Names of nothing but entries that are not arrays."""
        unreadable = {
            int(row) + start
            for table, start in zip(tables, self._starts, strict=False)
            for row in _unreadable(table)
        }
        for row in sorted(unreadable):
            label = labels[row]
            if label in self._rows and unreadable.issuperset(
                (self._rows[label], *self._more.get(label, ()))
            ):
                self.opaque[label] = None

    def __len__(self) -> int:
        return len(self._rows) - len(self.opaque)

    def __iter__(self) -> Iterator[str]:
        """Names of arrays."""
        if not self.opaque:
            return iter(self._rows)
        return (name for name in self._rows if name not in self.opaque)

    def __contains__(self, name: object) -> bool:
        return name in self._rows and name not in self.opaque

    def only(self, name: str) -> tuple[int, int] | None:
        """The ``(table, row)`` of a name that one array has, and nothing else."""
        row = self._rows.get(name)
        if row is None or name in self._more or name in self.opaque:
            return None
        table = bisect_right(self._starts, row) - 1
        return table, row - self._starts[table]

    def rows(self, name: str) -> list[tuple[int, int]]:
        """Every ``(table, row)`` of a name, of opaque entries too; nothing where there is none.

        Of a name of which all that had it were left out, one of them.
        """
        first = self._rows.get(name, self.dropped.get(name))
        if first is None:
            return []
        found = []
        for row in (first, *self._more.get(name, ())):
            table = bisect_right(self._starts, row) - 1
            found.append((table, row - self._starts[table]))
        return found


def _paths(table: Table) -> list[str]:
    """All exact paths, in row order."""
    paths = table.names()
    for row in np.flatnonzero(np.diff(table.columns["path_end"], prepend=0)).tolist():
        paths[row] = table.path(row)
    return paths


def _unreadable(table: Table) -> list[int]:
    readable = np.array([is_readable(dtype) for dtype in table.dtypes], np.bool_)
    if readable.all():
        return []
    found: list[int] = np.flatnonzero(~readable[table.columns["dtype"]]).tolist()
    return found
