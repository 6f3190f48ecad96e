"""``slimckpt reshard``: slim checkpoints of the same state on other ranks."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from any_layout import BITS, Ranks, Wholes, layouts, scatter, wholes, write
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES

import slimckpt
from slimckpt.convert.reshard import reshard
from slimckpt.errors import CheckFailedError, UsageError
from slimckpt.rewrite.verify import verify

DP8 = SAMPLES / "ms_dp8_ckpt"
TO_4 = SAMPLES / "ms_reshard_8to4" / "strategy.ckpt"


def held(path: Path) -> Ranks:
    with slimckpt.open(path) as ckpt:
        return {
            rank: {
                name: (view.info(name).dtype, view[name].view(BITS[view.info(name).dtype]))
                for name in view
            }
            for rank, view in ((rank, ckpt.rank(rank)) for rank in ckpt.ranks)
        }


def assert_equal(found: Ranks, wanted: Ranks) -> None:
    assert found.keys() == wanted.keys()
    for rank, tensors in wanted.items():
        assert found[rank].keys() == tensors.keys()
        for name, (dtype, bits) in tensors.items():
            assert found[rank][name][0] == dtype and found[rank][name][1].shape == bits.shape
            assert found[rank][name][1].tobytes() == bits.tobytes()


@settings(max_examples=25)
@given(st.data())
def test_any_layout_to_any_other_and_back_through_stores(data: Any) -> None:
    whole: Wholes = data.draw(wholes())
    one, other = data.draw(layouts(whole)), data.draw(layouts(whole))
    with tempfile.TemporaryDirectory() as folder:
        first, second, third = (Path(folder, name) for name in ("first", "second", "third"))
        write(first, scatter(whole, one))
        reshard(first, second, other, layout=one)
        assert verify(second).sound
        assert_equal(held(second), scatter(whole, other))
        reshard(second, third, one)  # the store knows its layout
        assert_equal(held(third), scatter(whole, one))


def test_a_resharded_store_holds_equal_bytes_once_and_stands_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    slimckpt.slim(DP8, source)
    done = reshard(source, tmp_path / "four", TO_4)
    source.rename(tmp_path / "away")
    assert done.ranks == (0, 1, 2, 3) and "learning_rate" in done.carried
    assert verify(tmp_path / "four").sound
    assert done.store_nbytes < 0.5 * done.tensor_nbytes
    with slimckpt.open(tmp_path / "four") as ckpt:
        assert ckpt.ranks == (0, 1, 2, 3)
        embedding = "backbone.embedding.weight"
        places = {ckpt.rank(rank)[embedding].__array_interface__["data"][0] for rank in range(4)}
        assert len(places) == 1
        assert set(ckpt.layout().tensors) >= {embedding, "layers.0.qkv"}


def test_only_some_of_the_new_ranks(tmp_path: Path) -> None:
    done = reshard(DP8, tmp_path / "two", TO_4, only_ranks=[1, 3])
    assert done.ranks == (1, 3)
    with slimckpt.open(tmp_path / "two") as ckpt, slimckpt.open(DP8) as source:
        assert ckpt.ranks == (1, 3)
        wanted = source.reshard(TO_4)[3]
        assert {name: a.tobytes() for name, a in ckpt.rank(3).items()} == {
            name: a.tobytes() for name, a in wanted.items()
        }
    with pytest.raises(CheckFailedError, match=r"not there.*take one that has all"):
        slimckpt.merge(tmp_path / "two", tmp_path / "merged")
    with pytest.raises(UsageError, match=r"has no ranks 4; there are 0-3"):
        reshard(DP8, tmp_path / "no", TO_4, only_ranks=[3, 4])
    assert not (tmp_path / "no").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    dry = reshard(DP8, tmp_path / "four", TO_4, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    wet = reshard(DP8, tmp_path / "four", TO_4)
    assert (dry.tensors, dry.tensor_nbytes, dry.store_nbytes) == (
        wet.tensors,
        wet.tensor_nbytes,
        wet.store_nbytes,
    )


def ranks_of(place: Path, tensors: list[list[tuple[str, np.ndarray]]]) -> Path:
    for rank, own in enumerate(tensors):
        path = place / f"rank_{rank}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        rows = [(n, {4: "F32", 1: "U8"}[a.itemsize], a.shape, a.tobytes()) for n, a in own]
        path.write_bytes(safetensors_file(rows))
    return place


WEIGHT = np.arange(26, dtype=np.float32).reshape(13, 2)


def test_equal_ranks_become_any_number_of_them_and_each_keeps_its_generator(
    tmp_path: Path,
) -> None:
    seeds = [np.full(5056, rank, np.uint8) for rank in range(2)]
    source = ranks_of(tmp_path / "a", [[("w", WEIGHT), ("rng_state", seed)] for seed in seeds])
    done = reshard(source, tmp_path / "b", ranks=3)
    assert done.carried == ["rng_state"]
    with slimckpt.open(tmp_path / "b") as ckpt:
        for rank, seed in enumerate([0, 1, 0]):
            assert (ckpt.rank(rank)["w"] == WEIGHT).all()
            assert (ckpt.rank(rank)["rng_state"] == seed).all()


def test_ranks_that_differ_need_a_layout_and_it_is_said_where(tmp_path: Path) -> None:
    source = ranks_of(tmp_path / "a", [[("same", WEIGHT), ("w", WEIGHT + r)] for r in range(2)])
    with pytest.raises(UsageError, match=r"ranks 0 and 1 differ in tensor 'w'; give one"):
        reshard(source, tmp_path / "b", ranks=3)
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[mesh]\ntp = 2\n[[rule]]\nmatch = "w"\ndim = 0\naxis = "tp"\nsplit = "ceil"\n'
    )
    reshard(source, tmp_path / "b", ranks=4, layout=rules)
    whole = np.concatenate([WEIGHT, WEIGHT + 1])
    with slimckpt.open(tmp_path / "b") as ckpt:
        for rank, (low, high) in enumerate([(0, 7), (7, 14), (14, 21), (21, 26)]):
            assert (ckpt.rank(rank)["w"] == whole[low:high]).all()
            assert ckpt.rank(rank)["w"].shape == (high - low, 2)
            assert (ckpt.rank(rank)["same"] == WEIGHT).all()


def test_claims_that_are_false_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = ranks_of(tmp_path / "a", [[("w", WEIGHT + r)] for r in range(2)])
    rules = tmp_path / "rules.toml"
    rules.write_text("[mesh]\ndp = 2\n")
    with pytest.raises(CheckFailedError, match=r"'w'"):
        reshard(source, tmp_path / "b", ranks=4, layout=rules)
    assert not (tmp_path / "b").exists()
    reshard(source, tmp_path / "b", ranks=4, layout=rules, allow_drift=True)
    with slimckpt.open(tmp_path / "b") as ckpt:
        assert all((ckpt.rank(rank)["w"] == WEIGHT).all() for rank in range(4))


def test_where_a_number_of_ranks_is_not_enough_the_message_says_what_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'backbone.pos.weight' of shape \[128, 32\].*--layout"):
        reshard(DP8, tmp_path / "b", ranks=4)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slimckpt", *map(str, arguments)], capture_output=True, text=True
    )


def test_the_layout_that_is_printed_is_one_to_reshard_by(tmp_path: Path) -> None:
    printed = command("layout", DP8)
    assert printed.returncode == 0
    (tmp_path / "same.toml").write_text(printed.stdout)
    done = command("reshard", DP8, tmp_path / "same", "--layout", tmp_path / "same.toml", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "slimckpt.reshard/1" and found["ranks"] == list(range(8))
    with slimckpt.open(tmp_path / "same") as ckpt, slimckpt.open(DP8) as source:
        for rank in range(8):
            wanted = source.rank(rank)
            assert {n: a.tobytes() for n, a in ckpt.rank(rank).items()} == {
                n: a.tobytes() for n, a in wanted.items()
            }


def test_a_rule_that_matches_no_tensor_is_said(tmp_path: Path) -> None:
    rules = tmp_path / "tp2.toml"
    rules.write_text(
        '[mesh]\ntp = 2\n[[rule]]\nmatch = ["*.wieght", "head.*"]\ndim = 0\naxis = "tp"\n'
        '[[rule]]\nmatch = "rng.*"\nper_rank = true\n'
        '[[rule]]\nmatch = "*.heade"\ndim = 0\naxis = "tp"\n'
    )
    done = command("reshard", DP8, tmp_path / "out", "--layout", rules, "--dry-run")
    assert done.returncode == 0 and "tp2.toml matches no tensor: *.heade" in done.stderr
    assert "rng" not in done.stderr and "wieght" not in done.stderr


@pytest.mark.parametrize(
    "wanted", [[], ["--ranks", "2", "--strategy", TO_4], ["--only-ranks", "3-1", "--ranks", "2"]]
)
def test_what_is_wanted_is_said_once_and_well(wanted: list[Any], tmp_path: Path) -> None:
    done = command("reshard", DP8, tmp_path / "b", *wanted)
    assert done.returncode == 2 and "Error" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "b").exists()
