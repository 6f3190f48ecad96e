"""Weight, optimizer state or something else: what a tensor is, told by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from slimckpt.dtypes import OPAQUE
from slimckpt.errors import UsageError

CATEGORIES = ("weight", "optimizer", "master weight", "other")
_WEIGHT, _OPTIMIZER, _MASTER, _OTHER = range(4)

_SEGMENTS = {
    _OPTIMIZER: (
        "accum accumulator adam_m adam_v beta1_pow_acc beta1_power beta2_pow_acc beta2_power "
        "exp_avg exp_avg_sq moment moment1 moment2 moments momentum momentum_buffer optim "
        "optimizer optimizer_state velocity"
    ),
    _MASTER: (
        "fp32_flat_groups fp32_param fp32_params master master_params master_weights "
        "single_partition_of_fp32_groups"
    ),
    _OTHER: (
        "accu_grads cuda_rng_state grads np_rng_state random_rng_state rng rng_state "
        "rng_tracker_states torch_rng_state"
    ),
}
"""Whole segments of a name that say what it is, wherever they stand."""

_PATTERNS = {
    # Paddle: linear_0.w_0_moment1_0, and linear_0.w_0_fp32_master_0 with its own moments
    _OPTIMIZER: r"_(?:moment[12]|beta[12]_pow_acc|velocity)_[0-9]+\Z",
    _MASTER: r"_fp32_master_[0-9]+\Z|\Afp32_from_fp16",
}
"""The same, for segments with a varying part; each such segment has an underscore."""

_LAST_SEGMENTS = (
    "current_iterator_step epoch epoch_num global_step iteration last_overflow_iterator_step "
    "learning_rate loss_scale lr scale_sense seed step step_num"
)
"""Numbers of the training loop. Further up in a name (``step.weight``) they are modules."""

_KNOWN = {segment: code for code, text in _SEGMENTS.items() for segment in text.split()}
_LAST_OTHER = frozenset(_LAST_SEGMENTS.split())
_VARYING = re.compile("|".join(f"(?P<c{code}>{text})" for code, text in _PATTERNS.items()))


def categorize(
    names: Sequence[str], dtypes: Sequence[str], overrides: Sequence[tuple[str, str]] = ()
) -> npt.NDArray[np.uint8]:
    """What each tensor is.

    Only whole segments of a name count (``optimizer_embedding.weight`` is a weight): a test by
    prefix takes weights for optimizer state sooner or later. Where several apply, the one later in
    :data:`CATEGORIES` does (``optimizer.fp32_from_fp16_params.0`` is a master weight).

    Parameters
    ----------
    names, dtypes
        One of each a tensor.
    overrides
        Pairs of a category and a case-sensitive glob for whole names; the first that matches wins
        over everything else.

    Returns
    -------
    codes
        Positions in :data:`CATEGORIES`.

    Raises
    ------
    UsageError
        An override's category is none of :data:`CATEGORIES`.
    """
    opaque = {dtype for dtype in set(dtypes) if dtype.startswith(OPAQUE)}
    codes: Iterable[int] = (
        _OTHER if dtype in opaque else _by_name(name)
        for name, dtype in zip(names, dtypes, strict=True)
    )
    if overrides:
        override = _compile(overrides)
        codes = (
            code if (forced := override(name)) is None else forced
            for name, code in zip(names, codes, strict=True)
        )
    return np.fromiter(codes, np.uint8, len(names))


def _by_name(name: str) -> int:
    segments = name.replace("/", ".").split(".")
    return _OTHER if segments[-1] in _LAST_OTHER else max(map(_by_segment, segments))


@lru_cache(maxsize=1 << 16)
def _by_segment(segment: str) -> int:
    known = _KNOWN.get(segment, _WEIGHT)
    if known or "_" not in segment or not (match := _VARYING.search(segment)):
        return known
    return next(code for code in _PATTERNS if match[f"c{code}"])


def _compile(overrides: Sequence[tuple[str, str]]) -> Callable[[str], int | None]:
    rules = []
    for category, glob in overrides:
        if category not in CATEGORIES:
            raise UsageError(
                f"{category!r} is no category of tensors; there are: {', '.join(CATEGORIES)}"
            )
        rules.append((re.compile(translate(glob)).match, CATEGORIES.index(category)))

    def override(name: str) -> int | None:
        for matches, code in rules:
            if matches(name):
                return code
        return None

    return override
