"""Which whole tensors of a step are to be written, and what the step has besides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase

from slimckpt.convert.entries import LeftOut
from slimckpt.convert.values import values_in
from slimckpt.convert.weights import not_weights
from slimckpt.dtypes import OPAQUE
from slimckpt.errors import SlimckptError
from slimckpt.formats.dcp_metadata import read_metadata
from slimckpt.layouts.dcp import metadata_among
from slimckpt.model import RAW, Tensor
from slimckpt.views.checkpoint import Step
from slimckpt.views.whole import Wholes

NO_WEIGHT, SKIPPED = "it is no weight", "it is skipped"


def chosen_of(
    wholes: Wholes,
    only: str | None,
    left_out: list[LeftOut],
    skip: Sequence[str] = (),
    categories: Sequence[tuple[str, str]] = (),
) -> dict[str, tuple[str, str | None]]:
    """What is to be written, by name: which whole tensor, and the dtype to give it in (``None``:
    its own). What is not for ``only``, or matches a glob of ``skip``, is added to ``left_out``.

    Where the record says which tensors are weights, they have the names of the parameters.
    """
    found = _chosen_for(wholes, only, left_out, categories)
    skipped = [name for name in found if any(fnmatchcase(name, glob) for glob in skip)]
    left_out += [LeftOut(name, SKIPPED) for name in skipped]
    for name in skipped:
        del found[name]
    return found


def _chosen_for(
    wholes: Wholes, only: str | None, left_out: list[LeftOut], categories: Sequence[tuple[str, str]]
) -> dict[str, tuple[str, str | None]]:
    layout = wholes.layout
    if only and layout.weights:
        taken = {whole for whole, _ in layout.weights.values()}
        left_out += [LeftOut(name, NO_WEIGHT) for name in layout.tensors if name not in taken]
        return dict(layout.weights)
    other: Mapping[str, str] = {}
    if only:
        other = not_weights(
            [
                Tensor(name, "", each.dtype, False, each.shape, None, 0, 0, None, None, RAW)
                for name, each in layout.tensors.items()
            ],
            categories,
        )
        left_out += [LeftOut(name, f"{NO_WEIGHT}: {kind}") for name, kind in other.items()]
    return {name: (name, None) for name in layout.tensors if name not in other}


def outside_of(step: Step, wholes: Wholes) -> Iterator[LeftOut]:
    """What files of the step have and no whole tensor has."""
    layout = wholes.layout
    known = {*wholes, *layout.local}
    for name in wholes:
        with suppress(SlimckptError):  # it may be refused, and be no weight
            known |= {shard.name for shard in layout.tensors[name].shards if shard.name}
    seen: set[str] = set()
    for member in step.members:
        if not member.holding.file.understood:
            continue
        table = member.holding.table
        for row, name in enumerate(table.names()):
            if name not in known and name not in seen:
                seen.add(name)
                dtype = table.dtype(row)
                yield LeftOut(
                    name,
                    f"it is no tensor: {dtype.removeprefix(OPAQUE)}"
                    if dtype.startswith(OPAQUE)
                    else f"{layout.origin} has no place for it: of each rank its own",
                )
    values = dict.fromkeys(_values(step))
    yield from (LeftOut(name, "it is a value of Python, no tensor") for name in values)


def _values(step: Step) -> Iterator[str]:
    """Names of what is pickled beside tensors."""
    metadata = metadata_among(step.members)
    if metadata is not None:
        with metadata.holding.source() as source:
            items = read_metadata(source).items
        yield from (item.name for item in items if item.offsets is None)
        return
    for member in step.members:
        if member.holding.file.understood:
            yield from values_in(member.holding)
