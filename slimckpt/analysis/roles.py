"""What a path says of a file: the run and step it belongs to, its rank and coordinates."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from enum import Flag
from functools import lru_cache
from typing import NamedTuple

from slimckpt.model import Role, StepLabel, encode_path


class _Of(Flag):
    DIRECTORY = 1
    FILE = 2


class _Row(NamedTuple):
    """Names of one kind. ``pattern`` is to match all of a path component, and its groups say what
    such a name states: ``step`` (a number), ``label`` (a step of several numbers), ``rank`` or a
    coordinate. What it matches has ``text`` in it; most patterns are so never compiled."""

    of: _Of
    text: str
    pattern: str


_N = r"[0-9]{1,18}"
"""A number that surely fits 64 bits."""
_HEAD, _TAIL = r"(?:.*[_.-])?", r"(?:[_.-].*)?"
"""What a file name may have around the part that counts."""
_MP = rf"mp_rank_(?P<tp>{_N})(?:_(?P<pp>{_N}))?(?:_(?P<ep>{_N}))?"
_ZERO = rf"(?:(?:bf|fp)16_)?zero_pp_rank_(?P<dp>{_N})_mp_rank_(?P<tp>{_N})"
_MP_TAIL = r"(?:[_.-](?![0-9]).*)?"
"""No digit first, or a number too long for a coordinate would count as the rest of the name."""
_OF_THE_JOB = "".join(
    rf"(?<!(?<![^_.-]){word}[_-])"
    for word in ("[cdemstp]p", "expp", "local", "node", "lora", "low")
)
"""Tensor-parallel ranks, ranks in a node and ranks of adapters are not ranks of the job."""

_TABLE = (
    # Megatron-LM, MindFormers
    _Row(_Of.DIRECTORY, "iter", rf"iter(?:ation)?_(?P<step>{_N})"),
    # DeepSpeed
    _Row(_Of.DIRECTORY, "global_step", rf"global_step(?P<step>{_N})"),
    # Hugging Face Trainer, accelerate
    _Row(_Of.DIRECTORY, "checkpoint", rf"checkpoint[-_](?P<step>{_N})"),
    # JAX
    _Row(_Of.DIRECTORY, "ckpt", rf"ckpt[-_](?P<step>{_N})"),
    _Row(_Of.DIRECTORY, "step", rf"step[_-]?(?P<step>{_N})"),
    # Lightning, whose step counts over all epochs; sharded strategies write a directory
    _Row(
        _Of.DIRECTORY | _Of.FILE,
        "epoch=",
        rf"(?:.*-)?epoch={_N}-step=(?P<step>{_N})(?:-v[0-9]+)?(?:\.[A-Za-z]+)?",
    ),
    # MindSpore, whose step starts anew in every epoch
    _Row(_Of.FILE, "-", rf".*-(?P<label>{_N}_{_N})\.(?:ckpt|safetensors)"),
    _Row(_Of.FILE, "step", rf"{_HEAD}step[_-]?(?P<step>{_N}){_TAIL}"),
    _Row(_Of.DIRECTORY, "rank", rf"rank[_-]?(?P<rank>{_N})"),
    _Row(_Of.FILE, "rank", rf"{_HEAD}{_OF_THE_JOB}rank[_-]?(?P<rank>{_N}){_TAIL}"),
    # Megatron-LM, DeepSpeed. Without pipeline but with expert parallelism Megatron-LM writes
    # mp_rank_TT_EEE, which no one can tell from mp_rank_TT_PPP.
    _Row(_Of.DIRECTORY, "mp_rank_", _MP),
    _Row(_Of.FILE, "mp_rank_", _MP + _MP_TAIL),
    # DeepSpeed: experts; their optimizer state; layers of a pipeline
    _Row(_Of.FILE, "_expert_", rf"layer_{_N}_expert_(?P<ep>{_N})_mp_rank_(?P<tp>{_N}){_MP_TAIL}"),
    _Row(_Of.FILE, "expp_rank_", rf"expp_rank_(?P<ep>{_N})_mp_rank_(?P<tp>{_N}){_MP_TAIL}"),
    _Row(_Of.FILE, "layer_", rf"layer_{_N}-model_(?P<tp>{_N}){_MP_TAIL}"),
    # torch.distributed.checkpoint: which rank wrote the file, and which of its files; Paddle: rank
    # and number of the save
    _Row(_Of.FILE, ".distcp", rf"__(?P<rank>{_N})_{_N}\.distcp"),
    _Row(_Of.FILE, ".distcp", rf"(?P<rank>{_N})_{_N}\.distcp"),
    # Hugging Face Trainer, accelerate
    _Row(_Of.FILE, "rng_state_", rf"rng_state_(?P<rank>{_N})\.pth"),
    _Row(_Of.FILE, "random_states_", rf"random_states_(?P<rank>{_N})\.pkl"),
    _Row(_Of.DIRECTORY, "zero_pp_rank_", _ZERO),
    _Row(_Of.FILE, "zero_pp_rank_", _ZERO + _MP_TAIL),
)


def role_of(path: bytes, directory: bool = False) -> Role:
    """What ``path`` states, of the steps the outermost and of the ranks the innermost.

    Parameters
    ----------
    path
        Relative to the root of the tree.
    directory
        Whether the last component too is a directory.

    Returns
    -------
    role
        Its ``run`` is the part of the path before the first component that states anything, and
        empty if none does; see :func:`assign_roles`.
    """
    components = encode_path(path).split("/")
    role, stated = Role(), False
    for depth, component in enumerate(components):
        is_file = depth == len(components) - 1 and not directory
        step, rank, coords = _stated(component, _Of.FILE if is_file else _Of.DIRECTORY)
        if step is None and rank is None and not coords:
            continue
        if not stated:
            stated = True
            role.run = "/".join(components[:depth])
        if role.step is None:
            role.step = step
        if rank is not None:
            role.rank = rank
        role.coords.update(coords)
    return role


def assign_roles(paths: Sequence[bytes]) -> list[Role]:
    """The role of each file of a tree.

    A file whose path states nothing (a tokenizer, say) belongs to the innermost run around it
    that other files' paths state.
    """
    roles = [role_of(path) for path in paths]
    states = [not (role.step is None and role.rank is None and not role.coords) for role in roles]
    runs = {role.run for role, stated in zip(roles, states, strict=True) if stated}
    for path, role, stated in zip(paths, roles, states, strict=True):
        if stated:
            continue
        directory = encode_path(path).rpartition("/")[0]
        while directory and directory not in runs:
            directory = directory.rpartition("/")[0]
        role.run = directory
    return roles


def roles_below(root: bytes, paths: Sequence[bytes]) -> list[Role]:
    """The role of each file of one of several trees, whose ``paths`` start with its ``root``.

    The name of the root counts (``checkpoint-10``), what is above it does not. Runs are named from
    the root on, so that those of different trees stay apart.
    """
    above = root[: len(root) - len(os.path.basename(root))]
    roles = assign_roles([path[len(above) :] for path in paths])
    for role in roles:
        stated = not (role.step is None and role.rank is None and not role.coords)
        nowhere = not (stated or role.run)
        role.run = encode_path(root) if nowhere else (encode_path(above) + role.run).rstrip("/")
    return roles


def step_key(label: StepLabel | None) -> tuple[int, tuple[int, ...], str]:
    """A sort key: no step, then numbers, then other labels by the numbers in them."""
    if label is None:
        return 0, (), ""
    if isinstance(label, int):
        return 1, (label,), ""
    return 2, tuple(map(int, re.findall("[0-9]{1,18}", label))), label


@lru_cache(maxsize=1 << 14)
def _stated(
    component: str, of: _Of
) -> tuple[StepLabel | None, int | None, tuple[tuple[str, int], ...]]:
    """The step, rank and coordinates that one component states."""
    found: dict[str, str] = {}
    for row in _TABLE:
        if row.text not in component or of not in row.of:
            continue
        if match := re.fullmatch(row.pattern, component, re.DOTALL):
            for group, text in match.groupdict().items():
                if text is not None:
                    found.setdefault(group, text)
    label = found.pop("label", None)
    numbers = {group: int(text) for group, text in found.items()}
    step, rank = numbers.pop("step", None), numbers.pop("rank", None)
    return (label if label is not None else step), rank, tuple(numbers.items())
