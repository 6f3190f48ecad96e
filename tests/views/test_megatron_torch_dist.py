"""Megatron's torch_dist checkpoints: every item is what Megatron held in memory when it saved.

``tests/interop/make_megatron_moe.py`` made the sample, and the truth with it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.formats.dcp_metadata import read_metadata
from slimckpt.rewrite.slim import slim
from slimckpt.sources.positioned import FileSource

SAMPLE = SAMPLES / "megatron_moe_torch_dist"
TRUTH = expected(SAMPLE.name)["ranks"]
STEP = "iter_0000002"
FORMATS = ("dp_reshardable", "fully_reshardable")
FILES = [f"__{rank}_{thread}.distcp" for rank in range(4) for thread in range(2)]

Place = tuple[str, tuple[int, ...]]
"""Key and offset in the whole tensor."""


@pytest.fixture(scope="module", params=["directory", "store"])
def ckpt(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[slimckpt.Checkpoint]:
    path = SAMPLE
    if request.param == "store":
        path = tmp_path_factory.mktemp("megatron") / "store"
        slim(SAMPLE, path, min_saving=0)
    with slimckpt.open(path) as checkpoint:
        yield checkpoint


def hashed(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def held(kind: str) -> dict[Place, dict[str, Any]]:
    """What all ranks together gave to be written."""
    items = [item for rank in TRUTH for item in rank["items"][kind] if "key" in item]
    found = {(item["key"], tuple(item["offset"])): item for item in items}
    assert len(found) == len(items) > 80
    return found


def places(kind: str) -> dict[tuple[str, int], Place]:
    """For each tensor item, by file and its number there, what ``.metadata`` says it is."""
    path = SAMPLE / kind / STEP / ".metadata"
    with FileSource(bytes(path)) as source:
        metadata = read_metadata(source)
    count: Counter[str] = Counter()
    found = {}
    for item in metadata.items:
        if item.offsets is not None:
            found[item.file, count[item.file]] = item.name, item.offsets
        count[item.file] += 1
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_every_item_is_what_megatron_held(ckpt: slimckpt.Checkpoint, kind: str) -> None:
    truth, items = held(kind), places(kind)
    assert set(items.values()) == set(truth) and len(items) == len(truth)
    read = {
        (file, int(path.strip("[]"))): array
        for file in FILES
        for path, array in ckpt.files[f"{kind}/{STEP}/{file}"].by_path.items()
    }
    assert set(read) == set(items)
    for where, array in read.items():
        item = truth[items[where]]
        assert array.dtype.name == item["dtype"], where
        assert list(array.shape) == item["shape"], where
        assert hashed(array) == item["sha256"], where


@pytest.mark.parametrize("kind", FORMATS)
def test_every_whole_tensor_is_its_shards_at_their_offsets(
    ckpt: slimckpt.Checkpoint, kind: str
) -> None:
    step = ckpt.step(2, run=kind)
    for (key, offset), item in held(kind).items():
        whole = step.tensor(key)
        assert list(whole.shape) == item["global_shape"], key
        box = tuple(slice(o, o + n) for o, n in zip(offset, item["shape"], strict=True))
        assert hashed(whole[box]) == item["sha256"], (key, offset)


def test_buckets_hold_the_slices_of_every_distributed_optimizer(
    ckpt: slimckpt.Checkpoint,
) -> None:
    """What each rank's optimizer held of each parameter lies where its maps say."""
    step = ckpt.step(2, run="dp_reshardable")
    for rank in TRUTH:
        for part in rank["optimizer"]:
            key = (
                f"chained_{part['optimizer']}.optimizer.distributed.dp_group_idx_{part['group']}"
                f".gbuf_idx_{part['buffer']}.dtype_(torch.bfloat16, torch.float32)"
                f".bucket_idx_{part['bucket']}"
            )
            start = part["start_in_bucket"]
            for state, sha256 in part["sha256"].items():
                found = step.tensor(f"{key}.{state}")[start : start + part["numel"]]
                assert hashed(found) == sha256, (key, state, part["parameter"])


def test_parameters_are_those_of_the_model_in_memory(ckpt: slimckpt.Checkpoint) -> None:
    """Tensor parallel: the vocabulary in halves. Expert parallel: whole experts, of which the
    gate and the other half of ``linear_fc1`` are items of their own."""
    step = ckpt.step(2, run="fully_reshardable")
    embedding = step.tensor("embedding.word_embeddings.weight")
    experts = step.tensor("decoder.layers.mlp.experts.experts.linear_fc1.weight")
    for rank, truth in enumerate(TRUTH):
        part, parameters = rank % 2, truth["parameters"]
        assert (
            hashed(embedding[32 * part : 32 * (part + 1)])
            == (parameters["embedding.word_embeddings.weight"])
        )
        for local in range(2):
            assert (
                hashed(experts[0, 2 * part + local])
                == (
                    parameters[
                        f"decoder.layers.0.mlp.experts.local_experts.{local}.linear_fc1.weight"
                    ]
                )
            )


def test_gathered_states_hold_the_slices_of_every_distributed_optimizer(
    ckpt: slimckpt.Checkpoint,
) -> None:
    """Megatron gathers them before it saves in this format; what each rank held is in it."""
    step, name = ckpt.step(2, run="fully_reshardable"), "embedding.word_embeddings.weight"
    elements = 0
    for rank, truth in enumerate(TRUTH):
        rows = slice(32 * (rank % 2), 32 * (rank % 2 + 1))
        for part in (part for part in truth["optimizer"] if part["parameter"] == name):
            start = part["start_in_parameter"]
            for state, sha256 in part["sha256"].items():
                whole = step.tensor(f"chained_0.optimizer.state.{state}.{name}")
                found = whole[rows].reshape(-1)[start : start + part["numel"]]
                assert hashed(found) == sha256, (rank, state)
                elements += found.size
    assert elements == 3 * 64 * 16
