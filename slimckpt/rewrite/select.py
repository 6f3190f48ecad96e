"""Choosing what to restore: by step, rank and path."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from slimckpt.analysis.roles import step_key
from slimckpt.errors import UnsupportedStoreError, UsageError
from slimckpt.model import StepLabel, compact_ranks, encode_path, show_path
from slimckpt.store.manifest import ORIGINS, FileEntry, OtherEntry, Part, refuse_synthetic
from slimckpt.store.reader import Store


@dataclass(frozen=True, slots=True)
class Selection:
    """What was asked for; nothing given means everything.

    A file is taken when it is of a chosen step, or has none; of a chosen rank, or has none; and
    when one of its paths matches a chosen glob.
    """

    steps: tuple[StepLabel, ...] = ()
    ranks: tuple[int, ...] = ()
    globs: tuple[str, ...] = ()
    run: str | None = None

    @property
    def everything(self) -> bool:
        return not (self.steps or self.ranks or self.globs or self.run is not None)

    def in_part(self, part: Part) -> bool:
        if self.run is not None and part.step is not None and part.run != self.run:
            return False
        wanted = {str(step) for step in self.steps}
        return not wanted or part.step is None or str(part.step) in wanted

    def names(self, entry: FileEntry, elsewhere: Container[bytes]) -> list[bytes]:
        """Which paths of a file of a chosen part are wanted; ``elsewhere`` have their own entry."""
        file = entry.file
        if self.ranks and file.role.rank is not None and file.role.rank not in self.ranks:
            return []
        paths = [file.path, *(link for link in file.links if link not in elsewhere)]
        if not self.globs:
            return paths
        return [path for path in paths if self.matches(path)]

    def matches(self, path: bytes) -> bool:
        return any(fnmatchcase(encode_path(path), glob) for glob in self.globs)


@dataclass(slots=True)
class Chosen:
    """What a selection came to: files with the paths wanted, and directories and links."""

    files: list[tuple[Part, FileEntry, list[bytes]]] = field(default_factory=list)
    directories: list[OtherEntry] = field(default_factory=list)
    symlinks: list[OtherEntry] = field(default_factory=list)


def choose(store: Store, selection: Selection, what: str) -> Chosen:
    """Apply a selection, to do ``what`` ("restore") with original files.

    Raises
    ------
    NoOriginalError
        Entries are chosen that were made by resharding.
    UsageError, UnsupportedStoreError
        As of :func:`select`.
    """
    chosen = select(store, selection)
    refuse_synthetic((entry for _, entry, _ in chosen.files), what)
    return chosen


def select(store: Store, selection: Selection) -> Chosen:
    """Apply a selection to entries of any origin.

    Raises
    ------
    UsageError
        A step, rank, run or glob matches nothing; lists what there is.
    UnsupportedStoreError
        An entry is of an unknown origin.
    """
    parts = list(store.parts())
    _refuse_unknown(parts, selection)
    chosen = Chosen()
    directories: dict[bytes, OtherEntry] = {}
    bodies: dict[bytes, tuple[Part, FileEntry, list[bytes]]] = {}
    elsewhere = linked_paths(parts)
    for part in parts:
        here = selection.in_part(part)
        for entry in part.files:
            if here:
                if entry.origin not in ORIGINS:
                    raise UnsupportedStoreError(
                        f"{entry.file.label}: of an origin ({entry.origin!a}) that this slimckpt"
                        " does not know; a newer one wrote it"
                    )
                names = selection.names(entry, elsewhere)
                body = entry.file.path if entry.body is None else entry.body
                if names:
                    bodies.setdefault(body, (part, entry, []))[2].extend(names)
        for other in part.others:
            if other.target is None:
                directories[other.path] = other
            elif here and (not selection.globs or selection.matches(other.path)):
                chosen.symlinks.append(other)
    chosen.files = [(part, entry, sorted(names)) for part, entry, names in bodies.values()]
    empty = _empty_directories(parts, selection)
    if not (selection.everything or chosen.files or chosen.symlinks or empty):
        raise UsageError("the selection matches no file; `slimckpt ls` shows what there is")
    if selection.everything:
        chosen.directories = list(directories.values())
    else:
        paths = [path for _, _, names in chosen.files for path in names]
        paths += [link.path for link in chosen.symlinks] + empty
        needed = {above for path in paths for above in _above(path)}.union(empty)
        chosen.directories = [directories[path] for path in needed if path in directories]
    chosen.directories.sort(key=lambda entry: entry.path)
    return chosen


def linked_paths(parts: Iterable[Part]) -> set[bytes]:
    """Further names of files that have an entry of their own."""
    return {e.file.path for part in parts for e in part.files if e.origin == "link"}


def _empty_directories(parts: Sequence[Part], selection: Selection) -> list[bytes]:
    """Wanted directories of chosen parts that hold nothing."""
    paths = [p for part in parts for e in part.files for p in (e.file.path, *e.file.links)]
    paths += [other.path for part in parts for other in part.others]
    holding = {os.path.dirname(path) for path in paths if path}
    return [
        other.path
        for part in parts
        if selection.in_part(part)
        for other in part.others
        if other.target is None
        and other.path not in holding
        and other.path
        and (not selection.globs or selection.matches(other.path))
    ]


def _above(path: bytes) -> list[bytes]:
    found = []
    while path:
        path = os.path.dirname(path)
        found.append(path)
    return found


def _refuse_unknown(parts: Sequence[Part], selection: Selection) -> None:
    labels = {part.step for part in parts if part.step is not None}
    steps = [str(label) for label in sorted(labels, key=step_key)]
    for step in selection.steps:
        if str(step) not in steps:
            raise UsageError(f"no step {step}; there are {', '.join(steps) or 'none'}")
    if selection.run is not None and selection.run not in {part.run for part in parts}:
        runs = sorted({repr(part.run) for part in parts})
        raise UsageError(f"no run {selection.run!r}; there are {', '.join(runs)}")
    ranks = {e.file.role.rank for part in parts if selection.in_part(part) for e in part.files}
    for rank in selection.ranks:
        if rank not in ranks:
            known = compact_ranks(r for r in ranks if r is not None)
            coords = any(e.file.role.coords for part in parts for e in part.files)
            hint = "none: paths state coordinates (tp, pp, dp), so select by --file"
            there = known or (hint if coords else "none")
            raise UsageError(f"no rank {rank} in what is selected; there are {there}")
    paths = [p for part in parts for e in part.files for p in (e.file.path, *e.file.links)]
    paths += [other.path for part in parts for other in part.others]
    for glob in selection.globs:
        if not any(fnmatchcase(encode_path(path), glob) for path in paths):
            first = show_path(paths[0]) if paths else "none"
            raise UsageError(f"no file matches {glob!r}; paths are like {first}")
