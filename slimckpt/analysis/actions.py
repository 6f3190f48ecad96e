"""What a user can do with a directory, and what each thing would save."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slimckpt.analysis.dropping import Drop, may_drop, refuse_last_copies
from slimckpt.analysis.roles import step_key
from slimckpt.analysis.sharing import Bodies, Sharing, decide, first_users
from slimckpt.errors import UsageError
from slimckpt.model import Bytes, Ints, StepLabel
from slimckpt.sources.digest import Digests

NEWEST = "last:1"


@dataclass(slots=True)
class Saving:
    """Options of ``slim`` and the bytes they save: ``saved`` beyond what no options save, or, where
    there are none, in all. Dropping is policy: what it saves is no redundancy, and is gone."""

    options: str
    saved: int


def stored_nbytes(bodies: Bodies, sharing: Sharing, before: Ints) -> Ints:
    """Of the bytes of each body as counted in ``before``, those that a store would hold."""
    after: Ints = before.copy()
    again = (sharing.shared(bodies) & ~first_users(bodies, sharing)) | sharing.dropped
    after[again] = 0
    # A skeleton stored elsewhere takes the small payloads inside it along.
    gone = again[bodies.n_payloads :][bodies.file[: bodies.n_payloads]]
    after[: bodies.n_payloads][gone & ~bodies.catalog.table.stored_apart] = 0
    return after


def savings(
    bodies: Bodies,
    digests: Digests,
    sharing: Sharing,
    before: Ints,
    codes: Bytes,
    min_saving: float,
) -> list[Saving]:
    """What ``slim`` saves, and what it saves beyond that when it drops; nothing that saves nothing.

    Notes
    -----
    ``slim`` refuses ``--drop master`` where a weight has no other copy. It is only named here where
    there are weights that could be the copies; whether they are is not looked into.
    """
    plain = int(stored_nbytes(bodies, sharing, before).sum())
    found = [Saving("", int(before.sum()) - plain)]
    for kinds, keep in ((["optimizer"], NEWEST), (["optimizer"], None), (["master"], None)):
        try:
            droppable = may_drop(bodies, Drop.parse(kinds, keep), codes)
            dropping = decide(bodies, digests, min_saving, droppable, sharing.class_of)
            refuse_last_copies(bodies, dropping, codes, by_bytes=False)
        except UsageError:
            continue
        options = f"--drop {kinds[0]}" + (f" --keep-full {keep}" if keep else "")
        more = plain - int(stored_nbytes(bodies, dropping, before).sum())
        found.append(Saving(options, more))
    return [saving for saving in found if saving.saved > 0]


def repeated_steps(bodies: Bodies, class_of: Ints) -> list[tuple[str, StepLabel, StepLabel]]:
    """Steps of a run whose tensors are all those of an earlier step: run, step, earlier step."""
    catalog = bodies.catalog
    members: dict[tuple[str, StepLabel], list[Ints]] = {}
    for number, file in enumerate(catalog.files):
        if file.role.step is not None and file.understood:
            rows = catalog.payloads(number)
            members.setdefault((file.role.run, file.role.step), []).append(class_of[rows])
    seen: dict[tuple[str, bytes], StepLabel] = {}
    found = []
    for run, step in sorted(members, key=lambda key: (key[0], step_key(key[1]))):
        contents = np.sort(np.concatenate(members[run, step]))
        earlier = seen.setdefault((run, contents.tobytes()), step)
        if earlier != step and len(contents):
            found.append((run, step, earlier))
    return found
