"""What MindSpore itself writes goes through slimckpt and is loaded by MindSpore again.

Truth is ``mindspore.load_checkpoint`` on the originals: the restored files must load alike, and
the lazy views, of the slim checkpoint and of the original directory, must agree with it bit for
bit. Run by ``scripts/interop``.
"""

import filecmp
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
import numpy as np
import pytest
from mindspore.train import serialization

import slimckpt

SAMPLES = Path(__file__).parents[1] / "samples"
SCRIPTS = Path(__file__).parents[2] / "scripts"
KEY = b"0123456789ABCDEF"

RANKS = range(4)
"""dp2 x mp2: the slice of a rank is its parity."""


class Array(NamedTuple):
    """A tensor by value: bits, not numbers, so that NaN equals itself."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def slim_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).parent / "slimckpt"
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True)


def load(path: Path, **options: Any) -> dict[str, Array | str]:
    """What MindSpore makes of a file; entries of ``append_dict`` may be plain strings."""
    if path.suffix == ".safetensors":
        options["format"] = "safetensors"
    loaded = {}
    for name, value in mindspore.load_checkpoint(str(path), **options).items():
        if isinstance(value, str):
            loaded[name] = value
            continue
        array = value.asnumpy()
        loaded[name] = Array(str(value.dtype).lower(), array.shape, array.tobytes())
    return loaded


def agrees(view: Mapping[str, np.ndarray], loaded: dict[str, Array | str]) -> None:
    """Assert that a view has MindSpore's names and, for each, its dtype, shape and bits."""
    assert set(view) >= {name for name, value in loaded.items() if isinstance(value, Array)}
    assert set(view) <= set(loaded)
    for name, expected in loaded.items():
        if isinstance(expected, str):
            with pytest.raises(TypeError):
                view[name]
            continue
        array = view[name]
        if expected.dtype == "int4":  # two elements a byte: bytes to both, named differently
            expected = expected._replace(dtype="uint8")
        assert Array(array.dtype.name, array.shape, array.tobytes()) == expected, name


def parameters(rank: int, step: int) -> list[dict[str, Any]]:
    """A small model with Adam moments; moments and half of the weights move with the step."""

    def values(name: str, shape: tuple[int, ...], when: int, part: int = 0) -> np.ndarray:
        seed = [*name.encode(), when, part]
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    part = rank % 2
    weights = {
        "backbone.embedding.weight": values("embedding", (640, 60), 0),
        "backbone.norm.gamma": values("norm", (64,), step),
        "layers.0.qkv.weight": values("qkv", (96, 64), step, 1 + part),
        "layers.0.mlp.weight": values("mlp", (64, 96), 0, 1 + part),
    }
    tensors = {name: mindspore.Tensor(value) for name, value in weights.items()}
    for name, value in weights.items():
        tensors[f"adam_m.{name}"] = mindspore.Tensor(values(f"m{name}", value.shape, step, part))
        tensors[f"adam_v.{name}"] = mindspore.Tensor(values(f"v{name}", value.shape, step, part))
    bits = np.random.default_rng([7, step]).integers(0, 1 << 16, (96, 33), np.uint32)
    float_bits = (bits << 16).view(np.float32)  # also infinities, NaN and denormals
    tensors["head.weight"] = mindspore.Tensor(float_bits, mindspore.bfloat16)
    tensors["tokens"] = mindspore.Tensor(np.arange(5000, dtype=np.int32))
    tensors["mask"] = mindspore.Tensor(np.arange(3000) % 3 == 0)
    tensors["half"] = mindspore.Tensor(values("half", (41, 43), 0).astype(np.float16))
    tensors["scale"] = mindspore.Tensor(np.float32(0.5))
    tensors["one"] = mindspore.Tensor(np.ones((1,), np.float64))
    return [{"name": name, "data": tensor} for name, tensor in tensors.items()]


def write_run(root: Path, suffix: str = ".ckpt", steps: int = 1, **options: Any) -> None:
    """One run as MindSpore's callbacks lay it out: ``rank_R/net-1_S.ckpt``."""
    for step in range(1, steps + 1):
        for rank in RANKS:
            path = root / f"rank_{rank}" / f"net-1_{step}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            chosen = parameters(rank, step)
            extra = {"epoch_num": 1, "step_num": step, "loss_scale": 0.1, "rng": rank, "ok": True}
            if suffix == ".safetensors":
                options["format"] = "safetensors"
            else:
                extra["note"] = "größe 日本"  # strings cannot be in MindSpore's safetensors
            if suffix == ".safetensors" and options.get("crc_check"):
                # MindSpore 2.10 fails on bfloat16 there: "cannot include dtype 'E' in a buffer".
                chosen = [entry for entry in chosen if entry["name"] != "head.weight"]
            mindspore.save_checkpoint(
                chosen, str(path.with_suffix(suffix)), append_dict=extra, **options
            )
            while not path.exists():  # async_save renames it into place when it is whole
                time.sleep(0.01)


