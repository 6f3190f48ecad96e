"""Leaving out what will not be resumed from: which payloads may go, and which must not."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slimckpt.analysis.categories import CATEGORIES, MASTER, OPTIMIZER, WEIGHTS, parameter_of
from slimckpt.analysis.roles import role_of, step_key
from slimckpt.analysis.sharing import Bodies, Mask, Sharing
from slimckpt.errors import UsageError
from slimckpt.model import HOME_PAYLOAD, Ints, Role, SourceFile, StepLabel, Table

KINDS = ("optimizer", "master")
"""``optimizer``: moments and step state. ``master``: high-precision copies of the weights."""

_CATEGORIES = {"optimizer": OPTIMIZER, "master": frozenset({MASTER})}
_LISTED = 5
_WRAPPERS = frozenset({"module", "model", "_orig_mod", "network", "net"})
"""First segments that a wrapper puts before the names of parameters, or does not."""

Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Drop:
    """What to leave out, and the steps that keep everything: the ``last`` newest of each run, and
    those whose number is a multiple of ``every`` (0: none)."""

    kinds: frozenset[str] = frozenset()
    last: int = 0
    every: int = 0

    @staticmethod
    def parse(kinds: Iterable[str], keep_full: str | None) -> Drop:
        """From ``["optimizer"]`` and ``"last:2,every:1000"``.

        Raises
        ------
        UsageError
            A kind or rule is unknown, or ``keep_full`` is given and nothing is dropped.
        """
        wanted = frozenset(kinds)
        if unknown := sorted(wanted - set(KINDS)):
            raise UsageError(f"cannot drop {unknown[0]!r}; there are: {', '.join(KINDS)}")
        if keep_full is None:
            return Drop(wanted)
        if not wanted:
            raise UsageError("keep-full says which steps --drop spares, but nothing is dropped")
        rules: dict[str, int] = {}
        for rule in keep_full.split(","):
            name, _, number = rule.partition(":")
            if name not in ("last", "every") or not number.isdecimal() or int(number) < 1:
                raise UsageError(f"{rule!r} is no rule of keep-full; say last:2 or every:1000")
            if name in rules:
                raise UsageError(f"keep-full says {name} twice")
            rules[name] = int(number)
        return Drop(wanted, **rules)


def may_drop(bodies: Bodies, drop: Drop, codes: Codes) -> Mask:
    """For each body, whether ``drop`` covers every tensor on it.

    Only payloads that are stored apart go; small ones stay in the skeleton. Where steps are spared,
    files that belong to no step are too: nothing says that they are old.

    Parameters
    ----------
    codes : uint8 array
        The category of each tensor, as of :func:`~slimckpt.analysis.categories.categorize`.

    Raises
    ------
    UsageError
        ``every`` cannot be told of a step that is not a number.
    """
    found = np.zeros(len(bodies), np.bool_)
    if not drop.kinds:
        return found
    covered = frozenset().union(*(_CATEGORIES[kind] for kind in drop.kinds))
    found[: bodies.n_payloads] = payloads_of(bodies.catalog.table, codes, covered)
    return found & bodies.apart & ~_spared(bodies, drop)[bodies.file]


def payloads_of(table: Table, codes: Codes, categories: Container[str]) -> Mask:
    """For each payload, whether tensors view it and all of them are of ``categories``."""
    other = np.array([category not in categories for category in CATEGORIES])[codes]
    starts, rows = table.tensors_of_payloads()
    others = np.concatenate([[0], np.cumsum(other[rows])])
    found: Mask = (starts[1:] > starts[:-1]) & (others[starts[1:]] == others[starts[:-1]])
    return found


def dropped_tensors(bodies: Bodies, sharing: Sharing) -> Ints:
    """Rows of the tensors whose bytes are left out."""
    columns = bodies.catalog.table.columns
    on_payload = np.flatnonzero(columns["home"] == HOME_PAYLOAD)
    found: Ints = on_payload[sharing.dropped[columns["home_row"][on_payload]]]
    return found


def refuse_last_copies(bodies: Bodies, sharing: Sharing, codes: Codes) -> None:
    """No master weight goes without a weight of its parameter: one with as many elements at least,
    in the same step, in a file of the same rank or of all ranks.

    Raises
    ------
    UsageError
        Names the parameters of which the master is the only copy.
    """
    catalog = bodies.catalog
    table = catalog.table
    rows = dropped_tensors(bodies, sharing)
    masters = rows[codes[rows] == CATEGORIES.index(MASTER)]
    if not len(masters):
        return
    file_of = np.searchsorted(catalog.tensor_start, np.arange(table.n_tensors), "right") - 1
    weights: dict[tuple[str, StepLabel | None, str], list[int]] = {}
    is_weight = np.array([category in WEIGHTS for category in CATEGORIES])[codes]
    for row in np.flatnonzero(is_weight).tolist():
        role = catalog.files[file_of[row]].role
        weights.setdefault((role.run, role.step, _bare(table.name(row))), []).append(row)
    alone = []
    for row in masters.tolist():
        file = catalog.files[file_of[row]]
        parameter = parameter_of(table.name(row))
        candidates = weights.get((file.role.run, file.role.step, _bare(parameter)), ())
        count = np.prod(table.shape(row), dtype=np.int64)
        if not parameter or not any(
            np.prod(table.shape(other), dtype=np.int64) >= count
            and _together(file.role, catalog.files[file_of[other]].role)
            for other in candidates
        ):
            alone.append(f"{table.name(row)} in {file.label}")
    if alone:
        shown = "; ".join(alone[:_LISTED]) + ("; …" if len(alone) > _LISTED else "")
        raise UsageError(
            f"--drop master is refused: of {len(alone)} master weights no other copy is stored"
            f" (no weight of the same parameter, step and rank): {shown}. Nothing was written;"
            " --drop optimizer alone leaves master weights where they are"
        )


def _spared(bodies: Bodies, drop: Drop) -> Mask:
    """For each file, whether one of its names is of a step that keeps everything."""
    files = bodies.catalog.files
    if not (drop.last or drop.every):
        return np.zeros(len(files), np.bool_)
    roles = [_roles(file) for file in files]
    steps: dict[str, set[StepLabel]] = {}
    for file, names in zip(files, roles, strict=True):
        for role in names:
            if role.step is not None and file.understood:
                steps.setdefault(role.run, set()).add(role.step)
    spared = set()
    for run, labels in steps.items():
        ordered = sorted(labels, key=step_key)
        spared |= {(run, label) for label in ordered[len(ordered) - drop.last :] if drop.last}
        for label in ordered if drop.every else ():
            if not isinstance(label, int):
                raise UsageError(
                    f"keep-full every:{drop.every} needs steps that are numbers, but step"
                    f" {label!r} of {run or 'the source'} is not; say last:N"
                )
            if label % drop.every == 0:
                spared.add((run, label))
    return np.array(
        [any(r.step is None or (r.run, r.step) in spared for r in names) for names in roles],
        np.bool_,
    )


def _roles(file: SourceFile) -> list[Role]:
    """The roles of all names of a file."""
    found = [file.role]
    for path in file.links:
        role = role_of(path)
        if role.step is not None or role.rank is not None or role.coords:
            found.append(role)
    return found


def _together(one: Role, other: Role) -> bool:
    """Whether nothing says that two files belong to different places of the job."""
    if None not in (one.rank, other.rank) and one.rank != other.rank:
        return False
    return all(other.coords.get(name, at) == at for name, at in one.coords.items())


def _bare(name: str) -> str:
    segments = name.replace("/", ".").split(".")
    while len(segments) > 1 and segments[0] in _WRAPPERS:
        del segments[0]
    return ".".join(segments)
