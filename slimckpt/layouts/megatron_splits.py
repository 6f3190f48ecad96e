"""How Megatron splits a parameter over tensor-parallel ranks, and what it takes to be sure.

As megatron-core 0.16.1 does (``tensor_parallel/layers.py``, ``transformer/mlp.py``,
``transformer/attention.py``). The attributes of the fp32 master say which axis; where there is no
master, the name does. ``linear_fc1`` of a gated unit (SwiGLU) is ``[gate; up]`` on each rank: two
boxes. ``linear_qkv`` has the query heads, key and value of one group after another, and ranks hold
equal runs of that, so one box. Neither is in the attributes: they are in ``args``, and shapes must
agree with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from slimckpt.errors import CheckFailedError, NotUnderstoodError
from slimckpt.layouts.layout import Shape
from slimckpt.layouts.megatron_files import Marks

_COLUMN = (
    *("word_embeddings", "output_layer", "linear_qkv", "linear_q", "linear_kv", "linear_fc1"),
    *("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"),
)
"""Split along axis 0, biases too."""
_ROW = ("linear_proj", "linear_fc2")
"""Split along axis 1; biases are replicated."""
_WHOLE = (
    *("position_embeddings", "tokentype_embeddings", "router", "final_norm", "final_layernorm"),
    *("input_layernorm", "pre_mlp_layernorm", "pre_cross_attn_layernorm", "enorm", "hnorm"),
    *("q_layernorm", "k_layernorm", "kv_layernorm"),
)
"""On every rank."""
_PLAIN = (*_COLUMN, *_ROW, "linear_q_down_proj", "linear_kv_down_proj", "eh_proj")
"""Parts along the axis that attributes name are the whole, one behind the other (of
``linear_fc1`` where it is not gated)."""
_GATED_BY = ("swiglu", "quick_geglu", "gated_linear_unit")
EMBEDDING = "embedding.word_embeddings.weight"
_OLDEST_QKV = 2.0
"""``checkpoint_version`` since which qkv is in the order that is read here."""


class Division(NamedTuple):
    """How a parameter is split: along ``dim``, each of its ``sections`` by itself; ``dim`` is
    ``None`` where it is replicated."""

    dim: int | None
    sections: tuple[int, ...] = ()


def axis_of(name: str, marks: Marks | None) -> int | None:
    """The axis along which a parameter is split, ``None`` where each rank has all of it.

    Parameters
    ----------
    name
        Of the parameter, in the model.
    marks
        Attributes of its master; ``None`` where it has none.

    Raises
    ------
    NotUnderstoodError
        It is not known how parts of such a parameter are joined.
    CheckFailedError
        Attributes contradict the name.
    """
    module, leaf = ["", *name.split(".")][-2:]
    known, by_name = _by_name(module, leaf)
    if marks is None:
        if not known:
            raise NotUnderstoodError(
                f"parameter {name!a}: the file has no fp32 master whose attributes say how it is"
                " split, and it is none of those known by name; a layout can say it (TOML)"
            )
        return by_name
    if known and marks.dim != by_name:
        raise CheckFailedError(
            f"parameter {name!a}: its master says that it is {_along(marks.dim)}, and Megatron has"
            f" {module} {_along(by_name)}; the optimizer's state is of another model"
        )
    fused = marks.stride != 1 and module != "linear_fc1"
    if marks.dim is not None and (fused or module not in _PLAIN or leaf not in ("weight", "bias")):
        raise NotUnderstoodError(
            f"parameter {name!a} is {_along(marks.dim)}, and it is not known here whether its parts"
            " are fused of others; a layout can say it (TOML)"
        )
    return marks.dim


def division_of(
    name: str,
    dim: int | None,
    shape_of: Callable[[str], Shape],
    args: Mapping[str, Any],
    version: float,
) -> Division:
    """How a parameter is split, of what it is fused included.

    Parameters
    ----------
    name
        Of the parameter, in the model.
    dim
        The axis.
    shape_of
        Gives the whole shape of a parameter, ``()`` where there is none of that name.
    args
        What training was started with.
    version
        ``checkpoint_version``.

    Raises
    ------
    NotUnderstoodError
        It is fused, and ``args`` do not say how.
    CheckFailedError
        It has not the shape that ``args`` lead to.
    """
    module = ["", *name.split(".")][-2]
    if dim is not None and module == "linear_fc1":
        return _check_gated(name, dim, shape_of, args)
    if dim is not None and module == "linear_qkv":
        _check_groups(name, shape_of, args, version)
    rows = args.get("padded_vocab_size")
    if name == EMBEDDING and type(rows) is int and shape_of(name)[0] != rows:
        raise CheckFailedError(
            f"parameter {name!a} has {shape_of(name)[0]} rows in all; expected {rows}, the"
            " padded_vocab_size in args; files are missing, or are of another save"
        )
    return Division(dim)


def _by_name(module: str, leaf: str) -> tuple[bool, int | None]:
    """Whether the name tells, and what."""
    if leaf in ("layer_norm_weight", "layer_norm_bias") or module in _WHOLE:
        return True, None
    if leaf in ("weight", "bias") and module in _COLUMN:
        return True, 0
    if leaf in ("weight", "bias") and module in _ROW:
        return True, 1 if leaf == "weight" else None
    return False, None


def _along(dim: int | None) -> str:
    return "on every rank whole" if dim is None else f"split along axis {dim}"


def _check_gated(
    name: str, dim: int, shape_of: Callable[[str], Shape], args: Mapping[str, Any]
) -> Division:
    """Whether gate and up are in one; proved by what ``linear_fc2`` takes in."""
    second = name.rpartition(".")[0].removesuffix("linear_fc1") + "linear_fc2.weight"
    rows = shape_of(name)[0]
    width = _columns(shape_of(second))
    said = [args[key] for key in _GATED_BY if type(args.get(key)) is bool]
    if not said and rows != width:
        raise NotUnderstoodError(
            f"parameter {name!a} of {rows} rows may be [gate; up] on each rank, and args, as far as"
            " they are in the file, do not say whether it is (swiglu); a layout can say it (TOML:"
            " sections = [1, 1])"
        )
    gated = any(said)
    if width != (rows // 2 if gated else rows) or (gated and rows % 2):
        raise CheckFailedError(
            f"parameter {name!a} has {rows} rows in all and {second!a} {width} columns, which args"
            f" (swiglu: {gated}) do not explain; they are of another model"
        )
    return Division(dim, (1, 1) if gated else ())


def _check_groups(
    name: str, shape_of: Callable[[str], Shape], args: Mapping[str, Any], version: float
) -> None:
    """The rows are those of the heads and groups in ``args``."""
    if version < _OLDEST_QKV:
        raise NotUnderstoodError(
            f"parameter {name!a}: checkpoint_version is {version}, and before {_OLDEST_QKV} rows of"
            " qkv were in another order, which is not read here"
        )
    rows = shape_of(name)[0]
    projection = name.rpartition(".")[0].removesuffix("linear_qkv") + "linear_proj.weight"
    width = _columns(shape_of(projection))
    heads, groups = count_in(args, "num_attention_heads"), count_in(args, "num_query_groups")
    if args.get("group_query_attention") is False:
        groups = heads
    if not groups and rows == 3 * width:
        return
    if not groups or not heads:
        raise NotUnderstoodError(
            f"parameter {name!a} of {rows} rows has queries, keys and values in groups, and args,"
            " as far as they are in the file, do not say in how many (num_query_groups,"
            " num_attention_heads); a layout can say it (TOML)"
        )
    channels = count_in(args, "kv_channels") or width // heads
    queries = heads * (2 if args.get("attention_output_gate") is True else 1)
    if heads % groups or rows != channels * (queries + 2 * groups) or width != channels * heads:
        raise CheckFailedError(
            f"parameter {name!a} has {rows} rows in all and {projection!a} {width} columns, which"
            f" {heads} heads in {groups} groups of {channels} channels, as args say, do not"
            " explain; they are of another model"
        )


def _columns(shape: Shape) -> int:
    return shape[1] if len(shape) == 2 else 0


def count_in(args: Mapping[str, Any], key: str) -> int:
    found = args.get(key)
    return found if type(found) is int and found > 0 else 0
