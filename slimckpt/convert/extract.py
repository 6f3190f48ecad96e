"""``extract STORE DST``: what one node needs of a slim checkpoint, as one that stands alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slimckpt.errors import UsageError
from slimckpt.model import StepLabel
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.excerpt import Excerpt
from slimckpt.rewrite.excerpt_writing import write_excerpt
from slimckpt.rewrite.select import Selection
from slimckpt.rewrite.workplace import check_destination, publish, require_room, workplace
from slimckpt.sources.threads import default_jobs
from slimckpt.store.reader import Store


@dataclass(frozen=True, slots=True)
class ExtractResult:
    """What was written, or with ``dry_run`` would be. Sizes in bytes.

    ``nbytes`` is that of the files, ``stored_nbytes`` what is stored of them, each body once;
    structure and manifests come on top.
    """

    ranks: tuple[int, ...]
    steps: tuple[StepLabel, ...]
    files: int
    nbytes: int
    stored_nbytes: int
    dry_run: bool


def extract(
    store: str | bytes | os.PathLike[str],
    destination: str | bytes | os.PathLike[str],
    ranks: Sequence[int],
    *,
    steps: Sequence[StepLabel] = (),
    run: str | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> ExtractResult:
    """Write a slim checkpoint of some ranks of a slim checkpoint, which needs nothing of it.

    Files of the steps that belong to no rank, and files of no step, come along. ``restore`` gives
    from it what it gives from ``store``, byte for byte.

    Parameters
    ----------
    store, destination
        A slim checkpoint, and a path that does not exist yet.
    ranks
        Which ranks.
    steps, run
        Only these steps, only this run.
    jobs : int, optional
        Threads; by default as many as cores.
    dry_run : bool
        Select and measure, write nothing.

    Raises
    ------
    UsageError
        There is no such rank, step or run; lists those that exist.
    StoreDamagedError
        What is to be copied is damaged; names the file and the tensor.
    DestinationError, NoSpaceError, StoppedError
        As their names say. In every case there is no ``destination``.
    """
    if not ranks:
        raise UsageError("no ranks were named; say which ranks to extract")
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}")
    opened = Store(os.fsencode(store), trust_times=False)
    target = check_destination(os.fsencode(destination), opened.path)
    excerpt = Excerpt(opened, Selection(tuple(steps), tuple(ranks), (), run))
    require_room(excerpt.nbytes, target)
    if not dry_run:
        with ThreadPoolExecutor(jobs or default_jobs()) as executor, workplace(target) as work:
            try:
                write_excerpt(excerpt, work, executor, progress)
            finally:
                progress.finish()
            publish(work, target)
    return ExtractResult(
        tuple(excerpt.ranks),
        tuple(excerpt.steps),
        len(excerpt.files),
        sum(file.entry.file.size for file in excerpt.files),
        excerpt.nbytes,
        dry_run,
    )
