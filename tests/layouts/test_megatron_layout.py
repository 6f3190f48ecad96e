"""Legacy Megatron checkpoints as whole tensors and at other parallel sizes.

Truth of ``megatron_swiglu_gqa`` is what Megatron itself held after it had loaded the state at
tensor parallel 1 and 4; of ``megatron_tp2_pp2`` the files and Megatron's own list of parameters; of
files made by ``megatron_bytes`` the arrays they were made of.
"""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron_bytes import (
    ARGS,
    megatron_file,
    part,
    renumbered,
    staged,
    tensor,
    unwrapped,
    whole_model,
    write,
)
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES, expected
from torch_bytes import saved_members, torch_zip

import slimckpt
from slimckpt.errors import (
    CheckFailedError,
    DamagedFileError,
    NotUnderstoodError,
    SlimckptError,
    UsageError,
)
from slimckpt.layouts.megatron import MegatronLayout
from slimckpt.layouts.megatron_files import _interleaved
from slimckpt.layouts.toml_rules import read_toml
from slimckpt.layouts.toml_writing import to_toml
from slimckpt.rewrite.slim import slim

GATED, PLAIN = SAMPLES / "megatron_swiglu_gqa", SAMPLES / "megatron_tp2_pp2"
LOADS: dict[str, Any] = expected(GATED.name)["loads"]
RUNS = ("tp2", "tp2_pp2")
ROWS = 64
"""Of the padded vocabulary at tensor parallel 2 and 4; at 1 Megatron pads to 56."""


