"""check=True: bytes of a slim checkpoint are compared with their digests before they are used."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_files import SAMPLES

import slimckpt
from slimckpt.errors import SlimckptError, StoreDamagedError, UsageError
from slimckpt.rewrite.slim import slim

SAMPLE = SAMPLES / "torch_ddp4"
FILE = "checkpoint_rank1.pt"
BLOCK = 4 * 1024 * 1024


@pytest.fixture
def store(tmp_path: Path) -> Path:
    slim(SAMPLE, tmp_path / "store", min_saving=0)
    return tmp_path / "store"


def flip(path: Path, at: int) -> None:
    times = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def broken(path: Path, **options: object) -> dict[str, str]:
    """What reading each tensor of the file raises, by name; the others equal the original's."""
    found = {}
    with slimckpt.open(SAMPLE) as truth, slimckpt.open(path, **options) as ckpt:
        view = ckpt.files[FILE]
        for name in view:
            try:
                np.testing.assert_array_equal(view[name], truth.files[FILE][name])
            except StoreDamagedError as error:
                found[name] = str(error)
    return found


def place_of(store: Path, name: str) -> tuple[Path, int]:
    """Where the bytes of a tensor are in the store."""
    with slimckpt.open(store) as ckpt:
        member = ckpt.files.member(FILE)
        row = list(member.holding.table.names()).index(name)
        payload = member.holding.table.tensor(row).payload
        assert payload is not None
        (stretch,) = member.holding.stretches(payload)
        assert stretch.path is not None
        return Path(os.fsdecode(stretch.path)), stretch.offset


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_flipped_bit_is_found_in_the_tensors_it_belongs_to_and_no_others(
    store: Path, backend: str
) -> None:
    assert broken(store, backend=backend, check=True) == {}
    flip(*place_of(store, "model.wte.weight"))
    found = broken(store, backend=backend, check=True)
    # The head is tied to the embedding: one storage.
    assert sorted(found) == ["model.head.weight", "model.wte.weight"]
    message = found["model.wte.weight"]
    assert "model.wte.weight" in message and FILE in message and "digest is wrong" in message


def test_writable_views_and_pickled_checkpoints_check_too(store: Path) -> None:
    flip(*place_of(store, "model.wte.weight"))
    with (
        slimckpt.open(store, check=True) as ckpt,
        pickle.loads(pickle.dumps(ckpt)) as again,
    ):
        for checkpoint in (ckpt, again):
            with pytest.raises(StoreDamagedError, match="digest is wrong"):
                checkpoint.rank(1, writable=True)["model.wte.weight"]


def test_a_small_tensor_in_the_skeleton_and_the_skeleton_itself_are_checked(store: Path) -> None:
    small = "optimizer.state.0.step"
    path, at = place_of(store, small)
    flip(path, at)
    assert small in broken(store, check=True)
    with slimckpt.open(store, check=True) as ckpt:
        holding = ckpt.files.member(FILE).holding
        with pytest.raises(StoreDamagedError, match="its skeleton"), holding.source():
            pass


def test_a_payload_of_several_blocks_is_checked_to_its_last_byte(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    np.save(tree / "a.npy", np.arange(BLOCK // 4 * 2 + 5, dtype=np.float32))
    shutil.copy(tree / "a.npy", tree / "b.npy")
    slim(tree, tmp_path / "store")
    with slimckpt.open(tmp_path / "store", check=True) as ckpt:
        (stretch,) = ckpt.files.member("a.npy").holding.stretches(0)
        assert ckpt.files["b.npy"]["b"][-1] == BLOCK // 4 * 2 + 4
    assert stretch.path is not None
    flip(Path(os.fsdecode(stretch.path)), stretch.offset + stretch.nbytes - 1)
    with slimckpt.open(tmp_path / "store", check=True) as ckpt, pytest.raises(StoreDamagedError):
        ckpt.files["b.npy"]["b"]
    with slimckpt.open(tmp_path / "store") as ckpt:
        assert ckpt.files["b.npy"]["b"][-1] != BLOCK // 4 * 2 + 4


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_what_is_compared_is_the_copy_in_a_stage(store: Path, tmp_path: Path, backend: Any) -> None:
    stage = tmp_path / "stage"
    with slimckpt.open(store, backend, check=True, stage=stage) as ckpt:
        assert ckpt.files[FILE]["model.wte.weight"].size
    path, at = place_of(store, "model.wte.weight")
    (copy,) = [copy for copy in stage.iterdir() if copy.read_bytes() == path.read_bytes()]
    flip(copy, at)
    with (
        slimckpt.open(store, backend, check=True, stage=stage) as ckpt,
        pytest.raises(StoreDamagedError, match="digest is wrong"),
    ):
        ckpt.files[FILE]["model.wte.weight"]


def test_copying_checks_and_what_only_asks_where_tensors_lie_does_not(store: Path) -> None:
    flip(*place_of(store, "model.wte.weight"))
    with slimckpt.open(store, check=True) as ckpt:
        view = ckpt.files[FILE]
        assert sorted(view.in_storage_order()) == sorted(view)
        assert view.prefetch().wait()
        room = bytearray(view.info("model.wte.weight").nbytes)
        with pytest.raises(StoreDamagedError, match="digest is wrong"):
            view.copy_into("model.wte.weight", room)
        assert not any(room)


def test_originals_have_no_digests_and_say_so() -> None:
    with pytest.raises(UsageError, match="no digests"):
        slimckpt.open(SAMPLE, check=True)
    assert issubclass(UsageError, SlimckptError)
