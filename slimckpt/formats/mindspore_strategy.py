"""What MindSpore's strategy and group files say, as ``node_strategy.proto`` (2.10) has it.

::

    ParallelStrategyMap  1 a counter of saves   2 { 1 node, 2 { 1 stage, 2 { 1 parts... }... } }...
                         3 { 1 parameter, 2 layout }...
    layout               1 dev_matrix   2 tensor_map   3 param_split_shape   4 indices_offset
                         (each { 1 number... }, repeated)
                         5 field   6 opt_weight_shard_step   7 opt_weight_shard_size
    ParallelGroupMap     1 { 1 name, 2 { 1 rank... } }...   2 { 1 rank... }

The JSON form has the same names, and ``tensor_shape``, which is wrong for uneven splits and
therefore not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from slimckpt.errors import DamagedFileError
from slimckpt.formats.mindspore_parallel import is_group_map, is_strategy
from slimckpt.formats.protobuf import Broken, fields_of, numbers_in

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """How one parameter is split, in the words of the file.

    Attributes
    ----------
    dev_matrix, tensor_map, param_split_shape, indices_offset
        One entry each, as a rule. Several of ``tensor_map`` are one for each axis of the tensor:
        numbers of device axes, the most significant first.
    """

    dev_matrix: tuple[Numbers, ...]
    tensor_map: tuple[Numbers, ...]
    param_split_shape: tuple[Numbers, ...] = ((),)
    indices_offset: tuple[Numbers, ...] = ((),)
    field: int = 0
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy file.

    Attributes
    ----------
    current_stage
        Counts saves; no pipeline stage. 1 in merged files.
    operators
        For each operator its pipeline stage, and into how many parts each axis of its inputs is
        split.
    parameters
        In merged files names start with their stage: ``1-head.weight``.
    """

    current_stage: int
    operators: dict[str, tuple[int, tuple[Numbers, ...]]]
    parameters: dict[str, ParameterLayout]


@dataclass(frozen=True, slots=True)
class Groups:
    """A group file: ranks by the name of their group, and the ranks that can restore this one."""

    groups: dict[str, Numbers]
    restore: Numbers


def read_strategy(data: bytes, label: str) -> Strategy:
    """A strategy file of either form.

    Raises
    ------
    DamagedFileError
        It is none, or breaks the rules of its form.
    """
    try:
        if data[:1].isspace() or data[:1] == b"{":
            return _from_json(json.loads(data))
        if not is_strategy(data, len(data)):
            raise ValueError("it is no ParallelStrategyMap")
        return _from_protobuf(data)
    except (Broken, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        why = error.why if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        raise DamagedFileError(f"{label} is not a strategy file of MindSpore: {why}") from None


def read_groups(data: bytes, label: str) -> Groups:
    """A group file (``group_ckpt_save_file``).

    Raises
    ------
    DamagedFileError
        It is none.
    """
    if not is_group_map(data, len(data)):
        raise DamagedFileError(f"{label} is not a group file of MindSpore")
    groups: dict[str, Numbers] = {}
    restore: Numbers = ()
    for number, value in fields_of(data):
        if number == 2:
            restore = tuple(numbers_in(_bytes(value)))
        else:
            name, body = _named(value)
            groups[name] = tuple(numbers_in(body))
    return Groups(groups, restore)


def _from_protobuf(data: bytes) -> Strategy:
    counter, operators, parameters = 0, {}, {}
    for number, value in fields_of(data):
        if number == 1 and isinstance(value, int):
            counter = value
            continue
        name, body = _named(value)
        fields = list(fields_of(body))
        if number == 2:
            stage = next((v for n, v in fields if n == 1 and isinstance(v, int)), 0)
            operators[name] = stage, _several(fields, 2)
        else:
            lists = [_several(fields, n) for n in (1, 2, 3, 4)]
            last = {n: v for n, v in fields if isinstance(v, int)}
            parameters[name] = ParameterLayout(
                lists[0],
                lists[1],
                lists[2],
                lists[3],
                last.get(5, 0),
                last.get(6, 0),
                last.get(7, 0),
            )
    return Strategy(counter, operators, parameters)


def _several(fields: list[tuple[int, int | bytes]], number: int) -> tuple[Numbers, ...]:
    return tuple(tuple(numbers_in(_bytes(v))) for n, v in fields if n == number)


def _named(value: int | bytes) -> tuple[str, bytes]:
    fields = dict(fields_of(_bytes(value)))
    return _bytes(fields[1]).decode(), _bytes(fields[2])


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    raise ValueError("a number stands where a message should")


def _from_json(root: dict[str, Any]) -> Strategy:
    operators = {
        name: (int(entry["stage"]), tuple(map(_numbers, entry["parallel_strategy"])))
        for name, entry in root.get("parallel_strategy_item", {}).items()
    }
    parameters = {}
    for name, entry in root["parallel_layout_item"].items():
        tensor_map = entry["tensor_map"]
        nested = any(isinstance(number, list) for number in tensor_map)
        parameters[name] = ParameterLayout(
            (_numbers(entry["dev_matrix"]),),
            tuple(_numbers(n if isinstance(n, list) else [n]) for n in tensor_map)
            if nested
            else (_numbers(tensor_map),),
            (_numbers(entry.get("param_split_shape", [])),),
            (_numbers(entry.get("indices_offset", [])),),
            int(entry.get("field", 0)),
            int(entry.get("opt_weight_shard_step", 0)),
            int(entry.get("opt_weight_shard_size", 0)),
        )
    return Strategy(int(root.get("current_stage", 0)), operators, parameters)


def _numbers(values: list[Any]) -> Numbers:
    if not all(type(value) is int for value in values):
        raise TypeError(f"expected whole numbers, found {values!a}")
    return tuple(values)
