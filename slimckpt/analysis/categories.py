"""What a tensor is: a kind of weight, optimizer state, or something else."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from slimckpt.analysis.distinct import distinct_runs
from slimckpt.analysis.state_names import GRADIENT, MASTER, MOMENT, STEP, parameter_of, state_of
from slimckpt.dtypes import OPAQUE
from slimckpt.errors import UsageError
from slimckpt.model import Table

__all__ = ["CATEGORIES", "GRADIENT", "MASTER", "OPTIMIZER", "WEIGHTS", "categorize", "parameter_of"]

WEIGHTS = ("embedding", "attention", "mlp", "norm", "bias", "weight")
"""Kinds of weights; ``weight`` is any that is none of the others."""
CATEGORIES = (*WEIGHTS, MOMENT, STEP, MASTER, GRADIENT, "rng", "scalar", "other")
OPTIMIZER = frozenset({MOMENT, STEP})
"""What only a resumed training needs, apart from master weights."""

_RNG = re.compile(r"rng|(?:.*_)?rng(?:_tracker)?_states?")
_RNG_ARRAYS = frozenset({("U8", (5056,)), ("U32", (624,))})
"""The state of PyTorch's CPU generator, and of the Mersenne Twister as numpy keeps it."""
_NOT_TRAINED = frozenset({"BOOL", "I64", "U64"})
"""Dtypes of masks and indices, never of weights."""

_NORM = re.compile(
    r"(?:.*_)?(?:layer|rms|batch|group|instance)?norm(?:[0-9].*|s|_.*)?|(?:ln|bn|gn)(?:_?[0-9a-z]+)?"
    r"|(?:.*_)?(?:ln|bn|gn)|running_(?:mean|var)|moving_(?:mean|variance)|gamma|g",
    re.IGNORECASE,
)
_STACKED_NORM = re.compile(r"(?:.*\.)?(?:layer_norm_|(?:.*_)?layernorm\.)(?:weight|bias)")
"""As Megatron names them, which saves those of all layers as one tensor of two dimensions."""
_BIAS = re.compile(r"(?:.*_)?(?:bias|b)(?:_[0-9a-z]+)?|beta")
_EMBEDDING = re.compile(
    r"(?:.*_)?(?:embed|embeds|embedding|embeddings|embedder|emb|wte|wpe)(?:_.*)?", re.IGNORECASE
)
_ATTENTION = re.compile(
    r"(?:.*_)?(?:attn|attention|selfattention|crossattention|qkv)(?:[0-9]*|_.*)"
    r"|(?:linear_)?(?:q|k|v|o|qkv|kv|q_[ab]|kv_[ab]|q_up|q_down|kv_up|kv_down)_proj(?:_.*)?|w_?qkv|w[qkv]"
    r"|query_key_value|to_[qkv]|to_out|.*lora_qkv|mixer_attn",
    re.IGNORECASE,
)
_MLP = re.compile(
    r"(?:.*_)?(?:mlp|ffn|moe|expert|experts|feed_forward|feedforward)(?:[0-9]*|_.*)"
    r"|(?:gate|up|down|gate_up)_proj(?:_.*)?|(?:linear_)?fc[12]|c_fc|dense_h_to_4h|dense_4h_to_h"
    r"|DenseReluDense|w[123]|w_gate_hidden|intermediate|ffn[0-9]*"
)
_MODULES = (("embedding", _EMBEDDING), ("attention", _ATTENTION), ("mlp", _MLP))
_LAST_RESORT = dict.fromkeys(("k", "key", "q", "query", "v", "value", "wo"), "attention")
_LAST_RESORT |= dict.fromkeys(
    ("down", "gate", "mapping", "projection", "up", "wi", "wi_0", "wi_1"), "mlp"
)
"""Names that the modules around them decide, and these only where those say nothing."""


def categorize(table: Table, overrides: Sequence[tuple[str, str]] = ()) -> npt.NDArray[np.uint8]:
    """What each tensor is: by structure first, by name second.

    Parameters
    ----------
    table
        Tensors of all files that belong together: what is to confirm a name is looked for in all
        of it (optimizers are saved in files of their own).
    overrides
        Pairs of a category and a case-sensitive glob for whole names; the first that matches wins
        over everything else.

    Returns
    -------
    codes
        Positions in :data:`CATEGORIES`, one for each tensor of the table.

    Raises
    ------
    UsageError
        An override's category is none of :data:`CATEGORIES`.

    Notes
    -----
    A weight taken for a moment would be lost by ``--drop``; a moment taken for a weight costs
    bytes. So, in this order:

    1. Opaque tensors are ``other``.
    2. Generator states are ``rng``: by a segment, or by the dtype and shape they have everywhere.
    3. Moments, step state, master weights and gradients, where the name claims it by whole segments
       at its front or end (:mod:`~slimckpt.analysis.state_names`). Some claims stand alone
       (``exp_avg``, ``linear_0.w_0_moment1_0``, ``optimizer.state.…``); one that could be a
       module's name (``moments.…``, ``master.…``, ``optimizer.…``) stands only with a tensor of the
       parameter's name and of the same shape, or as many elements where one of both is flat. What
       has one element is step state unless its name says moment; step state by name
       (``beta1_power``) has one element.
    4. Up to one element in no more than one dimension that is no norm or bias: ``scalar``.
    5. Weights: one-dimensional ones by norm or bias, then embedding, attention and mlp by the
       innermost segment that says so. Masks and indices are ``other``.
    """
    names, name_of = distinct_runs(table.columns["names"], table.columns["name_end"])
    shapes, shape_of = distinct_runs(table.columns["dims"], table.columns["dim_end"])
    # One key for each name, shape and dtype: replicas and steps are looked at once.
    sizes = (max(len(names), 1), max(len(shapes), 1), max(len(table.dtypes), 1))
    keys = np.ravel_multi_index((name_of, shape_of, table.columns["dtype"]), sizes)
    keys, key_of = np.unique(keys, return_inverse=True)
    name_codes, shape_codes, dtype_codes = np.unravel_index(keys, sizes)
    dims = [tuple(np.frombuffer(shape, np.int64).tolist()) for shape in shapes]
    witnesses = _Witnesses(names, dims, name_codes, shape_codes)
    override = _compile(overrides)
    found = np.zeros(len(keys), np.uint8)
    columns = (name_codes.tolist(), shape_codes.tolist(), dtype_codes.tolist())
    for at, (name, shape, dtype) in enumerate(zip(*columns, strict=True)):
        text = names[name].decode()
        category = override(text) or _category(text, dims[shape], table.dtypes[dtype], witnesses)
        found[at] = _CODES[category]
    return found[key_of.reshape(-1)]