def sha(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def named(name: str) -> str:
    """The whole tensor that the truth calls ``name``."""
    state = name.startswith(("fp32_param.", "exp_avg.", "exp_avg_sq."))
    return f"optimizer.state.{name}" if state else f"model.{name}"


def megatron(step: slimckpt.Step | slimckpt.Checkpoint) -> MegatronLayout:
    layout = step.layout()
    assert isinstance(layout, MegatronLayout)
    return layout


@pytest.fixture(scope="module", params=["directory", "store"])
def gated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[slimckpt.Checkpoint]:
    path = GATED
    if request.param == "store":
        path = tmp_path_factory.mktemp("megatron") / "store"
        slim(GATED, path, min_saving=0)
    with slimckpt.open(path) as checkpoint:
        yield checkpoint


@pytest.mark.parametrize("run", RUNS)
def test_whole_tensors_are_what_megatron_loads_at_tensor_parallel_1(
    gated: slimckpt.Checkpoint, run: str
) -> None:
    step = gated.step(2, run=run)
    (truth,) = LOADS["tp1"]
    for name, (dtype, shape, digest) in truth.items():
        whole = step.tensor(named(name))
        padded = "word_embeddings" in name
        assert list(whole.shape) == ([ROWS, *shape[1:]] if padded else shape), name
        found = whole[: shape[0]]
        assert found.dtype.name == dtype and sha(found) == digest, name
    steps = {f"optimizer.state.step.{name}" for name in truth if named(name) == f"model.{name}"}
    assert set(step.layout().tensors) == {*map(named, truth), *steps} and len(truth) == 88


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("way", ["sizes", "edited rules"])
def test_ranks_of_tensor_parallel_4_have_what_megatron_loads_there(
    gated: slimckpt.Checkpoint, run: str, way: str
) -> None:
    step = gated.step(2, run=run)
    layout = megatron(step)
    rules: Any = layout.at(4)
    if way == "edited rules":
        text = to_toml(layout)
        mesh = {"tp2": "rank = 2\n", "tp2_pp2": "axis0 = 2\naxis1 = 2\n"}[run]
        assert text.count(mesh) == 1 and "sections = [1, 1]" in text and "No rule" not in text
        rules = read_toml(text.replace(mesh, mesh[:-2] + "4\n").encode(), "edited")
    ranks = step.reshard(rules)
    compared = 0
    for rank, at in enumerate(ranks):
        stage, part = divmod(rank, 4)
        for name, (dtype, shape, digest) in LOADS["tp4"][part].items():
            found = ranks[at].get(named(name))
            if found is None:
                assert len(ranks) == 8, name
                continue
            assert (found.dtype.name, list(found.shape)) == (dtype, shape), (stage, name)
            assert sha(found) == digest, (stage, name)
            compared += 1
    tied = 4 * 4 if len(ranks) == 8 else 0
    assert compared == 4 * 88 + tied and not ranks[0].carried


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("sizes", [(1, 1), (4, 1), (8, 1), (1, 2), (4, 2)])
def test_there_and_back_gives_the_same_bytes(
    tmp_path: Path, run: str, sizes: tuple[int, int]
) -> None:
    stages = 2 if run == "tp2_pp2" else 1
    with slimckpt.open(GATED) as checkpoint:
        step = checkpoint.step(2, run=run)
        layout = megatron(step)
        there, back = layout.at(*sizes), layout.at(2, stages)
        for rank, view in step.reshard(there).items():
            tensors = [(name, *view.info(name), view[name].tobytes()) for name in view]
            (tmp_path / f"rank_{rank}").mkdir()
            (tmp_path / f"rank_{rank}" / "m.safetensors").write_bytes(safetensors_file(tensors))
        with slimckpt.open(tmp_path) as other:
            ranks = other.reshard(back, there)
            compared = 0
            for name, tensor in layout.tensors.items():
                for shard in tensor.shards:
                    assert isinstance(shard.holder, str) and shard.name
                    coords = checkpoint.files.member(shard.holder).role.coords
                    found = ranks[coords.get("pp", 0) * 2 + coords["tp"]][name]
                    own = checkpoint.files[shard.holder][shard.name]
                    assert found.dtype == own.dtype and found.tobytes() == own.tobytes(), name
                    compared += 1
    assert compared == (2 * 110 if stages == 1 else 2 * (110 + 5))


def test_sizes_that_heads_or_layers_do_not_allow_are_refused() -> None:
    with slimckpt.open(GATED) as checkpoint:
        layout = megatron(checkpoint.step(2, run="tp2"))
        for tensor, pipeline in ((3, 1), (2, 3), (16, 1)):
            with pytest.raises(UsageError, match="2 layers, 8 heads and 4 groups"):
                layout.at(tensor, pipeline)


def test_a_model_that_is_neither_gated_nor_grouped_is_its_parts_end_to_end() -> None:
    truth = expected(PLAIN.name)["truth"]
    with slimckpt.open(PLAIN) as checkpoint:
        step = checkpoint.step(10)
        compared = 0
        for stage in ("0", "1"):
            views = [step.rank(tp=rank, pp=int(stage)) for rank in (0, 1)]
            split = truth["model_keys_tp_sharded"][stage]
            ids = truth["bf16_from_fp32"][f"tp0_pp{stage}"]["param_id_to_name"]
            assert len(ids) == len(split) + len(truth["model_keys_replicated_across_tp"][stage])
            groups = [len(group) for group in masters_of(views[0])]
            for number, name in ids.items():
                group, at = (0, int(number)) if int(number) < groups[0] else (1, int(number))
                local = {
                    f"model.{name}": f"model.{whole_name(name, stage)}",
                    f"optimizer.fp32_from_fp16_params.{group}.{at - group * groups[0]}": (
                        f"optimizer.state.fp32_param.{whole_name(name, stage)}"
                    ),
                }
                for key in ("exp_avg", "exp_avg_sq"):
                    local[f"optimizer.optimizer.state.{number}.{key}"] = (
                        f"optimizer.state.{key}.{whole_name(name, stage)}"
                    )
                dim = int(name.endswith(("linear_proj.weight", "linear_fc2.weight")))
                for own, whole in local.items():
                    wanted = views[0][own]
                    if name in split:
                        wanted = np.concatenate([view[own] for view in views], dim)
                    assert sha(step.tensor(whole)) == sha(wanted), whole
                    compared += 1
        # The tied embedding was compared twice.
        assert compared == 4 * (52 + 1)
        embedding = step.tensor("model.embedding.word_embeddings.weight").layout
        assert [shard.name for shard in embedding.shards] == [
            *["model.embedding.word_embeddings.weight"] * 2,
            *["model.output_layer.weight"] * 2,
        ]


def masters_of(view: slimckpt.RankView) -> list[list[str]]:
    names = [name for name in view if name.startswith("optimizer.fp32_from_fp16_params.")]
    return [[name for name in names if name.split(".")[2] == group] for group in "01"]


def whole_name(name: str, stage: str) -> str:
    """Stage 1 has the layers from 2 on, and the tied embedding under another name."""
    for local, number in (("layers.0.", "layers.2."), ("layers.1.", "layers.3.")):
        if stage == "1" and local in name:
            return name.replace(local, number)
    return name.replace("output_layer.weight", "embedding.word_embeddings.weight")


def test_weights_are_listed_by_the_names_of_the_model() -> None:
    with slimckpt.open(PLAIN) as checkpoint:
        layout = megatron(checkpoint)
    assert len(layout.weights) == 52 and layout.ranks == (0, 1, 2, 3)
    assert layout.weights["decoder.layers.3.mlp.linear_fc1.bias"] == (
        "model.decoder.layers.3.mlp.linear_fc1.bias",
        "BF16",
    )


def edited(target: Path, old: bytes, new: bytes, run: str = "tp2") -> Path:
    """A copy of the sample, in every file of which other bytes stand for ``old``."""
    shutil.copytree(GATED / run, target)
    for path in target.rglob("*.pt"):
        data = path.read_bytes()
        assert data.count(old) == 1 and len(old) == len(new)
        path.write_bytes(data.replace(old, new))
    return target


def text(word: str) -> bytes:
    """As pickle protocol 2 writes it, up to the number it is remembered by."""
    return b"X" + len(word).to_bytes(4, "little") + word.encode() + b"q"


FILE = GATED / "tp2" / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt"
FC1, QKV = (
    "model.decoder.layers.1.mlp.linear_fc1.",
    "model.decoder.layers.0.self_attention.linear_qkv.",
)


def lied(word: str, value: bytes) -> tuple[bytes, bytes]:
    """A pair for :func:`edited`: what ``args`` have under ``word`` becomes ``value``."""
    data = FILE.read_bytes()
    start = data.index(text(word))
    old = data[start : start + len(text(word)) + 1 + len(value)]
    return old, old[: -len(value)] + value


def hidden(word: str) -> tuple[bytes, bytes]:
    """A pair for :func:`edited`: ``args`` have nothing under ``word``."""
    return text(word), text("x" * len(word))


@pytest.mark.parametrize(
    ("change", "error", "why", "refused"),
    [
        (lied("swiglu", b"\x89"), CheckFailedError, r"\(swiglu: False\) do not explain", FC1),
        (hidden("swiglu"), NotUnderstoodError, r"do not say whether it is \(swiglu\)", FC1),
        (lied("num_query_groups", b"K\x02"), CheckFailedError, "8 heads in 2 groups", QKV),
        (lied("kv_channels", b"K\x08"), CheckFailedError, "groups of 8 channels", QKV),
        (lied("num_attention_heads", b"K\x04"), CheckFailedError, "4 heads in 4 groups", QKV),
        (lied("group_query_attention", b"\x89"), CheckFailedError, "8 heads in 8 groups", QKV),
        (hidden("num_query_groups"), NotUnderstoodError, r"in how many \(num_query_groups", QKV),
        (
            (b"G@\x08" + bytes(6), b"G?\xf0" + bytes(6)),
            NotUnderstoodError,
            "checkpoint_version is 1.0",
            QKV,
        ),
    ],
)
def test_what_args_do_not_say_or_say_wrongly_is_refused_and_never_guessed(
    tmp_path: Path,
    change: tuple[bytes, bytes],
    error: type[SlimckptError],
    why: str,
    refused: str,
) -> None:
    with slimckpt.open(edited(tmp_path / "edited", *change)) as checkpoint:
        layout = megatron(checkpoint)
        for leaf in ("weight", "bias"):
            name = f"{refused}{leaf}"
            state = name.replace("model.", "optimizer.state.exp_avg.")
            for each in (name, state):
                with pytest.raises(error, match=why) as caught:
                    checkpoint.tensor(each)
                assert name.removeprefix("model.") in str(caught.value)
        with pytest.raises(error, match=why):
            checkpoint.reshard(read_toml(b"[mesh]\ntp = 1\n", "one"))
        kind = refused.split(".")[-2]
        text = to_toml(layout)
        assert text.count("# Refused:") == 1 and f'"{refused}weight": "parameter ' in text
        one = checkpoint.reshard(read_toml(b"[mesh]\ntp = 1\n", "one"), skip=[f"*{kind}*"])
        (truth,) = LOADS["tp1"]
        compared = 0
        for name, (_, shape, digest) in truth.items():
            if kind not in name:
                assert sha(one[0][named(name)][: shape[0]]) == digest, name
                compared += 1
        assert compared == 88 - 2 * 2 * 4 and not one[0].carried


def test_a_vocabulary_of_another_size_than_args_say_is_refused(tmp_path: Path) -> None:
    path = edited(tmp_path / "edited", *lied("padded_vocab_size", b"K\x80"))
    with (
        slimckpt.open(path) as checkpoint,
        pytest.raises(CheckFailedError, match="has 64 rows in all; expected 128"),
    ):
        checkpoint.tensor("model.embedding.word_embeddings.weight")


def test_layers_that_args_do_not_have_are_refused(tmp_path: Path) -> None:
    path = edited(tmp_path / "edited", *lied("num_layers", b"K\x04"))
    with (
        slimckpt.open(path) as checkpoint,
        pytest.raises(CheckFailedError, match="is of 4 layers, and the files have 2"),
    ):
        checkpoint.layout()


@pytest.mark.parametrize("lost", ["mp_rank_01", "mp_rank_00"])
def test_a_missing_file_is_an_error(tmp_path: Path, lost: str) -> None:
    shutil.copytree(GATED / "tp2", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "iter_0000002" / lost)
    with (
        slimckpt.open(tmp_path / "run") as checkpoint,
        pytest.raises(CheckFailedError, match="a file for each of 2 ranks, found 1"),
    ):
        checkpoint.layout()


@pytest.mark.parametrize(
    ("run", "rank", "local", "whole"),
    [
        (
            "tp2",
            "mp_rank_01",
            "model.decoder.layers.0.self_attention.linear_proj.bias",
            "model.decoder.layers.0.self_attention.linear_proj.bias",
        ),
        (
            "tp2_pp2",
            "mp_rank_01_001",
            "model.output_layer.weight",
            "model.embedding.word_embeddings.weight",
        ),
    ],
)
def test_replicas_that_differ_are_refused_unless_drift_is_allowed(
    tmp_path: Path, run: str, rank: str, local: str, whole: str
) -> None:
    """One replicated over tensor-parallel ranks, and the embedding tied over stages."""
    shutil.copytree(GATED / run, tmp_path / "run")
    file = f"iter_0000002/{rank}/model_optim_rng.pt"
    with slimckpt.open(tmp_path / "run") as checkpoint:
        before = np.asarray(checkpoint.tensor(whole))
        own = checkpoint.files[file][local].tobytes()
    path = tmp_path / "run" / file
    data = path.read_bytes()
    assert data.count(own) == 1
    path.write_bytes(data.replace(own, own[:-1] + bytes([own[-1] ^ 1])))
    with slimckpt.open(tmp_path / "run") as checkpoint:
        with pytest.raises(CheckFailedError, match=f"differs between.*{rank}"):
            np.asarray(checkpoint.tensor(whole))
        drifting = checkpoint.tensor(whole, allow_drift=True)
        assert np.asarray(drifting).tobytes() == before.tobytes()


def test_masters_of_another_model_are_refused(tmp_path: Path) -> None:
    """``partition_dim`` says 1 of the word embedding, which is split along axis 0."""
    data = FILE.read_bytes()
    start = data.index(b"tensor_model_parallelr")
    end = data.index(b"K\x00", start) + 2
    old = data[start:end]
    assert b"partition_dim" in old and len(old) < 64
    with (
        slimckpt.open(edited(tmp_path / "edited", old, old[:-1] + b"\x01")) as checkpoint,
        pytest.raises(CheckFailedError, match="says that it is split along axis 1"),
    ):
        checkpoint.tensor("model.embedding.word_embeddings.weight")


def test_virtual_pipeline_stages_are_put_in_order(tmp_path: Path) -> None:
    """Stage 0 has layers 0, 1 and 3; stage 1 has 2 and 4, 5: uneven, as Megatron allows."""
    whole = whole_model(6)
    places = {(0, 0): [0, 1], (1, 0): [2], (0, 1): [3], (1, 1): [4, 5]}
    files = {}
    for rank in (0, 1):
        for stage in (0, 1):
            chunks = []
            for chunk in (0, 1):
                layers = places[stage, chunk]
                names = staged(whole, layers, (stage, chunk) == (0, 0), (stage, chunk) == (1, 1))
                chunks.append({renumbered(n, layers[0]): part(n, whole[n], rank, 2) for n in names})
            files[rank, stage] = megatron_file(chunks, ARGS)
    with slimckpt.open(write(tmp_path, files)) as checkpoint:
        assert set(checkpoint.layout().tensors) == {f"model.{name}" for name in whole}
        for name, array in whole.items():
            assert np.array_equal(checkpoint.tensor(f"model.{name}"), array), name


def split_in_two(
    whole: dict[str, np.ndarray], args: Any = ARGS, with_optimizer: bool = False
) -> dict[tuple[int, None], bytes]:
    files: dict[tuple[int, None], bytes] = {}
    for rank in (0, 1):
        held = {name: part(name, array, rank, 2) for name, array in whole.items()}
        optimizer = None
        if with_optimizer:
            groups = [[-a for a in held.values() if a.ndim == axes] for axes in (1, 2)]
            optimizer = unwrapped(groups)
        files[rank, None] = megatron_file([held], args, optimizer)
    return files


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_without_masters_names_tell_how_parameters_are_split(
    tmp_path: Path, with_optimizer: bool
) -> None:
    whole = whole_model(2)
    with slimckpt.open(write(tmp_path, split_in_two(whole, ARGS, with_optimizer))) as checkpoint:
        for name, array in whole.items():
            assert np.array_equal(checkpoint.tensor(f"model.{name}"), array), name
            if with_optimizer:
                moment = checkpoint.tensor(f"optimizer.state.exp_avg.{name}")
                assert np.array_equal(moment, -array), name
        assert len(checkpoint.layout().tensors) == len(whole) * (1 + with_optimizer)


def test_a_parameter_of_an_unknown_name_without_a_master_is_refused(tmp_path: Path) -> None:
    whole = whole_model(1) | {"decoder.layers.0.mixer.in_proj.weight": np.ones((4, 2), np.float32)}
    with (
        slimckpt.open(write(tmp_path, split_in_two(whole))) as checkpoint,
        pytest.raises(NotUnderstoodError, match="none of those known by name"),
    ):
        checkpoint.tensor("model.decoder.layers.0.mixer.in_proj.weight")


def test_without_args_only_what_shapes_prove_is_merged(tmp_path: Path) -> None:
    """fc1 as wide as fc2 is not gated, qkv three times as wide as the projection not grouped."""
    whole = whole_model(1)
    plain = {
        "decoder.layers.0.self_attention.linear_qkv.weight": (24, 6),
        "decoder.layers.0.mlp.linear_fc1.weight": (10, 6),
    }
    write(tmp_path / "fused", split_in_two(whole, None))
    for name, shape in plain.items():
        whole[name] = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    files = {}
    for rank in (0, 1):
        parts = {n: part(n.replace("fc1", "-"), a, rank, 2) for n, a in whole.items()}
        files[rank, None] = megatron_file([parts], None)
    write(tmp_path / "plain", files)
    for run in ("fused", "plain"):
        with slimckpt.open(tmp_path / run) as checkpoint:
            for name, array in whole.items():
                if run == "fused" and name in plain:
                    with pytest.raises(NotUnderstoodError, match="do not say"):
                        checkpoint.tensor(f"model.{name}")
                elif run == "plain":
                    assert np.array_equal(checkpoint.tensor(f"model.{name}"), array), name


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (
            {"optimizer": {"param_groups": [{"lr": 0.1}]}},
            "a distributed optimizer keeps it in buckets",
        ),
        ([unwrapped([]), unwrapped([])], "chained of several"),
        (unwrapped([[np.ones((6,), np.float32)]]), "has 1 parameters and its model 8"),
    ],
)
def test_an_optimizer_that_cannot_be_told_by_parameter_is_refused_and_weights_are_not(
    tmp_path: Path, optimizer: Any, why: str
) -> None:
    whole = whole_model(1)
    files = {}
    for rank in (0, 1):
        held = {name: part(name, array, rank, 2) for name, array in whole.items()}
        files[rank, None] = megatron_file([held], ARGS, optimizer)
    root = write(tmp_path, files)
    for directory in root.glob("*/mp_rank_*"):
        buckets = {"param": tensor(np.ones((64,), np.float32), "0")}
        data = torch_zip(saved_members({"buckets_coalesced": True, 0: buckets}))
        (directory / "distrib_optim.pt").write_bytes(data)
    one = read_toml(b"[mesh]\ntp = 1\n", "one")
    with slimckpt.open(root) as checkpoint:
        assert "0.param" in checkpoint.rank(0)
        with pytest.raises(NotUnderstoodError, match=why):
            checkpoint.reshard(one)
        ranks = checkpoint.reshard(one, skip=["optimizer.state"])
        assert set(ranks[0]) == {f"model.{name}" for name in whole}
        for name, array in whole.items():
            assert np.array_equal(ranks[0][f"model.{name}"], array)


