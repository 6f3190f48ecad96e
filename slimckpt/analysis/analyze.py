"""``analyze`` as a library call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from slimckpt.analysis.report import Report, analyze_tree
from slimckpt.analysis.tree import is_store, walk
from slimckpt.errors import UsageError
from slimckpt.model import show_path
from slimckpt.progress import SILENT, Progress
from slimckpt.sources.digest import default_jobs


def analyze(
    source: str | bytes | os.PathLike[str],
    *,
    exact: bool = False,
    categories: Sequence[tuple[str, str]] = (),
    most_groups: int = 10,
    min_saving: float = 5.0,
    jobs: int | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Find out what is replicated in a directory of rank files.

    Parameters
    ----------
    exact : bool
        Hash all bytes. Without it only headers and under a KiB of each payload are read, and the
        savings are an upper bound.
    categories : sequence of (category, glob)
        Override the category of tensors whose name matches.
    most_groups : int
        How many of the largest replica groups to list.
    min_saving : float
        As for ``slim``: percent of a file that must be shared for it to count as slimmed.

    Raises
    ------
    UnfaithfulSourceError
        The tree holds something that cannot be read or copied.
    """
    root = os.fsencode(source)
    tree = walk(root)
    if is_store(tree.root):
        raise UsageError(
            f"{show_path(root)} is a slim checkpoint; `slimckpt ls` shows what is in it"
        )
    with ThreadPoolExecutor(jobs or default_jobs()) as executor:
        try:
            report = analyze_tree(
                tree,
                executor,
                exact=exact,
                overrides=categories,
                most_groups=most_groups,
                min_saving=min_saving,
                progress=progress,
            )
            report.source = os.fsdecode(source)
            return report
        finally:
            progress.finish()
