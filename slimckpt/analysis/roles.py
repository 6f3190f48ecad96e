"""What a path says of a file: the run and step it belongs to, its rank and coordinates."""

from __future__ import annotations

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
    """Names of one kind. The groups of ``pattern``, which is to match all of a path component, say
    what the name states: ``step`` (a number), ``label`` (a step of several numbers), ``rank`` or a
    coordinate."""

    of: _Of
    pattern: re.Pattern[str]


def _row(of: _Of, pattern: str) -> _Row:
    # N is a number that fits 64 bits; HEAD and TAIL are what a file name may have around the part
    # that counts. A TAIL does not start with a digit, or a number too long would be read in part.
    for short, long in (
        ("HEAD", r"(?:.*[_.-])?"),
        ("TAIL", r"(?:[_.-](?![0-9]).*)?"),
        ("REST", r"(?:[_.-].*)?"),
        ("N", r"[0-9]{1,18}"),
    ):
        pattern = pattern.replace(short, long)
    return _Row(of, re.compile(pattern, re.DOTALL))


_MP = r"mp_rank_(?P<tp>N)(?:_(?P<pp>N))?(?:_(?P<ep>N))?"
_ZERO = r"(?:(?:bf|fp)16_)?zero_pp_rank_(?P<dp>N)_mp_rank_(?P<tp>N)"
# A tensor-parallel rank or the rank of an adapter is not a rank of the job.
_GLOBAL = "".join(
    rf"(?<!(?<![^_.-]){word}[_-])" for word in ("[cdemstp]p", "local", "node", "lora", "low")
)

_TABLE = (
    # Megatron-LM, MindFormers
    _row(_Of.DIRECTORY, r"iter(?:ation)?_(?P<step>N)"),
    # DeepSpeed
    _row(_Of.DIRECTORY, r"global_step(?P<step>N)"),
    # Hugging Face Trainer
    _row(_Of.DIRECTORY, r"checkpoint-(?P<step>N)"),
    _row(_Of.DIRECTORY, r"step[_-]?(?P<step>N)"),
    # Lightning, whose step counts over all epochs; sharded strategies write a directory
    _row(
        _Of.DIRECTORY | _Of.FILE, r"(?:.*-)?epoch=N-step=(?P<step>N)(?:-v[0-9]+)?(?:\.[A-Za-z]+)?"
    ),
    # MindSpore, whose step starts anew in every epoch
    _row(_Of.FILE, r".*-(?P<label>N_N)\.(?:ckpt|safetensors)"),
    _row(_Of.FILE, r"HEADstep[_-]?(?P<step>N)REST"),
    _row(_Of.DIRECTORY, r"rank[_-]?(?P<rank>N)"),
    _row(_Of.FILE, rf"HEAD{_GLOBAL}rank[_-]?(?P<rank>N)REST"),
    # Megatron-LM, DeepSpeed. Without pipeline but with expert parallelism Megatron-LM writes
    # mp_rank_TT_EEE, which no one can tell from mp_rank_TT_PPP.
    _row(_Of.DIRECTORY, _MP),
    _row(_Of.FILE, _MP + "TAIL"),
    _row(_Of.DIRECTORY, _ZERO),
    _row(_Of.FILE, _ZERO + "TAIL"),
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
        if of in row.of and (match := row.pattern.fullmatch(component)):
            for group, text in match.groupdict().items():
                if text is not None:
                    found.setdefault(group, text)
    label = found.pop("label", None)
    numbers = {group: int(text) for group, text in found.items()}
    step, rank = numbers.pop("step", None), numbers.pop("rank", None)
    return (label if label is not None else step), rank, tuple(numbers.items())
