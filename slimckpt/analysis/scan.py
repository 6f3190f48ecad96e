"""From a tree of files to a catalog of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from slimckpt.analysis.companions import completed
from slimckpt.analysis.roles import assign_roles, roles_below
from slimckpt.analysis.tree import Tree
from slimckpt.errors import UnfaithfulSourceError
from slimckpt.formats import Found, examine
from slimckpt.model import Catalog, SourceFile, Table, TableBuilder, show_path
from slimckpt.sources.digest import run_units
from slimckpt.sources.positioned import FileSource

_UNIT_FILES = 32
_EMPTY = TableBuilder().build()


@dataclass(frozen=True, slots=True)
class ScanUnit:
    """Some files to examine: plain and picklable. ``first`` is the number of the first."""

    first: int
    files: tuple[tuple[bytes, str], ...]


def scan_unit(unit: ScanUnit) -> list[Found]:
    """Detect the format of each file and locate its tensors."""
    return [_examine(path, label) for path, label in unit.files]


def scan(tree: Tree, executor: Executor, progress: Callable[[int], None] | None = None) -> Catalog:
    """Locate every tensor of every file of ``tree``; one catalog row of files per body.

    Reads headers only. ``progress`` is told how many files are done, each time some are.
    """
    files = source_files(tree)
    return Catalog.of(files, _tables(tree, files, executor, progress))


def _tables(
    tree: Tree,
    files: list[SourceFile],
    executor: Executor,
    progress: Callable[[int], None] | None,
) -> Iterator[Table]:
    """The table of each file, in order: few are kept waiting, for memory's sake."""
    waiting: dict[int, list[Found]] = {}
    at = 0
    for unit, found in run_units(executor, scan_unit, _units(tree)):
        waiting[unit.first] = found
        while at in waiting:
            for result in waiting.pop(at):
                yield fill_in(files[at], result)
                at += 1
        if progress:
            progress(len(found))


def source_files(tree: Tree) -> list[SourceFile]:
    """The files of a tree with their roles, not yet examined."""
    paths = [file.path for file in tree.files]
    roles = [] if tree.roots else assign_roles(paths)
    for root, count in tree.roots:
        roles += roles_below(root, paths[len(roles) : len(roles) + count])
    return [
        SourceFile(file.path, file.size, file.stat, role, links=file.links)
        for file, role in zip(tree.files, roles, strict=True)
    ]


def fill_in(file: SourceFile, found: Found) -> Table:
    """Note in ``file`` what it turned out to be; its table."""
    file.format, file.condition = found.format, found.condition
    file.problem, file.facts = found.problem, found.facts
    return found.table


def _examine(path: bytes, label: str) -> Found:
    if not label:
        return Found("slimckpt", "store", "belongs to a slim checkpoint", {}, _EMPTY)
    try:
        with FileSource(path, label) as source:
            return completed(examine(source), path)
    except UnfaithfulSourceError:
        raise
    except OSError as error:
        raise UnfaithfulSourceError(
            f"{label}: {error.strerror}; slimckpt must be able to read every file of the tree"
        ) from None


def _units(tree: Tree) -> Iterator[ScanUnit]:
    for first in range(0, len(tree.files), _UNIT_FILES):
        some = tree.files[first : first + _UNIT_FILES]
        yield ScanUnit(
            first,
            tuple((tree.absolute(f.path), "" if f.in_store else show_path(f.path)) for f in some),
        )