def test_weights_are_whole_also_where_the_optimizer_was_dropped(tmp_path: Path) -> None:
    slim(GATED / "tp2_pp2", tmp_path / "store", min_saving=0, drop=["optimizer", "master"])
    with slimckpt.open(tmp_path / "store") as checkpoint:
        assert len(checkpoint.rank(tp=0, pp=0).dropped) > 5
        rank = checkpoint.reshard(megatron(checkpoint).at(1), skip=["optimizer.*"])[0]
        assert len(rank) == 22
        for name in rank:
            _, shape, digest = LOADS["tp1"][0][name.removeprefix("model.")]
            assert sha(rank[name][: shape[0]]) == digest, name


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    shutil.copytree(GATED / "tp2", tmp_path / "run")
    path = tmp_path / "run" / "iter_0000002" / "mp_rank_01" / "model_optim_rng.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with (
        slimckpt.open(tmp_path / "run") as checkpoint,
        pytest.raises(DamagedFileError, match="mp_rank_01"),
    ):
        checkpoint.layout()


def test_experts_over_ranks_and_old_names_are_refused(tmp_path: Path) -> None:
    whole = whole_model(1)
    write(tmp_path / "experts", split_in_two(whole, ARGS | {"expert_model_parallel_size": 2}))
    old = {"language_model": {"encoder": {}}}
    data = megatron_file([], ARGS, extra={"model": old})
    write(tmp_path / "old", {(0, None): data})
    for run, why in (("experts", "experts are spread"), ("old", "not named as megatron-core")):
        with (
            slimckpt.open(tmp_path / run) as checkpoint,
            pytest.raises(NotUnderstoodError, match=why),
        ):
            checkpoint.layout()


