"""What ``--drop`` leaves out of real checkpoints of torch, Megatron, DeepSpeed and Paddle."""

import re
from collections import Counter
from math import prod
from pathlib import Path

import pytest
from sample_files import SAMPLES, expected

from slimckpt.analysis.categories import CATEGORIES, categorize
from slimckpt.errors import NothingToGainError, UsageError
from slimckpt.model import TableBuilder
from slimckpt.rewrite.slim import slim

MOMENTS = re.compile(r"(?:^|[._])(?:exp_avg|exp_avg_sq|moment1|moment2)(?:[._]|$)")
"""In these samples; step states have one element, so they are never left out."""
TORCH = ["torch_ddp4", "lora_steps", "deepspeed_zero1_dp4", "deepspeed_zero3_dp4"]
SMALL = 1024


def moments_of(folder: str) -> Counter[tuple[str, str, int]]:
    """File, exact path and bytes of every moment of at least 1 KiB that the truth names."""
    found: Counter[tuple[str, str, int]] = Counter()
    truth = expected(folder)
    if folder == "paddle_dp4":
        for file, tensors in truth["tensors"].items():
            for tensor in tensors:
                path = "".join(f"[{key!r}]" for key in tensor["path"])
                found[f"ckpt/{file}", path, tensor["nbytes"]] += bool(
                    MOMENTS.search(str(tensor["path"][-1]))
                )
    else:
        for file, entry in truth["files"].items():
            for path, tensor in entry.get("tensors", {}).items():
                leaf = re.findall(r"\['?([^\[\]']*)'?\]", path)[-1]
                found[file, path, tensor["nbytes"]] += bool(MOMENTS.fullmatch(leaf))
    return Counter({key: 1 for key, is_moment in found.items() if is_moment and key[2] >= SMALL})


@pytest.mark.parametrize("folder", [*TORCH, "megatron_tp2_pp2", "paddle_dp4"])
def test_drop_optimizer_leaves_out_the_moments_that_the_truth_names(folder: str) -> None:
    wanted = moments_of(folder)
    if folder == "lora_steps":
        assert not wanted  # those of the adapters are smaller
    else:
        assert len(wanted) >= 8
    found = Counter(
        (tensor.file, tensor.path, tensor.nbytes)
        for tensor in dropped(SAMPLES / folder, "optimizer")
    )
    assert found == wanted


@pytest.mark.parametrize("kind", ["dp_reshardable", "fully_reshardable"])
def test_drop_optimizer_leaves_out_the_moments_that_megatron_held(kind: str) -> None:
    wanted = Counter(
        (item["key"], 4 * prod(item["shape"]))
        for rank in expected("megatron_moe_torch_dist")["ranks"]
        for item in rank["items"][kind]
        if "key" in item and MOMENTS.search(item["key"]) and 4 * prod(item["shape"]) >= SMALL
    )
    assert sum(wanted.values()) > 20
    tensors = dropped(SAMPLES / "megatron_moe_torch_dist" / kind, "optimizer")
    assert Counter((tensor.name, tensor.nbytes) for tensor in tensors) == wanted


def test_nothing_of_a_checkpoint_with_small_moments_is_left_out() -> None:
    assert dropped(SAMPLES / "fsdp_dcp_4", "optimizer") == []


def test_masters_that_no_weight_repeats_are_not_left_out() -> None:
    with pytest.raises(UsageError, match="no other copy"):
        slim(
            SAMPLES / "deepspeed_zero3_dp4",
            "unused",
            min_saving=0,
            drop=["master"],
            dry_run=True,
        )


def dropped(folder: Path, kind: str) -> list:
    try:
        return slim(folder, "unused", min_saving=0, drop=[kind], dry_run=True).dropped
    except NothingToGainError:
        return []


def test_the_truth_of_megatrons_moe_divides_its_items() -> None:
    """Every item of both formats, by what its key says in Megatron's own words."""
    keys: dict[str, list[int]] = {}
    for rank in expected("megatron_moe_torch_dist")["ranks"]:
        for items in rank["items"].values():
            keys |= {item["key"]: item["shape"] for item in items if "key" in item}
    builder = TableBuilder()
    for key, shape in keys.items():
        builder.tensor(key, "F32" if "optimizer" in key else "BF16", tuple(shape), 0)
    table = builder.build()
    found = {
        table.name(row): CATEGORIES[code] for row, code in enumerate(categorize(table).tolist())
    }
    assert set(found) == set(keys)
    for key, kind in found.items():
        if MOMENTS.search(key):
            assert kind == "moment", key
        elif ".param" in key:
            assert kind == "master weight", key
        else:
            wanted = {"norm": "norm", "embedding": "embedding", "attention": "attention"}
            assert kind == next((v for k, v in wanted.items() if k in key), "mlp"), key
