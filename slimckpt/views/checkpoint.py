"""A checkpoint opened for reading, its steps and its files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from slimckpt.analysis.roles import role_of, step_key
from slimckpt.analysis.tree import is_store
from slimckpt.errors import (
    NotARankView,
    UnknownFileError,
    UnknownStepError,
    UnknownTensorError,
)
from slimckpt.layouts.dcp import metadata_among, sharded
from slimckpt.layouts.layout import Layout
from slimckpt.layouts.recorded import LayoutLike, given
from slimckpt.model import StepLabel, decode_path, encode_path, show_path
from slimckpt.sources.backends import BackendName, make_backend
from slimckpt.views.arrays import Arrays
from slimckpt.views.bound import Bound, NoLayoutError, bind, identity
from slimckpt.views.locals import Locals
from slimckpt.views.providers import DirectoryProvider, Group, Member, Provider, StoreProvider
from slimckpt.views.rank import FileView, RankView
from slimckpt.views.resharded import Resharded
from slimckpt.views.selection import Place, numbers_of, pick, places_of
from slimckpt.views.staging import Stage
from slimckpt.views.whole import Wholes, WholeTensor

_MOST_LINKS = 40
"""As many as Linux follows."""
Path = str | bytes | os.PathLike[Any]


def open(
    path: Path,
    backend: BackendName | None = None,
    check: bool = False,
    stage: Path | None = None,
) -> Checkpoint:
    """Open a slim checkpoint, or a directory of original files, for reading.

    Parameters
    ----------
    path
        The directory. A slim checkpoint is recognised as one.
    backend
        ``"mmap"`` (the default) maps files, so that processes of a node share memory; ``"pread"``
        reads what is asked for into memory of its own.
    check
        Compare the bytes of each tensor with their digests before they are used, once. Reads all
        of the storage that a tensor lies in; a slim checkpoint only.
    stage
        A directory of local storage (``"/dev/shm/NAME"``) of this user, made if it does not exist.
        A file with tensors that are read is brought there, as a whole and in large reads, when the
        first of its tensors is: by one process of the node, while the others wait for it and then
        use the same copy. ``prefetch()`` of a view brings all its files. Where there is no space a
        file is used where it is, and a warning is logged. The copies stay: ``rm -r`` the directory
        when the last job is done; processes that have them mapped keep what they have.

    Returns
    -------
    Checkpoint
        Only names are known so far: of a slim checkpoint its root manifest was read, a directory
        was listed.

    Raises
    ------
    UsageError
        There is no directory of that name, or no such backend; or ``check`` is asked for where
        there are no digests; or the stage is not this user's alone.
    StoreDamagedError, UnsupportedStoreError
        The root manifest is damaged, or asks for a newer slimckpt.
    """
    return Checkpoint(path, backend, check, stage)


class Checkpoint:
    """A slim checkpoint, or an original directory; both give the same views.

    A context manager. It can be pickled, and is opened again by its path where it is unpickled.
    """

    def __init__(
        self,
        path: Path,
        backend: BackendName | None = None,
        check: bool = False,
        stage: Path | None = None,
    ) -> None:
        directory = os.path.abspath(os.fsencode(path))
        self._path, self._backend_name, self._check = directory, backend, check
        self._stage = None if stage is None else os.path.abspath(os.fsencode(stage))
        kind = StoreProvider if is_store(directory) else DirectoryProvider
        self._provider: Provider = kind(directory)
        files = None
        if self._stage is not None:
            files = Stage(self._stage, directory, self._provider.identity)
        self._backend = make_backend(backend, self._provider.damaged, files)
        if check:
            self._provider.check_by(self._backend)
        self._counting: tuple[str, ...] | None = None
        self._wholes: dict[tuple[Any, ...], tuple[LayoutLike | None, Bound, Wholes]] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._path, self._backend_name, self._check, self._stage)

    def __repr__(self) -> str:
        return f"<Checkpoint {encode_path(self._path)!a}>"

    def close(self) -> None:
        """Let go of all files. Its views are of no more use; arrays taken from them stay valid."""
        self._backend.close()

    def unload(self) -> None:
        """Give pages of files that were touched back to the page cache: memory of this process does
        not grow with what it reads through. Arrays stay valid; what is touched again comes back."""
        self._backend.unload()

    @property
    def path(self) -> bytes:
        """Where it was opened, absolute."""
        return self._path

    @property
    def runs(self) -> tuple[str, ...]:
        """Runs under the root: the part of paths before what states a step or rank.

        Where there is more than one, only those with a file that is understood.
        """
        self._backend.require_open()
        if self._counting is None:
            runs = sorted({group.run for group in self._provider.groups()})
            if len(runs) > 1:
                runs = [run for run in runs if self._counts(run)] or [
                    run for run in runs if any(map(self._provider.members, self._groups(run)))
                ]
            self._counting = tuple(runs)
        return self._counting

    @property
    def steps(self) -> tuple[StepLabel, ...]:
        """Labels of the steps of all runs, in order; none where the tree has no steps."""
        labels = {group.step for run in self.runs for group in self._groups(run)}
        return tuple(sorted((s for s in labels if s is not None), key=step_key))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the only step, or of all steps."""
        found = {rank for step in self._steps(None) for rank in step.ranks}
        return tuple(sorted(found))

    @property
    def files(self) -> Files:
        """All files of the tree, by path."""
        self._backend.require_open()
        return Files(self, self._provider.groups(), None)

    def step(self, label: StepLabel | None, run: str | None = None) -> Step:
        """One step.

        Parameters
        ----------
        label
            One of :attr:`steps`.
        run
            One of :attr:`runs`, where two have a step of that label.

        Raises
        ------
        UnknownStepError
            There is none, or more than one; the message lists what there is.
        """
        steps = [s for s in self._steps(run) if s.label == label]
        if len(steps) == 1:
            return steps[0]
        if steps:
            raise UnknownStepError(
                f"step {label} is in {len(steps)} runs; say run=…: {_listed(s.run for s in steps)}"
            )
        if not self.steps:
            raise UnknownStepError(
                f"{self._label} has no steps, so no step {label!a}; use rank() of the checkpoint"
            )
        raise UnknownStepError(
            f"{self._label} has no step {label!a}{_in_run(run)}; there are"
            f" {_described(self._steps(run))}"
        )

    def rank(
        self,
        r: int | None = None,
        run: str | None = None,
        skip_damaged: bool = False,
        writable: bool = False,
        **coords: int,
    ) -> RankView:
        """The tensors of one rank, where there is only one step. See :meth:`Step.rank`.

        Raises
        ------
        UnknownStepError
            There are several steps or runs; the message lists them.
        """
        step = self.only_step(run, "rank")
        return step.rank(r, skip_damaged=skip_damaged, writable=writable, **coords)

    def only_step(
        self, run: str | None, call: str | None = None, label: StepLabel | None = None
    ) -> Step:
        """One step, to ``call`` something of it, or for a function with an argument ``step``: that
        of a label, which may be spelled as text, or else the only one.

        Raises
        ------
        UnknownStepError
            There are several, or none; the message says which call chooses one.
        """
        if label is not None:
            known = (s.label for s in self._steps(run) if str(s.label) == str(label))
            return self.step(next(known, label), run)
        steps = self._steps(run)
        if len(steps) == 1:
            return steps[0]
        way = "step=…" if call is None else f"step(…).{call}(…), or --step and --run"
        raise UnknownStepError(
            f"{self._label} has {len(steps)} steps{_in_run(run)}; say {way}: {_described(steps)}"
        )

    def tensor(
        self,
        name: str,
        run: str | None = None,
        layout: LayoutLike | None = None,
        allow_drift: bool = False,
    ) -> WholeTensor:
        """One whole tensor, where there is only one step. See :meth:`Step.tensor`."""
        return self.only_step(run, "tensor").tensor(name, layout, allow_drift)

    def layout(self, layout: LayoutLike | None = None, run: str | None = None) -> Layout:
        """Which part of each whole tensor each rank holds, where there is only one step. See
        :meth:`Step.layout`."""
        return self.only_step(run, "layout").layout(layout)

    def reshard(
        self,
        target: LayoutLike,
        layout: LayoutLike | None = None,
        run: str | None = None,
        allow_drift: bool = False,
        skip: Sequence[str] = (),
    ) -> Resharded:
        """Its tensors as other ranks would hold them, where there is only one step. See
        :meth:`Step.reshard`."""
        step = self.only_step(run, "reshard")
        return step.reshard(target, layout, allow_drift=allow_drift, skip=skip)

    def _steps(self, run: str | None) -> list[Step]:
        """Steps of a run, or of all; a run without steps is one step without a label."""
        self._backend.require_open()
        if run is not None and run not in self.runs:
            raise UnknownStepError(
                f"{self._label} has no run {run!a}; there are {_listed(self.runs)}"
            )
        runs = self.runs if run is None else (run,)
        groups = [group for name in runs for group in self._groups(name)]
        stepped = [group for group in groups if group.step is not None]
        return [Step(self, *group) for group in stepped or groups or [Group("", None)]]

    def _groups(self, run: str) -> list[Group]:
        return [group for group in self._provider.groups() if group.run == run]

    def _counts(self, run: str) -> bool:
        members = (m for g in self._groups(run) for m in self._provider.members(g))
        return any(member.holding.file.understood for member in members)

    @property
    def _label(self) -> str:
        return show_path(self._path)


