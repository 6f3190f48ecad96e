"""A layout bound to a step: rules become a layout by what its ranks hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

from slimckpt.errors import CheckFailedError, UnknownRankError, UnknownTensorError, UsageError
from slimckpt.layouts.dcp import metadata_among, sharded
from slimckpt.layouts.layout import Holder, Layout, TensorLayout
from slimckpt.layouts.placement import Inference, Rules, Typed
from slimckpt.layouts.recorded import LayoutLike, given, recorded
from slimckpt.layouts.toml_rules import TomlRules
from slimckpt.model import compact_ranks
from slimckpt.views.arrays import Arrays, is_readable
from slimckpt.views.mapping import TensorView
from slimckpt.views.providers import Member
from slimckpt.views.replicated import replicated

if TYPE_CHECKING:
    from slimckpt.views.checkpoint import Step


class Bound(NamedTuple):
    """A layout, the views of those who hold something by it, and the ranks there are."""

    layout: Layout
    view_of: Callable[[Holder], TensorView]
    ranks: tuple[int, ...]


class NoLayoutError(UsageError):
    """A step records no layout, and none was given."""


def bind(
    step: Step,
    layout: LayoutLike | None,
    members: Sequence[Member],
    what: str,
    compare: Arrays | None = None,
) -> Bound:
    """A layout bound to a step.

    Parameters
    ----------
    step
        The step.
    layout
        As in :meth:`~slimckpt.views.Step.layout`.
    members
        Its files.
    what
        What errors call it.
    compare
        With these all ranks are compared where no layout is known: if all hold the same, each has
        all tensors whole.

    Raises
    ------
    NoLayoutError
        None is given, and the step records none.
    """
    found = _recorded(step, members) if layout is None else given(layout)
    why = ""
    if found is None and compare and step.ranks == tuple(range(len(step.ranks))):
        equal = replicated([step.rank(rank) for rank in step.ranks], compare)
        found, why = (None, f", and {equal}") if isinstance(equal, str) else (equal, "")
    if found is None:
        raise NoLayoutError(
            f"{what} records no layout that describes whole tensors (metadata of"
            " torch.distributed.checkpoint or Paddle, states of DeepSpeed, arguments of Megatron,"
            f" strategy files of MindSpore){why}; give one, in TOML or a strategy"
            " file (layout=…; --layout FILE, of reshard --source-layout FILE)"
        )
    if isinstance(found, Rules):
        return bind_rules(found, step.ranks, step.coords, step.rank, what)

    def view_of(holder: Holder) -> TensorView:
        return step.rank(holder) if isinstance(holder, int) else step.files[holder]

    planned = metadata_among(members) is not None or bool(sharded(members))
    return Bound(found, view_of, () if planned else step.ranks)


def _recorded(step: Step, members: Sequence[Member]) -> Layout | Rules | None:
    checkpoint = step._checkpoint
    provider = checkpoint._provider
    groups = [g for g in provider.groups() if g.step is None and g != step._group]
    groups.sort(key=lambda group: (group.run != step.run, group.run != "", group.run))
    around = chain([members], map(provider.members, groups))
    return recorded(members, around, os.path.dirname(checkpoint.path), len(step.ranks))


def identity(layout: LayoutLike | None) -> Any:
    """What tells a layout, or the state of a file that gives one, from others."""
    if layout is None or isinstance(layout, Layout | Rules):
        return id(layout)
    try:
        return os.fspath(layout), os.stat(layout).st_mtime_ns
    except OSError:
        return os.fspath(layout)


def bind_rules(
    rules: Rules,
    ranks: Sequence[int],
    coords: Sequence[Mapping[str, int]],
    rank_of: Callable[..., TensorView],
    what: str,
) -> Bound:
    """The layout that rules and the tensors of all ranks make up.

    Parameters
    ----------
    rules
        For as many ranks as there are.
    ranks, coords
        Of the step: its ranks, or, where more than one coordinate varies, their coordinates.
    rank_of
        Gives the view of a rank, by its number or its coordinates.
    what
        What errors call the step.

    Raises
    ------
    CheckFailedError
        The rules are for another number of ranks.
    UsageError
        Ranks are told apart by coordinates, and the mesh has other names.
    """
    if ranks or not coords:
        asked = {rank: {"r": rank} for rank in ranks}
        if tuple(ranks) != tuple(range(rules.n_ranks)):
            raise CheckFailedError(
                f"{rules.origin} is for {rules.n_ranks} ranks, and {what} has"
                f" {len(ranks)} (ranks {compact_ranks(ranks)}); the layout is of another save"
            )
    else:
        asked = _by_coords(rules, coords, what)
    views: dict[int, TensorView] = {}

    def view_of(holder: Holder) -> TensorView:
        if not isinstance(holder, int) or holder not in asked:
            raise UnknownRankError(f"{what} has no rank {holder!a}")
        if holder not in views:
            views[holder] = rank_of(**asked[holder])
        return views[holder]

    tensors = _Inferred(rules, tuple(asked), view_of)
    return Bound(Layout(tensors, tuple(range(rules.n_ranks)), rules.origin), view_of, tuple(asked))


def _by_coords(
    rules: Rules, coords: Sequence[Mapping[str, int]], what: str
) -> dict[int, dict[str, int]]:
    """For each place of a step the first rank of the mesh that has its coordinates."""
    names = sorted({name for place in coords for name in place})
    axes = rules.axes if isinstance(rules, TomlRules) else {}
    if not set(names) <= set(axes):
        raise UsageError(
            f"{what} tells ranks apart by {', '.join(names)}; a layout for it has a mesh with these"
            f" axes, and {rules.origin} has {', '.join(axes) or 'none with names'}"
        )
    asked: dict[int, dict[str, int]] = {}
    taken = set()
    for rank, at in enumerate(product(*map(range, axes.values()))):
        whole = dict(zip(axes, at, strict=True))
        place = next((c for c in coords if all(whole[n] == v for n, v in c.items())), None)
        if place is not None and tuple(place.items()) not in taken:
            taken.add(tuple(place.items()))
            asked[rank] = dict(place)
    if len(taken) != len(coords):
        raise CheckFailedError(
            f"{rules.origin} has mesh {axes}, and {what} has {len(coords)} places, some of them not"
            " in it; the layout is of another save"
        )
    return asked


class _Inferred(Mapping[str, TensorLayout]):
    """Tensors of the ranks of a step, each inferred when it is asked for."""

    def __init__(
        self, rules: Rules, ranks: Sequence[int], view_of: Callable[[Holder], TensorView]
    ) -> None:
        self._rules, self._ranks, self._view_of = rules, ranks, view_of
        self._inference = Inference(rules)
        self._found: dict[str, dict[int, Typed]] | None = None

    @property
    def _named(self) -> dict[str, dict[int, Typed]]:
        """For each tensor that the rules place, dtype and shape on all ranks that have it."""
        if self._found is None:
            found: dict[str, dict[int, Typed]] = {}
            for rank in self._ranks:
                for name, typed in _typed(self._view_of(rank)):
                    found.setdefault(name, {})[rank] = typed
            self._found = {name: held for name, held in found.items() if self._places(name)}
        return self._found

    def _places(self, name: str) -> bool:
        return bool(self._rules.placements(name))

    def __len__(self) -> int:
        return len(self._named)

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def __getitem__(self, name: str) -> TensorLayout:
        held = self._named.get(name)
        if held is None:
            if self._rules.placements(name):
                near = ", ".join(list(self._named)[:5])
                raise UnknownTensorError(f"no rank has a tensor {name!a}; they have {near}, …")
            raise UnknownTensorError(
                f"{self._rules.origin} does not place {name!a}: each rank has its own, which"
                " rank(r)[name] gives"
            )
        found = self._inference.tensor(name, held)
        assert found is not None
        return found


def _typed(view: TensorView) -> Iterator[tuple[str, Typed]]:
    """Name, dtype and shape of all arrays of a view. Of a name that two have, those of the first:
    whether they agree is seen when it is read."""
    seen = {*view.opaque, *view.dropped}
    for member in view._members():
        table = member.holding.table
        dims, ends = table.columns["dims"].tolist(), [0, *table.columns["dim_end"].tolist()]
        dtypes = table.columns["dtype"].tolist()
        readable = [is_readable(dtype) for dtype in table.dtypes]
        for row, name in enumerate(table.names()):
            if name not in seen and readable[dtypes[row]]:
                seen.add(name)
                yield name, (table.dtypes[dtypes[row]], tuple(dims[ends[row] : ends[row + 1]]))
