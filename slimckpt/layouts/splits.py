"""How one axis of a tensor is split over axes of a mesh of ranks.

========== =====================================================================================
``ceil``     every part the quotient rounded up, the last ones what is left: torch.chunk, Paddle,
             DTensor. 13 over 4: 4, 4, 4, 1; 5 over 4: 2, 2, 1, 0
``balanced`` numpy.array_split. 13 over 4: 4, 3, 3, 3
``even``     equal parts; an error where that cannot be
sizes        as listed
========== =====================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from slimckpt.errors import UsageError

How = str | tuple[int, ...]
RULES = ("ceil", "balanced", "even")

Range = tuple[int, int]
Places = tuple[tuple[int, int], ...]
"""Which part of how many, for one split after another."""


def sizes_of(how: How, length: int, parts: int) -> list[int]:
    """The sizes of the parts of an axis.

    Raises
    ------
    UsageError
        ``even`` does not divide it, or listed sizes do not make it up.
    """
    if how == "ceil":
        step = -(-length // parts)
        return [max(min(step, length - part * step), 0) for part in range(parts)]
    if how == "balanced":
        step, more = divmod(length, parts)
        return [step + (part < more) for part in range(parts)]
    if how == "even":
        if length % parts:
            raise UsageError(
                f'{length} does not divide by {parts}; split = "ceil" or "balanced" allow that'
            )
        return [length // parts] * parts
    if isinstance(how, str):
        raise UsageError(f"no split rule {how!a}; there are {', '.join(RULES)}, or a list of sizes")
    if len(how) != parts or sum(how) != length:
        raise UsageError(f"sizes {list(how)} do not make up {length} in {parts} parts")
    return list(how)


@dataclass(frozen=True, slots=True)
class Split:
    """One axis of a tensor over some axes of a mesh.

    Attributes
    ----------
    dim
        Of the tensor.
    axes
        Of the mesh, by number, the most significant first: the parts of the first are split over
        the second, and so on (listed sizes are those of all parts).
    how
        ``ceil``, ``balanced``, ``even``, or the sizes.
    sections
        Proportions of tensors that are fused one behind the other, ``(1, 1)`` for ``[gate; up]``:
        each is split by itself, and a rank has its part of each.
    groups
        Each section is of so many groups, and a rank holds whole ones: group by group, of each its
        part of every section (grouped qkv).
    parts
        There are only so many parts, and ranks have them in turn (MindSpore's optimizer sharding
        over part of the ranks). ``None``: as many as the axes have ranks.
    """

    dim: int
    axes: tuple[int, ...]
    how: How = "even"
    sections: tuple[int, ...] = ()
    groups: int = 1
    parts: int | None = None

    def places(self, mesh: Sequence[int], coords: Sequence[int]) -> Places:
        """Which part a rank has."""
        each = tuple((coords[axis], mesh[axis]) for axis in self.axes)
        if self.parts is None and isinstance(self.how, str):
            return each
        number = 0
        for index, count in each:
            number = number * count + index
        count = self.count(mesh)
        return ((number % count, count),)

    def count(self, mesh: Sequence[int]) -> int:
        """How many parts there are."""
        return self.parts or math.prod(mesh[axis] for axis in self.axes)

    def ranges(self, length: int, places: Places) -> list[Range]:
        """What a part has of an axis, in the order in which a rank has it.

        Raises
        ------
        UsageError
            The axis cannot be split like that.
        """
        starts = list(accumulate(self._sections(length), initial=0))
        found = []
        if self.groups == 1:
            for start, stop in pairwise(starts):
                low, high = self._part(stop - start, places)
                found.append((start + low, start + high))
        else:
            first, last = self._part(self.groups, places)
            for group in range(first, last):
                for start, stop in pairwise(starts):
                    size = (stop - start) // self.groups
                    found.append((start + group * size, start + (group + 1) * size))
        return [span for span in found if span[0] < span[1]]

    def _part(self, length: int, places: Places) -> Range:
        low, high = 0, length
        for index, count in places:
            sizes = sizes_of(self.how, high - low, count)
            low += sum(sizes[:index])
            high = low + sizes[index]
        return low, high

    def _sections(self, length: int) -> list[int]:
        proportions = self.sections or (1,)
        unit, rest = divmod(length, sum(proportions))
        if rest or any(unit * part % self.groups for part in proportions):
            raise UsageError(
                f"{length} is not made of sections {list(proportions)}"
                + (f" of {self.groups} groups each" if self.groups > 1 else "")
            )
        return [unit * part for part in proportions]