class Step:
    """One step of a run. ``label`` is ``None`` for a run that has no steps."""

    def __init__(self, checkpoint: Checkpoint, run: str, label: StepLabel | None) -> None:
        self._checkpoint = checkpoint
        self._group = Group(run, label)

    def __reduce__(self) -> tuple[Any, ...]:
        return Step, (self._checkpoint, *self._group)

    def __repr__(self) -> str:
        return f"<Step {self._what}>"

    @property
    def label(self) -> StepLabel | None:
        return self._group.step

    @property
    def run(self) -> str:
        return self._group.run

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks; only 0 where paths state none; none where more than one coordinate varies."""
        return tuple(sorted(numbers_of(places_of(self.members))))

    @property
    def coords(self) -> tuple[dict[str, int], ...]:
        """What :meth:`rank` can be asked for by coordinates (``tp``, ``pp``, ``dp``, ``ep``)."""
        return tuple(dict(place.coords) for place in places_of(self.members) if place.coords)

    @property
    def files(self) -> Files:
        """Its files, by path."""
        self._checkpoint._backend.require_open()
        return Files(self._checkpoint, [self._group], self._group)

    def rank(
        self,
        r: int | None = None,
        *,
        skip_damaged: bool = False,
        writable: bool = False,
        **coords: int,
    ) -> RankView:
        """The tensors of one rank: of its files, and of files of the step that have no rank.

        Parameters
        ----------
        r
            The global rank; may be left out where there is only one.
        skip_damaged
            Leave out damaged and refused files and list them in ``problems``.
        writable
            Give each tensor private memory that can be written to. No file changes.
        coords
            ``tp=1, pp=0``, where paths state coordinates.

        Raises
        ------
        UnknownRankError
            There is no such rank, or more than one.
        DamagedFileError, RefusedFileError, StoreDamagedError
            A file of the rank cannot be read.
        NotUnderstoodError
            None of its files is of a known format.
        NotARankView
            Its files are not made for ranks: torch.distributed.checkpoint, torch_dist.
        """
        planned = metadata_among(self.members)
        held: list[Member] = []
        if planned is None:
            place, held = self._place(r, coords), self.held(r, coords)
            planned = next(iter(sharded(held)), None)
        if planned is not None:
            raise NotARankView(
                f"{self._what} was saved by torch.distributed.checkpoint: a file of a rank holds"
                " what the save plan put there, not what the rank had. tensor(name) gives whole"
                f" tensors, files[path] what one file holds ({encode_path(planned.path)} says"
                " which tensors there are)"
            )
        return RankView(
            self,
            self._checkpoint._backend,
            held,
            f"{place} of {self._what}",
            (r, coords),
            skip_damaged,
            writable,
        )

    def held(self, r: int | None, coords: Mapping[str, int]) -> list[Member]:
        """The files of a rank, and those of the step that have no rank, as :meth:`rank` takes
        them."""
        place = self._place(r, coords)
        return [member for member in self.members if place.holds(member)]

    def _place(self, r: int | None, coords: Mapping[str, int]) -> Place:
        return pick(places_of(self.members), r, coords, self._what)

    def layout(self, layout: LayoutLike | None = None) -> Layout:
        """Which part of each whole tensor each rank, or file, holds.

        Parameters
        ----------
        layout
            A layout, rules for one, or the path of a file with rules (TOML, a strategy file of
            MindSpore, a directory of the strategy files of all pipeline stages); ``None``: what
            the checkpoint records: metadata of torch.distributed.checkpoint or Paddle, states of
            DeepSpeed, arguments of Megatron, strategy files of MindSpore in the tree or beside it;
            or else, that all ranks have the same, if they have.

        Raises
        ------
        UsageError
            Nothing is recorded, and none is given.
        CheckFailedError
            It is for another number of ranks. What else is wrong is found tensor by tensor.
        """
        return self.whole_tensors(layout).layout

    @property
    def wholes(self) -> Mapping[str, WholeTensor]:
        """Whole tensors, over all ranks, by name; none where no layout is recorded. Ranks are not
        compared here, to see whether all have the same."""
        try:
            return self._through(None, False, compare=False)[1]
        except NoLayoutError:
            return {}

    def whole_tensors(self, layout: LayoutLike | None = None, allow_drift: bool = False) -> Wholes:
        """Whole tensors, over all ranks, by name; parameters and errors as of :meth:`tensor`."""
        return self._through(layout, allow_drift)[1]

    def _through(
        self, layout: LayoutLike | None, allow_drift: bool, compare: bool = True
    ) -> tuple[Bound, Wholes]:
        known = self._checkpoint._wholes
        key = self._group, allow_drift, identity(layout)
        if key not in known:
            arrays = Arrays(self._checkpoint._backend, False)
            bound = bind(self, layout, self.members, self._what, arrays if compare else None)
            local = Locals(bound.view_of, arrays, bound.layout.origin)
            # The layout is kept, lest its id is given to another.
            known[key] = layout, bound, Wholes(bound.layout, local, allow_drift)
        return known[key][1:]

    def tensor(
        self, name: str, layout: LayoutLike | None = None, allow_drift: bool = False
    ) -> WholeTensor:
        """One whole tensor, over all ranks.

        Parameters
        ----------
        name
            As ranks have it, or as the metadata of the save has it.
        layout
            As in :meth:`layout`.
        allow_drift
            Where ranks that should hold the same differ, take the lowest and log a warning.

        Raises
        ------
        UnknownTensorError
            There is none of that name, or no layout.
        CheckFailedError
            Ranks or files do not hold what the layout says. Whether replicas are equal is known
            when it is read.
        """
        try:
            whole = self.whole_tensors(layout, allow_drift)[name]
        except NoLayoutError as error:
            raise UnknownTensorError(f"{error}; rank(r)[name] gives what a rank has") from None
        whole.require()
        return whole

    def reshard(
        self,
        target: LayoutLike,
        layout: LayoutLike | None = None,
        *,
        allow_drift: bool = False,
        skip: Sequence[str] = (),
    ) -> Resharded:
        """Its tensors as other ranks would hold them.

        Parameters
        ----------
        target
            The layout that is wanted: what :meth:`layout` takes.
        layout
            That of the checkpoint, as there.
        allow_drift
            As in :meth:`tensor`.
        skip
            Globs of names of whole tensors that are not wanted.

        Returns
        -------
        Resharded
            For each rank a lazy mapping from names to arrays. Tensors outside of the layouts are
            those of the rank of the same number, or of the first.

        Raises
        ------
        UsageError
            A tensor cannot be split as the new layout says, or it does not place a tensor that the
            ranks have parts of.
        CheckFailedError
            Ranks or files do not hold what the layout of the checkpoint says.
        """
        bound, wholes = self._through(layout, allow_drift)
        return Resharded(wholes, bound, given(target), skip)

    @property
    def members(self) -> Sequence[Member]:
        """Its files, in the order of their paths."""
        self._checkpoint._backend.require_open()
        provider = self._checkpoint._provider
        return provider.members(self._group) if self._group in provider.groups() else []

    @property
    def _what(self) -> str:
        where = show_path(os.path.join(self._checkpoint.path, decode_path(self.run)).rstrip(b"/"))
        return where if self.label is None else f"step {self.label} of {where}"


class Files(Mapping[str, FileView]):
    """Files by their path in the tree, in byte order; paths may also be bytes or ``PathLike``, and
    lead through symbolic links of the tree that stay inside it.

    Looking one up reads no more of a slim checkpoint than it takes to find it; iterating reads
    all parts.
    """

    def __init__(self, checkpoint: Checkpoint, groups: Sequence[Group], only: Group | None) -> None:
        self._checkpoint, self._groups, self._only = checkpoint, groups, only
        self._all: list[str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._only is None:
            return _files_of, (self._checkpoint,)
        return _files_of, (Step(self._checkpoint, *self._only),)

    def __repr__(self) -> str:
        return f"<Files of {self._checkpoint!r}>"

    def __getitem__(self, path: Path) -> FileView:
        return FileView(self, self._checkpoint._backend, self.member(path))

    def member(self, path: Path) -> Member:
        """A file as views and loaders take it; errors are those of looking it up."""
        found = self._find(path)
        if found is None:
            raise UnknownFileError(
                f"{self._checkpoint._label} has no file {os.fsdecode(path)!a}; paths are those of"
                " the original tree, relative to its root"
            )
        return found

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and self._find(path) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths())

    def __len__(self) -> int:
        return len(self._paths())

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def _find(self, path: Path) -> Member | None:
        self._checkpoint._backend.require_open()
        name = os.fspath(path)
        try:
            wanted = decode_path(name) if isinstance(name, str) else name
        except UnicodeEncodeError:
            return None
        found = self._named(wanted)
        if found is None:
            pointed = _through_links(wanted, self._checkpoint._provider.links())
            found = None if pointed is None else self._named(pointed)
        return found

    def _named(self, wanted: bytes) -> Member | None:
        role = role_of(wanted)
        likely = Group(role.run, role.step)
        for group in sorted(self._groups, key=lambda group: group != likely):
            found = self._checkpoint._provider.listed(group).get(wanted)
            if found is not None and self._only in (None, found.group):
                return found
        return None

    def _paths(self) -> list[str]:
        self._checkpoint._backend.require_open()
        if self._all is None:
            provider = self._checkpoint._provider
            found = {
                path
                for group in self._groups
                for path, member in provider.listed(group).items()
                if self._only in (None, member.group)
            }
            self._all = [encode_path(path) for path in sorted(found)]
        return self._all


def _files_of(owner: Checkpoint | Step) -> Files:
    return owner.files


def _in_run(run: str | None) -> str:
    return "" if run is None else f" in run {run!a}"


def _listed(names: Any) -> str:
    return ", ".join(ascii(name) for name in names)


def _described(steps: Sequence[Step]) -> str:
    """Steps as errors list them, with their runs where there are several."""
    several = len({step.run for step in steps}) > 1
    shown = [
        f"step {step.label}" + (f" of run {step.run!a}" if several else "")
        if step.label is not None
        else f"run {step.run!a}"
        for step in steps[:32]
    ]
    more = f", … ({len(steps)} in all)" if len(steps) > 32 else ""
    return ", ".join(shown) + more


def _through_links(path: bytes, links: Mapping[bytes, bytes]) -> bytes | None:
    """A path with the symbolic links in it followed, in the tree alone; ``None`` where there are
    none, too many, or one that leads out."""
    for followed in range(_MOST_LINKS):
        names = path.split(b"/")
        ways = (b"/".join(names[:count]) for count in range(1, len(names) + 1))
        link = next((way for way in ways if way in links), None)
        if link is None:
            return path if followed else None
        target = os.path.join(os.path.dirname(link), links[link])
        path = os.path.normpath(target + path[len(link) :])
        if path.startswith((b"/", b"../")):
            return None
    return None
