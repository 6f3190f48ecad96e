"""Leaving out what will not be resumed from: which payloads may go, and which must not."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slimckpt.analysis.categories import CATEGORIES, MASTER, OPTIMIZER, WEIGHTS, parameter_of
from slimckpt.analysis.roles import role_of, step_key
from slimckpt.analysis.rounded import is_rounded
from slimckpt.analysis.sharing import Bodies, Mask, Sharing
from slimckpt.errors import UsageError
from slimckpt.model import HOME_PAYLOAD, Ints, Role, SourceFile, StepLabel, Table

KINDS = ("optimizer", "master")
"""``optimizer``: moments and step state. ``master``: high-precision copies of the weights."""

_CATEGORIES = {"optimizer": OPTIMIZER, "master": frozenset({MASTER})}
_LISTED = 5
_WRAPPERS = frozenset({"module", "model", "_orig_mod", "network", "net", "state_dict"})
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
    found &= bodies.apart
    losing = np.zeros(bodies.n_files, np.bool_)
    losing[bodies.file[found]] = True
    return found & ~_spared(bodies, drop, losing)[bodies.file]


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


def refuse_last_copies(bodies: Bodies, sharing: Sharing, codes: Codes, *, by_bytes: bool) -> None:
    """No master weight goes unless a weight is the same values, rounded.

    Names propose, bytes decide: compared is the weight of its parameter in the same step, or, where
    the master has no name of its own, any weight in its file of as many elements.

    Parameters
    ----------
    by_bytes : bool
        Whether to compare: all bytes of master and weight are read. Else only those are refused
        that have nothing to be compared with.

    Raises
    ------
    UsageError
        Names the master weights of which there is no other copy.
    """
    catalog, table = bodies.catalog, bodies.catalog.table
    rows = dropped_tensors(bodies, sharing)
    masters = rows[codes[rows] == CATEGORIES.index(MASTER)]
    if not len(masters):
        return
    file_of = catalog.files_of(np.arange(table.n_tensors))
    weights = _Weights(bodies, codes, file_of)
    alone = []
    known: dict[tuple[int, ...], bool] = {}
    for row in masters.tolist():
        for weight in weights.of(row):
            key = (*_identity(bodies, sharing, row), *_identity(bodies, sharing, weight))
            if key not in known:
                known[key] = not by_bytes or is_rounded(bodies, row, weight)
            if known[key]:
                break
        else:
            alone.append(f"{table.name(row)} in {catalog.files[file_of[row]].label}")
    if alone:
        shown = "; ".join(alone[:_LISTED]) + ("; …" if len(alone) > _LISTED else "")
        raise UsageError(
            f"--drop master is refused: of {len(alone)} master weights no other copy is stored (a"
            " weight of the same parameter and step that is the same values, rounded): "
            f"{shown}. Nothing was written; --drop optimizer alone leaves master weights where"
            " they are"
        )


class _Weights:
    """Which weights could be the copies of a master."""

    def __init__(self, bodies: Bodies, codes: Codes, file_of: Ints) -> None:
        self.catalog, self.file_of = bodies.catalog, file_of
        self.named: dict[tuple[str, StepLabel | None, str], list[int]] = {}
        self.inside: dict[tuple[int, int], list[int]] = {}
        is_weight = np.array([category in WEIGHTS for category in CATEGORIES])[codes]
        for row in np.flatnonzero(is_weight).tolist():
            file = int(file_of[row])
            role = self.catalog.files[file].role
            key = (role.run, role.step, _bare(self.catalog.table.name(row)))
            self.named.setdefault(key, []).append(row)
            self.inside.setdefault((file, self._count(row)), []).append(row)

    def of(self, master: int) -> list[int]:
        """Rows of weights, those in the same file first."""
        file, count = int(self.file_of[master]), self._count(master)
        parameter = parameter_of(self.catalog.table.name(master))
        if not parameter:
            return self.inside.get((file, count), [])
        role = self.catalog.files[file].role
        found = self.named.get((role.run, role.step, _bare(parameter)), [])
        found = [row for row in found if self._count(row) == count]
        return sorted(found, key=lambda row: self.file_of[row] != file)

    def _count(self, row: int) -> int:
        return math.prod(self.catalog.table.shape(row))


def _identity(bodies: Bodies, sharing: Sharing, row: int) -> tuple[int, int, int]:
    """The bytes of a tensor: equal for replicas. Rows without payload are their own."""
    columns = bodies.catalog.table.columns
    if columns["home"][row] != HOME_PAYLOAD:
        return -1, row, 0
    payload = int(columns["home_row"][row])
    return int(sharing.class_of[payload]), int(columns["offset"][row]), int(columns["dtype"][row])


def _spared(bodies: Bodies, drop: Drop, losing: Mask) -> Mask:
    """For each file, whether one of its names is of a step that keeps everything.

    ``losing`` are the files that hold what is to be dropped. Only their steps count as newest: a
    newer one that was cut short, or holds weights alone, is none to resume from. Each rank has its
    own newest steps, since one may have stopped before the others.
    """
    files = bodies.catalog.files
    if not (drop.last or drop.every):
        return np.zeros(len(files), np.bool_)
    roles = [_roles(file) for file in files]
    steps: dict[tuple[str, int | None, tuple[tuple[str, int], ...]], set[StepLabel]] = {}
    for number in np.flatnonzero(losing).tolist():
        for role in roles[number]:
            if role.step is not None:
                place = (role.run, role.rank, tuple(sorted(role.coords.items())))
                steps.setdefault(place, set()).add(role.step)
    if losing.any() and not steps:
        raise UsageError(
            f"keep-full cannot say which of {int(losing.sum())} files to spare: no path states a"
            f" step (such as {files[int(np.flatnonzero(losing)[0])].label}); leave it out, or give"
            " directories names like step_1000"
        )
    spared = set()
    for (run, _, _), labels in steps.items():
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


def _bare(name: str) -> str:
    segments = name.replace("/", ".").split(".")
    while len(segments) > 1 and segments[0] in _WRAPPERS:
        del segments[0]
    return ".".join(segments)
