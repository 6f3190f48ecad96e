"""Whole tensors and other ranks' views through a layout that is given: what is read, what is said,
what is refused."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors_bytes import safetensors_file

import slimckpt
from slimckpt.errors import CheckFailedError, UnknownRankError, UnknownTensorError, UsageError
from slimckpt.layouts.layout import Box, Layout, Piece, Shard, TensorLayout
from slimckpt.rewrite.slim import slim

WHOLE = np.arange(6 * 512, dtype=np.float32).reshape(6, 512)


def write(place: Path, ranks: list[dict[str, np.ndarray]]) -> Path:
    for rank, tensors in enumerate(ranks):
        path = place / f"rank_{rank}" / "model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(
            safetensors_file([(n, "F32", a.shape, a.tobytes()) for n, a in tensors.items()])
        )
    return place


def rows(*held: tuple[int, int], shape: tuple[int, ...] = (6, 512), name: str = "w") -> Layout:
    """The layout of ranks that hold rows from one to before another."""
    shards = tuple(
        Shard(rank, (high - low, 512), (Piece(Box((low, 0), (high - low, 512)), (0, 0)),))
        for rank, (low, high) in enumerate(held)
    )
    return Layout({name: TensorLayout("F32", shape, shards)}, tuple(range(len(held))), "by hand")


@pytest.fixture(params=["directory", "store"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Puts a run where the test reads it from: as it is, or slimmed."""

    def place(run: Path) -> Path:
        if request.param == "directory":
            return run
        slim(run, tmp_path / "store", min_saving=0)
        return tmp_path / "store"

    return place


def test_boxes_may_overlap_where_they_agree(stored: Any, tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"w": WHOLE[:4]}, {"w": WHOLE[2:]}])
    with slimckpt.open(stored(run)) as ckpt:
        whole = ckpt.tensor("w", layout=rows((0, 4), (2, 6)))
        assert (np.asarray(whole) == WHOLE).all()
        assert (whole[1:3, 5:9] == WHOLE[1:3, 5:9]).all()
        assert (whole[5] == WHOLE[5]).all()


def test_boxes_that_overlap_and_differ_are_refused(
    stored: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = WHOLE[2:].copy()
    other[1, 7] = np.nan
    run = write(tmp_path / "run", [{"w": WHOLE[:4]}, {"w": other}])
    layout = rows((0, 4), (2, 6))
    with slimckpt.open(stored(run)) as ckpt:
        with pytest.raises(CheckFailedError, match=r"'w' differs between rank 0.*rank 1.*by hand"):
            np.asarray(ckpt.tensor("w", layout=layout))
        with caplog.at_level(logging.WARNING):
            found = np.asarray(ckpt.tensor("w", layout=layout, allow_drift=True))
        assert (found == WHOLE).all() and "taken from rank 0" in caplog.text


def test_replicas_that_differ_in_what_is_read_are_refused(stored: Any, tmp_path: Path) -> None:
    other = WHOLE.copy()
    other[5, 0] = -other[5, 0]
    run = write(tmp_path / "run", [{"w": WHOLE}, {"w": other}])
    layout = rows((0, 6), (0, 6))
    with slimckpt.open(stored(run)) as ckpt:
        for key in (..., 5, (slice(4, 6), 0)):
            with pytest.raises(CheckFailedError, match=r"'w'.*rank 0.*\[6, 512\].*rank 1"):
                ckpt.tensor("w", layout=layout)[key]
        drifted = ckpt.tensor("w", layout=layout, allow_drift=True)
        assert drifted[5, 0] == WHOLE[5, 0]
        with pytest.raises(CheckFailedError):
            ckpt.reshard(rows((0, 6)), layout=layout)[0]["w"]


def test_a_zero_is_not_a_negative_zero(stored: Any, tmp_path: Path) -> None:
    zeros = np.zeros((6, 512), np.float32)
    run = write(tmp_path / "run", [{"w": zeros}, {"w": -zeros}])
    with slimckpt.open(stored(run)) as ckpt, pytest.raises(CheckFailedError):
        np.asarray(ckpt.tensor("w", layout=rows((0, 6), (0, 6))))


def test_one_box_comes_without_a_copy_and_read_only(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"w": WHOLE[:4]}, {"w": WHOLE[4:]}])
    with slimckpt.open(run) as ckpt:
        whole = ckpt.tensor("w", layout=rows((0, 4), (4, 6)))
        part = whole[1:3]
        assert np.shares_memory(part, ckpt.rank(0)["w"]) and not part.flags.writeable
        assert not np.shares_memory(whole[3:5], ckpt.rank(0)["w"])
        view = ckpt.reshard(rows((0, 2), (2, 6)), layout=rows((0, 4), (4, 6)))
        assert np.shares_memory(view[0]["w"], ckpt.rank(0)["w"])
        assert not view[0]["w"].flags.writeable and not view[1]["w"].flags.writeable
        assert (view[1]["w"] == WHOLE[2:]).all()


