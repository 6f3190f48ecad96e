"""Tensors that Paddle cut in pieces are there as a whole too."""

from pathlib import Path

import numpy as np
import pytest
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.rewrite.slim import slim

FOLDER = "paddle_proto_variants"


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("writable", [False, True])
def test_the_whole_is_its_pieces_in_its_own_shape(
    protocol: int, stored: bool, writable: bool, tmp_path: Path
) -> None:
    file = f"bigparam_p{protocol}_lowlimit.pdparams"
    pieces = [
        tensor
        for tensor in expected(FOLDER)["tensors"][file]
        if tensor["path"][0].startswith("w@@")
    ]
    where = tmp_path / "run"
    where.mkdir()
    for rank in (0, 1):
        (where / f"rank_{rank}.pdparams").write_bytes(
            (SAMPLES / FOLDER / "ckpt" / file).read_bytes()
        )
    if stored:
        slim(where, tmp_path / "store", min_saving=0)
        where = tmp_path / "store"
    with slimckpt.open(where) as ckpt:
        view = ckpt.rank(1, writable=writable)
        assert view["w"].shape == (20, 30)
        flat = np.concatenate([view[piece["path"][0]] for piece in pieces])
        assert [len(view[piece["path"][0]]) for piece in pieces] == [p["shape"][0] for p in pieces]
        assert np.array_equal(view["w"].reshape(-1), flat)
        assert np.array_equal(flat, np.arange(600, dtype=np.float32))
