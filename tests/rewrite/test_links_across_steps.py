"""A body whose names lie in several steps and ranks is found and restored by each of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors_bytes import safetensors_file

import slimckpt


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """One file of step 1, rank 0 that step 2 has for rank 0 and rank 1 too, and one of its own."""
    root = tmp_path / "run"
    for name in ("step_1/rank_0", "step_2/rank_0", "step_2/rank_1"):
        (root / name).mkdir(parents=True)
    base = safetensors_file([("base", "U8", [5000], os.urandom(5000))])
    (root / "step_1/rank_0/base").write_bytes(base)
    for name in ("step_2/rank_0/base", "step_2/rank_1/base"):
        os.link(root / "step_1/rank_0/base", root / name)
    own = safetensors_file([("own", "U8", [3000], os.urandom(3000))])
    (root / "step_2/rank_1/own").write_bytes(own)
    slimckpt.slim(root, tmp_path / "store", min_saving=0)
    return tmp_path


def inodes(root: Path) -> dict[str, int]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    groups = list(dict.fromkeys(path.stat().st_ino for path in files))
    return {str(p.relative_to(root)): groups.index(p.stat().st_ino) for p in files}


def test_a_store_and_its_source_have_the_same_steps_ranks_and_tensors(linked: Path) -> None:
    found = []
    for path in (linked / "run", linked / "store"):
        with slimckpt.open(path) as checkpoint:
            found.append(
                {
                    (step, rank): {
                        name: array.tobytes()
                        for name, array in checkpoint.step(step).rank(rank).items()
                    }
                    for step in checkpoint.steps
                    for rank in checkpoint.step(step).ranks
                }
            )
    assert found[0] == found[1]
    assert set(found[0]) == {(1, 0), (2, 0), (2, 1)}
    assert set(found[0][2, 1]) == {"base", "own"}


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ([], {"step_1/rank_0/base": 0, "step_2/rank_0/base": 0, "step_2/rank_1/base": 0,
              "step_2/rank_1/own": 1}),
        (["--step", "1"], {"step_1/rank_0/base": 0}),
        (["--step", "2"], {"step_2/rank_0/base": 0, "step_2/rank_1/base": 0,
                           "step_2/rank_1/own": 1}),
        (["--step", "2", "--rank", "1"], {"step_2/rank_1/base": 0, "step_2/rank_1/own": 1}),
        (["--file", "*rank_1/base"], {"step_2/rank_1/base": 0}),
    ],
)  # fmt: skip
def test_the_names_of_a_selection_come_back_linked(
    selection: list[str], expected: dict[str, int], linked: Path
) -> None:
    for number, command in enumerate(
        ([sys.executable, "-m", "slimckpt", "restore", linked / "store"],
         [sys.executable, "-I", "-S", linked / "store" / "restore.py"])
    ):  # fmt: skip
        out = linked / f"out{number}"
        subprocess.run([*command, out, *selection], check=True, capture_output=True)
        assert inodes(out) == expected
        for name in expected:
            assert (out / name).read_bytes() == (linked / "run" / name).read_bytes()


def test_the_store_is_sound_and_counts_bodies_once(linked: Path) -> None:
    result = slimckpt.verify(linked / "store", against=linked / "run")
    assert (result.problems, result.safe, result.files) == ([], True, 2)
