"""The layout of DeepSpeed's ZeRO checkpoints, of all three stages.

As DeepSpeed 0.19.8 writes them (``runtime/zero/stage_1_and_2.py``, ``stage3.py`` and
``utils/zero_to_fp32.py``). Stages 1 and 2 lay the parameters of a group end to end, pad them, and
give every rank an equal slice; ``param_slice_mappings`` says which part of which parameter lies
where in it. Stage 3 splits each parameter by itself, and a rank has its parts end to end. Padding
is what is left over: it is on the last ranks, may be uninitialised, and is named by no piece.

Whole tensors are named by their parameter: ``fc.weight`` is the fp32 master (or what there is, of
buffers and frozen parameters), ``module.fc.weight`` the weight that was trained with, and
``optimizer.state.fc.weight.exp_avg`` a moment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from slimckpt.errors import CheckFailedError, NotUnderstoodError
from slimckpt.formats.numpy_arrays import is_shape
from slimckpt.formats.pickles import PickleReader, fields_of, pairs_of
from slimckpt.formats.torch_files import archives_of, read_archive
from slimckpt.formats.torch_tensors import plain
from slimckpt.layouts.deepspeed_ranks import spread_groups, spread_params
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Layout, Piece, Shape, Shard, TensorLayout, whole_box
from slimckpt.model import Table, encode_path

_OPTIMIZER = re.compile(
    rb"(?:.*/)?(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"
)
_MODEL = re.compile(rb"(?:.*/)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_STATES = "optimizer_state_dict"
_GAPS = "param_alignment_paddings"
_MOMENT = re.compile(rf"{_STATES}\.(?:base_optimizer_state|{_STATES})\.(?:state\.)?(\d+)\.(\w+)")
_MASTER = re.compile(rf"{_STATES}\.(?:single_partition_of_fp32_groups|fp32_flat_groups)\.(\d+)")


class Part(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter, at element ``at`` of group ``group``."""

    group: int
    start: int
    stop: int
    at: int


class Saved(NamedTuple):
    """What the files of one rank's states say."""

    file: File
    states: dict[str, Any]
    local: dict[str, tuple[str, Shape]]
    """Dtype and shape of each tensor of the file, by name."""


class Model(NamedTuple):
    """What ``model_states`` says of the parameters."""

    saved: list[Saved]
    groups: list[dict[str, Shape]]
    frozen: dict[str, Shape]
    buffers: list[str]
    shared: dict[str, str]


def deepspeed_layout(files: Sequence[File], n_ranks: int | None = None) -> Layout | None:
    """The layout of a step that DeepSpeed saved under ZeRO; ``None`` where it did not.

    With ``n_ranks`` the layout that DeepSpeed would give the same state on so many data-parallel
    ranks: padding is by its own rule, and is zero.

    Raises
    ------
    NotUnderstoodError
        It is also split by tensor or pipeline parallelism, or has experts: how those are merged is
        not recorded.
    CheckFailedError
        Files of ranks are missing, or contradict each other.
    """
    ranks = _ranked(files, _OPTIMIZER)
    models = _ranked(files, _MODEL)
    if not ranks or not models:
        return None
    optimizer = [_saved(file, _STATES) for file in ranks]
    model = _model([_saved(file, "") for file in models])
    where = encode_path(ranks[0].path)
    stage = _stage(optimizer[0].states.get("zero_stage"))
    count = optimizer[0].states.get("partition_count")
    saved_by = max((c for c in _listed(count) if type(c) is int), default=0)
    if saved_by != len(ranks):
        raise CheckFailedError(
            f"{where} is of {saved_by} ranks, and {len(ranks)} files of optimizer states are there;"
            " files are missing, or are of another save"
        )
    parts = _parts_of_stage_3 if stage == 3 else _parts_of_slices
    found = _Tensors(model, optimizer, parts(model, optimizer))
    origin = f"the records in {where}"
    if n_ranks is None:
        return Layout(found.tensors, tuple(range(saved_by)), origin, found.weights)
    if any(any(_listed(gaps)) for gaps in _listed(optimizer[0].states.get(_GAPS))):
        raise NotUnderstoodError(
            f"{where}: parameters lie with gaps in their groups ({_GAPS}), and the rule for them on"
            " other ranks is not known"
        )
    spread = spread_params if stage == 3 else spread_groups
    tensors = dict(spread(found.tensors, n_ranks))
    return Layout(tensors, tuple(range(n_ranks)), f"ZeRO stage {stage} on {n_ranks} ranks")