def write_chunked(root: Path, **options: Any) -> None:
    """As ``write_run``, with tensors cut into records at 4 KiB where the real limit is 512 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "SLICE_SIZE", 4)
        write_run(root, **options)


WRITERS: dict[str, Callable[[Path], None]] = {
    "ckpt": write_run,
    "three steps": lambda root: write_run(root, steps=3),
    "safetensors": lambda root: write_run(root, ".safetensors"),
    "crc": lambda root: write_run(root, crc_check=True),
    "safetensors crc": lambda root: write_run(root, ".safetensors", crc_check=True),
    "cut inside rows": write_chunked,
    "cut between rows": lambda root: write_chunked(root, async_save=True),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_run_comes_back_as_mindspore_wrote_it(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    original = tmp_path / "run"
    write(original)
    truth = {path.relative_to(original): load(path) for path in files_of(original)}
    check_round_trip(original, truth)
    for path in (original, tmp_path / "slim"):
        with slimckpt.open(path) as checkpoint:
            for file, loaded in truth.items():
                step, rank = file.stem.removeprefix("net-"), int(file.parent.name[5:])
                agrees(checkpoint.step(step).rank(rank), loaded)


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC", "SM4-CBC"])
def test_an_encrypted_file_is_kept_and_still_opens_with_its_key(tmp_path: Path, mode: str) -> None:
    original = tmp_path / "run"
    write_run(original)
    truth = {path.relative_to(original): load(path) for path in files_of(original)}
    secret = original / "rank_0" / "secret-1_1.ckpt"
    mindspore.save_checkpoint(parameters(0, 1), str(secret), enc_key=KEY, enc_mode=mode)
    expected = load(secret, dec_key=KEY, dec_mode=mode)
    check_round_trip(original, truth)
    restored = tmp_path / "restored" / secret.relative_to(original)
    assert load(restored, dec_key=KEY, dec_mode=mode) == expected
    for path in (original, tmp_path / "slim"):
        with (
            slimckpt.open(path) as checkpoint,
            pytest.raises(slimckpt.SlimckptError, match="encrypted"),
        ):
            dict(checkpoint.files["rank_0/secret-1_1.ckpt"])


@pytest.mark.parametrize("sample", sorted(path.name for path in SAMPLES.glob("ms_*")))
def test_a_sample_comes_back_as_mindspore_wrote_it(tmp_path: Path, sample: str) -> None:
    original = tmp_path / "run"
    shutil.copytree(SAMPLES / sample, original / sample)
    truth = {}
    for path in files_of(original):
        if sample == "ms_encrypted" or sample == "ms_strategies" or "strategy" in path.name:
            continue  # nothing that MindSpore's loader opens without more
        truth[path.relative_to(original)] = load(path)
    write_run(original / "ballast")  # so that there is something to gain
    check_round_trip(original, truth)


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_mindspore_loads_the_synthetic_checkpoints(tmp_path: Path, suffix: str) -> None:
    original = tmp_path / "run"
    kind = {".ckpt": "mindspore", ".safetensors": "safetensors"}[suffix]
    options = f"--format {kind} --size 12M --dp 2 --mp 2 --slice-size 1Mi".split()
    subprocess.run([sys.executable, SCRIPTS / "make_checkpoint.py", original, *options], check=True)
    truth = {path.relative_to(original): load(path) for path in files_of(original)}
    assert sum(len(array.content) for loaded in truth.values() for array in loaded.values()) > 11e6
    check_round_trip(original, truth)


def files_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in (".ckpt", ".safetensors"))


def check_round_trip(original: Path, truth: dict[Path, dict[str, Array | str]]) -> None:
    """Slim a tree beside itself, restore it, and compare with what MindSpore loads of it."""
    slim, restored = original.parent / "slim", original.parent / "restored"
    done = slim_command("slim", original, slim, "--min-saving", "0")
    assert done.returncode == 0, done.stderr
    done = slim_command("restore", slim, restored)
    assert done.returncode == 0, done.stderr
    for path in original.rglob("*"):
        again = restored / path.relative_to(original)
        assert again.is_dir() if path.is_dir() else filecmp.cmp(path, again, shallow=False)
    for file, loaded in truth.items():
        assert load(restored / file) == loaded
    for path in (original, slim):
        with slimckpt.open(path) as checkpoint:
            for file, loaded in truth.items():
                agrees(checkpoint.files[file.as_posix()], loaded)