def test_files_of_different_saves_are_refused(tmp_path: Path) -> None:
    whole = whole_model(2)
    files = split_in_two(whole)
    files[1, None] = split_in_two(whole_model(1))[1, None]
    with (
        slimckpt.open(write(tmp_path, files)) as checkpoint,
        pytest.raises(CheckFailedError, match=r"only one has parameter 'decoder.layers.1"),
    ):
        checkpoint.layout()


def test_parameters_are_told_by_shapes_where_these_leave_no_choice() -> None:
    norm, square, wide = (4,), (4, 4), (4, 8)
    shapes = [norm, square, norm, wide, square, norm]
    found = _interleaved(shapes, [[norm, norm, norm], [square, wide, square]])
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (0, 2)]
    found = _interleaved(shapes, [[norm, norm], [square, wide, square, norm]])
    assert found == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (1, 3)]
    for groups in ([[square], [square, square]], [[square, wide], [square]], [[], [square]]):
        with pytest.raises(NotUnderstoodError, match=r"which is whose|do not tell"):
            _interleaved([square, square, square], groups)


def test_buckets_of_torch_dist_are_not_given_to_other_ranks() -> None:
    one = read_toml(b"[mesh]\ntp = 1\n", "one")
    with slimckpt.open(SAMPLES / "megatron_moe_torch_dist") as checkpoint:
        step = checkpoint.step(2, run="dp_reshardable")
        with pytest.raises(NotUnderstoodError, match=r"gbuf_idx_0.*saved as dp_reshardable"):
            step.reshard(one)
        weights = step.reshard(one, skip=["*.gbuf_idx_*"])[0]
        assert "embedding.word_embeddings.weight" in weights
        assert not any("gbuf_idx" in name for name in weights)
        states = checkpoint.step(2, run="fully_reshardable").reshard(one)[0]
        assert "chained_0.optimizer.state.exp_avg.embedding.word_embeddings.weight" in states


def test_torch_dist_stacks_the_layers_that_the_legacy_layout_counts(
    gated: slimckpt.Checkpoint,
) -> None:
    """The same state in both formats; local norms have the names of fused ones in torch_dist."""
    stacked = gated.step(2, run="torch_dist")
    (truth,) = LOADS["tp1"]
    compared = 0
    for name in (name for name in truth if named(name) == f"model.{name}"):
        legacy = np.asarray(gated.step(2, run="tp2").tensor(f"model.{name}"))
        if not name.startswith("decoder.layers."):
            assert np.array_equal(stacked.tensor(name), legacy), name
            compared += 1
            continue
        number, _, rest = name.removeprefix("decoder.layers.").partition(".")
        fused = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
        for local, other in fused.items():
            rest = rest.replace(local, other)
        assert np.array_equal(stacked.tensor(f"decoder.layers.{rest}")[int(number)], legacy), name
        compared += 1
    assert compared == 22
