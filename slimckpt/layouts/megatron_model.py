"""The parameters of a legacy Megatron checkpoint, over all tensor-parallel ranks and stages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product

from slimckpt.errors import CheckFailedError, NotUnderstoodError
from slimckpt.layouts.layout import Box, Piece, Shape, Shard, TensorLayout, whole_box
from slimckpt.layouts.megatron_files import Parameter, Saved
from slimckpt.layouts.megatron_splits import EMBEDDING, Division, axis_of, count_in, division_of
from slimckpt.model import encode_path

LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d+)(\..+)", re.DOTALL)
"""A name with the number of a layer; numbers are those of a stage in files."""
DECODER = "decoder.layers."

Member = tuple[Saved, Parameter]


class Model:
    """The parameters of a model, and which files hold them.

    Attributes
    ----------
    held
        By name in the whole model: files, by stage and tensor-parallel rank, and the parameter
        there.
    size
        Tensor-parallel ranks.
    layers
        How many there are by the names before their numbers.
    tied
        Whether the output layer is the word embedding.
    """

    def __init__(self, saved: list[Saved]) -> None:
        self.saved, self.args = saved, saved[0].args
        self.size, stages = _grid(saved)
        self.tied = self.args.get("untie_embeddings_and_output_weights") is False
        self.held: dict[str, list[Member]] = {}
        self.layers: Counter[str] = Counter()
        for chunk, stage in product(range(max(len(each.chunks) for each in saved)), range(stages)):
            mine = saved[stage * self.size : (stage + 1) * self.size]
            if chunk < len(mine[0].chunks):
                self._add(mine, chunk, stage)
        expected = self.args.get("num_layers")
        if type(expected) is int and self.layers[DECODER] not in (0, expected):
            raise CheckFailedError(
                f"{self.label} is of {expected} layers, and the files have"
                f" {self.layers[DECODER]}; files are missing, or are of another save"
            )

    @property
    def label(self) -> str:
        return self.saved[0].file.holding.label

    def _add(self, saved: list[Saved], chunk: int, stage: int) -> None:
        """The parameters of a chunk of a stage, which all its tensor-parallel ranks have."""
        names = saved[0].chunks[chunk]
        numbers: dict[str, set[int]] = {}
        for name in names:
            if layer := LAYER.fullmatch(name):
                numbers.setdefault(layer[1], set()).add(int(layer[2]))
        for each in saved:
            other = each.chunks[chunk] if chunk < len(each.chunks) else {}
            if other.keys() != names.keys():
                odd = sorted(other.keys() ^ names.keys())[0]
                raise CheckFailedError(
                    f"{each.file.holding.label} and {saved[0].file.holding.label}: only one has"
                    f" parameter {odd!a}; they are of different saves"
                )
            for name, parameter in other.items():
                whole = name
                if layer := LAYER.fullmatch(name):
                    whole = f"{layer[1]}{self.layers[layer[1]] + int(layer[2])}{layer[3]}"
                elif stage and name == "output_layer.weight":
                    if parameter.marks is not None and parameter.marks.shared:
                        self.tied = True
                    whole = EMBEDDING if self.tied else name
                self.held.setdefault(whole, []).append((each, parameter))
        for before, found in numbers.items():
            if found != set(range(len(found))):
                raise NotUnderstoodError(
                    f"{saved[0].file.holding.label}: layers {before}* are numbered"
                    f" {sorted(found)[:8]}; expected the numbers of one stage, from 0 on"
                )
            self.layers[before] += len(found)

    def axis(self, name: str) -> int | None:
        """The axis along which a parameter is split."""
        axes = {axis_of(name, parameter.marks) for _, parameter in self.held[name]}
        if len(axes) > 1:
            raise CheckFailedError(
                f"parameter {name!a}: masters say that it is split along axis"
                f" {' and '.join(map(str, axes))}; the files are of different saves"
            )
        return axes.pop()

    def shape_of(self, name: str) -> Shape:
        """The whole shape of a parameter; ``()`` where there is none of that name."""
        if name not in self.held:
            return ()
        saved, parameter = self.held[name][0]
        shape = list(saved.tensors[parameter.local][1])
        dim = self.axis(name) if self.size > 1 else None
        if dim is not None and dim < len(shape):
            shape[dim] *= self.size
        return tuple(shape)

    def division(self, name: str) -> Division:
        """How a parameter is split; refused where it is not known."""
        return division_of(name, self.axis(name), self.shape_of, self.args, self.saved[0].version)

    def tensor(self, name: str, key: str) -> TensorLayout:
        """A parameter, or what the optimizer has for it under ``key``."""
        first, parameter = self.held[name][0]
        own = first.tensors[parameter.local][1]
        dtype, local = first.tensors[parameter.states[key] if key else parameter.local]
        if local not in (own, ()):
            raise NotUnderstoodError(
                f"{first.file.holding.label}: {key} of parameter {name!a} has shape {list(local)},"
                f" and the parameter {list(own)}; how ranks share it is not known here"
            )
        split = local == own and self.size > 1
        division = self.division(name) if split else Division(None)
        shape = list(local)
        if division.dim is not None:
            shape[division.dim] *= self.size
        pieces = [tuple(_pieces(division, local, self.size, at)) for at in range(self.size)]
        shards = []
        for saved, parameter in self.held[name]:
            named = parameter.states.get(key) if key else parameter.local
            found = saved.tensors.get(named or "")
            if found != (dtype, local):
                raise CheckFailedError(
                    f"{saved.file.holding.label}: {key or 'parameter'} {name!a}: expected {dtype}"
                    f" {list(local)}, as in {first.file.holding.label}, found"
                    f" {'none' if found is None else f'{found[0]} {list(found[1])}'}"
                )
            path = encode_path(saved.file.path)
            shards.append(Shard(path, local, pieces[saved.tensor], named))
        return TensorLayout(dtype, tuple(shape), tuple(shards))


def _grid(saved: list[Saved]) -> tuple[int, int]:
    """How many tensor-parallel ranks and stages there are; all of them must be there."""
    size = max(each.tensor for each in saved) + 1
    stages = max(each.stage for each in saved) + 1
    args = saved[0].args
    wanted = (
        count_in(args, "tensor_model_parallel_size") or size,
        count_in(args, "pipeline_model_parallel_size") or stages,
    )
    places = [(each.stage, each.tensor) for each in saved]
    if (size, stages) != wanted or places != list(product(range(stages), range(size))):
        raise CheckFailedError(
            f"{saved[0].file.holding.label} was saved at tensor parallel {wanted[0]}, pipeline"
            f" parallel {wanted[1]}; expected a file for each of {wanted[0] * wanted[1]} ranks,"
            f" found {len(saved)} (stage, tensor rank: {places[:8]}); files are missing, or are of"
            " another save"
        )
    return size, stages


def _pieces(division: Division, local: Shape, size: int, at: int) -> Iterator[Piece]:
    """What of the whole one the local tensor of a tensor-parallel rank is."""
    dim, sections = division
    if dim is None:
        yield Piece(whole_box(local), (0,) * len(local))
        return
    count = len(sections) or 1
    each = local[dim] // count
    for number in range(count):
        offsets, places, lengths = [0] * len(local), [0] * len(local), list(local)
        offsets[dim], places[dim] = (number * size + at) * each, number * each
        lengths[dim] = each
        yield Piece(Box(tuple(offsets), tuple(lengths)), tuple(places))
