"""``analyze`` as a library call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from slimckpt.analysis.report import Report, analyze_tree
from slimckpt.analysis.tree import is_store, join, walk
from slimckpt.errors import UsageError
from slimckpt.model import show_path
from slimckpt.progress import SILENT, Progress
from slimckpt.sources.threads import default_jobs

Source = str | bytes | os.PathLike[str]


def analyze(
    source: Source | Sequence[Source],
    *,
    exact: bool = False,
    categories: Sequence[tuple[str, str]] = (),
    most_groups: int = 10,
    min_saving: float = 5.0,
    jobs: int | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Find out what is replicated in a directory of rank files, or in several together.

    Parameters
    ----------
    source : path or sequence of paths
        Directories, none inside another. Of several, the names of files start with the directory as
        it is given, and equal bytes are found across them.
    exact : bool
        Hash all bytes. Without it only headers and under a KiB of each payload are read, and the
        savings are an upper bound.
    categories : sequence of (category, glob)
        Override the category of tensors whose name matches; names are in
        :data:`~slimckpt.analysis.categories.CATEGORIES`.
    most_groups : int
        How many of the largest replica groups to list.
    min_saving : float
        As for ``slim``: percent of a file that must be shared for it to count as slimmed.

    Raises
    ------
    UsageError
        A directory is a slim checkpoint, or inside another.
    UnfaithfulSourceError
        The tree holds something that cannot be read or copied.
    """
    if not 0 <= min_saving <= 100:
        raise UsageError(f"min_saving is a percentage, 0 to 100, not {min_saving}")
    sources = [source] if isinstance(source, str | bytes | os.PathLike) else list(source)
    names = [os.fsencode(name) for name in sources]
    trees = [walk(name) for name in names]
    for tree, name in zip(trees, names, strict=True):
        if is_store(tree.root):
            raise UsageError(
                f"{show_path(name)} is a slim checkpoint; `slimckpt ls` shows what is in it"
            )
    if not trees:
        raise UsageError("no directory is named")
    tree = trees[0] if len(trees) == 1 else join(trees, [n.rstrip(b"/") or n for n in names])
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
            report.sources = [os.fsdecode(name) for name in names]
            return report
        finally:
            progress.finish()
