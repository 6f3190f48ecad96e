"""``slim SRC DST``: store once what is the same, check it, publish it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from slimckpt.analysis.categories import CATEGORIES, categorize, unmatched
from slimckpt.analysis.dropping import (
    Codes,
    Drop,
    dropped_tensors,
    may_drop,
    refuse_last_copies,
)
from slimckpt.analysis.scan import scan
from slimckpt.analysis.sharing import Bodies, Sharing, decide, hash_files, hash_whole, sample
from slimckpt.analysis.tree import Tree, changed_since, is_store, walk
from slimckpt.errors import (
    CheckFailedError,
    NoSpaceError,
    NothingToGainError,
    UnfaithfulSourceError,
    UsageError,
)
from slimckpt.model import FLOOR, show_path
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.build import build
from slimckpt.rewrite.plan import Plan, make_plan
from slimckpt.rewrite.workplace import check_destination, publish, workplace
from slimckpt.sources.digest import Digests
from slimckpt.sources.threads import default_jobs


@dataclass(frozen=True, slots=True)
class DroppedTensor:
    """A tensor that is left out. ``nbytes`` are its own, decoded; ``path`` is its exact path."""

    file: str
    name: str
    path: str
    category: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class SlimResult:
    """What ``slim`` did, or with ``dry_run`` would do. Sizes in bytes.

    ``store_nbytes`` is measured once the store is written, else predicted. ``dropped_nbytes`` is
    what dropped tensors take in the files.
    """

    source_nbytes: int
    store_nbytes: int
    store_inodes: int
    files: int
    rewritten: int
    dry_run: bool
    dropped: list[DroppedTensor] = field(default_factory=list)
    dropped_nbytes: int = 0
    kept_whole: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Prepared:
    """A source tree, understood and decided upon."""

    tree: Tree
    bodies: Bodies
    digests: Digests
    wholes: Digests
    sharing: Sharing
    plan: Plan
    codes: Codes


def slim(
    source: str | bytes | os.PathLike[str],
    destination: str | bytes | os.PathLike[str],
    *,
    min_saving: float = 5.0,
    drop: Sequence[str] = (),
    keep_full: str | None = None,
    categories: Sequence[tuple[str, str]] = (),
    jobs: int | None = None,
    dry_run: bool = False,
    strict: bool = False,
    progress: Progress = SILENT,
) -> SlimResult:
    """Write ``destination``, a slim checkpoint from which ``source`` can be restored exactly.

    Parameters
    ----------
    source, destination
        A directory, and a path that does not exist yet. The source is never changed.
    min_saving : float
        Percent of a file that must be shared for it to be rewritten. 0 rewrites every file that
        is understood and always publishes.
    drop : sequence of str
        What to leave out for good: ``"optimizer"`` (moments and step state), ``"master"`` (master
        weights, if a weight of the same parameter stays). Files that lose a tensor cannot be
        restored; everything else of them can be read.
    keep_full : str, optional
        Steps that lose nothing: ``"last:2,every:1000"``.
    categories : sequence of (category, glob)
        Override the category of tensors whose name matches.
    jobs : int, optional
        Threads; by default as many as cores.
    dry_run : bool
        Decide and predict, write nothing.
    strict : bool
        A damaged file is an error before anything is written, instead of being kept whole.

    Raises
    ------
    NothingToGainError
        Nothing was written, because nothing would be saved.
    UsageError
        ``drop`` would leave out the last copy of a parameter, and the like.
    UnfaithfulSourceError
        The source cannot be read or copied faithfully, or changed meanwhile.
    DestinationError, NoSpaceError, CheckFailedError, StoppedError
        As their names say. In every case there is no ``destination``.
    """
    root, target = os.fsencode(source), os.fsencode(destination)
    if not 0 <= min_saving <= 100:
        raise UsageError(f"min_saving is a percentage, 0 to 100, not {min_saving}")
    wanted = Drop.parse(drop, keep_full)
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}")
    tree = walk(root)
    if is_store(tree.root):
        raise NothingToGainError(
            f"{show_path(root)} is a slim checkpoint already. Further steps will be put into one by"
            " `slimckpt add`, which this version does not have yet"
        )
    target = check_destination(target, tree.root)
    with ThreadPoolExecutor(jobs or default_jobs()) as executor:
        try:
            prepared = prepare(tree, executor, min_saving, strict, progress, wanted, categories)
            result = _result(prepared, dry_run)
            result.warnings += unmatched(prepared.bodies.catalog.table, categories)
            _refuse_what_does_not_fit(prepared.plan, target)
            if not dry_run:
                with workplace(target) as work:
                    build(prepared, work, executor, progress)
                    _refuse_changes(tree)
                    result.store_nbytes, result.store_inodes = _measure(work)
                    publish(work, target)
        finally:
            progress.finish()
    return result


def prepare(
    tree: Tree,
    executor: Executor,
    min_saving: float,
    strict: bool,
    progress: Progress,
    drop: Drop,
    categories: Sequence[tuple[str, str]],
) -> Prepared:
    """Scan, decide and plan; reads all bytes that the decision needs, and writes nothing."""
    progress.start("reading headers", len(tree.files))
    catalog = scan(tree, executor, progress.advance)
    damaged = [file for file in catalog.files if file.condition == "damaged"]
    if strict and damaged:
        listed = "; ".join(str(file.problem) for file in damaged[:5])
        raise CheckFailedError(f"{len(damaged)} damaged files, and --strict was given: {listed}")
    bodies = Bodies(catalog, tree.root)
    codes = categorize(catalog.table, categories)
    droppable = may_drop(bodies, drop, codes)
    sharing = decide(bodies, sample(bodies, executor), min_saving, droppable)
    refuse_last_copies(bodies, sharing, codes, by_bytes=False)
    if min_saving > 0 and not sharing.rewritten.any():
        raise NothingToGainError(_why_nothing(bodies, sharing, min_saving))
    digests = Digests(bodies.nbytes)
    understood = [n for n, file in enumerate(catalog.files) if file.understood]
    wanted = np.flatnonzero(sharing.rewritten).tolist()
    progress.start("hashing", int(bodies.sizes[wanted].sum()))
    hash_files(bodies, wanted, executor, digests, progress.advance)
    sharing = decide(bodies, digests, min_saving, droppable)
    refuse_last_copies(bodies, sharing, codes, by_bytes=True)
    plan = make_plan(tree, bodies, sharing, codes)
    if min_saving > 0:
        total = int(bodies.sizes.sum())
        if not sharing.rewritten.any() or plan.predicted_nbytes >= total:
            raise NothingToGainError(_why_nothing(bodies, sharing, min_saving, plan))
    late = sorted(set(understood) & plan.whole.keys() - set(wanted))
    progress.start("hashing files kept whole", int(bodies.sizes[late + list(plan.whole)].sum()))
    hash_files(bodies, late, executor, digests, progress.advance)
    wholes = hash_whole(bodies, plan.whole, executor, progress.advance)
    return Prepared(tree, bodies, digests, wholes, sharing, plan, codes)


def _why_nothing(
    bodies: Bodies, sharing: Sharing, min_saving: float, plan: Plan | None = None
) -> str:
    total = int(bodies.sizes.sum())
    files = bodies.catalog.files
    understood = sum(file.understood for file in files)
    if plan is not None and sharing.rewritten.any():
        return (
            f"nothing to gain: the slim checkpoint would have about {plan.predicted_nbytes} bytes,"
            f" the source has {total}; nothing was written"
        )
    if not files:
        return "nothing to gain: there are no files; nothing was written"
    return (
        f"nothing to gain: of {len(files)} files ({understood} understood, {total} bytes) none has"
        f" {min_saving:g} % of its bytes, in pieces of at least {FLOOR}, in common with another"
        " file; nothing was written. --min-saving 0 rewrites them all the same"
    )


def _result(prepared: Prepared, dry_run: bool) -> SlimResult:
    files = prepared.bodies.catalog.files
    plan = prepared.plan
    result = SlimResult(
        int(prepared.bodies.sizes.sum()),
        plan.predicted_nbytes,
        plan.predicted_inodes,
        len(files),
        int(prepared.sharing.rewritten.sum()),
        dry_run,
    )
    result.dropped = _dropped(prepared)
    result.dropped_nbytes = int(prepared.bodies.nbytes[prepared.sharing.dropped].sum())
    for number in plan.whole:
        reason = files[number].problem or "too little of it is shared"
        result.kept_whole.append((files[number].label, reason))
        if files[number].condition == "damaged":
            result.warnings.append(f"damaged, kept whole: {reason}")
    if prepared.tree.xattrs:
        result.warnings.append(
            f"{len(prepared.tree.xattrs)} entries have extended attributes or ACLs, which are not"
            f" kept (first: {show_path(prepared.tree.xattrs[0]) or '.'})"
        )
    outside = [file for file in prepared.tree.files if file.outside_links > 0]
    if outside:
        result.warnings.append(
            f"{len(outside)} files have hard links outside the source; they are restored as files"
            f" of their own (first: {show_path(outside[0].path)})"
        )
    return result


def _dropped(prepared: Prepared) -> list[DroppedTensor]:
    catalog = prepared.bodies.catalog
    rows = dropped_tensors(prepared.bodies, prepared.sharing)
    files = catalog.files_of(rows)
    found = []
    for row, number in zip(rows.tolist(), files.tolist(), strict=True):
        tensor = catalog.table.tensor(row)
        found.append(
            DroppedTensor(
                catalog.files[number].label,
                tensor.name,
                tensor.path,
                CATEGORIES[prepared.codes[row]],
                tensor.dtype,
                tensor.shape,
                tensor.nbytes,
            )
        )
    return found


def _refuse_what_does_not_fit(plan: Plan, target: bytes) -> None:
    parent = os.path.dirname(target)
    free = os.statvfs(parent)
    available = free.f_bavail * free.f_frsize
    if plan.predicted_nbytes > available:
        raise NoSpaceError(
            f"{show_path(target)} would have about {plan.predicted_nbytes} bytes, its file system"
            f" has {available} free; nothing was written"
        )
    if free.f_files and plan.predicted_inodes > free.f_favail:
        raise NoSpaceError(
            f"{show_path(target)} would have {plan.predicted_inodes} files and directories, its"
            f" file system has {free.f_favail} inodes free; nothing was written"
        )


def _refuse_changes(tree: Tree) -> None:
    changed = changed_since(tree)
    if changed:
        raise UnfaithfulSourceError(
            f"{len(changed)} entries of {show_path(tree.root)} changed while they were read (first:"
            f" {show_path(changed[0]) or '.'}); run it again when nothing writes there"
        )


def _measure(work: bytes) -> tuple[int, int]:
    nbytes = inodes = 0
    for directory, _, files in os.walk(work):
        inodes += 1 + len(files)
        nbytes += sum(os.lstat(os.path.join(directory, name)).st_size for name in files)
    return nbytes, inodes
