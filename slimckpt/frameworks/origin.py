"""Which file of a checkpoint is meant, and the memory of its payloads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slimckpt.analysis.tree import is_store
from slimckpt.encodings import decoder
from slimckpt.errors import (
    DamagedFileError,
    DroppedTensorError,
    NoOriginalError,
    NotUnderstoodError,
    UsageError,
)
from slimckpt.model import HOME_PAYLOAD, RAW, SYNTHETIC, Bytes, StepLabel, Tensor, encode_path
from slimckpt.sources.backends import BackendName
from slimckpt.views.arrays import Arrays
from slimckpt.views.checkpoint import Checkpoint, Path, Step
from slimckpt.views.mapping import TensorView
from slimckpt.views.providers import Holding, Member

_LISTED = 16


class Origin(NamedTuple):
    """A file of an opened checkpoint, and what makes private arrays of it."""

    checkpoint: Checkpoint
    member: Member
    arrays: Arrays

    @property
    def holding(self) -> Holding:
        return self.member.holding


@contextmanager
def opened(
    path: Path,
    file: Path | None,
    rank: int | None,
    step: StepLabel | None,
    run: str | None,
    formats: tuple[str, ...],
    writer: str,
    backend: BackendName | None = None,
    check: bool = False,
) -> Iterator[Origin]:
    """The one file that the arguments name, of one of ``formats``.

    Parameters
    ----------
    path
        A slim checkpoint, an original directory, or either with the path of a file behind it.
    file
        The original path of the file, relative to the root of the tree.
    rank, step, run
        Say which file, where ``file`` does not: the only one of the rank that has one of
        ``formats``.
    writer : str
        What errors call something that writes ``formats``.

    Raises
    ------
    UsageError
        The arguments name no file, or more than one.
    NotUnderstoodError
        The file is of another format.
    NoOriginalError
        What they name was made by resharding.
    """
    root, wanted = which(path, file, rank, step, run)
    with Checkpoint(root, backend, check) as checkpoint:
        if wanted is not None:
            member = checkpoint.files.member(wanted)
            _require(member, formats, writer)
        else:
            member = _only(step_of(checkpoint, step, run), rank, formats, writer)
        yield Origin(checkpoint, member, Arrays(checkpoint._backend, True))


def which(
    path: Path,
    file: Path | None,
    rank: int | None,
    step: StepLabel | None,
    run: str | None,
) -> tuple[bytes, str | bytes | None]:
    """The root of a checkpoint, and the file in it, if the arguments name one; those that
    contradict each other are a ``UsageError``."""
    root, inner = split(path)
    if inner is not None and file is not None:
        raise UsageError(f"{os.fsdecode(path)!a} names a file already; leave out file=")
    wanted = os.path.normpath(file) if file is not None else inner and encode_path(inner)
    if wanted is not None and (rank, step, run) != (None, None, None):
        raise UsageError("a file was named; leave out rank, step and run")
    return root, wanted


def split(path: Path) -> tuple[bytes, bytes | None]:
    """The root of a checkpoint, and the path of a file in it, if one was named. An original file
    may be named by a symbolic link to it."""
    name = os.path.abspath(os.fsencode(path))
    if is_store(name):
        return name, None
    root, rest = os.path.split(name)
    while len(root) > 1:
        if is_store(root):
            return root, rest
        root, first = os.path.split(root)
        rest = os.path.join(first, rest)
    if os.path.isfile(name):
        return os.path.split(os.path.realpath(name) if os.path.islink(name) else name)
    return name, None


def step_of(checkpoint: Checkpoint, step: StepLabel | None, run: str | None) -> Step:
    """The step that was asked for, or the only one."""
    return checkpoint.only_step(run, label=step)


def view_of(
    checkpoint: Checkpoint,
    wanted: str | bytes | None,
    rank: int | None,
    step: StepLabel | None,
    run: str | None,
    coords: Mapping[str, int] | None,
) -> TensorView:
    """The tensors of the file that is wanted, or else of a rank."""
    if wanted is not None:
        return checkpoint.files[wanted]
    return step_of(checkpoint, step, run).rank(rank, **dict(coords or {}))  # type: ignore[arg-type]


def _only(step: Step, rank: int | None, formats: tuple[str, ...], writer: str) -> Member:
    """The one file of a rank that has one of the formats; its own before those of all ranks."""
    held = step.held(rank, {})
    found = [
        member
        for member in held
        if member.holding.file.format in formats and member.holding.file.condition != "opaque"
    ]
    own = [member for member in found if member.role.rank is not None or member.role.coords]
    for member in own or found:
        if not member.holding.file.understood:
            # It may well be the one that is meant.
            raise member.holding.refusal()
    by_body = {id(member.holding): member for member in reversed(own or found)}
    if len(by_body) == 1:
        return next(iter(by_body.values()))
    if not by_body:
        for member in sorted(held, key=lambda member: member.role.rank is None):
            _refuse_synthetic(member, writer)
        problems = [m.holding.file.problem for m in held if not m.holding.file.understood]
        raise NotUnderstoodError(
            f"none of the {len(held)} files of {step._what} that were asked for is of {writer}"
            + "".join(f"; {problem}" for problem in problems[:4] if problem)
        )
    paths = sorted(encode_path(member.path) for member in by_body.values())
    shown = ", ".join(map(ascii, paths[:_LISTED])) + (", …" if len(paths) > _LISTED else "")
    raise UsageError(f"{step._what} has {len(paths)} files of {writer}; say file=…: {shown}")


def _require(member: Member, formats: tuple[str, ...], writer: str) -> None:
    try:
        member.holding.require()
    except NotUnderstoodError as error:
        raise NotUnderstoodError(
            f"{error}; if it is of {writer} all the same, restore it and load it with the framework"
        ) from None
    _refuse_synthetic(member, writer)
    found = member.holding.file.format
    if found not in formats:
        raise NotUnderstoodError(
            f"{member.holding.label}: expected a file of {writer}, found {found}; its tensors can"
            " be had all the same (slimckpt.open, or tensors of a framework by name)"
        )


def _refuse_synthetic(member: Member, writer: str) -> None:
    if member.holding.file.format == SYNTHETIC:
        raise NoOriginalError(
            f"{member.holding.label}: made by resharding, so there is no file of {writer} to load."
            " Its tensors can be had by name: state_dict or tensors of a framework, or"
            " slimckpt.open(…).rank(r); `slimckpt export` writes files of them"
        )


def require_complete(holding: Holding) -> None:
    """All tensors of a file are there, as making its object takes.

    Raises
    ------
    DroppedTensorError
        Some were left out when it was slimmed.
    """
    dropped = holding.dropped()
    if dropped:
        first = holding.table.name(dropped[0])
        raise DroppedTensorError(
            f"{holding.label}: {len(dropped)} of its tensors were left out when it was slimmed"
            f" (--drop), such as {first!a}, so its object cannot be made. What is left can be had"
            " by name: state_dict or tensors, or slimckpt.open"
        )


class Payloads:
    """The private memory of a file's payloads, by where they begin in the file.

    Bytes that are no payload are read.
    """

    def __init__(self, origin: Origin, read: Callable[[int, int], bytes]) -> None:
        self._holding, self._arrays, self._read = origin.holding, origin.arrays, read
        table = self._holding.table
        ends = table.columns["span_end"]
        single = np.flatnonzero(np.diff(ends, prepend=0) == 1)
        starts = table.columns["span_offset"][ends[single] - 1]
        self._rows = dict(zip(starts.tolist(), single.tolist(), strict=True))
        home = np.where(table.columns["home"] == HOME_PAYLOAD, table.columns["home_row"], -1)
        payloads, tensors = np.unique(home, return_index=True)
        self._tensors = dict(zip(payloads.tolist(), tensors.tolist(), strict=True))

    def __call__(self, offset: int, nbytes: int, encoding: str = RAW) -> Bytes:
        """Memory of the ``nbytes`` stored at ``offset`` of the file, decoded.

        Raises
        ------
        DroppedTensorError
            They were left out when it was slimmed.
        """
        row = self._rows.get(offset)
        table = self._holding.table
        if row is None or int(table.payload_nbytes[row]) != nbytes:
            stored = np.frombuffer(self._read(offset, nbytes), np.uint8)
            try:
                return np.array(decoder(encoding)(stored, [nbytes]))
            except (DamagedFileError, NotUnderstoodError) as error:
                raise type(error)(
                    f"{self._holding.label}: bytes {offset} to {offset + nbytes}: {error}"
                ) from None
        return self._arrays.stream(self._holding, self._tensor(row, encoding))

    def _tensor(self, payload: int, encoding: str) -> Tensor:
        """A tensor of a payload: errors name it."""
        row = self._tensors.get(payload)
        if row is not None:
            return replace(self._holding.table.tensor(row), encoding=encoding)
        nbytes = int(self._holding.table.payload_nbytes[payload])
        name = f"payload {payload}"
        return Tensor(
            name, name, "U8", False, (nbytes,), None, 0, nbytes, payload, None, encoding
        )  # fmt: skip