class _Tensors:
    """Whole tensors, and which of them are the weights."""

    def __init__(
        self, model: Model, optimizer: list[Saved], parts: list[dict[str, list[Part]]]
    ) -> None:
        self.tensors: dict[str, TensorLayout] = {}
        self.weights: dict[str, tuple[str, str]] = {}
        self._model, self._optimizer = model, optimizer
        for name in model.buffers:
            self._kept(name, name)
            dtype = self.tensors[name].dtype if name in self.tensors else ""
            self._weigh(name, "F32" if dtype in ("BF16", "F16") else dtype)
        for name, shape in model.frozen.items():
            self._frozen(name, shape)
            self._weigh(name)
        for group in model.groups:
            for name, shape in group.items():
                self._trained(name, shape, parts)
                self._weigh(name)
                self._kept(f"module.{name}", name)
        for name, source in model.shared.items():
            self._kept(f"module.{name}", name)
            if source in self.weights:
                self.weights[name] = self.weights[source]

    def _weigh(self, name: str, dtype: str = "") -> None:
        if name in self.tensors:
            self.weights[name] = (name, dtype or self.tensors[name].dtype)

    def _kept(self, whole: str, name: str) -> None:
        """A tensor of the module that every file of model states has as it is."""
        local = f"module.{name}"
        held = [(s.file, *s.local[local]) for s in self._model.saved if local in s.local]
        if not held or (0 in held[0][2] and whole != name):
            return
        dtype, shape = held[0][1:]
        pieces = (Piece(whole_box(shape), (0,) * len(shape)),)
        shards = [Shard(_path(file), form, pieces, local) for file, _, form in held]
        self.tensors[whole] = TensorLayout(dtype, shape, tuple(shards))

    def _frozen(self, name: str, shape: Shape) -> None:
        local = f"frozen_param_fragments.{name}"
        held = [(s.file, *s.local[local]) for s in self._model.saved if local in s.local]
        if len(held) < 2 or math.prod(held[0][2]) == math.prod(shape):
            self._kept(name, name)
            return
        each, numel = math.prod(held[0][2]), math.prod(shape)
        shards = []
        for rank, (file, _, form) in enumerate(held):
            span = min(rank * each, numel), min((rank + 1) * each, numel)
            shards.append(Shard(_path(file), form, (Piece(whole_box(shape), 0, span),), local))
        self.tensors[name] = TensorLayout(held[0][1], shape, tuple(shards))

    def _trained(self, name: str, shape: Shape, parts: list[dict[str, list[Part]]]) -> None:
        """A parameter's master and its moments: all that has an element for each of its own."""
        shards: dict[str, list[Shard]] = {}
        dtypes: dict[str, str] = {}
        for saved, mine in zip(self._optimizer, parts, strict=True):
            for part in mine.get(name, ()):
                for key, (local, dtype, form) in _flat(saved, part).items():
                    whole = f"optimizer.state.{name}.{key}" if key else name
                    piece = Piece(whole_box(shape), part.at, (part.start, part.stop))
                    shards.setdefault(whole, []).append(
                        Shard(_path(saved.file), form, (piece,), local)
                    )
                    if dtypes.setdefault(whole, dtype) != dtype:
                        raise CheckFailedError(
                            f"tensor {whole!a}: {saved.file.holding.label} has it as {dtype}, files"
                            f" of other ranks as {dtypes[whole]}"
                        )
        for whole, held in shards.items():
            self.tensors[whole] = TensorLayout(dtypes[whole], shape, tuple(held))


def _flat(saved: Saved, part: Part) -> dict[str, tuple[str, str, Shape]]:
    """The flat tensors of a group: the master (an empty key) and moments, those long enough."""
    found: dict[str, tuple[str, str, Shape]] = {}
    for local, (dtype, shape) in saved.local.items():
        match = _MASTER.fullmatch(local) or _MOMENT.fullmatch(local)
        long = len(shape) == 1 and shape[0] >= part.at + part.stop - part.start
        if match and long and int(match[1]) == part.group:
            found[match[2] if match.re is _MOMENT else ""] = (local, dtype, shape)
    return found


def _parts_of_slices(model: Model, optimizer: list[Saved]) -> list[dict[str, list[Part]]]:
    """Stages 1 and 2: what each rank's slice of each group has of which parameter."""
    taken: dict[str, int] = {}
    found: list[dict[str, list[Part]]] = []
    for saved in optimizer:
        mine: dict[str, list[Part]] = {}
        for number, mapping in enumerate(_mappings(saved)):
            for name, start, numel in mapping:
                first = taken.get(name, 0)
                mine.setdefault(name, []).append(Part(number, first, first + numel, start))
                taken[name] = first + numel
        found.append(mine)
    if not any(found):
        raise NotUnderstoodError(
            f"{optimizer[0].file.holding.label} has no param_slice_mappings; it was written by a"
            " DeepSpeed before 0.7, which did not record where in the groups parameters lie"
        )
    return found


