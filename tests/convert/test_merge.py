"""Merged checkpoints: whole tensors, read back by a reader of their own."""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from in_process import invoke
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.convert.merge import MergeResult, shard_size
from slimckpt.convert.rounding import rounded
from slimckpt.errors import CheckFailedError, DestinationError, SlimckptError, UsageError
from slimckpt.rewrite.slim import slim

NUMPY: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
}


def read(path: Path) -> tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]:
    """Dtype, shape and bytes of all tensors of a safetensors file, and its metadata."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    found = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        low, high = entry["data_offsets"]
        assert low == end, "no gaps"
        end = high
        found[name] = entry["dtype"], entry["shape"], data[start + low : start + high]
    assert start + end == len(data)
    return found, metadata


def merged(source: Path, out: Path, **options: Any) -> tuple[MergeResult, dict[str, Any]]:
    result = slimckpt.merge(source, out, **options)
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors"]
    tensors, metadata = read(out / "model.safetensors")
    assert metadata == {"format": "pt", **result.tied}
    assert result.tensors == len(tensors)
    assert result.tensor_nbytes == sum(len(data) for _, _, data in tensors.values())
    return result, tensors


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def ranks(place: Path, *each: list[tuple[str, str, list[int], bytes]]) -> Path:
    """One safetensors file for each rank."""
    for rank, tensors in enumerate(each):
        path = place / f"rank_{rank}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(safetensors_file(tensors))
    return place


def array(name: str, values: Any, dtype: str = "F32") -> tuple[str, str, list[int], bytes]:
    found = np.asarray(values).astype(NUMPY[dtype])
    return name, dtype, list(found.shape), found.tobytes()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("sample", ["ms_dp8_ckpt", "ms_opshard8_ckpt"])
def test_mindspore_ranks_merge_to_the_whole_tensors(
    sample: str, stored: bool, tmp_path: Path
) -> None:
    source, options = SAMPLES / sample, {}
    if sample == "ms_opshard8_ckpt":
        options["layout"] = source / "strategy.ckpt"
    if stored:
        slim(source, tmp_path / "store", min_saving=0)
        source = tmp_path / "store"
    result, found = merged(source, tmp_path / "out", **options)
    truth = expected("ms_dp8_ckpt")["full_params"]
    assert set(found) == set(truth) and len(truth) == 45
    for name, tensor in truth.items():
        assert found[name][1] == tensor["shape"] and sha(found[name][2]) == tensor["sha256"], name
    left = {one.name for one in result.left_out}
    held = set(expected(sample)["files"][next(iter(expected(sample)["files"]))]["params"])
    assert left == held - set(truth) and "rng.seed" in left


def test_a_torch_distributed_checkpoint_merges_to_what_torch_makes_of_it(tmp_path: Path) -> None:
    result, found = merged(SAMPLES / "fsdp_dcp_4", tmp_path / "out")
    truth = {
        ".".join(re.findall(r"\['?(.*?)'?\]", path)): tensor
        for path, tensor in expected("fsdp_dcp_4")["full_tensors_after_dcp_to_torch_save"][
            "tensors"
        ].items()
    }
    assert set(found) == set(truth)
    for name, tensor in truth.items():
        assert found[name][1] == tensor["shape"] and sha(found[name][2]) == tensor["sha256"], name
    assert "trainer.lr" in {one.name for one in result.left_out}


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_of_deepspeed_are_those_that_zero_to_fp32_gives(stage: int, tmp_path: Path) -> None:
    sample = f"deepspeed_zero{stage}_dp4"
    result, found = merged(SAMPLES / sample, tmp_path / "out", only="weights")
    truth = expected(sample)["fp32_state_dict_by_zero_to_fp32"]
    assert result.tied == {"head.weight": "wte.weight"}
    # Under stage 1 zero_to_fp32 loses frozen parameters; here they are.
    assert set(found) - set(truth) <= {"frozen.weight", "frozen.bias"}
    assert set(truth) <= set(found) | set(result.tied)
    for name, tensor in truth.items():
        dtype, shape, data = found[result.tied.get(name, name)]
        assert (shape, sha(data)) == (tensor["shape"], tensor["sha256"]), name
        assert (
            dtype
            == {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}[
                tensor["dtype"].removeprefix("torch.")
            ]
        )
    assert any("exp_avg" in one.name for one in result.left_out)


@pytest.mark.parametrize("run", ["tp2", "tp2_pp2"])
def test_weights_of_megatron_are_those_it_loads_without_parallelism(
    run: str, tmp_path: Path
) -> None:
    source = SAMPLES / "megatron_swiglu_gqa"
    _, found = merged(source, tmp_path / "out", run=run, only="weights")
    (truth,) = expected(source.name)["loads"]["tp1"]
    wanted = {
        name: tensor
        for name, tensor in truth.items()
        if not name.startswith(("fp32_param.", "exp_avg.", "exp_avg_sq."))
    }
    assert set(found) == set(wanted) and len(wanted) > 10
    for name, (_, shape, digest) in wanted.items():
        dtype, _, data = found[name]
        assert dtype == "BF16"
        assert sha(data[: math.prod(shape) * 2]) == digest, name  # less rows that pad


def test_replicas_merge_without_a_layout_and_tied_tensors_are_written_once(tmp_path: Path) -> None:
    result, found = merged(SAMPLES / "torch_ddp4", tmp_path / "out")
    assert result.tied == {"model.head.weight": "model.wte.weight"}
    assert "model.head.weight" not in found
    with slimckpt.open(SAMPLES / "torch_ddp4") as ckpt:
        view = ckpt.rank(2)
        for name, (_, shape, data) in found.items():
            assert list(view[name].shape) == shape and view[name].tobytes() == data, name
    assert {"rng_state.torch"} < {one.name for one in result.left_out}


def test_ranks_that_differ_need_a_layout(tmp_path: Path) -> None:
    parts = [[array("w", np.arange(6) + 6 * rank)] for rank in (0, 1)]
    source = ranks(tmp_path / "run", *parts)
    with pytest.raises(UsageError, match=r"'w'.*layout="):
        slimckpt.merge(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rules = tmp_path / "rules.toml"
    rules.write_text('[mesh]\ntp = 2\n[[rule]]\nmatch = "w"\ndim = 0\naxis = "tp"\n')
    _, found = merged(source, tmp_path / "out", layout=rules)
    assert found == {"w": ("F32", [12], np.arange(12, dtype=np.float32).tobytes())}


def test_ranks_that_drifted_are_refused_or_the_lowest_counts(tmp_path: Path) -> None:
    source = ranks(tmp_path / "run", [array("w", [1, 2])], [array("w", [1, 3])])
    rules = tmp_path / "rules.toml"
    rules.write_text("[mesh]\ndp = 2\n")
    with pytest.raises(CheckFailedError, match=r"'w' differs between rank 0 .* and rank 1"):
        slimckpt.merge(source, tmp_path / "out", layout=rules)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []
    _, found = merged(source, tmp_path / "out", layout=rules, allow_drift=True)
    assert found["w"][2] == np.array([1, 2], np.float32).tobytes()


def test_shards_and_index_are_as_huggingface_cuts_them(tmp_path: Path) -> None:
    tensors = [
        array(name, np.arange(n) + n) for name, n in zip("edcba", (10, 40, 5, 5, 9), strict=True)
    ]
    source = ranks(tmp_path / "run", tensors)
    result = slimckpt.merge(source, tmp_path / "out", max_shard_size=100)
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * 69}
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    # 160 bytes by themselves; in the order of the file 40 + 20 + 20, and 36 are too many then.
    assert index["weight_map"] == dict(
        zip("decba", map(names.__getitem__, (0, 1, 1, 1, 2)), strict=True)
    )
    assert result.files.keys() == {*names, "model.safetensors.index.json"}
    for name, nbytes in result.files.items():
        assert (out / name).stat().st_size == nbytes
    seen = {}
    for name in names:
        found, metadata = read(out / name)
        assert metadata["format"] == "pt"
        assert len(found) == 1 or sum(len(data) for _, _, data in found.values()) <= 100
        assert {index["weight_map"][tensor] for tensor in found} == {name}
        seen |= found
    assert seen == {name: (dtype, shape, data) for name, dtype, shape, data in tensors}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2KiB", 2048), (77, 77), ("77", 77)],
)
def test_sizes_of_shards_are_read(text: str | int, nbytes: int) -> None:
    assert shard_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 apples", 0])
def test_what_is_no_size_is_an_error(text: str | int) -> None:
    with pytest.raises(UsageError, match="no size"):
        shard_size(text)


def test_only_floating_tensors_are_rounded_and_bits_stay_without_dtype(tmp_path: Path) -> None:
    nan = np.array([0x7F81, 0xFF81, 0x7FFF], np.uint16).tobytes()
    tensors = [
        ("odd", "BF16", [3], nan),
        array("w", [1.00390625, 1.01171875, -3e38, np.nan, np.inf]),
        array("n", [1, 2**40], "I64"),
    ]
    source = ranks(tmp_path / "run", tensors)
    _, found = merged(source, tmp_path / "bits")
    assert found["odd"][2] == nan
    result, found = merged(source, tmp_path / "bf16", dtype="bf16")
    assert found["odd"][2] == nan and found["n"] == tuple(tensors[2][1:])
    assert found["w"][0] == "BF16" and result.overflowed == []
    values = np.frombuffer(found["w"][2], ml_dtypes.bfloat16).astype(np.float64)
    assert values[:2].tolist() == [1.0, 1.015625]  # ties go to the even one
    assert np.isnan(values[3]) and values[4] == np.inf
    result, found = merged(source, tmp_path / "f16", dtype="f16")
    assert result.overflowed == ["w"]
    assert np.frombuffer(found["w"][2], np.float16)[2] == -np.inf


def test_every_rounding_is_to_the_nearest_and_once() -> None:
    rng = np.random.default_rng(0)
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    every = np.sort(every[every.view(np.uint16) & 0x7F80 != 0x7F80].astype(np.float64))
    values = rng.standard_normal(4000) * 10.0 ** rng.integers(-30, 30, 4000)
    halves = (every[20000:20100] + every[20001:20101]) / 2
    values = np.concatenate([values, halves, halves * (1 + 2**-50), halves * (1 - 2**-50)])
    found = rounded(values, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    at = np.searchsorted(every, values)
    low, high = every[at - 1], every[at]
    assert (np.abs(found - values) == np.minimum(values - low, high - values)).all()
    tied = values - low == high - values
    bits = found[tied].astype(ml_dtypes.bfloat16).view(np.uint16)
    assert tied.sum() >= 100 and (bits % 2 == 0).all()


def test_what_safetensors_has_not_is_skipped_or_refused(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    np.savez(place / "m.npz", w=np.arange(3), z=np.zeros(2, np.complex128))
    with pytest.raises(UsageError, match=r"'z' is C128.*--skip"):
        slimckpt.merge(place, tmp_path / "out")
    result = slimckpt.merge(place, tmp_path / "out", skip=["z*"])
    assert result.tensors == 1 and result.left_out == [("z", "it is skipped")]


def test_names_follow_rules_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    source = ranks(tmp_path / "run", [array("a.w", [1]), array("b.w", [2]), array("c", [3])])
    rules = tmp_path / "rename.toml"
    rules.write_text(
        "[[rule]]\nmatch = '(.)\\.(w)'\nto = '\\2.of.\\1'\n[[rule]]\nmatch = 'x.*'\nto = 'y'\n"
    )
    result, found = merged(source, tmp_path / "out", rename=rules)
    assert set(found) == {"w.of.a", "w.of.b", "c"} and result.unused == ["x.*"]
    rules.write_text("[[rule]]\nmatch = '.\\.w'\nto = 'same'\n")
    nameless = ranks(tmp_path / "nameless", [array("", [1])])
    assert set(merged(nameless, tmp_path / "kept")[1]) == {""}
    with pytest.raises(UsageError, match=r"'a\.w' and 'b\.w' would both be named 'same'"):
        slimckpt.merge(source, tmp_path / "again", rename=rules)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "",
        "[[rule]]\nmatch = 'a'\n",
        "[[rule]]\nmatch = '('\nto = 'b'\n",
        "[[rule]]\nmatch = 'a'\nto = '\\1'\n",
        "[[rule]]\nmatch = 'a'\nto = '\\g<no>'\n",
        "[[rule]]\nmatch = 1\nto = 'b'\n",
        "[[rule]]\nmatch = 'a'\nto = 'b'\nelse = 'c'\n",
    ],
)
def test_rules_that_are_none_are_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    source = ranks(tmp_path / "run", [array("w", [1])])
    rules = tmp_path / "rename.toml"
    rules.write_text(text)
    with pytest.raises(UsageError, match=r"rename\.toml"):
        slimckpt.merge(source, tmp_path / "out", rename=rules)


def test_only_weights_leaves_optimizer_states_and_keeps_buffers(tmp_path: Path) -> None:
    tensors = [
        array("block.attn.weight", np.ones((4, 4))),
        array("block.bn.weight", np.ones(4)),
        ("block.bn.num_batches_tracked", "I64", [], (7).to_bytes(8, "little")),
        array("exp_avg.block.attn.weight", np.ones((4, 4))),
        ("global_step", "I64", [], (7).to_bytes(8, "little")),
    ]
    source = ranks(tmp_path / "run", tensors)
    result, found = merged(source, tmp_path / "out", only="weights")
    assert set(found) == {name for name, *_ in tensors[:3]}
    assert {one.name for one in result.left_out} == {name for name, *_ in tensors[3:]}


def test_tensors_without_elements_and_of_no_dimension_are_written(tmp_path: Path) -> None:
    source = ranks(tmp_path / "run", [array("none", np.ones((0, 3))), array("one", 5)])
    _, found = merged(source, tmp_path / "out")
    assert found == {"none": ("F32", [0, 3], b""), "one": ("F32", [], np.float32(5).tobytes())}


def test_wrong_options_and_destinations_are_refused(tmp_path: Path) -> None:
    source = ranks(tmp_path / "run", [array("w", [1])])
    for options in ({"dtype": "f8"}, {"only": "optimizer"}):
        with pytest.raises(UsageError):
            slimckpt.merge(source, tmp_path / "out", **options)
    (tmp_path / "there").mkdir()
    with pytest.raises(DestinationError):
        slimckpt.merge(source, tmp_path / "there")


def test_a_damaged_file_is_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    tensors = [array("w", np.arange(4000))]
    source = ranks(tmp_path / "run", tensors, tensors)
    path = source / "rank_1" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SlimckptError, match="rank_1"):
        slimckpt.merge(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_the_command_says_what_it_wrote_and_what_not(tmp_path: Path) -> None:
    command = ["merge", str(SAMPLES / "torch_ddp4"), str(tmp_path / "out"), "--dtype", "bf16"]
    dry = invoke([*command, "--dry-run", "--json"])
    assert dry.exit_code == 0, dry.output
    assert not (tmp_path / "out").exists()
    found = json.loads(dry.stdout)
    assert found["schema"] == "slimckpt.merge/1" and found["dry_run"] is True
    done = invoke(command)
    assert done.exit_code == 0, done.output
    assert "tied: model.head.weight is model.wte.weight" in done.stdout
    assert "rng_state.torch" in done.stdout
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert sizes == found["files"]
    refused = invoke(command)
    assert refused.exit_code == 2 and "exists" in refused.stderr
