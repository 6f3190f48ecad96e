"""Three steps of a real fine-tuning: each step's view has that step's own tensors."""

import hashlib
import re
import shutil
from pathlib import Path

import pytest
from sample_files import SAMPLES, expected

import slimckpt


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lora")
    shutil.copytree(SAMPLES / "lora_steps", place / "run")
    slimckpt.slim(place / "run", place / "store")
    return place / "store"


@pytest.mark.parametrize("step", [10, 20, 30])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("which", ["store", "run"])
def test_a_step_has_its_own_tensors(step: int, backend: str, which: str, store: Path) -> None:
    files = expected("lora_steps")["files"]
    truth = files[f"checkpoint-{step}/model.safetensors"]["tensors"]
    here = [
        file
        for path, file in files.items()
        if path.startswith(f"checkpoint-{step}/") and "rng_state_1" not in path
    ]
    wanted = {
        re.sub(r"^\['(.*)'\]$", r"\1", path): (tuple(tensor["shape"]), tensor["sha256"])
        for path, tensor in truth.items()
    }
    with slimckpt.open(store.with_name(which), backend=backend) as checkpoint:
        assert checkpoint.steps == (10, 20, 30)
        view = checkpoint.step(step).rank(0)
        found = {
            name: (array.shape, hashlib.sha256(array.tobytes()).hexdigest())
            for name, array in view.items()
        }
    assert wanted.items() <= found.items()
    assert len(wanted) == 28
    # Beside the model: the state of its optimizer, and of the rank's random numbers.
    assert len(found) == sum(len(file.get("tensors", ())) for file in here) > 28
