"""What each file of a legacy Megatron checkpoint says: parameters, the optimizer's state of each,
and the attributes of fp32 masters.

As Megatron-LM writes it with ``--ckpt-format torch`` (``megatron/training/checkpointing.py``,
``optimizer/optimizer.py`` of megatron-core 0.16.1): one ``model_optim_rng.pt`` for each tensor and
pipeline rank. Parameters have names, the optimizer counts them: group by group, in each in the
order of the model. Which group a parameter is in is not recorded; it is told by shapes, and refused
where these leave a choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slimckpt.errors import CheckFailedError, NotUnderstoodError
from slimckpt.formats.pickles import Call, PickleReader, fields_of, pairs_of
from slimckpt.formats.torch_files import archives_of, read_archive, read_legacy
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Shape
from slimckpt.sources.positioned import ByteSource

_FILE = re.compile(
    rb"(?:.*/)?mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/model_(?:optim_)?rng\.pt", re.DOTALL
)
_CHUNK = re.compile(r"model(\d*)")
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
_BUFFERS = ("expert_bias", "inv_freq", "local_tokens_per_expert")
"""Names of tensors of the model that are no parameters."""
_OF_PARTS = re.compile(r"model\d*\.|optimizer\.(?!grad_scaler\.|(?:optimizer\.)?param_groups\.)")
_BUCKETS = b"distrib_optim.pt"
_HALF = ("BF16", "F16")
_MOST_WAYS = 1 << 12


class Marks(NamedTuple):
    """Attributes that Megatron gives a parameter, and with it its fp32 master."""

    dim: int | None
    stride: int
    shared: bool


class Parameter(NamedTuple):
    """A parameter, or buffer, of one file.

    Attributes
    ----------
    local
        Its name in the file, ``model.decoder.layers.0.mlp.linear_fc1.weight``.
    states
        Names there of the optimizer's tensors for it, by their key; ``fp32_param`` is the master.
    marks
        Of its master, where it has one.
    """

    local: str
    states: dict[str, str]
    marks: Marks | None


class Saved(NamedTuple):
    """One file.

    Attributes
    ----------
    tensor, stage
        Its tensor-parallel rank and pipeline stage.
    args
        What training was started with.
    tensors
        Dtype and shape of each tensor of the file, by name.
    chunks
        The parts of the model in it, by their number (more than one with virtual pipeline stages):
        parameters by name, in the order of the model.
    refused
        Why the optimizer's state cannot be told by parameter; empty where it can, or there is none.
    """

    file: File
    tensor: int
    stage: int
    args: dict[str, Any]
    version: float
    tensors: Mapping[str, tuple[str, Shape]]
    chunks: list[dict[str, Parameter]]
    refused: str


def saved_files(files: Sequence[File]) -> list[Saved]:
    """All such files, by stage and tensor-parallel rank; none where Megatron wrote none.

    Raises
    ------
    NotUnderstoodError
        They are of a Megatron before megatron-core, or experts are spread over them.
    DamagedFileError
        One is damaged.
    """
    found = []
    for file in files:
        match = _FILE.fullmatch(file.path)
        if match is None:
            continue
        file.holding.require()
        root = _read(file)
        if any(_CHUNK.fullmatch(key) for key in root) and root.keys() & {
            "args",
            "checkpoint_version",
        }:
            found.append(_saved(file, root, [int(text or 0) for text in match.groups()]))
    return sorted(found, key=lambda saved: (saved.stage, saved.tensor))


def names_of_parts(saved: Sequence[Saved], files: Sequence[File]) -> frozenset[str]:
    """Names of tensors that mean nothing to other ranks as they are: parameters, all of the
    optimizer but its settings, and what a distributed optimizer has in files of its own."""
    own = {name for each in saved for name in each.tensors if _OF_PARTS.match(name)}
    buckets = {
        name
        for file in files
        if os.path.basename(file.path) == _BUCKETS
        for name in file.holding.require().names()
    }
    return frozenset(own | buckets)


def _saved(file: File, root: dict[str, Any], numbers: list[int]) -> Saved:
    args = fields_of(root.get("args"))
    label = file.holding.label
    if _size(args, "expert_model_parallel_size") > 1 or numbers[2]:
        raise NotUnderstoodError(
            f"{label}: experts are spread over ranks, and which of them has which is not read here;"
            " ranks can be read one by one, and Megatron's torch_dist as a whole"
        )
    table = file.holding.require()
    tensors = {}
    for row, name in enumerate(table.names()):
        tensor = table.tensor(row)
        tensors[name] = (tensor.dtype, tensor.shape)
    keys = sorted((key for key in root if _CHUNK.fullmatch(key)), key=lambda key: (len(key), key))
    names = [
        [
            name
            for name, _ in _named(root[key])
            if f"{key}.{name}" in tensors and not name.endswith("_extra_state")
        ]
        for key in keys
    ]
    if not any(names):
        raise NotUnderstoodError(
            f"{label}: its parameters are not named as megatron-core names them; checkpoints of"
            " Megatron-LM before it are read rank by rank, or with a layout (TOML)"
        )
    locals_of = [f"{key}.{name}" for key, each in zip(keys, names, strict=True) for name in each]
    refused = ""
    states: dict[str, tuple[dict[str, str], Marks | None]] = {}
    try:
        states = _states(root.get("optimizer"), tensors, locals_of)
    except NotUnderstoodError as error:
        refused = f"{label}: {error}"
    empty: tuple[dict[str, str], Marks | None] = ({}, None)
    chunks = [
        {
            name: Parameter(local, *states.get(local, empty))
            for name in each
            if (local := f"{key}.{name}")
        }
        for key, each in zip(keys, names, strict=True)
    ]
    version = root.get("checkpoint_version")
    return Saved(
        file,
        numbers[0],
        numbers[1],
        args,
        version if isinstance(version, int | float) else 0.0,
        tensors,
        chunks,
        refused,
    )


def _read(file: File) -> dict[str, Any]:
    """The object of a file."""
    if not file.holding.file.format.startswith("torch"):
        return {}
    with file.holding.source() as source:
        return dict(_named(_root(file.holding.file.format, source)))


def _root(name: str, source: ByteSource) -> Any:
    if name == "torch-legacy":
        return read_legacy(source).root
    archives = archives_of(source)
    return PickleReader(*read_archive(archives[0]).opened()).read()


def _states(
    optimizer: Any, tensors: Mapping[str, tuple[str, Shape]], parameters: list[str]
) -> dict[str, tuple[dict[str, str], Marks | None]]:
    """The optimizer's tensors for each parameter, and the attributes of its master."""
    if optimizer is None:
        return {}
    outer = dict(_named(optimizer))
    if not outer:
        raise NotUnderstoodError(
            "its optimizer is one chained of several, and which parameters each has is not known"
        )
    wrapped = "optimizer" in outer
    inner = dict(_named(outer["optimizer"])) if wrapped else outer
    prefix = "optimizer.optimizer.state" if wrapped else "optimizer.state"
    key = next((key for key in _MASTERS if key in outer), "")
    masters = [list(group) for group in outer[key]] if key else []
    groups = [_ids(group) for group in inner.get("param_groups") or ()]
    held: dict[int, dict[str, str]] = {}
    for number, state in pairs_of(inner.get("state")):
        if type(number) is int:
            named = ((each, f"{prefix}.{number}.{each}") for each, _ in _named(state))
            held[number] = {each: local for each, local in named if local in tensors}
    if not held and not masters:
        raise NotUnderstoodError(
            "the optimizer's state is not in it; a distributed optimizer keeps it in buckets, which"
            " depend on the number of ranks and are not taken apart here"
        )
    half = [local for local in parameters if tensors[local][0] in _HALF]
    order = [local for local in parameters if local.rpartition(".")[2] not in _BUFFERS]
    if masters and [len(group) for group in masters] == [len(group) for group in groups]:
        order = [local for local in order if local in half]
        shapes = [
            [tensors[f"optimizer.{key}.{at}.{row}"][1] for row in range(len(group))]
            for at, group in enumerate(masters)
        ]
    elif not masters:
        shapes = [[_shape(held.get(number, {}), tensors) for number in group] for group in groups]
    else:
        raise NotUnderstoodError(
            "some parameters of its optimizer have fp32 masters and some have none, so which is"
            " whose is not known"
        )
    found = {}
    chosen = _interleaved([tensors[local][1] for local in order], shapes)
    for local, (at, row) in zip(order, chosen, strict=True):
        states = dict(held.get(groups[at][row], {}))
        marks = None
        if masters:
            states["fp32_param"] = f"optimizer.{key}.{at}.{row}"
            marks = _marks(masters[at][row])
        found[local] = states, marks
    return found


