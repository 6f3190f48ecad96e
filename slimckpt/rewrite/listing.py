"""What a slim checkpoint or an original directory holds, as a listing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slimckpt.analysis.roles import step_key
from slimckpt.analysis.scan import scan
from slimckpt.analysis.tree import is_store, walk
from slimckpt.errors import SlimckptError, UsageError
from slimckpt.model import SourceFile, StepLabel, Table, Tensor, show_path
from slimckpt.sources.threads import default_jobs
from slimckpt.store.reader import Store


@dataclass(slots=True)
class ListedFile:
    """One file. ``stored`` says how: ``original``, ``slim``, ``whole``, or ``synthetic`` (made by
    resharding); ``dropped`` are those of its tensors, by number, that were left out."""

    path: str
    nbytes: int
    run: str
    step: StepLabel | None
    rank: int | None
    coords: dict[str, int]
    format: str
    stored: str
    problem: str | None
    tensors: list[Tensor]
    dropped: frozenset[int]


@dataclass(slots=True)
class Listing:
    """The files of a path, in order of run, step, rank and path."""

    files: list[ListedFile] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def as_json(self, tensors: bool) -> dict[str, Any]:
        files = []
        for file in self.files:
            row = {name: getattr(file, name) for name in ListedFile.__slots__}
            row["tensors"], row["dropped"] = len(file.tensors), len(file.dropped)
            if tensors:
                row["tensors"] = [
                    {
                        "name": t.name,
                        "path": t.path,
                        "dtype": t.dtype,
                        "shape": list(t.shape),
                        "dropped": number in file.dropped,
                    }
                    for number, t in enumerate(file.tensors)
                ]
            files.append(row)
        return {"files": files, "problems": self.problems}


def list_path(
    path: str | bytes | os.PathLike[str],
    *,
    step: StepLabel | None = None,
    rank: int | None = None,
    run: str | None = None,
) -> Listing:
    """List a slim checkpoint or a directory; a step or rank that is not there is an error."""
    root = os.fsencode(path)
    listing = Listing()
    found = list(_stored(root, listing) if is_store(root) else _scanned(root))
    roles = [row.file.role for row in found]
    for what, wanted, known in (
        ("step", step, {str(role.step) for role in roles if role.step is not None}),
        ("rank", rank, {str(role.rank) for role in roles if role.rank is not None}),
        ("run", run, {role.run for role in roles}),
    ):
        if wanted is not None and str(wanted) not in known:
            there = ", ".join(sorted(known, key=lambda k: (len(k), k))) or "none"
            if what == "rank" and not known and any(role.coords for role in roles):
                there = "none: paths state coordinates (tp, pp, dp); without --rank all are listed"
            raise UsageError(f"no {what} {wanted} in {show_path(root)}; there are {there}")
    for file, table, stored, dropped in found:
        role = file.role
        if (
            (step is not None and str(role.step) != str(step))
            or (rank is not None and role.rank not in (rank, None))
            or (run is not None and role.run != run)
        ):
            continue
        tensors = [table.tensor(row) for row in range(table.n_tensors)] if table else []
        listing.files.append(
            ListedFile(
                file.label,
                file.size,
                role.run,
                role.step,
                role.rank,
                role.coords,
                file.format if file.condition != "damaged" else f"{file.format} (damaged)",
                stored,
                file.problem,
                tensors,
                frozenset(dropped),
            )
        )
    listing.files.sort(
        key=lambda f: (f.run, step_key(f.step), -1 if f.rank is None else f.rank, f.path)
    )
    return listing


class _Row(NamedTuple):
    file: SourceFile
    table: Table | None
    stored: str
    dropped: Sequence[int] = ()


def _scanned(root: bytes) -> Iterator[_Row]:
    tree = walk(root)
    with ThreadPoolExecutor(default_jobs()) as executor:
        catalog = scan(tree, executor)
    for number, file in enumerate(catalog.files):
        yield _Row(file, catalog.table_of(number), "original")


def _stored(root: bytes, listing: Listing) -> Iterator[_Row]:
    store = Store(root)
    listing.problems += store.problems
    for part in store.parts():
        for entry in part.files:
            index = None
            try:
                index = store.index(part, entry)
            except SlimckptError as error:
                listing.problems.append(str(error))
            stored = "whole" if entry.skeleton.kind == "whole" else "slim"
            if entry.synthetic:
                stored = entry.origin
            if index is None:
                yield _Row(entry.file, None, stored)
            else:
                yield _Row(entry.file, index.table, stored, index.dropped_tensors())
