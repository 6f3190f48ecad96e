"""A torch.distributed.checkpoint of four ranks, resharded: what torch itself loads on two and
three."""

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.layouts.toml_rules import read_toml
from slimckpt.layouts.toml_writing import to_toml
from slimckpt.rewrite.slim import slim

SAMPLE = SAMPLES / "fsdp_dcp_4"
TRUTH = expected("fsdp_dcp_4")
RULES = """
[mesh]
fsdp = {ranks}

[[rule]]
match = "shard_dim1"
dim = 1
axis = "fsdp"
split = "ceil"

[[rule]]
match = ["*.step", "rep.*", "repl_dtensor", "per_rank_same_key", "trainer.*", "model.steps_seen"]

[[rule]]
match = ["model.*", "optim.*"]
dim = 0
axis = "fsdp"
split = "ceil"
"""


def views(ranks: int) -> dict[int, dict[str, Any]]:
    """What torch holds on each rank, by the flat names of the metadata."""
    return {
        int(rank.removeprefix("rank")): {
            ".".join(re.findall(r"\['?(.*?)'?\]", path)): tensor.get("local", tensor)
            for path, tensor in tensors.items()
        }
        for rank, tensors in TRUTH[f"loaded_views_{ranks}_ranks"].items()
    }


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_other_ranks_hold_what_torch_loads_there(ranks: int, stored: bool, tmp_path: Path) -> None:
    path = SAMPLE
    if stored:
        path = tmp_path / "store"
        slim(SAMPLE, path, min_saving=0)
    rules = tmp_path / "fsdp.toml"
    rules.write_text(RULES.format(ranks=ranks))
    truth = views(ranks)
    assert len(truth) == ranks
    with slimckpt.open(path) as ckpt:
        resharded = ckpt.reshard(rules)
        assert set(resharded) == set(truth)
        for rank, tensors in truth.items():
            view = resharded[rank]
            assert len(tensors) == 39 and not view.carried
            for name, tensor in tensors.items():
                found = view[name]
                assert list(found.shape) == tensor["shape"], (rank, name)
                assert not found.flags.writeable
                assert sha(found) == tensor["sha256"], (rank, name)


def test_the_rules_written_of_it_give_back_the_ranks_that_saved_it() -> None:
    with slimckpt.open(SAMPLE) as ckpt:
        text = to_toml(ckpt.layout())
        back = ckpt.reshard(read_toml(text.encode(), "written"))
        saved = TRUTH["saved_views_4_ranks"]
        assert list(back) == [0, 1, 2, 3]
        for rank in range(4):
            for path, tensor in saved[f"rank{rank}"].items():
                name = ".".join(re.findall(r"\['?(.*?)'?\]", path))
                if "local" in tensor and tensor["dtensor"]["placements"] != ["R"]:
                    assert list(back[rank][name].shape) == tensor["local"]["shape"], name
                    assert sha(back[rank][name]) == tensor["local"]["sha256"], name


def test_a_rank_that_needs_rows_of_one_chunk_gets_them_without_a_copy(tmp_path: Path) -> None:
    rules = tmp_path / "rows.toml"
    rules.write_text(
        '[mesh]\nr = 7\n[[rule]]\nmatch="*.l0.weight"\ndim=0\naxis="r"\nsplit="ceil"\n'
    )
    with slimckpt.open(SAMPLE) as ckpt:
        whole = ckpt.tensor("model.l0.weight")
        assert whole.shape == (30, 24)
        first = ckpt.reshard(rules)[0]["model.l0.weight"]  # rows 0 to 4 of 0 to 7
        second = ckpt.reshard(rules)[1]["model.l0.weight"]  # rows 5 to 9, of two chunks
        assert (first.view(np.uint16) == whole[:5].view(np.uint16)).all()
        assert np.shares_memory(first, whole[0:8])
        assert not np.shares_memory(second, whole[0:8])
        assert (second.view(np.uint16) == np.asarray(whole)[5:10].view(np.uint16)).all()