def _ids(group: Any) -> list[int]:
    ids = dict(_named(group)).get("params")
    return [number for number in ids if type(number) is int] if type(ids) is list else []


def _shape(states: Mapping[str, str], tensors: Mapping[str, tuple[str, Shape]]) -> Shape:
    """That of the largest of a parameter's states: its own."""
    return max((tensors[local][1] for local in states.values()), key=len, default=())


def _interleaved(shapes: list[Shape], groups: list[list[Shape]]) -> list[tuple[int, int]]:
    """For each parameter its group and number there, where groups are parts of the list of all, in
    its order; refused where shapes do not tell which parts."""
    wanted = tuple(map(len, groups))
    if sum(wanted) != len(shapes):
        raise NotUnderstoodError(
            f"its optimizer has {sum(wanted)} parameters and its model {len(shapes)}, so which is"
            " whose is not known; some may be frozen"
        )
    ways: list[dict[tuple[int, ...], list[int]]] = [{(0,) * len(groups): []}]
    for shape in shapes:
        further: dict[tuple[int, ...], list[int]] = {}
        for taken in ways[-1]:
            for at, group in enumerate(groups):
                if taken[at] < len(group) and group[taken[at]] == shape:
                    following = (*taken[:at], taken[at] + 1, *taken[at + 1 :])
                    further.setdefault(following, []).append(at)
        if not 0 < len(further) <= _MOST_WAYS:
            break
        ways.append(further)
    found: list[tuple[int, int]] = []
    taken = wanted
    while len(ways) == len(shapes) + 1 and len(found) < len(shapes):
        before = ways[len(shapes) - len(found)].get(taken, [])
        if len(before) != 1:
            break
        (at,) = before
        found.append((at, taken[at] - 1))
        taken = (*taken[:at], taken[at] - 1, *taken[at + 1 :])
    if len(found) != len(shapes):
        raise NotUnderstoodError(
            "the shapes of its optimizer's tensors do not tell which parameters they belong to"
        )
    return found[::-1]


def _marks(node: Any) -> Marks:
    """The attributes of a tensor that ``_rebuild_from_type_v2(function, class, args, state)``
    makes; one without attributes is made otherwise."""
    state: dict[str, Any] = {}
    if type(node) is Call and type(node.args) is tuple and len(node.args) == 4:
        parts = node.args[3] if type(node.args[3]) is tuple else (node.args[3],)
        state = {key: value for part in parts for key, value in _named(part)}
    dim = state.get("partition_dim")
    split = state.get("tensor_model_parallel") is True
    if split and (type(dim) is not int or dim < 0):
        raise CheckFailedError(
            f"a master is split along {dim!r:.40}; expected the number of an axis"
        )
    stride = state.get("partition_stride")
    return Marks(
        dim if split else None, stride if type(stride) is int else 1, state.get("shared") is True
    )


def _named(node: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in pairs_of(node) if type(key) is str)


def _size(args: Mapping[str, Any], key: str) -> int:
    found = args.get(key)
    return found if type(found) is int else 1