def _mappings(saved: Saved) -> Iterator[list[tuple[str, int, int]]]:
    """For each group the parameters in a rank's slice: name, start and number of elements."""
    for mapping in _listed(saved.states.get("param_slice_mappings")):
        rows = []
        for name, address in pairs_of(mapping):
            fields = fields_of(address)
            start, numel = fields.get("start"), fields.get("numel")
            if type(name) is not str or type(start) is not int or type(numel) is not int:
                raise CheckFailedError(
                    f"{saved.file.holding.label}: its param_slice_mappings say {start!r:.40} and"
                    f" {numel!r:.40} of {name!r:.80}"
                )
            rows.append((name, start, numel))
        yield rows


def _parts_of_stage_3(model: Model, optimizer: list[Saved]) -> list[dict[str, list[Part]]]:
    """Stage 3: a rank's part of each parameter, end to end over all of its flat groups."""
    found: list[dict[str, list[Part]]] = []
    for rank, saved in enumerate(optimizer):
        ends, total = [], 0
        masters = {int(m[1]): s[0] for n, (_, s) in saved.local.items() if (m := _MASTER.match(n))}
        for number in range(len(masters)):
            total += masters.get(number, 0)
            ends.append(total)
        mine: dict[str, list[Part]] = {}
        at = 0
        for group in model.groups:
            for name, shape in group.items():
                numel = math.prod(shape)
                each = -(-numel // len(optimizer))
                first, last = min(rank * each, numel), min((rank + 1) * each, numel)
                mine[name] = list(_over(ends, at, first, last))
                at += each
        if at != total:
            raise CheckFailedError(
                f"{saved.file.holding.label}: its flat groups have {total} elements, where the"
                f" parameters in the model states take {at}"
            )
        found.append(mine)
    return found


def _over(ends: list[int], at: int, first: int, last: int) -> Iterator[Part]:
    """Elements ``first`` to ``last`` that begin at ``at`` of some groups laid end to end."""
    begin = 0
    for number, end in enumerate(ends):
        low, high = max(at, begin), min(at + last - first, end)
        if low < high:
            yield Part(number, first + low - at, first + high - at, low - begin)
        begin = end


def _model(saved: list[Saved]) -> Model:
    states = saved[0].states
    label = saved[0].file.holding.label
    if states.get("mp_world_size") not in (1, None) or any(
        type(key) is str and key.startswith("layer_") for key in states
    ):
        raise NotUnderstoodError(
            f"{label}: it was saved under tensor or pipeline parallelism of"
            f" {states.get('mp_world_size')}, and how those parts are joined is not recorded;"
            " a layout can say it (TOML)"
        )
    groups = [_shapes(group) for group in _listed(states.get("param_shapes"))]
    buffers = [name for name in _listed(states.get("buffer_names")) if type(name) is str]
    shared = {
        name: source
        for name, source in pairs_of(states.get("shared_params"))
        if type(name) is str and type(source) is str
    }
    frozen = _shapes(states.get("frozen_param_shapes"))
    known = {*buffers, *shared, *frozen, *(name for group in groups for name in group)}
    for local, (_, shape) in saved[0].local.items():
        name = local.removeprefix("module.")
        if name != local and name not in known and 0 not in shape:
            frozen[name] = shape  # stage 1 does not list them
    return Model(saved, groups, frozen, buffers, shared)


def _ranked(files: Sequence[File], pattern: re.Pattern[bytes]) -> list[File]:
    """Files of that name, by data-parallel rank; those of one directory and of one mp rank."""
    found: dict[int, File] = {}
    for file in files:
        match = pattern.fullmatch(file.path)
        if not match:
            continue
        if int(match[2]):
            raise NotUnderstoodError(
                f"{file.holding.label}: it was saved under tensor parallelism, and how those parts"
                " are joined is not recorded; a layout can say it (TOML)"
            )
        found[int(match[1] or 0)] = file
    return [found[rank] for rank in sorted(found)]


def _saved(file: File, inner: str) -> Saved:
    """The object of a file, or what it has under the key ``inner``."""
    table = file.holding.require()
    with file.holding.source() as source:
        (archive,) = archives_of(source)
        root = PickleReader(*read_archive(archive).opened()).read()
    states = dict(_named(root))
    if inner:
        states = dict(_named(states.get(inner)))
    return Saved(file, states, dict(_locals(table)))


def _locals(table: Table) -> Iterator[tuple[str, tuple[str, Shape]]]:
    for row, name in enumerate(table.names()):
        tensor = table.tensor(row)
        yield name, (tensor.dtype, tensor.shape)


def _named(node: Any) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in pairs_of(node) if type(key) is str)


def _shapes(node: Any) -> dict[str, Shape]:
    shapes = ((name, plain(shape)) for name, shape in _named(node))
    return {name: shape for name, shape in shapes if is_shape(shape)}


def _listed(node: Any) -> list[Any]:
    return list(node) if type(node) in (list, tuple) else [] if node is None else [node]


def _stage(node: Any) -> int:
    """The stage, which is an enumeration's member."""
    args = getattr(node, "args", None)
    found = args[0] if type(args) is tuple and args else node
    return found if type(found) is int else 0


def _path(file: File) -> str:
    return encode_path(file.path)
