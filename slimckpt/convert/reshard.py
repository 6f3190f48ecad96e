"""``reshard STORE DST``: a slim checkpoint of the same state on other ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slimckpt.dtypes import numpy_dtype
from slimckpt.errors import UsageError
from slimckpt.layouts.ranks import at_ranks
from slimckpt.layouts.recorded import LayoutLike
from slimckpt.layouts.stored import NAME, pack
from slimckpt.model import Role, StepLabel, compact_ranks, decode_path
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.access import Guard
from slimckpt.rewrite.synthetic import SyntheticFile, SyntheticTensor, write_synthetic
from slimckpt.views.checkpoint import Checkpoint, Step
from slimckpt.views.resharded import Resharded, ReshardedRank


@dataclass(slots=True)
class ReshardResult:
    """What was written, or with ``dry_run`` would be. Sizes in bytes.

    ``tensor_nbytes`` counts every copy, ``store_nbytes`` the distinct ones. ``carried`` are tensors
    outside the layouts, which came as they were, arrays or not; ``unused`` are patterns of rules
    for the new layout that match no tensor.
    """

    ranks: tuple[int, ...]
    tensors: int
    tensor_nbytes: int
    store_nbytes: int
    dry_run: bool
    carried: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def reshard(
    source: str | bytes | os.PathLike[str],
    destination: str | bytes | os.PathLike[str],
    target: LayoutLike | None = None,
    *,
    ranks: int | None = None,
    only_ranks: Sequence[int] | None = None,
    layout: LayoutLike | None = None,
    step: StepLabel | None = None,
    run: str | None = None,
    skip: Sequence[str] = (),
    allow_drift: bool = False,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> ReshardResult:
    """Write a slim checkpoint of one step as other ranks would hold it.

    It stands alone: every part of a tensor is a payload of its own, equal ones are stored once.
    There is nothing to restore from it; ``export`` makes files of it.

    Parameters
    ----------
    source, destination
        A slim checkpoint or an original directory, and a path that does not exist yet.
    target
        The layout that is wanted, or a file with it: TOML, a strategy file of MindSpore.
    ranks
        Instead, a number of ranks, where that says enough.
    only_ranks
        Write only these of the new ranks.
    layout
        That of the source, where it records none.
    step, run
        Which step, where there are several.
    skip
        Globs of names of whole tensors that are left out.
    allow_drift
        Where ranks that should hold the same differ, take the lowest.

    Raises
    ------
    UsageError, CheckFailedError
        As of :meth:`slimckpt.Step.reshard`.
    DestinationError, NoSpaceError, StoppedError
        As their names say; there is no destination then.
    """
    if (target is None) == (ranks is None):
        raise UsageError("give either the layout that is wanted (--layout), or a number of ranks")
    with Checkpoint(source) as checkpoint:
        chosen = (
            checkpoint.step(step, run) if step is not None else checkpoint.only_step(run, "reshard")
        )
        if target is None:
            assert ranks is not None
            target = at_ranks(chosen.members, chosen.layout(layout), ranks)
        resharded = chosen.reshard(target, layout, allow_drift=allow_drift, skip=skip)
        wanted = _wanted(resharded, only_ranks)
        files = [_file(chosen, resharded[rank]) for rank in wanted]
        files.append(_record(chosen, resharded))
        stats = [(member.path, member.holding.file.stat) for member in chosen.members]
        written = write_synthetic(
            files,
            destination,
            checkpoint.path,
            Guard([]).strictest(stats),
            max(stat.mtime for _, stat in stats),
            jobs=jobs,
            dry_run=dry_run,
            progress=progress,
        )
        carried = {name: None for rank in wanted for name in resharded[rank].carried}
        carried |= {name: None for rank in wanted for name in resharded[rank].opaque}
    return ReshardResult(
        tuple(wanted),
        written.tensors,
        written.tensor_nbytes,
        written.store_nbytes,
        dry_run,
        list(carried),
        resharded.unused,
    )


def _wanted(resharded: Resharded, only: Sequence[int] | None) -> list[int]:
    if only is None:
        return list(resharded)
    missing = sorted(set(only) - set(resharded))
    if missing:
        raise UsageError(
            f"{resharded.layout.origin} has no ranks {compact_ranks(missing)}; there are"
            f" {compact_ranks(resharded)}"
        )
    return sorted(set(only))


def _file(step: Step, view: ReshardedRank) -> SyntheticFile:
    tensors = [_tensor(view, name) for name in (*view, *view.opaque)]
    role = Role(step.run, step.label, view.rank)
    return SyntheticFile(_path(step, f"rank_{view.rank}".encode(), b"tensors"), role, tensors)


def _record(step: Step, resharded: Resharded) -> SyntheticFile:
    """The entry that says which part of each whole tensor each rank holds."""
    layout = replace(resharded.layout, weights=resharded.wholes.layout.weights)
    content = pack(layout, resharded.placed)
    return SyntheticFile(_path(step, NAME), Role(step.run, step.label), [], content)


def _path(step: Step, *names: bytes) -> bytes:
    run = [decode_path(step.run)] if step.run else []
    inner = [] if step.label is None else [f"step_{step.label}".encode()]
    return b"/".join((*run, *inner, *names))


def _tensor(view: ReshardedRank, name: str) -> SyntheticTensor:
    dtype, shape = view.info(name)
    if view.parts(name):
        nbytes, big_endian = math.prod(shape) * numpy_dtype(dtype).itemsize, False
    else:
        known = view.carried_tensor(name)
        nbytes, big_endian = known.nbytes, known.big_endian
    content = view.content(name)
    return SyntheticTensor(
        name, dtype, shape, nbytes, content, lambda: view.pieces(name), big_endian
    )
