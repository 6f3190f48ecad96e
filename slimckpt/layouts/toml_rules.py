"""Rules in TOML, for everything that records no layout of its own::

    [mesh]                # axes in rank order: ranks vary fastest along the last
    dp = 2
    tp = 4

    [[rule]]              # the first that matches counts; where none does, it is replicated
    match = "*.qkv"       # glob, or a list of them; * crosses everything
    dim = 0
    axis = "tp"           # or a list, the most significant first
    split = "even"        # "ceil", "balanced", or the sizes; "even" where it is left out
    sections = [4, 1, 1]  # fused: each section is split by itself, a rank has its part of each
    groups = 8            # with sections: a rank has whole groups, each with all its sections

    [[rule.then]]         # what is left is split once more
    dim = 0
    axis = "dp"

    [[rule]]
    match = "rng.*"
    per_rank = true       # outside the layout: of each rank its own

A rule without ``dim`` replicates. ``only = {pp = 0}`` keeps tensors to ranks with that coordinate,
``ranks = [0, 3]`` to those ranks (an embedding on the first and the last stage);
``parts = 2`` has the ranks of the axes take so many parts in turn.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate
from typing import Any

from slimckpt.errors import UsageError
from slimckpt.layouts.placement import Placement, Rules
from slimckpt.layouts.splits import RULES, How, Split

_OF_SPLIT = ("dim", "axis", "split", "sections", "groups", "parts")
_OF_RULE = ("match", "then", "only", "ranks", "per_rank", *_OF_SPLIT)
_MOST_RANKS = 2**20
_MAGIC = re.compile(r"[*?\[]")


class TomlRules(Rules):
    """Rules as a TOML file has them.

    Attributes
    ----------
    axes
        Names and sizes of the axes of the mesh, in rank order.
    """

    def __init__(
        self,
        axes: dict[str, int],
        rules: Sequence[tuple[Sequence[str], Placement | None]],
        origin: str,
    ) -> None:
        self.origin, self.axes = origin, axes
        self.n_ranks = math.prod(axes.values())
        self._patterns = [[] if placed is None else list(patterns) for patterns, placed in rules]
        self._else = (Placement(tuple(axes.values())),)
        self._placements = [() if placed is None else (placed,) for _, placed in rules]
        self._exact: dict[str, int] = {}
        self._globs: list[tuple[int, re.Pattern[str]]] = []
        for number, (patterns, _) in enumerate(rules):
            for pattern in patterns:
                if _MAGIC.search(pattern):
                    self._globs.append((number, re.compile(translate(pattern))))
                else:
                    self._exact.setdefault(pattern, number)

    def placements(self, name: str) -> tuple[Placement, ...]:
        number = self._number(name)
        return self._placements[number] if number < len(self._placements) else self._else

    def unused(self, names: Iterable[str]) -> list[str]:
        """Patterns of rules that count for none of these tensors, ``per_rank`` ones aside."""
        used = {self._number(name) for name in names}
        return [
            pattern
            for number, patterns in enumerate(self._patterns)
            if number not in used
            for pattern in patterns
        ]

    def _number(self, name: str) -> int:
        """Which rule counts."""
        number = self._exact.get(name, len(self._placements))
        for other, pattern in self._globs:
            if other >= number:
                break
            if pattern.match(name):
                number = other
        return number


def read_toml(data: bytes, label: str) -> TomlRules:
    """Rules from the bytes of a TOML file.

    Raises
    ------
    UsageError
        It is no TOML, or no such rules; the message names the line or the rule.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        root = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{label} is neither a strategy file nor TOML: {error}") from None
    try:
        _known(root, ("mesh", "rule"), "the file")
        axes = root.get("mesh")
        if not isinstance(axes, dict) or not axes or not all(map(_is_count, axes.values())):
            raise UsageError("expected [mesh] with the size of each axis, such as dp = 2")
        if math.prod(axes.values()) > _MOST_RANKS:
            raise UsageError(f"the mesh has more than {_MOST_RANKS:,} ranks")
        rules = root.get("rule", [])
        if not isinstance(rules, list):
            raise UsageError("expected rules as [[rule]]")
        found = [_rule(rule, number, axes) for number, rule in enumerate(rules, 1)]
    except UsageError as error:
        raise UsageError(f"{label}: {error}") from None
    return TomlRules(axes, found, label)


