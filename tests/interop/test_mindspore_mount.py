"""MindSpore and safetensors load their own files from a mounted slim checkpoint, none the wiser.

Truth is what they load from the originals. Run by ``scripts/interop``.
"""

from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import nn
from mounts import skip_without_fuse
from safetensors import safe_open
from safetensors.numpy import load_file
from test_mindspore import RANKS, load, write_run

from slimckpt.mount import mounted
from slimckpt.rewrite.slim import slim


@pytest.fixture
def point(tmp_path: Path) -> Path:
    skip_without_fuse()
    (tmp_path / "point").mkdir()
    return tmp_path / "point"


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("crc", [False, True])
def test_load_checkpoint_gives_what_it_gives_for_the_original(
    suffix: str, crc: bool, tmp_path: Path, point: Path
) -> None:
    options = {"crc_check": True} if crc else {}
    write_run(tmp_path / "source", suffix, **options)
    slim(tmp_path / "source", tmp_path / "store")
    with mounted(tmp_path / "store", point):
        for rank in RANKS:
            path = Path(f"rank_{rank}/net-1_1{suffix}")
            expected = load(tmp_path / "source" / path, **options)
            assert len(expected) > 15
            assert load(point / path, **options) == expected


def test_safetensors_opens_and_loads_mounted_files(tmp_path: Path, point: Path) -> None:
    # Without bfloat16, which safetensors 0.7 does not give to numpy.
    write_run(tmp_path / "source", ".safetensors", crc_check=True)
    slim(tmp_path / "source", tmp_path / "store")
    with mounted(tmp_path / "store", point):
        for rank in RANKS:
            path = f"rank_{rank}/net-1_1.safetensors"
            expected = load_file(tmp_path / "source" / path)
            found = load_file(point / path)
            assert found.keys() == expected.keys() and len(found) > 10
            with safe_open(point / path, "np") as opened:
                assert set(opened.keys()) == set(expected)
                for name, array in expected.items():
                    assert np.array_equal(found[name], array)
                    assert np.array_equal(opened.get_tensor(name), array)
                part = opened.get_slice("backbone.embedding.weight")[3:7, 5:]
            assert np.array_equal(part, expected["backbone.embedding.weight"][3:7, 5:])


def test_a_network_trains_on_from_a_mounted_file_as_from_the_original(
    tmp_path: Path, point: Path
) -> None:
    def network() -> tuple[nn.Cell, nn.Optimizer]:
        net = nn.SequentialCell(nn.Dense(300, 40), nn.ReLU(), nn.Dense(40, 1))
        return net, nn.Adam(net.trainable_params(), 0.01)

    def train(net: nn.Cell, optimizer: nn.Optimizer, steps: int) -> list[float]:
        inputs = mindspore.Tensor(np.random.default_rng(1).random((8, 300), np.float32))
        step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
        target = mindspore.ops.ones((8, 1))
        return [float(step(inputs, target).asnumpy()) for _ in range(steps)]

    def resumed(path: Path) -> list[float]:
        net, optimizer = network()
        found = mindspore.load_checkpoint(str(path))
        assert mindspore.load_param_into_net(optimizer, found)[0] == []
        assert mindspore.load_param_into_net(net, found)[0] == []
        return train(net, optimizer, 3)

    net, optimizer = network()
    train(net, optimizer, 2)
    for rank in range(2):
        path = tmp_path / "source" / f"rank_{rank}" / "net-1_2.ckpt"
        path.parent.mkdir(parents=True)
        mindspore.save_checkpoint(optimizer, str(path))
    expected = train(net, optimizer, 3)
    slim(tmp_path / "source", tmp_path / "store")
    with mounted(tmp_path / "store", point):
        losses = resumed(point / "rank_1" / "net-1_2.ckpt")
    assert losses == resumed(tmp_path / "source" / "rank_1" / "net-1_2.ckpt") == expected
    assert len(set(losses)) == 3
