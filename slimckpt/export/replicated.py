"""Steps that record no layout, taken to be plain data parallelism: what ranks have is the same."""

from __future__ import annotations

from slimckpt.analysis.categories import CATEGORIES, categorize
from slimckpt.errors import UsageError
from slimckpt.layouts.placement import Placement, Rules
from slimckpt.model import compact_ranks
from slimckpt.views.checkpoint import Step

_OWN = "rng"
"""What data-parallel ranks have of their own, by category."""


class Replicated(Rules):
    """Every tensor whole on every rank that has it, but for states of generators."""

    origin = "no layout that is recorded (then all ranks have to be alike; --layout gives one)"

    def __init__(self, n_ranks: int, own: frozenset[str]) -> None:
        self.n_ranks, self._own = n_ranks, own
        self._placed = (Placement((n_ranks,)),)

    def placements(self, name: str) -> tuple[Placement, ...]:
        return () if name in self._own else self._placed


def replicated(step: Step) -> Replicated:
    """Rules for the ranks of a step.

    Raises
    ------
    UsageError
        Its ranks are told apart by coordinates, tensor or pipeline parallelism among them.
    """
    ranks = step.ranks
    if not ranks or ranks != tuple(range(len(ranks))):
        which = f"ranks {compact_ranks(ranks)}" if ranks else f"{len(step.coords)} places"
        raise UsageError(
            f"{which} of {step!r}, and no layout is recorded that says how their tensors make up"
            " whole ones; give it (--layout FILE)"
        )
    own = set()
    for member in step.members:
        if member.holding.file.understood:
            table = member.holding.table
            codes = categorize(table).tolist()
            names = zip(table.names(), codes, strict=True)
            own |= {name for name, code in names if CATEGORIES[code] == _OWN}
    return Replicated(len(ranks), frozenset(own))
