"""Which files belong to a rank: by its number, or by the coordinates that paths state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import NamedTuple

from slimckpt.errors import UnknownRankError
from slimckpt.model import compact_ranks
from slimckpt.views.providers import Member

_LISTED = 32


class Place(NamedTuple):
    """A rank that paths state: its number, its coordinates, or both."""

    rank: int | None
    coords: tuple[tuple[str, int], ...]

    def holds(self, member: Member) -> bool:
        """Whether a file belongs to this place; one whose path states nothing belongs to all."""
        role = member.role
        if role.rank is not None:
            return role.rank == self.rank
        return set(role.coords.items()) <= set(self.coords)

    def __str__(self) -> str:
        parts = [] if self.rank is None else [f"rank {self.rank}"]
        return " ".join(parts + [f"{name}={value}" for name, value in self.coords]) or "rank 0"


def places_of(members: Sequence[Member]) -> list[Place]:
    """Every place that the paths of some files state; one that states nothing if none does.

    Coordinates that another place includes are no place of their own: with ``dp`` and ``tp`` in
    some names, a file that states only ``tp`` belongs to every ``dp``.
    """
    ranked: dict[int, dict[str, set[int]]] = {}
    loose: set[tuple[tuple[str, int], ...]] = set()
    for member in members:
        role = member.role
        if role.rank is not None:
            stated = ranked.setdefault(role.rank, {})
            for name, value in role.coords.items():
                stated.setdefault(name, set()).add(value)
        elif role.coords:
            loose.add(tuple(sorted(role.coords.items())))
    found = [
        Place(
            rank,
            tuple(sorted((name, min(vs)) for name, vs in stated.items() if len(vs) == 1)),
        )
        for rank, stated in sorted(ranked.items())
    ]
    taken = {frozenset(place.coords) for place in found}
    for coords in sorted(loose, key=lambda coords: (-len(coords), coords)):
        if not any(set(coords) <= other for other in taken):
            found.append(Place(None, coords))
            taken.add(frozenset(coords))
    return sorted(found, key=lambda p: (p.rank is None, p.rank or 0, p.coords)) or [Place(None, ())]


def numbers_of(places: Sequence[Place]) -> dict[int, Place]:
    """Places by number: their ranks, or the one coordinate that varies; nothing if several do."""
    ranked = {place.rank: place for place in places if place.rank is not None}
    if ranked:
        return ranked
    if len(places) == 1:
        coords = places[0].coords
        return {coords[0][1] if len(coords) == 1 else 0: places[0]}
    names = {name for place in places for name, _ in place.coords}
    varying = [name for name in names if len({dict(p.coords).get(name) for p in places}) > 1]
    if len(varying) != 1:
        return {}
    numbers = {dict(place.coords).get(varying[0]): place for place in places}
    return {number: place for number, place in numbers.items() if number is not None}


def pick(places: Sequence[Place], rank: int | None, coords: Mapping[str, int], where: str) -> Place:
    """The one place that is asked for.

    Raises
    ------
    UnknownRankError
        There is none, or more than one; the message lists what there is.
    """
    wanted = {(name, index(value)) for name, value in coords.items()}
    found = [place for place in places if wanted <= set(place.coords)]
    asked = " ".join(f"{name}={value}" for name, value in sorted(wanted))
    if not found:
        raise UnknownRankError(f"{where} has no {asked}; there are {_listed(places)}")
    if rank is None:
        if len(found) == 1:
            return found[0]
        raise UnknownRankError(
            f"{where} has {len(found)} ranks{' of ' + asked if asked else ''}; say which:"
            f" {_listed(found)}"
        )
    numbers = numbers_of(found)
    if not numbers:
        names = sorted({name for place in found for name, _ in place.coords})
        raise UnknownRankError(
            f"{where} is laid out by {', '.join(names)}, so {rank} does not name one rank; say"
            f" rank({', '.join(name + '=…' for name in names)}): {_listed(found)}"
        )
    if index(rank) not in numbers:
        raise UnknownRankError(f"{where} has no rank {rank}; there are {_listed(found)}")
    return numbers[index(rank)]


def _listed(places: Sequence[Place]) -> str:
    if all(place.rank is not None and not place.coords for place in places):
        return f"ranks {compact_ranks(place.rank or 0 for place in places)}"
    shown = "; ".join(str(place) for place in places[:_LISTED])
    return shown if len(places) <= _LISTED else f"{shown}; … ({len(places)} in all)"