_CONTAINERS = frozenset(
    b"_orig_mod model model_state_dict module net network params state_dict weights".split()
)
"""What a model's names may stand behind, while those of its optimizer do not."""
_CODES = {name: code for code, name in enumerate(CATEGORIES)}
_Shape = tuple[int, ...]


class _Witnesses:
    """Whether there is a tensor of a given name and shape."""

    def __init__(
        self,
        names: Sequence[bytes],
        dims: Sequence[_Shape],
        name_codes: npt.NDArray[np.intp],
        shape_codes: npt.NDArray[np.intp],
    ) -> None:
        """The codes are of all pairs there are, sorted by name."""
        self.names, self.dims = names, dims
        self.name_codes, self.shape_codes = name_codes, shape_codes
        self.codes_of: dict[bytes, list[int]] = {}

    def has(self, name: str, shape: _Shape) -> bool:
        if not self.codes_of:
            for code, known in enumerate(self.names):
                self.codes_of.setdefault(known, []).append(code)
                while (head := known.partition(b"."))[0] in _CONTAINERS and head[2]:
                    known = head[2]
                    self.codes_of.setdefault(known, []).append(code)
        for code in self.codes_of.get(name.encode(), ()):
            first, last = np.searchsorted(self.name_codes, (code, code + 1))
            for other in map(self.dims.__getitem__, self.shape_codes[first:last].tolist()):
                if shape == other:
                    return True
                if min(len(shape), len(other)) == 1 and prod(shape) == prod(other):
                    return True
        return False


def _category(name: str, shape: _Shape, dtype: str, witnesses: _Witnesses) -> str:
    if dtype.startswith(OPAQUE):
        return "other"
    segments = name.replace("/", ".").split(".")
    if any(map(_RNG.fullmatch, segments)) or (dtype, shape) in _RNG_ARRAYS:
        return "rng"
    single = prod(shape) == 1
    state = state_of(name)
    if state and (not state.witness or witnesses.has(state.witness, shape)):
        if single and not state.named:
            return STEP
        if single or state.kind != STEP or not state.named:
            return state.kind
    return _weight(segments, shape, dtype)


def _weight(segments: Sequence[str], shape: _Shape, dtype: str) -> str:
    if _STACKED_NORM.fullmatch(".".join(segments[-2:])):
        return "norm"
    if len(shape) <= 1:
        if any(map(_NORM.fullmatch, segments[-2:])):
            return "norm" if shape else "scalar"
        if _BIAS.fullmatch(segments[-1]) and shape:
            return "bias"
        if prod(shape) == 1:
            return "scalar"
    for last_resort in (False, True):
        for segment in reversed(segments):
            kind = _LAST_RESORT.get(segment) if last_resort else _by_segment(segment)
            if kind:
                return kind
    return "other" if dtype in _NOT_TRAINED else "weight"


@lru_cache(maxsize=1 << 16)
def _by_segment(segment: str) -> str | None:
    return next((kind for kind, regex in _MODULES if regex.fullmatch(segment)), None)


def unmatched(table: Table, overrides: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence for each override that no tensor's name matches."""
    if not overrides:
        return []
    names, _ = distinct_runs(table.columns["names"], table.columns["name_end"])
    texts = [name.decode() for name in names]
    return [
        f"no tensor's name matches {glob!r} (given as {category})"
        for category, glob in overrides
        if not any(map(re.compile(translate(glob)).match, texts))
    ]


def _compile(overrides: Sequence[tuple[str, str]]) -> Callable[[str], str | None]:
    rules = []
    for category, glob in overrides:
        if category not in CATEGORIES:
            raise UsageError(
                f"{category!r} is no category of tensors; there are: {', '.join(CATEGORIES)}"
            )
        rules.append((re.compile(translate(glob)).match, category))
    return lambda name: next((category for matches, category in rules if matches(name)), None)
