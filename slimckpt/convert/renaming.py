"""Rules that give tensors other names, in TOML::

[[rule]]                  # the first that matches counts; what none matches keeps its name
match = 'module\\.(.+)'    # a regular expression that has to match all of the name
to = '\\1'                 # \\1, \\g<name>: what its groups matched
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slimckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class Renaming:
    """Rules, in order, and where they are from."""

    rules: tuple[tuple[re.Pattern[str], str], ...]
    origin: str

    def name(self, name: str) -> tuple[str, int | None]:
        """What a name becomes, and by which rule."""
        for number, (pattern, to) in enumerate(self.rules):
            match = pattern.fullmatch(name)
            if match:
                return match.expand(to), number
        return name, None

    def names(self, names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """New names by old ones, and the patterns of rules that match none.

        Raises
        ------
        UsageError
            Two become the same, or one nothing.
        """
        found: dict[str, str] = {}
        taken: dict[str, str] = {}
        used = set()
        for name in names:
            new, number = self.name(name)
            used.add(number)
            if not new and number is not None:
                raise UsageError(f"{self.origin}: {name!a} would have no name left")
            if new in taken:
                raise UsageError(
                    f"{self.origin}: {taken[new]!a} and {name!a} would both be named {new!a}"
                )
            taken[new] = name
            found[name] = new
        unused = [p.pattern for number, (p, _) in enumerate(self.rules) if number not in used]
        return found, unused


NONE = Renaming((), "no rules")


def read_renaming(path: Path) -> Renaming:
    """The rules of a file.

    Raises
    ------
    UsageError
        It cannot be read, or is no TOML, or no such rules; the message names the rule.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    label = str(path)
    try:
        root = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{label}: {error.strerror}; expected rules for names") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{label} is no TOML: {error}") from None
    rules = root.pop("rule", None)
    if root or not isinstance(rules, list) or not rules:
        raise UsageError(f"{label}: expected rules as [[rule]] with match and to, and nothing else")
    return Renaming(
        tuple(_rule(rule, f"{label}: rule {n}") for n, rule in enumerate(rules, 1)), label
    )


def _rule(rule: object, label: str) -> tuple[re.Pattern[str], str]:
    if not isinstance(rule, dict) or set(rule) != {"match", "to"}:
        raise UsageError(f"{label}: expected match and to, and nothing else")
    match, to = rule["match"], rule["to"]
    if not isinstance(match, str) or not isinstance(to, str):
        raise UsageError(f"{label}: match and to are texts")
    try:
        pattern = re.compile(match, re.DOTALL)
        pattern.sub(to, "")  # an error where it names a group that there is not
    except (re.error, IndexError) as error:
        raise UsageError(f"{label}: match {match!a}, to {to!a}: {error}") from None
    return pattern, to
