"""Bytes per parameter: what a step costs for each number it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimckpt.analysis.categories import CATEGORIES, GRADIENT, MASTER, OPTIMIZER, WEIGHTS
from slimckpt.analysis.roles import step_key
from slimckpt.analysis.sharing import Bodies, Mask
from slimckpt.dtypes import BY_NAME
from slimckpt.model import FLOOR, HOME_FILL, HOME_NONE, Bytes, Ints, StepLabel

KINDS = ("weights", "master weights", "moments", "gradients", "other")
"""``moments`` with step state; ``other`` with what is outside tensors (headers, pickles)."""


@dataclass(slots=True)
class StepCost:
    """What one step holds.

    ``parameters`` is the number of elements of distinct weights: one that several ranks hold
    counts once, and so do tied ones; shards that differ count each. Of a step without weights
    (ZeRO stage 3 keeps none) the master weights are counted. ``now`` are the bytes of each kind as
    stored, ``distinct`` those of them that are different within the step. Divided by
    ``parameters`` they are bytes per parameter.

    Two weights of different names and equal bytes count once, unless they are constant (norms are
    all ones before they are trained) or shorter than 1 KiB, and not tied in the file. Padding of
    flat buffers counts as parameters. When samples told what is equal, ``parameters`` and
    ``distinct`` are lower bounds.
    """

    run: str
    step: StepLabel | None
    parameters: int
    now: dict[str, int]
    distinct: dict[str, int]


def step_costs(
    bodies: Bodies, class_of: Ints, before: Ints, body_codes: Bytes, codes: Bytes, constant: Mask
) -> list[StepCost]:
    """The cost of each step that holds any parameter.

    Parameters
    ----------
    before
        Bytes of each body as they are counted (skeletons without the payloads inside them).
    body_codes, codes
        The category of each body and of each tensor.
    constant
        For each class, whether it is one element over and over.
    """
    files = bodies.catalog.files
    keys = sorted({(f.role.run, f.role.step) for f in files}, key=lambda k: (k[0], step_key(k[1])))
    number = {key: at for at, key in enumerate(keys)}
    step_of = np.array([number[f.role.run, f.role.step] for f in files], np.int64)
    parameters = _parameters(bodies, class_of, step_of, len(keys), codes, constant)
    kind = _kinds()[body_codes]
    step = step_of[bodies.file]
    now = _sums(step, kind, before, len(keys))
    _, first = np.unique(step * (class_of.max(initial=0) + 1) + class_of, return_index=True)
    distinct = _sums(step[first], kind[first], before[first], len(keys))
    return [
        StepCost(run, label, parameters[at], _named(now[at]), _named(distinct[at]))
        for at, (run, label) in enumerate(keys)
        if parameters[at]
    ]


def _kinds() -> Bytes:
    """Position in :data:`KINDS` of each category."""
    groups = (WEIGHTS, {MASTER}, OPTIMIZER, {GRADIENT}, CATEGORIES)
    found = [next(at for at, group in enumerate(groups) if c in group) for c in CATEGORIES]
    return np.array(found, np.uint8)


def _named(row: Ints) -> dict[str, int]:
    return {name: int(nbytes) for name, nbytes in zip(KINDS, row.tolist(), strict=True)}


def _sums(step: Ints, kind: Bytes, nbytes: Ints, n_steps: int) -> Ints:
    found = np.zeros(n_steps * len(KINDS), np.int64)
    np.add.at(found, step * len(KINDS) + kind, nbytes)
    return found.reshape(n_steps, len(KINDS))


def _parameters(
    bodies: Bodies, class_of: Ints, step_of: Ints, n_steps: int, codes: Bytes, constant: Mask
) -> list[int]:
    catalog = bodies.catalog
    columns = catalog.table.columns
    kind = _kinds()[codes]
    steps = np.repeat(step_of, np.diff(catalog.tensor_start))
    known_bits = [BY_NAME[name].bits if name in BY_NAME else 0 for name in catalog.table.dtypes]
    bits = np.array(known_bits, np.int64)
    found = np.zeros(n_steps, np.int64)
    for wanted in (0, 1):
        missing = found[steps] == 0
        rows = np.flatnonzero((kind == wanted) & missing & (columns["home"] != HOME_NONE))
        rows = rows[bits[columns["dtype"][rows]] > 0]
        filled = columns["home"][rows] == HOME_FILL
        home = class_of[np.where(filled, 0, columns["home_row"][rows])]
        home[filled] = -1
        by_name = filled | constant[np.maximum(home, 0)] | (columns["nbytes"][rows] < FLOOR)
        known: dict[str, int] = {}
        names = np.zeros(len(rows), np.int64)
        named = np.flatnonzero(by_name)
        # Tied ones are on one payload of one file, and have the name of the first.
        place = np.where(filled, -1 - rows, columns["home_row"][rows])[named]
        tied = numbered([place, columns["offset"][rows[named]]])
        _, first, group = np.unique(tied, return_index=True, return_inverse=True)
        for at, row in zip(named.tolist(), rows[named[first[group]]].tolist(), strict=True):
            names[at] = known.setdefault(catalog.table.name(row), len(known) + 1)
        numbers = numbered([steps[rows], home, columns["offset"][rows], names])
        del home, names
        distinct = rows[np.unique(numbers, return_index=True)[1]]
        elements = columns["nbytes"][distinct] * 8 // bits[columns["dtype"][distinct]]
        np.add.at(found, steps[distinct], elements)
    return [int(count) for count in found.tolist()]


def numbered(columns: Sequence[Ints]) -> Ints:
    """One number for each row, the same for rows that agree in all columns.

    Sorting it takes a quarter of the memory of sorting rows of four columns.
    """
    numbers, reach = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        low, high = int(column.min(initial=0)), int(column.max(initial=0))
        if reach * (high - low + 1) >= 2**63:
            numbers, column = (np.unique(c, return_inverse=True)[1] for c in (numbers, column))
            reach, low, high = int(numbers.max(initial=0)) + 1, 0, int(column.max(initial=0))
        numbers = numbers * (high - low + 1) + (column - low)
        reach *= high - low + 1
    return numbers
