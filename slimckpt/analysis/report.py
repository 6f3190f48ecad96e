"""What ``analyze`` tells: where the bytes are, which are repeats, and what slimming would save."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from slimckpt.analysis.actions import Saving, repeated_steps, savings, stored_nbytes
from slimckpt.analysis.categories import CATEGORIES, categorize, unmatched
from slimckpt.analysis.constants import constant_classes
from slimckpt.analysis.dead_weight import dead_in
from slimckpt.analysis.parameters import StepCost, step_costs
from slimckpt.analysis.roles import step_key
from slimckpt.analysis.scan import scan
from slimckpt.analysis.sharing import (
    Bodies,
    Mask,
    Sharing,
    classes,
    decide,
    hash_files,
    sample,
)
from slimckpt.analysis.tree import Tree
from slimckpt.model import HOME_PAYLOAD, Bytes, Catalog, Ints, SourceFile, StepLabel, compact_ranks
from slimckpt.progress import Progress
from slimckpt.sources.digest import Digests

SCHEMA = "slimckpt.analyze/2"


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
class Remark:
    """Payloads of one kind: how many, their bytes as they are stored now, and a tensor or file."""

    payloads: int
    nbytes: int
    example: str


@dataclass(slots=True)
class Report:
    """The result of ``analyze``.

    Without ``exact``, what is saved and what is constant are upper bounds. ``by_root`` is there for
    several sources only. ``constants`` are payloads of one element over and over, ``dead`` bytes of
    payloads that no tensor views. ``repeated_steps`` are a run, a step, and the earlier step of
    which it has all the tensors. ``savings`` starts with what slimming saves; the others come on
    top of it and are policy, not redundancy.
    """

    sources: list[str]
    exact: bool
    files: int
    tensors: int
    formats: dict[str, int]
    steps: list[StepLabel]
    runs: list[str]
    ranks: str
    total: Amount
    by_root: list[tuple[str, Amount]]
    by_step: list[tuple[str, StepLabel | None, Amount]]
    by_category: dict[str, Amount]
    step_costs: list[StepCost]
    groups: list[ReplicaGroup]
    groups_total: int
    constants: Remark
    dead: Remark
    repeated_steps: list[tuple[str, StepLabel, StepLabel]]
    savings: list[Saving]
    not_slimmed: list[tuple[str, str, int]]
    gain: bool
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values under the versioned schema ``slimckpt.analyze/2``."""
        found = asdict(self)
        found["by_root"] = [{"root": root, **asdict(amount)} for root, amount in self.by_root]
        found["by_step"] = [
            {"run": run, "step": step, **asdict(amount)} for run, step, amount in self.by_step
        ]
        found["repeated_steps"] = [
            {"run": run, "step": step, "repeats": earlier}
            for run, step, earlier in self.repeated_steps
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
    codes = categorize(catalog.table, overrides)
    bodies = Bodies(catalog, tree.root)
    if exact:
        digests = Digests(bodies.nbytes)
        progress.start("hashing", int(bodies.sizes.sum()))
        everything = [n for n, file in enumerate(catalog.files) if file.condition != "store"]
        hash_files(bodies, everything, executor, digests, progress.advance)
    else:
        digests = sample(bodies, executor)
    class_of = classes(bodies, digests)
    constant = constant_classes(bodies, class_of, digests if exact else None, executor)
    report = _report(
        tree, bodies, digests, class_of, constant, codes, exact, min_saving, most_groups
    )
    report.notes += unmatched(catalog.table, overrides)
    return report


def _report(
    tree: Tree,
    bodies: Bodies,
    digests: Digests,
    class_of: Ints,
    constant: Mask,
    codes: Bytes,
    exact: bool,
    min_saving: float,
    most_groups: int,
) -> Report:
    catalog = bodies.catalog
    files, payloads = catalog.files, bodies.n_payloads
    sharing = decide(bodies, digests, min_saving, None, class_of)
    category = body_categories(bodies, codes)
    before = _counted(bodies)
    after = stored_nbytes(bodies, sharing, before)
    groups = _groups(bodies, sharing)
    formats: dict[str, int] = {}
    for file in files:
        name = file.format if file.condition in ("understood", "store") else _kind(file)
        formats[name] = formats.get(name, 0) + 1
    steps = sorted({f.role.step for f in files if f.role.step is not None}, key=step_key)
    per_file = [_per_file(bodies, nbytes) for nbytes in (before, after)]
    report = Report(
        sources=[os.fsdecode(root) for root, _ in tree.roots] or [os.fsdecode(tree.root)],
        exact=exact,
        files=len(files),
        tensors=catalog.table.n_tensors,
        formats=dict(sorted(formats.items())),
        steps=steps,
        runs=sorted({f.role.run for f in files if f.understood}),
        ranks=compact_ranks(f.role.rank for f in files if f.role.rank is not None),
        total=Amount(int(before.sum()), int(after.sum())),
        by_root=_by_root(tree, *per_file),
        by_step=_by_step(files, *per_file),
        by_category={
            name: Amount(int(before[category == code].sum()), int(after[category == code].sum()))
            for code, name in enumerate(CATEGORIES)
        },
        step_costs=step_costs(bodies, class_of, before, category, codes, constant),
        groups=groups[:most_groups],
        groups_total=len(groups),
        constants=_remark(
            bodies, np.where(constant[class_of[:payloads]], bodies.nbytes[:payloads], 0)
        ),
        dead=_remark(bodies, dead_in(catalog)),
        repeated_steps=repeated_steps(bodies, class_of),
        savings=savings(bodies, digests, sharing, before, codes, min_saving),
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


def body_categories(bodies: Bodies, codes: Bytes) -> Bytes:
    """A number into ``CATEGORIES`` for each body: that of its first tensor; ``other`` for bytes
    outside tensors."""
    found = np.full(len(bodies), CATEGORIES.index("other"), np.uint8)
    starts, rows = bodies.catalog.table.tensors_of_payloads()
    used = np.flatnonzero(starts[1:] > starts[:-1])
    found[used] = codes[rows[starts[used]]]
    return found


def _counted(bodies: Bodies) -> Ints:
    """Bytes of each body. Payloads that stay in the skeleton count for themselves, the skeleton for
    the rest."""
    nbytes: Ints = bodies.nbytes.copy()
    table = bodies.catalog.table
    inside = np.where(table.stored_apart, 0, table.payload_nbytes)
    np.add.at(nbytes, bodies.n_payloads + bodies.file[: bodies.n_payloads], -inside)
    return nbytes


def _per_file(bodies: Bodies, nbytes: Ints) -> Ints:
    found = np.zeros(bodies.n_files, np.int64)
    np.add.at(found, bodies.file, nbytes)
    return found


def _by_root(tree: Tree, before: Ints, after: Ints) -> list[tuple[str, Amount]]:
    found, first = [], 0
    for root, count in tree.roots:
        here = slice(first, first + count)
        found.append((os.fsdecode(root), Amount(int(before[here].sum()), int(after[here].sum()))))
        first += count
    return found


def _by_step(
    files: Sequence[SourceFile], before: Ints, after: Ints
) -> list[tuple[str, StepLabel | None, Amount]]:
    found: dict[tuple[str, StepLabel | None], Amount] = {}
    for file, now, then in zip(files, before.tolist(), after.tolist(), strict=True):
        amount = found.setdefault((file.role.run, file.role.step), Amount())
        amount.before += now
        amount.after += then
    order = sorted(found, key=lambda key: (key[0], step_key(key[1])))
    return [(run, step, found[run, step]) for run, step in order]


def _remark(bodies: Bodies, nbytes: Ints) -> Remark:
    """Of payloads of which ``nbytes`` each count; the example is the largest."""
    if not nbytes.any():
        return Remark(0, 0, "")
    catalog = bodies.catalog
    payload = int(nbytes.argmax())
    tensors = np.flatnonzero(
        (catalog.table.columns["home"] == HOME_PAYLOAD)
        & (catalog.table.columns["home_row"] == payload)
    )
    label = catalog.files[bodies.file[payload]].label
    example = f"{catalog.table.name(int(tensors[0]))} in {label}" if len(tensors) else label
    return Remark(int((nbytes > 0).sum()), int(nbytes.sum()), example)


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
    several = len({file.role.step for file in catalog.files if file.role.step is not None}) > 1
    joined: dict[tuple[int, ...], ReplicaGroup] = {}
    largest: dict[tuple[int, ...], tuple[int, int]] = {}
    for group in payload_groups(bodies, sharing):
        members = tuple(bodies.file[group].tolist())
        nbytes = int(bodies.nbytes[group[0]])
        if members not in joined:
            joined[members] = ReplicaGroup(
                _holders(catalog, members, several), len(members), 0, 0, 0, ""
            )
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


def _holders(catalog: Catalog, members: Sequence[int], several: bool) -> str:
    """``ranks 0-7``, ``steps 10, 20, 30``, or file names where paths state neither; the step also
    where there is one, if the tree has ``several``."""
    roles = [catalog.files[m].role for m in sorted(set(members))]
    ranks = {role.rank for role in roles if role.rank is not None}
    steps = sorted({role.step for role in roles if role.step is not None}, key=step_key)
    said = []
    if ranks:
        said.append(f"rank{'s' * (len(ranks) > 1)} {compact_ranks(ranks)}")
    if len(steps) > 1:
        shown = [str(step) for step in steps]
        said.append(f"steps {', '.join(shown if len(shown) < 6 else [*shown[:4], '…', shown[-1]])}")
    elif steps and several and ranks:
        said.append(f"step {steps[0]}")
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
