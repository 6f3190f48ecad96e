"""Contenders, who take turns, and verdicts on what they took."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

Figures = dict[str, float]
"""What one turn took, by what was measured: ``s`` are seconds."""


@dataclass(frozen=True)
class Contender:
    """``turn`` does all of the work once. ``most``: a slow one takes no more turns than that."""

    name: str
    turn: Callable[[], Figures]
    program: str = sys.executable
    most: int | None = None


@dataclass(frozen=True)
class Verdict:
    """A figure beside its bar; it holds where it is not above.

    ``by_minima`` is the figure that the smallest times give instead of the medians: far below on a
    machine that is busy with something else.
    """

    what: str
    figure: float
    bar: float
    unit: str
    by_minima: float | None = None

    @property
    def holds(self) -> bool:
        return self.figure <= self.bar


@dataclass
class Result:
    """What one measurement found."""

    what: str
    turns: dict[str, list[Figures]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Contenders that were not measured, and why."""
    verdicts: list[Verdict] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def take_turns(self, contenders: Sequence[Contender], runs: int) -> None:
        """All in turn, ``runs`` times, every second time from the last to the first."""
        here = []
        for contender in contenders:
            if shutil.which(contender.program):
                here.append(contender)
                self.turns[contender.name] = []
            else:
                self.missing[contender.name] = f"{contender.program} is not installed"
        for turn in range(runs):
            for contender in here if turn % 2 == 0 else reversed(here):
                if contender.most is None or turn < contender.most:
                    self.turns[contender.name].append(contender.turn())

    def all_of(self, name: str, key: str = "s") -> list[float]:
        return [figures[key] for figures in self.turns[name]]

    def median(self, name: str, key: str = "s") -> float:
        return statistics.median(self.all_of(name, key))

    def judge(
        self, what: str, figure: float, bar: float, unit: str, by_minima: float | None = None
    ) -> None:
        self.verdicts.append(Verdict(what, figure, bar, unit, by_minima))

    def judge_ratio(self, what: str, name: str, bar: float, other: str, key: str = "s") -> None:
        """The median of a contender, in medians of another; nothing where that is missing."""
        if self.turns.get(name) and self.turns.get(other):
            ratio = self.median(name, key) / self.median(other, key)
            least = min(self.all_of(name, key)) / min(self.all_of(other, key))
            self.judge(what, ratio, bar, f"x {other}", least)

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["verdicts"] = [asdict(v) | {"holds": v.holds} for v in self.verdicts]
        return found


def stop(message: str) -> NoReturn:
    """End the benchmark: a figure of what went wrong says nothing."""
    sys.exit(f"benchmark: {message}")