def _rule(rule: Any, number: int, axes: dict[str, int]) -> tuple[list[str], Placement | None]:
    match = rule.get("match") if isinstance(rule, dict) else None
    patterns = [match] if isinstance(match, str) else match
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise UsageError(f"rule {number}: expected match = a glob or a list of globs")
    what = f"rule {number} ({', '.join(patterns[:3])})"
    _known(rule, _OF_RULE, what)
    if "per_rank" in rule:
        if rule["per_rank"] is not True or len(rule) > 2:
            raise UsageError(f"{what}: expected per_rank = true, and nothing else")
        return patterns, None
    names = list(axes)
    later = rule.get("then", [])
    if not isinstance(later, list) or (later and "dim" not in rule):
        raise UsageError(f"{what}: expected [[rule.then]] behind a dim")
    splits = []
    for entry in [rule, *later]:
        if entry is not rule:
            _known(entry, _OF_SPLIT, f"{what}, then")
        if "dim" in entry:
            splits.append(_split(entry, names, list(axes.values()), what))
        elif entry is not rule or set(entry) & set(_OF_SPLIT):
            raise UsageError(f"{what}: expected dim, the axis of the tensor that is split")
    used = [axis for split in splits for axis in split.axes]
    if len(set(used)) != len(used):
        raise UsageError(f"{what}: an axis of the mesh can split a tensor only once")
    only = []
    wanted = rule.get("only", {})
    if not isinstance(wanted, dict):
        raise UsageError(f"{what}: only = {wanted!r}: expected a place in the mesh, as {{pp = 0}}")
    for name, at in wanted.items():
        if name not in axes or type(at) is not int or not 0 <= at < axes[name]:
            raise UsageError(f"{what}: only = {{{name} = {at}}} is no place in the mesh {axes}")
        if names.index(name) in used:
            raise UsageError(f"{what}: it is split over {name}, so not only on {name} = {at}")
        only.append((names.index(name), at))
    mesh, among = tuple(axes.values()), rule.get("ranks")
    if among is not None:
        count = math.prod(mesh)
        if not isinstance(among, list) or not among or not all(map(_is_rank(count), among)):
            raise UsageError(f"{what}: ranks = {among!r}: expected a list of ranks below {count}")
        if only:
            raise UsageError(f"{what}: expected only or ranks, not both")
        among = tuple(sorted(set(among)))
    return patterns, Placement(mesh, tuple(splits), only=tuple(only), among=among)


def _split(entry: dict[str, Any], names: list[str], mesh: list[int], what: str) -> Split:
    dim, axis = entry["dim"], entry.get("axis")
    listed = [axis] if isinstance(axis, str) else axis
    if type(dim) is not int or dim < 0:
        raise UsageError(f"{what}: dim = {dim!r}: expected the number of an axis, from 0 on")
    if not isinstance(listed, list) or not listed or not all(a in names for a in listed):
        raise UsageError(f"{what}: axis = {axis!r}: expected one or more of {', '.join(names)}")
    how: How = entry.get("split", "even")
    if isinstance(how, list) and all(type(size) is int and size >= 0 for size in how):
        how = tuple(how)
    elif how not in RULES:
        raise UsageError(
            f"{what}: split = {how!r}: expected one of {', '.join(RULES)}, or a list of sizes"
        )
    sections = entry.get("sections", [])
    if not isinstance(sections, list) or not all(map(_is_count, sections)):
        raise UsageError(f"{what}: sections = {sections!r}: expected a list of proportions")
    for key in ("groups", "parts"):
        if key in entry and not _is_count(entry[key]):
            raise UsageError(f"{what}: {key} = {entry[key]!r}: expected a count")
    groups, parts = entry.get("groups", 1), entry.get("parts")
    axes = tuple(map(names.index, listed))
    split = Split(dim, axes, how, tuple(sections), groups, parts)
    if split.count(mesh) != (len(how) if isinstance(how, tuple) else split.count(mesh)):
        raise UsageError(f"{what}: {len(how)} sizes for {split.count(mesh)} parts")
    ranks = Split(dim, axes).count(mesh)
    if ranks % split.count(mesh):
        raise UsageError(f"{what}: {ranks} ranks cannot take {parts} parts in turn")
    return split


def _known(table: Any, keys: Sequence[str], what: str) -> None:
    if not isinstance(table, dict):
        raise UsageError(f"{what}: expected a table, found {table!r}")
    for key in table:
        if key not in keys:
            raise UsageError(f"{what}: there is no key {key!r}; there are {', '.join(keys)}")


def _is_rank(count: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 0 <= value < count


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
