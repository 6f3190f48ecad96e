"""Steps without a record of how tensors lie, and without need of one: all ranks hold the same."""

from __future__ import annotations

from collections.abc import Sequence

from slimckpt.analysis.categories import CATEGORIES, categorize
from slimckpt.layouts.layout import Layout, TensorLayout
from slimckpt.layouts.placement import Placement
from slimckpt.model import compact_ranks
from slimckpt.views.arrays import Arrays
from slimckpt.views.mapping import TensorView
from slimckpt.views.providers import Holding


def replicated(views: Sequence[TensorView], arrays: Arrays) -> Layout | str:
    """The layout of ranks of which each has all tensors whole; or why it is not so.

    All tensors of all ranks are compared: by their digests, where there are any. One that differs
    is enough to say that nothing is known: equal tensors beside it may be parts of larger ones.
    States of generators and single numbers may differ; they are outside the layout then.

    Parameters
    ----------
    views
        Of ranks 0, 1, ….
    """
    first = views[0]
    own: set[str] = set()
    for rank, view in enumerate(views[1:], 1):
        odd = next(iter({*first}.symmetric_difference(view)), None)
        if odd is not None:
            return f"not all ranks have a tensor {odd!a}"
        for name in first:
            (here, row), (there, other) = first._find(name), view._find(name)
            if not arrays.same((here.holding, row), (there.holding, other)):
                if _is_of_rank(here.holding, row):
                    own.add(name)
                else:
                    return f"ranks 0 and {rank} differ in tensor {name!a}"
    ranks = tuple(range(len(views)))
    origin = f"the equality of ranks {compact_ranks(ranks)}" if len(ranks) > 1 else "its one rank"
    shards = {}
    tensors = {}
    for name in first:
        if name in own:
            continue
        info = first.info(name)
        if info.shape not in shards:
            shards[info.shape] = Placement((len(ranks),)).shards(info.shape)
        tensors[name] = TensorLayout(info.dtype, info.shape, shards[info.shape])
    return Layout(tensors, ranks, origin)


def _is_of_rank(holding: Holding, row: int) -> bool:
    return CATEGORIES[categorize(holding.table)[row]] in ("rng", "scalar")
