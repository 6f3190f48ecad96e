"""Files of Megatron's legacy format as bytes, made without Megatron: what it would write of whole
arrays, split over ranks by rules that are spelled out here and nowhere taken from the package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch_bytes import Made, Storage, Symbol, saved_members, torch_zip

Arrays = Mapping[str, np.ndarray]

ARGS: dict[str, Any] = {
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 2,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}
"""Of the models of :func:`whole_model`."""


def whole_model(layers: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters as megatron-core names them, in the order of the model."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (8, 6)}
    for layer in range(layers):
        shapes |= {
            f"decoder.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm.weight": (6,),
                "self_attention.linear_proj.weight": (6, 8),
                "self_attention.linear_qkv.weight": (16, 6),
                "mlp.linear_fc1.weight": (20, 6),
                "mlp.linear_fc2.weight": (6, 10),
            }.items()
        }
    shapes |= {"decoder.final_layernorm.weight": (6,), "output_layer.weight": (8, 6)}
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def axis(name: str) -> int | None:
    if "layernorm" in name:
        return None
    return 1 if "linear_proj" in name or "linear_fc2" in name else 0


def part(name: str, whole: np.ndarray, rank: int, size: int) -> np.ndarray:
    """What a tensor-parallel rank has: of ``linear_fc1`` its part of the gate, then of the rest."""
    if "linear_fc1" in name:
        halves = (np.split(half, size)[rank] for half in np.split(whole, 2))
        return np.concatenate(list(halves))
    dim = axis(name)
    return whole if dim is None else np.split(whole, size, dim)[rank]


def tensor(array: np.ndarray, key: str, **attributes: Any) -> Made:
    """As torch pickles a float32 tensor, with attributes where it has some."""
    storage = Storage(key, "FloatStorage", array.tobytes(), 4)
    strides = tuple(stride // 4 for stride in np.empty(array.shape, np.float32).strides)
    args = (storage, 0, array.shape, strides, False, Made(Symbol("collections", "OrderedDict")))
    rebuild = Symbol("torch._utils", "_rebuild_tensor_v2")
    if not attributes:
        return Made(rebuild, args)
    cls = Symbol("torch", "Tensor")
    by_type = Symbol("torch._tensor", "_rebuild_from_type_v2")
    return Made(by_type, (rebuild, cls, args, attributes))


def megatron_file(
    chunks: Sequence[Arrays],
    args: Mapping[str, Any] | None,
    optimizer: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """One ``model_optim_rng.pt``; of several chunks the first is ``model0``."""
    state: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 1}
    if args is not None:
        namespace = Symbol("argparse", "Namespace")
        state["args"] = Made(namespace, (), new=True, state=dict(args))
    for number, chunk in enumerate(chunks):
        key = f"model{number}" if len(chunks) > 1 else "model"
        state[key] = {
            name: tensor(array, f"{number}_{at}") for at, (name, array) in enumerate(chunk.items())
        }
    if optimizer is not None:
        state["optimizer"] = optimizer
    return torch_zip(saved_members(state | dict(extra or {})))


def unwrapped(groups: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
    """The optimizer of an fp32 model: torch's own state, without masters. Moments are the given
    arrays."""
    state: dict[int, Any] = {}
    counted = []
    for group in groups:
        first = len(state)
        for array in group:
            state[len(state)] = {"exp_avg": tensor(array, f"o{len(state)}")}
        counted.append({"lr": 0.1, "params": list(range(first, len(state)))})
    return {"state": state, "param_groups": counted}


def write(root: Path, files: Mapping[tuple[int, int | None], bytes]) -> Path:
    """Files by tensor-parallel rank and pipeline stage."""
    for (rank, stage), data in files.items():
        suffix = "" if stage is None else f"_{stage:03d}"
        path = root / "iter_0000001" / f"mp_rank_{rank:02d}{suffix}" / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    return root


def staged(whole: Arrays, layers: Sequence[int], first: bool, last: bool) -> Iterator[str]:
    """Names of the whole model that a chunk with these layers has."""
    for name in whole:
        if name.startswith("decoder.layers."):
            if int(name.split(".")[2]) in layers:
                yield name
        elif first if name.startswith("embedding.") else last:
            yield name


def renumbered(name: str, first: int) -> str:
    """The name of a chunk whose first layer has that number."""
    before, _, rest = name.partition("layers.")
    number, _, after = rest.partition(".")
    return f"{before}layers.{int(number) - first}.{after}" if rest else name
