"""What ``analyze`` tells: where the bytes are, which are repeats, and what slimming would save."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from slimckpt.analysis.categories import CATEGORIES, categorize
from slimckpt.analysis.roles import step_key
from slimckpt.analysis.scan import scan
from slimckpt.analysis.sharing import (
    Bodies,
    Sharing,
    decide,
    first_users,
    hash_files,
    sample,
)
from slimckpt.analysis.tree import Tree
from slimckpt.model import Catalog, Ints, SourceFile, StepLabel, compact_ranks
from slimckpt.progress import Progress
from slimckpt.sources.digest import Digests

SCHEMA = "slimckpt.analyze/1"


@dataclass(slots=True)
class Amount:
    """Bytes before and after, in bytes of the source's files (structure of a store not counted)."""

    before: int = 0
    after: int = 0


@dataclass(slots=True)
class ReplicaGroup:
    """Tensors with the same bytes on the same ranks.

    ``nbytes`` is one copy of all of them together; ``copies`` how often that is stored now.
    """

    ranks: str
    copies: int
    tensors: int
    nbytes: int
    saved: int
    example: str


@dataclass(slots=True)
class Report:
    """The result of ``analyze``. Without ``exact``, what is saved is an upper bound."""

    source: str
    exact: bool
    files: int
    tensors: int
    formats: dict[str, int]
    steps: list[StepLabel]
    runs: list[str]
    ranks: str
    total: Amount
    by_step: list[tuple[str, StepLabel | None, Amount]]
    by_category: dict[str, Amount]
    groups: list[ReplicaGroup]
    groups_total: int
    not_slimmed: list[tuple[str, str, int]]
    gain: bool
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values under the versioned schema ``slimckpt.analyze/1``."""
        found = asdict(self)
        found["by_step"] = [
            {"run": run, "step": step, **asdict(amount)} for run, step, amount in self.by_step
        ]
        found["not_slimmed"] = [
            {"path": path, "reason": reason, "nbytes": nbytes}
            for path, reason, nbytes in self.not_slimmed
        ]
        return {"schema": SCHEMA, **found}


def analyze_tree(
    tree: Tree,
    executor: Executor,
    *,
    exact: bool,
    overrides: Sequence[tuple[str, str]],
    most_groups: int,
    min_saving: float,
    progress: Progress,
) -> Report:
    """Scan, find what is the same, and count."""
    progress.start("reading headers", len(tree.files))
    catalog = scan(tree, executor, progress.advance)
    bodies = Bodies(catalog, tree.root)
    if exact:
        digests = Digests(bodies.nbytes)
        progress.start("hashing", int(bodies.sizes.sum()))
        everything = [n for n, file in enumerate(catalog.files) if file.condition != "store"]
        hash_files(bodies, everything, executor, digests, progress.advance)
    else:
        digests = sample(bodies, executor)
    sharing = decide(bodies, digests, min_saving)
    return _report(tree, bodies, sharing, exact, overrides, most_groups)


def _report(
    tree: Tree,
    bodies: Bodies,
    sharing: Sharing,
    exact: bool,
    overrides: Sequence[tuple[str, str]],
    most_groups: int,
) -> Report:
    catalog = bodies.catalog
    files = catalog.files
    category = body_categories(bodies, overrides)
    before, after = _weigh(bodies, sharing)
    groups = _groups(bodies, sharing)
    formats: dict[str, int] = {}
    for file in files:
        name = file.format if file.condition in ("understood", "store") else _kind(file)
        formats[name] = formats.get(name, 0) + 1
    steps = sorted({f.role.step for f in files if f.role.step is not None}, key=step_key)
    report = Report(
        source=os.fsdecode(tree.root),
        exact=exact,
        files=len(files),
        tensors=catalog.table.n_tensors,
        formats=dict(sorted(formats.items())),
        steps=steps,
        runs=sorted({f.role.run for f in files if f.understood}),
        ranks=compact_ranks(f.role.rank for f in files if f.role.rank is not None),
        total=Amount(int(before.sum()), int(after.sum())),
        by_step=_by_step(bodies, before, after),
        by_category={
            name: Amount(int(before[category == code].sum()), int(after[category == code].sum()))
            for code, name in enumerate(CATEGORIES)
        },
        groups=groups[:most_groups],
        groups_total=len(groups),
        not_slimmed=_not_slimmed(bodies, sharing),
        gain=bool((after < before).any()),
    )
    if tree.xattrs:
        report.notes.append(
            f"{len(tree.xattrs)} entries have extended attributes or ACLs, which slimming drops"
        )
    outside = sum(file.outside_links > 0 for file in tree.files)
    if outside:
        report.notes.append(f"{outside} files have hard links outside the source")
    return report


def _kind(file: SourceFile) -> str:
    return f"{file.format} ({file.condition})" if file.format != "unknown" else "other files"


def body_categories(bodies: Bodies, overrides: Sequence[tuple[str, str]] = ()) -> Ints:
    """A number into ``CATEGORIES`` for each body: that of its first tensor; ``other`` for bytes
    outside tensors."""
    table = bodies.catalog.table
    other = CATEGORIES.index("other")
    found = np.full(len(bodies), other, np.int64)
    starts, rows = table.tensors_of_payloads()
    used = np.flatnonzero(starts[1:] > starts[:-1])
    codes = categorize(table, overrides)
    found[used] = codes[rows[starts[used]]]
    return found


def _weigh(bodies: Bodies, sharing: Sharing) -> tuple[Ints, Ints]:
    """Bytes of each body before, and what of them is stored after. Payloads that stay in the
    skeleton count for themselves, the skeleton for the rest."""
    before = bodies.nbytes.copy()
    table = bodies.catalog.table
    inside = np.where(table.stored_apart, 0, table.payload_nbytes)
    np.add.at(before, bodies.n_payloads + bodies.file[: bodies.n_payloads], -inside)
    after = before.copy()
    shared = sharing.shared(bodies)
    again = shared & ~first_users(bodies, sharing)
    after[again] = 0
    # A skeleton stored elsewhere takes the small payloads inside it along.
    gone = again[bodies.n_payloads :][bodies.file[: bodies.n_payloads]]
    after[: bodies.n_payloads][gone & ~table.stored_apart] = 0
    return before, after


def _by_step(
    bodies: Bodies, before: Ints, after: Ints
) -> list[tuple[str, StepLabel | None, Amount]]:
    files = bodies.catalog.files
    found: dict[tuple[str, StepLabel | None], Amount] = {}
    per_file = [np.zeros(bodies.n_files, np.int64) for _ in range(2)]
    for sums, weights in zip(per_file, (before, after), strict=True):
        np.add.at(sums, bodies.file, weights)
    for number, file in enumerate(files):
        amount = found.setdefault((file.role.run, file.role.step), Amount())
        amount.before += int(per_file[0][number])
        amount.after += int(per_file[1][number])
    order = sorted(found, key=lambda key: (key[0], step_key(key[1])))
    return [(run, step, found[run, step]) for run, step in order]


def payload_groups(bodies: Bodies, sharing: Sharing) -> list[list[int]]:
    """All replica groups of payloads, small ones too: rows with the same bytes, two or more."""
    classes = sharing.class_of[: bodies.n_payloads]
    order = np.argsort(classes, kind="stable")
    bounds = np.flatnonzero(np.diff(classes[order])) + 1
    return [g.tolist() for g in np.split(order, bounds) if len(g) > 1]


def _groups(bodies: Bodies, sharing: Sharing) -> list[ReplicaGroup]:
    """Replica groups joined by who holds them, largest saving first."""
    catalog = bodies.catalog
    starts, rows = catalog.table.tensors_of_payloads()
    joined: dict[tuple[int, ...], ReplicaGroup] = {}
    largest: dict[tuple[int, ...], tuple[int, int]] = {}
    for group in payload_groups(bodies, sharing):
        members = tuple(bodies.file[group].tolist())
        nbytes = int(bodies.nbytes[group[0]])
        if members not in joined:
            joined[members] = ReplicaGroup(_holders(catalog, members), len(members), 0, 0, 0, "")
        found = joined[members]
        found.tensors += 1
        found.nbytes += nbytes
        found.saved += nbytes * (len(members) - 1)
        size_and_place = (nbytes, -group[0])
        if starts[group[0] + 1] > starts[group[0]] and size_and_place > largest.get(
            members, (-1, 0)
        ):
            largest[members] = size_and_place
            found.example = catalog.table.name(int(rows[starts[group[0]]]))
    return sorted(joined.values(), key=lambda g: (-g.saved, g.ranks, g.example))


def _holders(catalog: Catalog, members: Sequence[int]) -> str:
    """``ranks 0-7``, ``steps 10, 20, 30``, or file names where paths state neither."""
    roles = [catalog.files[m].role for m in sorted(set(members))]
    ranks = {role.rank for role in roles if role.rank is not None}
    steps = sorted({role.step for role in roles if role.step is not None}, key=step_key)
    said = []
    if ranks:
        said.append(f"rank{'s' * (len(ranks) > 1)} {compact_ranks(ranks)}")
    if len(steps) > 1:
        shown = [str(step) for step in steps]
        said.append(f"steps {', '.join(shown if len(shown) < 6 else [*shown[:4], '…', shown[-1]])}")
    if not said:
        labels = [catalog.files[m].label for m in sorted(set(members))]
        said = [", ".join(labels[:2]) + (f" and {len(labels) - 2} more" if len(labels) > 2 else "")]
    return ", ".join(said)


def _not_slimmed(bodies: Bodies, sharing: Sharing) -> list[tuple[str, str, int]]:
    found = []
    for number, file in enumerate(bodies.catalog.files):
        if sharing.rewritten[number]:
            continue
        reason = file.problem or "too little of it is shared with other files"
        found.append((file.label, reason, file.size))
    return sorted(found, key=lambda row: (-row[2], row[0]))