def test_only_the_ranks_that_have_a_part_are_read(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"w": WHOLE[2 * r : 2 * r + 2]} for r in range(3)])
    layout = rows((0, 2), (2, 4), (4, 6))
    os.truncate(run / "rank_2" / "model.safetensors", 100)
    with slimckpt.open(run) as ckpt:
        view = ckpt.reshard(rows((0, 3), (3, 6)), layout=layout)
        assert (view[0]["w"] == WHOLE[:3]).all()
        with pytest.raises(CheckFailedError, match="rank_2"):
            view[1]["w"]
        with pytest.raises(CheckFailedError, match="rank_2"):
            ckpt.tensor("w", layout=layout)


SHAPES = {
    "a gap": (rows((0, 3), (4, 6)), r"\[3:4, 0:512\]"),
    "another shape": (rows((0, 4), (4, 6)), r"rank_0.*'w' of rank 0.*\[4, 512\].*\[3, 512\]"),
    "another name": (rows((0, 3), (3, 6), name="v"), r"'v' of rank 0 is not there"),
    "another rank": (rows((0, 3), (3, 6), (0, 3)), r"rank 2 is not there.*has no rank 2"),
    "another size": (rows((0, 3), (3, 6), shape=(5, 512)), r"rank 1.*not inside"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_layout_of_another_save_is_refused_before_anything_is_read(
    name: str, tmp_path: Path
) -> None:
    layout, match = SHAPES[name]
    run = write(tmp_path / "run", [{"w": WHOLE[:3]}, {"w": WHOLE[3:]}])
    (tensor,) = layout.tensors
    with slimckpt.open(run) as ckpt, pytest.raises(CheckFailedError, match=match):
        ckpt.tensor(tensor, layout=layout)


TARGETS = {
    "another shape": (rows((0, 5), shape=(5, 512)), CheckFailedError, r"\[6, 512\].*\[5, 512\]"),
    "a gap": (rows((0, 5)), CheckFailedError, r"\[5:6, 0:512\]"),
    "another tensor": (rows((0, 6), name="v"), CheckFailedError, "'v'"),
    "no such file": ("nowhere.toml", UsageError, r"nowhere\.toml"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_new_layout_that_does_not_suit_is_refused(name: str, tmp_path: Path) -> None:
    target, kind, match = TARGETS[name]
    run = write(tmp_path / "run", [{"w": WHOLE[:3]}, {"w": WHOLE[3:]}])
    with slimckpt.open(run) as ckpt, pytest.raises(kind, match=match):
        ckpt.reshard(target, layout=rows((0, 3), (3, 6)))


def test_what_is_outside_comes_from_the_same_rank_or_the_first_and_is_listed(
    tmp_path: Path,
) -> None:
    seeds = [np.full(3, rank, np.float32) for rank in range(2)]
    run = write(
        tmp_path / "run", [{"w": WHOLE[:3], "rng": seeds[0]}, {"w": WHOLE[3:], "rng": seeds[1]}]
    )
    with slimckpt.open(run) as ckpt:
        new = ckpt.reshard(rows((0, 2), (2, 4), (4, 6)), layout=rows((0, 3), (3, 6)))
        assert len(new) == 3 and [view.carried for view in new.values()] == [("rng",)] * 3
        assert [view["rng"][0] for view in new.values()] == [0, 1, 0]
        assert [view.info("rng") for view in new.values()] == [("F32", (3,))] * 3
        assert set(new[0]) == {"w", "rng"} and len(new[0]) == 2 and "rng" in new[0]
        assert new[0].parts("rng") == () and new[0].parts("w")[0][0] == "w"
        assert new[1].raw("w") == WHOLE[2:4].tobytes() and new[1].raw("rng") == seeds[1].tobytes()
        with pytest.raises(UnknownTensorError, match="'v'"):
            new[0]["v"]
        with pytest.raises(UnknownRankError, match="0-2"):
            new[3]


def test_without_a_layout_the_way_on_is_named(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"w": WHOLE[:3]}, {"w": WHOLE[3:]}])
    with slimckpt.open(run) as ckpt:
        for call in (ckpt.layout, lambda: ckpt.reshard(rows((0, 6)))):
            with pytest.raises(UsageError, match=r"layout=…"):
                call()
        with pytest.raises(UnknownTensorError, match=r"rank\(r\)\[name\]"):
            ckpt.tensor("w")


def test_a_file_of_rules_that_changed_is_read_again(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [{"w": WHOLE[:3]}, {"w": WHOLE[3:]}])
    rules = tmp_path / "rules.toml"
    with slimckpt.open(run) as ckpt:
        for dim, shape in ((0, (6, 512)), (1, (3, 1024))):
            rules.write_text(f'[mesh]\ntp = 2\n[[rule]]\nmatch = "w"\ndim = {dim}\naxis = "tp"\n')
            os.utime(rules, (dim, dim))
            assert ckpt.tensor("w", layout=rules).shape == shape
