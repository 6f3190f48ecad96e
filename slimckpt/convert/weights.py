"""Which of the tensors of a rank belong to the model, and which only to its training."""

from __future__ import annotations

from collections.abc import Sequence

from slimckpt.analysis.categories import CATEGORIES, WEIGHTS, categorize
from slimckpt.model import TableBuilder, Tensor

_OF_MODEL = frozenset(WEIGHTS)
_BUFFERS = frozenset({"scalar", "other"})


def not_weights(
    tensors: Sequence[Tensor], categories: Sequence[tuple[str, str]] = ()
) -> dict[str, str]:
    """Names of those that are not the model's, each with what it is.

    Parameters
    ----------
    tensors
        All of a rank, its optimizer's too: they tell moments from weights.
    categories
        As of :func:`~slimckpt.analysis.categories.categorize`.

    Notes
    -----
    Weights are told as ``slim --drop`` tells them. What is neither weight nor state (masks, running
    counts) stays where it lies beside a weight, in the same module: a learning rate does not.
    """
    builder = TableBuilder()
    for tensor in tensors:
        builder.tensor(tensor.name, tensor.dtype, tensor.shape, 0)
    codes = categorize(builder.build(), categories).tolist()
    kinds = {tensor.name: CATEGORIES[code] for tensor, code in zip(tensors, codes, strict=True)}
    modules = {_module(name) for name, kind in kinds.items() if kind in _OF_MODEL} - {""}
    return {
        name: kind
        for name, kind in kinds.items()
        if kind not in _OF_MODEL and not (kind in _BUFFERS and _module(name) in modules)
    }


def _module(name: str) -> str:
    return name.rpartition(".")[0]
