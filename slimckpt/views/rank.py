"""Views of one rank and of one file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slimckpt.errors import NotUnderstoodError, SlimckptError, StoreDamagedError
from slimckpt.model import Condition, SourceFile, StepLabel, encode_path
from slimckpt.sources.backends import Backend
from slimckpt.views.arrays import Arrays
from slimckpt.views.mapping import TensorView
from slimckpt.views.providers import Member, problem_of

if TYPE_CHECKING:
    from slimckpt.views.checkpoint import Step

Problems = tuple[tuple[str, str], ...]
"""Paths of files, and for each the reason."""


class RankView(TensorView):
    """The tensors of one rank of one step, over all its files.

    Made by :meth:`Step.rank` and :meth:`Checkpoint.rank`.
    """

    def __init__(
        self,
        step: Step,
        backend: Backend,
        members: list[Member],
        what: str,
        asked: tuple[int | None, Mapping[str, int]],
        skip_damaged: bool,
        writable: bool,
    ) -> None:
        super().__init__(Arrays(backend, writable))
        self._step, self._asked = step, asked
        self._skip_damaged = skip_damaged
        self._label = what
        self._understood: list[Member] = []
        problems: list[tuple[str, str]] = []
        not_read: list[tuple[str, str]] = []
        for member in members:
            file = member.holding.file
            reason = (encode_path(member.path), "" if file.understood else problem_of(file))
            if file.understood:
                try:
                    member.holding.require()
                except StoreDamagedError as error:
                    if not skip_damaged:
                        raise
                    problems.append((reason[0], str(error)))
                else:
                    self._understood.append(member)
            elif file.condition not in ("damaged", "refused"):
                not_read.append(reason)
            elif skip_damaged:
                problems.append(reason)
            else:
                raise _with_a_way_on(member)
        self._problems, self._not_read = tuple(problems), tuple(not_read)
        if not self._understood:
            reasons = "; ".join(reason for _, reason in [*problems, *not_read][:8])
            raise NotUnderstoodError(
                f"{what}: none of its {len(members)} files is understood: {reasons or 'no files'}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        rank, coords = self._asked
        arguments = (rank, dict(coords), self._skip_damaged, self._arrays.writable)
        return _rank_of, (self._step, *arguments)

    def __repr__(self) -> str:
        return f"<RankView of {self._label}>"

    @property
    def step(self) -> StepLabel | None:
        """The label of its step."""
        return self._step.label

    @property
    def problems(self) -> Problems:
        """Damaged or refused files that were skipped: path and reason."""
        return self._problems

    @property
    def not_read(self) -> Problems:
        """Files of the rank that are of no known format, or hold no tensors: path and reason."""
        return self._not_read

    def _members(self) -> list[Member]:
        return self._understood

    def _what(self) -> str:
        return self._label


class FileView(TensorView):
    """The tensors of one file, and what the file is.

    Whatever the file is, making the view is no error. Asking it for tensors is a
    ``NotUnderstoodError``, ``DamagedFileError`` or ``RefusedFileError`` where they cannot be read.
    """

    def __init__(self, files: Mapping[str, FileView], backend: Backend, member: Member) -> None:
        super().__init__(Arrays(backend, False))
        self._files, self._member = files, member

    def __reduce__(self) -> tuple[Any, ...]:
        return _file_of, (self._files, self.path)

    def __repr__(self) -> str:
        return f"<FileView {self.path!a}>"

    @property
    def path(self) -> str:
        """Relative to the root of the tree; bytes that are not UTF-8 as lone surrogates."""
        return encode_path(self._member.path)

    @property
    def size(self) -> int:
        """Of the original file, in bytes."""
        return self._member.holding.size

    @property
    def format(self) -> str:
        """``safetensors``, ``mindspore``, … or ``unknown``."""
        return self._file.format

    @property
    def condition(self) -> Condition:
        """``understood``, ``opaque``, ``damaged``, ``refused`` or ``store``."""
        return self._file.condition

    @property
    def problem(self) -> str | None:
        """Why it is not understood."""
        return self._file.problem

    @property
    def _file(self) -> SourceFile:
        self._arrays.backend.require_open()
        return self._member.holding.file

    def _members(self) -> list[Member]:
        return [self._member]

    def _what(self) -> str:
        return self._member.holding.label


def _with_a_way_on(member: Member) -> SlimckptError:
    error = member.holding.refusal()
    return type(error)(f"{error}. skip_damaged=True opens the rank without it")


def _rank_of(
    step: Step, rank: int | None, coords: dict[str, int], skip_damaged: bool, writable: bool
) -> RankView:
    return step.rank(rank, skip_damaged=skip_damaged, writable=writable, **coords)


def _file_of(files: Mapping[str, FileView], path: str) -> FileView:
    return files[path]
