"""What a name says of a tensor that belongs to a parameter: its moment, master copy, gradient.

Only whole path segments count, and only at the front of a name (behind the containers optimizers
are saved in) or at its end: ``momentum_encoder.layer.weight`` is a weight, and so is
``layer.exp_avg_pool.weight``. Where the spellings come from:

- MindSpore clones parameters with a prefix: ``adam_m.``, ``moment1.``, ``moments.`` (Momentum),
  ``accum.`` (Adagrad, SGD), ``exp_avg.`` (MindFormers AdamW); ``accu_grads.`` with pipelines.
- Paddle appends to a parameter's name: ``linear_0.w_0_moment1_0``, ``…_beta1_pow_acc_0``,
  ``…_fp32_master_0_moment1_0``; unified checkpoints ``llama.norm.weight/moment1_0``.
- PyTorch: ``optimizer.state.3.exp_avg``; DCP ``optim.state.wte.weight.exp_avg``; bitsandbytes
  ``state1``, ``absmax1``, ``qmap1``; torchao ``exp_avg.codes``.
- Megatron-LM: ``optimizer.fp32_from_fp16_params.0.1``; torch_dist
  ``optimizer.state.fp32_param.<parameter>``, ``chained_0.optimizer.state.param.<parameter>``
  (fully reshardable); flat buckets
  ``chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.….bucket_idx_0.exp_avg``, whose
  ``.param`` is the fp32 master.
- DeepSpeed: ``optimizer_state_dict.base_optimizer_state.state.0.exp_avg``,
  ``single_partition_of_fp32_groups.0`` (stages 1 and 2), ``fp32_flat_groups.0`` (stage 3).
- Keras: ``optimizer/vars/3``; JAX: ``opt_state/0/mu/…``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MOMENT, STEP, MASTER, GRADIENT = "moment", "step state", "master weight", "gradient"


class State(NamedTuple):
    """What a name claims.

    ``parameter`` is the parameter it belongs to, empty where the name does not tell. ``witness`` is
    the name of a tensor of the same shape without which the claim is not believed; empty where the
    name alone is enough. ``named`` is ``False`` where only the place (an optimizer's state) speaks.
    """

    kind: str
    parameter: str
    witness: str = ""
    named: bool = True


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOMENTS = _words(
    "adam_m adam_v exp_avg exp_avg_diff exp_avg_insta_col exp_avg_insta_row exp_avg_sq"
    " exp_avg_sq_col exp_avg_sq_row exp_inf lamb_m lamb_v max_exp_avg_sq momentum_buffer"
    " square_avg"
)
"""At the front or the end of a name, optimizer state whatever else there is."""

_STEPS = _words("beta1_pow_acc beta1_power beta2_pow_acc beta2_power beta3_power state_step")
_MASTERS = _words(
    "fp32_flat_groups fp32_from_fp16 fp32_from_fp16_params fp32_groups fp32_groups_flat"
    " fp32_param fp32_params master_params master_weights single_partition_of_fp32_groups"
)
"""At the front only."""

_FRONT = dict.fromkeys(_MOMENTS, MOMENT) | dict.fromkeys(_STEPS, STEP)
_FRONT |= dict.fromkeys(_MASTERS, MASTER) | {"accu_grads": GRADIENT}
_END = dict.fromkeys(_MOMENTS, MOMENT) | dict.fromkeys(_STEPS, STEP)

_MAYBE = dict.fromkeys(
    _words(
        "accum accum_update accumulator mean_grad mean_square moment moment1 moment2 moment3"
        " moments vhat"
    ),
    MOMENT,
)
_MAYBE |= dict.fromkeys(_words("master master_param master_weight"), MASTER)
_MAYBE |= dict.fromkeys(_words("grad gradients grads main_grad main_grads"), GRADIENT)
"""At the front or the end, if there is a parameter of that name and shape: models have modules
called ``moment`` and ``master`` too. Not so ``momentum``: the modules of that name are copies of
others, whose names and shapes are there."""
_INSIDE = _MAYBE | dict.fromkeys(_words("m momentum mu nu v velocity"), MOMENT)
"""In an optimizer's state, likewise."""

_OPTIMIZERS = _words("opt optim optimizer")
_STATES = _words(
    "base_optimizer_state opt_state optimizer_state optimizer_state_dict optimizer_states"
    " optimizer_weights"
)
_WITHIN = _words("distributed state state_dict vars")
_CHAINED = re.compile(r"chained_[0-9]+")
_BUCKET = re.compile(r"(?:bucket|gbuf|dp_group)_idx_[0-9]+")
_QUANTIZED = _words("absmax codes qmap scale")
"""Parts of one quantized moment."""
_TORCH_KEYS = _MOMENTS | _words(
    "absmax1 absmax2 acc_delta grad_avg max1 max2 new_max1 new_max2 qmap1 qmap2 state1 state2 step"
)
"""Keys of the state of one numbered parameter, where nothing else says that it is one."""
_OPTIMIZER_KEYS = _TORCH_KEYS | _words(
    "RMS ax col_var eta hessian mu neg_pre_grad prev row_var step_size sum unorm_vec variance z"
)
"""The same, inside something called an optimizer. Other keys hold weights: ``ema_param``."""
_MASTER_KEY = re.compile(r"(?:.*_)?(?:fp32|master)(?:_.*)?|(?:shard_)?main_param|param")

_PADDLE = re.compile(
    r"(?P<parameter>.+?)(?P<master>[_./]fp32_master_[0-9]+)?"
    r"(?:[_./](?:(?P<moment>moment1|moment2|moment2_max)|(?P<step>beta[12]_pow_acc)"
    r"|(?P<maybe>_avg_squared_grad|_avg_squared_update|inf_norm|mean_grad|mean_square|moment"
    r"|momentum|velocity))_[0-9]+)?",
    re.DOTALL,
)
_PADDLE_PARAMETER = re.compile(r".*\.[bw]_[0-9]+", re.DOTALL)
"""As Paddle names parameters itself (``linear_0.w_0``): what follows is surely a state of it."""

_SEGMENT = re.compile(r"[^./]+")


def parameter_of(name: str) -> str:
    """The parameter that a moment, step state, master weight or gradient belongs to.

    As far as the name tells: empty for ``optimizer.state.0.exp_avg``, which counts parameters, for
    ``fp32_flat_groups.0``, which joins them, and for names of no such tensor.
    """
    state = state_of(name)
    return state.parameter if state else ""


def state_of(name: str) -> State | None:
    """What a name claims its tensor to be; ``None`` for that of an ordinary tensor."""
    if paddle := _paddle(name):
        return paddle
    bounds = [found.span() for found in _SEGMENT.finditer(name)]
    segments = [name[start:end] for start, end in bounds]
    if not segments:
        return None
    first, optimizer, inside = _containers(segments)
    if optimizer and segments[first] == "param_groups":
        return None
    stop = len(segments)

    def parameter(start: int, stop: int) -> str:
        inner = segments[start:stop]
        if not inner or all(s.isdigit() for s in inner) or any(map(_BUCKET.fullmatch, inner)):
            return ""
        return name[bounds[start][0] : bounds[stop - 1][1]]

    end = stop - 1
    if end > first and segments[end] in _QUANTIZED and segments[end - 1] in _END:
        end -= 1
    front, leaf = segments[first], segments[end]
    numbered = inside or any(map(_BUCKET.fullmatch, segments))
    for kinds, marker, start, beyond in (
        (_FRONT, front, first + 1, stop),
        (_END, leaf, first, end),
    ):
        if marker in kinds:
            kind, owner = kinds[marker], parameter(start, beyond)
            if kind != MOMENT:
                return State(kind, owner)
            return State(kind, owner, owner) if owner or numbered else None
    if leaf == "param" and any(map(_BUCKET.fullmatch, segments)):
        return State(MASTER, "")
    if inside:
        if _MASTER_KEY.fullmatch(leaf):
            return State(MASTER, parameter(first, end))
        if not parameter(first, end) and leaf in _OPTIMIZER_KEYS:
            return State(MOMENT, "", named=False)
        if leaf in ("count", "step"):
            return State(STEP, parameter(first, end), named=False)
        if segments[first - 1] == "vars" and leaf.isdigit() and first == end:
            return State(MOMENT, "", named=False)
        if front == "param":
            owner = parameter(first + 1, stop)
            return State(MASTER, owner, owner)
    maybe = _INSIDE if inside else _MAYBE
    claims = [(maybe, front, first + 1, stop), (maybe, leaf, first, end)]
    if not optimizer and leaf == "param" and end:
        return State(MASTER, "", name[: bounds[end][0]] + "exp_avg")
    for kinds, marker, start, beyond in claims:
        if marker in kinds and (owner := parameter(start, beyond)):
            return State(kinds[marker], owner, owner)
    return None


def _paddle(name: str) -> State | None:
    found = _PADDLE.fullmatch(name)
    if not found or not found.lastgroup or found.lastgroup == "parameter":
        return None
    parameter = found["parameter"]
    if found["step"]:
        return State(STEP, parameter)
    if not (found["moment"] or found["maybe"]):
        return State(MASTER, parameter)
    sure = found["master"] or _PADDLE_PARAMETER.fullmatch(parameter)
    return State(MOMENT, parameter, "" if sure else parameter)


def _containers(segments: list[str]) -> tuple[int, bool, bool]:
    """Skip the containers an optimizer is saved in.

    Returns
    -------
    first, optimizer, inside
        The first segment behind them; whether they name an optimizer, and whether its state.
    """
    at, optimizer, inside = 0, False, False
    while at < len(segments) - 1:
        segment, following = segments[at], segments[at + 1]
        if segment in _STATES:
            optimizer = inside = True
        elif segment in _OPTIMIZERS or _CHAINED.fullmatch(segment):
            optimizer = True
        elif optimizer and segment in _WITHIN:
            inside = inside or segment in ("state", "vars")
        elif not (
            optimizer
            and segment.isdigit()
            and (following in _WITHIN or following in _FRONT or following in _INSIDE)
            and at + 2 < len(segments)
        ):
            break
        at += 1
    if not optimizer and segments[0] == "state" and len(segments) > 2 and segments[1].isdigit():
        # torch.save(optimizer.state_dict()): state.<number>.<key>
        rest = segments[2:]
        inside = rest[0] in _TORCH_KEYS and all(key in _QUANTIZED for key in rest[1:])
        return (1, True, True) if inside else (0, False, False)
    return at, optimizer, inside
