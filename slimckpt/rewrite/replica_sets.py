"""Which files have what in common, and the containers it goes to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from slimckpt.model import Role
from slimckpt.rewrite.plan import MAX_CONTAINER, SMALL_SET, ranks_title, scope_title

K = TypeVar("K", bound=Hashable)


class Use(NamedTuple):
    """The length of a body, and the numbers of the files that have it, ascending."""

    nbytes: int
    files: Sequence[int]


def shared_containers(
    uses: Mapping[K, Use], roles: Sequence[Role]
) -> Iterator[tuple[str, list[K]]]:
    """What several files have, container by container, each with its title.

    There is one container for each set of ranks, of the same step or of several; sets of few bytes
    are joined, and those of many are cut. ``roles`` are the files' by their numbers.
    """
    scopes: dict[str, dict[str, list[K]]] = {}
    titles: dict[tuple[int, ...], tuple[str, str]] = {}
    for key, use in uses.items():
        files = tuple(use.files)
        if len(files) < 2:
            continue
        if files not in titles:
            users = [roles[number] for number in files]
            titles[files] = scope_title(users), ranks_title(users)
        scope, ranks = titles[files]
        scopes.setdefault(scope, {}).setdefault(ranks, []).append(key)
    joined: dict[str, list[K]] = {}
    for scope, sets in scopes.items():
        small = [r for r, keys in sets.items() if sum(uses[k].nbytes for k in keys) < SMALL_SET]
        for ranks, keys in sets.items():
            name = "ranks-mixed" if len(small) > 1 and ranks in small else ranks
            title = ".".join(part for part in (scope, name) if part)
            joined.setdefault(title or "common", []).extend(keys)
    for title, keys in sorted(joined.items()):
        held: list[K] = []
        filled = 0
        for key in keys:
            if held and filled + uses[key].nbytes > MAX_CONTAINER:
                yield title, held
                held, filled = [], 0
            held.append(key)
            filled += uses[key].nbytes
        yield title, held
