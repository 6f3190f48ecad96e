"""``export STORE DST``: the tensors of each rank as files of a format that frameworks load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from slimckpt.convert import hdf5, mindspore, npz, safetensors, torch
from slimckpt.convert.blueprint import Blueprint
from slimckpt.convert.dcp import DcpResult, export_dcp
from slimckpt.convert.entries import Contents, LeftOut, LocalEntry
from slimckpt.convert.values import text_of, values_in
from slimckpt.convert.weights import not_weights
from slimckpt.convert.writing import Planned, require_room, write_all
from slimckpt.dtypes import OPAQUE
from slimckpt.errors import SlimckptError, UnknownRankError, UsageError
from slimckpt.formats.dcp_metadata import METADATA
from slimckpt.layouts.recorded import LayoutLike
from slimckpt.layouts.stored import NAME
from slimckpt.model import StepLabel, compact_ranks, decode_path, encode_path, show_path
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.access import Guard
from slimckpt.rewrite.workplace import check_destination
from slimckpt.views.checkpoint import Checkpoint, Step
from slimckpt.views.providers import Member
from slimckpt.views.rank import RankView
from slimckpt.views.selection import Place, numbers_of, places_of

_LISTED = 5
_ENDINGS = (
    *(".ckpt", ".safetensors", ".pt", ".pth", ".bin", ".npz", ".npy", ".h5", ".hdf5", ".keras"),
    *(".pdparams", ".pdopt", ".pkl", ".pickle"),
)


class Format(NamedTuple):
    """How a file of a format is made.

    Attributes
    ----------
    ending
        Of its name.
    dtypes
        Those it can hold.
    plan
        What the bytes of a file will be; takes from ``contents`` what the format cannot say.
    """

    ending: str
    dtypes: frozenset[str]
    plan: Callable[[Contents], dict[str, Blueprint]]


FORMATS: Mapping[str, Format] = {
    "safetensors": Format(".safetensors", safetensors.DTYPES, safetensors.plan),
    "mindspore": Format(".ckpt", mindspore.DTYPES, mindspore.plan),
    "torch": Format(".pt", torch.DTYPES, torch.plan),
    "npz": Format(".npz", npz.DTYPES, npz.plan),
    "hdf5": Format(".h5", hdf5.DTYPES, hdf5.plan),
}
"""Formats of one file for each rank."""
OF_ALL_RANKS = "dcp"
"""A directory of torch.distributed.checkpoint, whose files are nothing without each other."""


@dataclass(slots=True)
class ExportedFile:
    """One file: its path in the destination, the rank it is of (``None`` where only coordinates
    say which), how many tensors it has, and its bytes."""

    path: str
    rank: int | None
    tensors: int
    nbytes: int


@dataclass(slots=True)
class ExportResult:
    """What was written, or with ``dry_run`` would be.

    ``left_out`` has for each file what did not get into it: path of the file, name, reason.
    """

    format: str
    files: list[ExportedFile] = field(default_factory=list)
    left_out: list[tuple[str, str, str]] = field(default_factory=list)
    dry_run: bool = False

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


class _Rank(NamedTuple):
    """A rank: its number, where it has one, its files that are understood, and of these its own."""

    number: int | None
    place: Place
    members: list[Member]
    own: list[Member]

    @property
    def coords(self) -> dict[str, int]:
        """What names it, where no rank does."""
        return {} if self.place.rank is not None else dict(self.place.coords)


def export(
    source: str | bytes | os.PathLike[str],
    destination: str | bytes | os.PathLike[str],
    format: str,
    *,
    ranks: Sequence[int] | None = None,
    step: StepLabel | None = None,
    run: str | None = None,
    only: str | None = None,
    categories: Sequence[tuple[str, str]] = (),
    skip: Sequence[str] = (),
    layout: LayoutLike | None = None,
    allow_drift: bool = False,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> ExportResult:
    """Write one file for each rank of a step, of a format that its framework loads.

    A rank has what :meth:`slimckpt.Step.rank` gives: its own files and those of the step that
    belong to no rank, as one. The file has the path of the rank's own, with the ending of the
    format; where the rank has several, ``rank_R/`` and the name of the first.

    Parameters
    ----------
    source, destination
        A slim checkpoint, one made by ``reshard``, or an original directory; and a path that does
        not exist yet.
    format
        ``mindspore``: a ``.ckpt`` for ``load_checkpoint``. ``torch``: a dict from names to tensors
        for ``torch.load(weights_only=True)``; tensors that share a storage in the source share one.
        ``safetensors``: tensors that share a storage are written each. ``npz``: dtypes that numpy
        does not have come as ``V1`` and ``V2``; ``.view(ml_dtypes.bfloat16)`` gives them back.
        ``hdf5``: a dataset for each tensor, ``/`` in names nests. ``dcp``: a directory of
        torch.distributed.checkpoint, of whole tensors in the chunks that ranks hold.
    ranks
        Only these.
    step, run
        Which step, where there are several.
    only
        ``"weights"``: only what belongs to the model.
    categories
        Pairs of a category and a glob of names, that decide for ``only``.
    skip
        Globs of names that are left out.
    layout, allow_drift
        Of ``dcp``: how the source lies, where it records none; and where ranks that should hold the
        same differ, take the lowest.

    Returns
    -------
    ExportResult
        Its ``left_out`` names all that the source has and the files have not.

    Raises
    ------
    UsageError
        There is no such format, or it cannot hold a tensor: of that dtype, name or shape.
    UnknownRankError, UnknownStepError, NotARankView, AmbiguousTensorError
        As of :meth:`slimckpt.Step.rank`.
    DestinationError, NoSpaceError, StoppedError
        As their names say; there is no destination then.

    Notes
    -----
    What each file will be is decided first. Then every thread holds some MiB at a time, or, of a
    tensor that is compressed in the source, all of it.
    """
    if format not in (*FORMATS, OF_ALL_RANKS):
        there = ", ".join((*FORMATS, OF_ALL_RANKS))
        raise UsageError(f"there is no format {format!r}; there are {there}")
    if only not in (None, "weights"):
        raise UsageError(f"only={only!r} means nothing; only='weights' does")
    if format != OF_ALL_RANKS and (layout is not None or allow_drift):
        raise UsageError(
            f"{format} has for each rank what it has, by no layout; --layout and --allow-drift"
            f" (layout=…, allow_drift=True) are of --format {OF_ALL_RANKS}"
        )
    if format == OF_ALL_RANKS:
        if ranks is not None:
            raise UsageError(f"{format} is of all ranks together; leave out which (--rank)")
        return _of_all_ranks(
            export_dcp(
                source,
                destination,
                step=step,
                run=run,
                only=only,
                categories=categories,
                skip=skip,
                layout=layout,
                allow_drift=allow_drift,
                jobs=jobs,
                dry_run=dry_run,
                progress=progress,
            )
        )
    with Checkpoint(source) as checkpoint:
        target = check_destination(os.fsencode(destination), checkpoint.path)
        chosen = checkpoint.only_step(run, "rank", step)
        result = ExportResult(format, dry_run=dry_run)
        planned = []
        for rank in _ranks(chosen, ranks):
            view = chosen.rank(rank.place.rank, **rank.coords)  # type: ignore[arg-type]
            contents = _contents(rank, view, only, categories, skip)
            path = _path(rank, FORMATS[format].ending)
            _require_dtypes(contents, format, path)
            (blueprint,) = FORMATS[format].plan(contents).values()
            stats = [(member.path, member.holding.file.stat) for member in rank.members]
            planned.append(Planned(path, blueprint, Guard([]).strictest(stats)))
            shown = encode_path(path)
            count = len(contents.entries)
            result.files.append(ExportedFile(shown, rank.number, count, blueprint.nbytes))
            result.left_out += [(shown, *one) for one in contents.left_out + contents.failed]
        if not any(file.tensors for file in result.files):
            raise UsageError(
                f"there is no tensor to be written{' that is a weight' if only else ''};"
                " `slimckpt ls` shows what there is"
            )
        require_room(result.nbytes, target)
        if not dry_run:
            write_all(planned, target, checkpoint.path, jobs, progress, checkpoint.unload)
    return result


def _of_all_ranks(found: DcpResult) -> ExportResult:
    result = ExportResult(OF_ALL_RANKS, dry_run=found.dry_run)
    for path, nbytes in found.files.items():
        result.files.append(ExportedFile(path, None, found.counts.get(path, 0), nbytes))
    result.left_out += [(METADATA, *one) for one in found.left_out]
    return result


def _ranks(step: Step, wanted: Sequence[int] | None) -> list[_Rank]:
    places = places_of(step.members)
    numbers = {place: number for number, place in numbers_of(places).items()}
    if wanted is not None:
        by_number = {number: place for place, number in numbers.items()}
        for number in sorted(set(wanted) - set(by_number)):
            raise UnknownRankError(
                f"there is no rank {number}; there are {compact_ranks(by_number) or 'none'}"
            )
        places = [by_number[number] for number in sorted(set(wanted))]
    found = []
    for place in places:
        held = [member for member in step.members if place.holds(member)]
        members = [member for member in held if member.holding.file.understood]
        own = [m for m in members if m.role.rank is not None or m.role.coords]
        found.append(_Rank(numbers.get(place), place, members, own))
    return found


def _path(rank: _Rank, ending: str) -> bytes:
    """Where its file goes: as the only one of the rank lies, or the first one of several."""
    with_tensors = [m for m in rank.own or rank.members if m.holding.table.n_tensors]
    first = (with_tensors or rank.own or rank.members)[0]
    path = first.path
    for known in _ENDINGS:
        path = path.removesuffix(known.encode())
        if path != first.path:
            break
    if len(with_tensors) > 1 or (rank.place.rank is not None and not rank.own):
        stated = [f"{name}_{value}" for name, value in sorted(rank.coords.items())]
        directory = "_".join(stated) or f"rank_{rank.number or 0}"
        top = [decode_path(first.role.run)] if first.role.run else []
        path = b"/".join((*top, directory.encode(), os.path.basename(path)))
    return path + ending.encode()


def _contents(
    rank: _Rank,
    view: RankView,
    only: str | None,
    categories: Sequence[tuple[str, str]],
    skip: Sequence[str],
) -> Contents:
    """What a rank has, and what of it is not to be written."""
    contents = Contents(formats={member.holding.file.format for member in rank.members})
    known = [view.info(name) for name in (*view, *view.opaque)]
    other = not_weights(known, categories) if only == "weights" else {}
    for tensor in known:
        name, is_text = tensor.name, tensor.dtype.startswith(OPAQUE)
        if any(fnmatchcase(name, glob) for glob in skip):
            contents.left_out.append(LeftOut(name, "it is skipped"))
        elif name in other:
            contents.left_out.append(LeftOut(name, f"it is no weight: {other[name]}"))
        elif (text := text_of(view, name)) is not None:
            contents.texts[name] = text
        elif is_text:
            reason = f"it is no tensor: {tensor.dtype.removeprefix(OPAQUE)}"
            contents.left_out.append(LeftOut(name, reason))
        else:
            contents.entries.append(LocalEntry(name, view.arrays, *view.located(name)))
    for name in view.dropped:
        contents.left_out.append(LeftOut(name, "it was left out when it was slimmed (--drop)"))
    for member in rank.members:
        contents.left_out += _values(member)
    for path, reason in view.not_read:
        if os.path.basename(decode_path(path)) == NAME:
            continue  # our own, of how the ranks lie
        contents.left_out.append(LeftOut(path, f"the file has no tensors: {reason}"))
    return contents


def _values(member: Member) -> Iterator[LeftOut]:
    try:
        for name in values_in(member.holding):
            yield LeftOut(name, "it is a value of Python, no tensor")
    except SlimckptError as error:
        path = encode_path(member.path)
        yield LeftOut(path, f"what it has besides tensors cannot be read: {error}")


def _require_dtypes(contents: Contents, format: str, path: bytes) -> None:
    refused = [e for e in contents.entries if e.dtype not in FORMATS[format].dtypes]
    if not refused:
        return
    dtypes = {entry.dtype for entry in refused}
    able = [name for name, other in FORMATS.items() if dtypes <= other.dtypes]
    shown = ", ".join(f"{entry.name!a} ({entry.dtype})" for entry in refused[:_LISTED])
    more = f" and {len(refused) - _LISTED} more" if len(refused) > _LISTED else ""
    raise UsageError(
        f"{show_path(path)}: {format} has no type for {shown}{more};"
        f" {'--format ' + ' or '.join(able) if able else 'no other format'} has, or leave them out"
        " (--skip)"
    )
