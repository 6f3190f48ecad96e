"""Plain tensors: the fast way gives what the other way gives, and is the way of nearly all."""

from pathlib import Path

import pytest
from sample_files import SAMPLES

import slimckpt
from slimckpt.errors import SlimckptError
from slimckpt.rewrite.slim import slim
from slimckpt.views.arrays import Arrays
from slimckpt.views.mapping import TensorView
from slimckpt.views.plain import PlainTensors

FOLDERS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


def compared(file: TensorView) -> tuple[int, int]:
    """How many arrays of a file are plain, and how many there are; each plain one compared."""
    (member,) = file._members()
    backend = file._arrays.backend
    plain, arrays = PlainTensors(member.holding, backend), Arrays(backend, False)
    count = total = 0
    for row in range(member.holding.table.n_tensors):
        quick = plain.array(row)
        try:
            slow = arrays.array(member.holding, row)
        except SlimckptError:
            assert quick is None
            continue
        total += slow.nbytes > 0
        if quick is None:
            continue
        count += 1
        assert (quick.dtype, quick.shape, quick.strides) == (slow.dtype, slow.shape, slow.strides)
        assert quick.tobytes() == slow.tobytes()
        assert quick.flags.aligned == slow.flags.aligned
        assert not quick.flags.writeable
        assert quick.__array_interface__["data"] == slow.__array_interface__["data"]
    return count, total


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("folder", FOLDERS)
def test_plain_tensors_are_the_same_memory_the_other_way_finds(
    folder: str, stored: bool, tmp_path: Path
) -> None:
    where = SAMPLES / folder
    if stored:
        slim(where, tmp_path / "store", min_saving=0)
        where = tmp_path / "store"
    with slimckpt.open(where) as checkpoint:
        for file in checkpoint.files.values():
            if file.condition == "understood":
                compared(file)


@pytest.mark.parametrize("stored", [False, True])
def test_nearly_all_tensors_of_a_training_run_are_plain(stored: bool, tmp_path: Path) -> None:
    where = SAMPLES / "lora_steps"
    if stored:
        slim(where, tmp_path / "store", min_saving=0)
        where = tmp_path / "store"
    with slimckpt.open(where) as checkpoint:
        counts = [compared(f) for f in checkpoint.files.values() if f.condition == "understood"]
    plain, total = (sum(column) for column in zip(*counts, strict=True))
    assert plain >= 0.9 * total > 0
