"""Whole tensors of Paddle's distributed checkpoints, against what Paddle itself loads of them."""

import shutil
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed
import pytest
from sample_files import SAMPLES

import slimckpt
from slimckpt.convert.reshard import reshard

SAVES = ["paddle_distcp_4", "paddle_distcp_4_uneven"]  # Paddle 3.3 cannot read those of 2.6
DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
    "U8": "uint8",
    "F64": "float64",
}


@pytest.mark.parametrize("sample", SAVES)
def test_whole_tensors_are_those_that_paddle_loads(sample: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(SAMPLES / sample / "ckpt", place)
    with slimckpt.open(place) as ckpt:
        tensors = ckpt.layout().tensors
        state = {
            name: paddle.zeros(tensors[name].shape, dtype=DTYPES[tensors[name].dtype])
            for name in tensors
        }
        paddle.distributed.load_state_dict(state, str(place))
        assert state
        for name, theirs in state.items():
            ours = np.asarray(ckpt.tensor(name))
            assert ours.shape == tuple(theirs.shape), name
            assert ours.tobytes() == theirs.numpy().tobytes(), name


def test_a_resharded_store_has_the_whole_tensors_that_paddle_loads(tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(SAMPLES / "paddle_distcp_4" / "ckpt", place)
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[mesh]\nmp = 3\n[[rule]]\nmatch = "model.embed.weight"\ndim = 0\naxis = "mp"\n'
        'split = "ceil"\n'
    )
    reshard(place, tmp_path / "three", rules)
    with slimckpt.open(tmp_path / "three") as ckpt:
        name = "model.embed.weight"
        tensor = ckpt.layout().tensors[name]
        state = {name: paddle.zeros(tensor.shape, dtype=DTYPES[tensor.dtype])}
        paddle.distributed.load_state_dict(state, str(place))
        assert len({shard.pieces for shard in tensor.shards}) == 3
        assert np.asarray(ckpt.tensor(name)).tobytes() == state[name].numpy().tobytes()
