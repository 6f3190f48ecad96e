"""Frameworks, imported when a loader of theirs is called."""

from __future__ import annotations

import importlib
import re
from typing import Any

from slimckpt.errors import FrameworkMissingError


def installed(module: str, title: str, oldest: tuple[int, int]) -> Any:
    """The module of a framework.

    Parameters
    ----------
    module : str
        Its name, which is that of our extra and of our loader too.
    title : str
        What errors call it.
    oldest
        The first version that will do.

    Raises
    ------
    FrameworkMissingError
        It is not installed, or too old.
    """
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        what = f"is not to be had ({error})"
    else:
        if version_of(found) >= oldest:
            return found
        what = f"is {found.__version__}"
    raise FrameworkMissingError(
        f"{module} {what}; slimckpt.frameworks.{module} needs {title} {oldest[0]}.{oldest[1]} or"
        f" newer: pip install 'slimckpt[{module}]'"
    ) from None


def version_of(module: Any) -> tuple[int, ...]:
    """Its first two numbers; a build of a development branch, 0.0.0, is newer than any."""
    found = tuple(int(number) for number in re.findall(r"\d+", module.__version__)[:2])
    return found if any(found) else (9999, 0)
