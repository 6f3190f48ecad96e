"""The layout of legacy Megatron checkpoints: ``iter_0000010/mp_rank_01_000/model_optim_rng.pt``.

Whole tensors have the names that files of a model without pipeline would have, with layers numbered
over all stages: ``model.decoder.layers.7.mlp.linear_fc1.weight``. What the optimizer has for that
parameter is ``optimizer.state.exp_avg.decoder.layers.7.mlp.linear_fc1.weight``, the fp32 master
``optimizer.state.fp32_param.…``, as in Megatron's torch_dist. A word embedding that is tied over
stages is one tensor; rows that pad the vocabulary are part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slimckpt.errors import NotUnderstoodError, UnknownTensorError, UsageError
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Layout, TensorLayout
from slimckpt.layouts.megatron_files import names_of_parts, saved_files
from slimckpt.layouts.megatron_model import DECODER, LAYER, Model
from slimckpt.layouts.megatron_splits import EMBEDDING, count_in
from slimckpt.layouts.placement import Placement, Rules
from slimckpt.layouts.splits import Split
from slimckpt.model import encode_path

_FIRST, _LAST = ("embedding.",), ("decoder.final_", "output_layer.")
_STATES = "optimizer.state"


@dataclass(frozen=True, slots=True)
class MegatronLayout(Layout):
    """A layout that knows how Megatron would have it on other ranks."""

    model: Model = field(kw_only=True)

    def at(self, tensor: int, pipeline: int = 1) -> Rules:
        """Rules for the same tensors at other parallel sizes; ranks vary fastest along tensor
        parallelism.

        Parameters
        ----------
        tensor, pipeline
            Tensor-parallel ranks, and pipeline stages, each with as many layers.

        Raises
        ------
        UsageError
            Heads or layers cannot be split like that.
        """
        return _RulesAt(self.model, tensor, pipeline)


def megatron_layout(files: Sequence[File]) -> MegatronLayout | None:
    """The layout of a step in Megatron's legacy format; ``None`` where it is in none.

    Raises
    ------
    NotUnderstoodError
        It is of a Megatron before megatron-core, or experts are spread over ranks.
    CheckFailedError
        Files are missing, or contradict each other. What else is wrong is found tensor by tensor.
    """
    saved = saved_files(files)
    if not saved:
        return None
    model = Model(saved)
    tensors = _Tensors(model)
    weights = {
        name: (f"model.{name}", held[0][0].tensors[held[0][1].local][0])
        for name, held in model.held.items()
    }
    where = encode_path(saved[0].file.path)
    ranks = tuple(range(len(saved)))
    local = names_of_parts(saved, files)
    return MegatronLayout(tensors, ranks, f"{where} and its like", weights, local, model=model)


class _Tensors(Mapping[str, TensorLayout]):
    """All whole tensors; each is made, or refused, when it is asked for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[str, TensorLayout] = {}
        self._refused = next((each.refused for each in model.saved if each.refused), "")
        self._names = {f"model.{name}": (name, "") for name in model.held}
        for name, held in model.held.items():
            self._names |= {f"{_STATES}.{key}.{name}": (name, key) for key in held[0][1].states}
        if self._refused:
            self._names[_STATES] = "", ""

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> TensorLayout:
        if name not in self._names:
            near = ", ".join(list(self._names)[:5])
            raise UnknownTensorError(
                f"{self._model.label} and its like have no tensor {name!a} as a whole; they have"
                f" {len(self)}, such as {near}"
            )
        if name == _STATES and self._refused:
            raise NotUnderstoodError(f"{self._refused}; leave it out (skip=['{_STATES}'])")
        if name not in self._known:
            self._known[name] = self._model.tensor(*self._names[name])
        return self._known[name]

    def parameter(self, name: str) -> tuple[str, str]:
        """The parameter of a tensor, and which state of it that is."""
        return self._names[name]


class _RulesAt(Rules):
    """Where Megatron has each tensor at some tensor- and pipeline-parallel size."""

    def __init__(self, model: Model, tensor: int, pipeline: int) -> None:
        self.origin = f"Megatron at tensor parallel {tensor}, pipeline parallel {pipeline}"
        self.n_ranks = tensor * pipeline
        self._model, self._size, self._stages = model, tensor, pipeline
        self._tensors = _Tensors(model)
        layers = model.layers[DECODER]
        heads, groups = (
            count_in(model.args, key) for key in ("num_attention_heads", "num_query_groups")
        )
        if model.args.get("group_query_attention") is False:
            groups = heads
        if layers % pipeline or heads % tensor or (groups % tensor and tensor % (groups or 1)):
            raise UsageError(
                f"{self.origin}: {layers} layers, {heads} heads and {groups} groups of queries"
                " cannot be split like that"
            )

    def placements(self, name: str) -> tuple[Placement, ...]:
        if name not in self._tensors:
            return ()
        parameter, key = self._tensors.parameter(name)
        tensor = self._tensors[name]
        splits: tuple[Split, ...] = ()
        if not key or tensor.shape == self._model.shape_of(parameter):
            dim, sections = self._model.division(parameter)
            if dim is not None:
                splits = (Split(dim, (0,), "even", sections),)
        stages = sorted(self._stages_of(parameter))
        return tuple(Placement((self._size,), splits, first=stage * self._size) for stage in stages)

    def _stages_of(self, name: str) -> set[int]:
        last = self._stages - 1
        layer = LAYER.fullmatch(name)
        if layer and layer[1] == DECODER:
            return {int(layer[2]) * self._stages // self._model.layers[DECODER]}
        if name == EMBEDDING and self._model.tied:
            return {0, last}
        if name.startswith(_FIRST) or not last:
            return {0}
        if name.startswith(_LAST):
            return {last}
        raise UsageError(
            f"parameter {name!a}: on which of {self._stages} stages it belongs is not known here"
        )
