"""The synthetic checkpoints other tests and the benchmark stand on are what they claim to be."""

import hashlib
import json
import os
import pickletools
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from slimckpt.formats import examine
from slimckpt.sources.positioned import FileSource

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"


class Found(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    spans: int
    sha256: str


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )


def make(out: Path, *arguments: object) -> Path:
    result = run(out, *arguments)
    assert result.returncode == 0, result.stderr
    return out


def read(path: Path) -> dict[str, Found]:
    """The tensors of a file by name, hashed from the file's own bytes."""
    with FileSource(os.fsencode(path)) as source:
        found = examine(source)
    assert found.condition == "understood", found.problem
    data, tensors = path.read_bytes(), {}
    for row in range(found.table.n_tensors):
        tensor = found.table.tensor(row)
        spans = found.table.spans(tensor.payload)
        content = b"".join(data[span.offset : span.offset + span.nbytes] for span in spans)
        assert tensor.name not in tensors
        tensors[tensor.name] = Found(
            tensor.dtype,
            tensor.shape,
            len(content),
            len(spans),
            hashlib.sha256(content).hexdigest(),
        )
    return tensors


def read_ranks(out: Path, step: int = 100) -> list[dict[str, Found]]:
    paths = sorted(
        out.glob(f"rank_*/net-1_{step}.ckpt"), key=lambda path: int(path.parent.name[5:])
    )
    return [read(path) for path in paths]


def distinct_and_total(ranks: list[dict[str, Found]]) -> tuple[int, int]:
    sizes = {found.sha256: found.nbytes for rank in ranks for found in rank.values()}
    return sum(sizes.values()), sum(found.nbytes for rank in ranks for found in rank.values())


def test_slices_are_replicated_over_data_parallel_ranks_only(tmp_path: Path) -> None:
    ranks = read_ranks(make(tmp_path / "c", "--size", "8M", "--dp", 3, "--mp", 2))
    assert len(ranks) == 6
    assert len({tuple(rank) for rank in ranks}) == 1
    everywhere = ["backbone.embedding.weight", "backbone.layernorm.gamma"]
    sliced = ["backbone.blocks.0.attention.qkv.weight", "backbone.blocks.4.mlp.mapping.bias"]
    for name in ["", "adam_m.", "adam_v."]:
        for weight in everywhere:
            assert len({rank[name + weight].sha256 for rank in ranks}) == 1
        for weight in sliced:
            digests = [rank[name + weight].sha256 for rank in ranks]
            assert digests == digests[:2] * 3
            assert digests[0] != digests[1]
    assert len({rank["rng_seed"].sha256 for rank in ranks}) == 6
    assert ranks[0]["global_step"][:3] == ("I64", (), 8)
    assert len({ranks[0][name + everywhere[0]].sha256 for name in ["", "adam_m.", "adam_v."]}) == 3


def test_the_default_is_of_the_asked_size_and_82_percent_redundant(tmp_path: Path) -> None:
    distinct, total = distinct_and_total(
        read_ranks(make(tmp_path / "c", "--size", "40M", "--dp", 4, "--mp", 2))
    )
    assert total == pytest.approx(40e6, rel=0.005)
    assert 1 - distinct / total == pytest.approx(0.82, abs=0.01)


def test_what_is_printed_is_what_was_written(tmp_path: Path) -> None:
    out = tmp_path / "c"
    printed = run(out, "--size", "40M", "--dp", 2, "--mp", 2).stdout
    distinct, total = distinct_and_total(read_ranks(out))
    assert "4 files" in printed
    assert f"{total / 1e9:.3f} GB of tensors" in printed
    assert f"{distinct / 1e9:.3f} GB of them distinct" in printed


def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    arguments = ("--size", "1M", "--dp", 2, "--mp", 1)
    contents = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        out = make(tmp_path / name, *arguments, "--seed", seed)
        contents.append([path.read_bytes() for path in sorted(out.rglob("*.ckpt"))])
    assert contents[0] == contents[1]
    assert contents[0][0] != contents[2][0]


def test_unique_shares_nothing(tmp_path: Path) -> None:
    ranks = read_ranks(make(tmp_path / "c", "--size", "4M", "--dp", 2, "--mp", 2, "--unique"))
    seen = defaultdict(int)
    for rank in ranks:
        for name, found in rank.items():
            if name not in ("global_step", "learning_rate"):
                seen[found.sha256] += 1
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("size", ["4Ki", "64"])
def test_equal_tensors_have_the_asked_count_and_size_and_share(tmp_path: Path, size: str) -> None:
    out = tmp_path / "c"
    make(out, "--tensors", 1000, "--tensor-bytes", size, "--shared", 0.5, "--dp", 1, "--mp", 2)
    first, second = read_ranks(out)
    assert len(first) == len(second) == 1000
    assert {found.nbytes for found in first.values()} == {{"4Ki": 4096, "64": 64}[size]}
    assert len(set(first.values()) & set(second.values())) == 500
    assert len(set(first.values())) == 1000


def test_the_largest_tensor_has_the_asked_size(tmp_path: Path) -> None:
    out = tmp_path / "c"
    make(out, "--size", "20M", "--largest", "10M", "--dp", 1, "--mp", 1, "--no-optimizer")
    (rank,) = read_ranks(out)
    assert max(found.nbytes for found in rank.values()) == pytest.approx(10e6, rel=0.001)
    assert sum(found.nbytes for found in rank.values()) == pytest.approx(20e6, rel=0.005)


def test_frozen_weights_are_the_same_in_every_step_and_have_no_moments(tmp_path: Path) -> None:
    out = tmp_path / "c"
    make(
        *(out, "--format", "safetensors", "--size", "30M", "--dp", 1, "--mp", 1),
        *("--steps", 3, "--frozen", 0.9, "--dtype", "BF16"),
    )
    steps = [out / f"checkpoint-{step}" / "rank_0" for step in (100, 200, 300)]
    weights = [read(step / "model.safetensors") for step in steps]
    frozen = {name for name in weights[0] if weights[0][name] == weights[1][name]}
    assert {weights[0][name] == weights[2][name] for name in frozen} == {True}
    share = sum(weights[0][name].nbytes for name in frozen) / sum(
        found.nbytes for found in weights[0].values()
    )
    assert 0.88 < share <= 0.9
    assert {found.dtype for found in weights[0].values()} == {"BF16"}
    moments = set(read(steps[0] / "optimizer.safetensors"))
    assert moments - {"global_step", "learning_rate", "rng_seed"} == {
        f"{moment}.{name}" for moment in ("adam_m", "adam_v") for name in set(weights[0]) - frozen
    }


def test_steps_of_a_mindspore_run_lie_beside_each_other(tmp_path: Path) -> None:
    out = make(tmp_path / "c", "--size", "4M", "--dp", 1, "--mp", 2, "--steps", 2)
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.ckpt")) == [
        f"rank_{rank}/net-1_{step}.ckpt" for rank in (0, 1) for step in (100, 200)
    ]
    weight = "backbone.embedding.weight"
    assert read_ranks(out, 100)[0][weight] != read_ranks(out, 200)[0][weight]


def test_cut_tensors_hold_the_bytes_of_uncut_ones(tmp_path: Path) -> None:
    arguments = ("--size", "12M", "--dp", 1, "--mp", 1, "--no-optimizer")
    whole = read_ranks(make(tmp_path / "whole", *arguments))[0]
    cut = read_ranks(make(tmp_path / "cut", *arguments, "--slice-size", "2Mi"))[0]
    assert [found._replace(spans=1) for found in cut.values()] == list(whole.values())
    longest = max(cut.values(), key=lambda found: found.nbytes)
    assert longest.nbytes > 2 << 20
    assert longest.spans == -(-longest.nbytes // (2 << 20))


@pytest.mark.parametrize(("dtype", "view"), [("F32", "<f4"), ("F16", "<f2"), ("BF16", None)])
def test_every_element_is_a_small_number(tmp_path: Path, dtype: str, view: str | None) -> None:
    out = tmp_path / "c"
    make(out, "--format", "safetensors", "--tensors", 1, "--tensor-bytes", "64Ki", "--dtype", dtype)
    data = (out / "checkpoint-100" / "rank_0" / "model.safetensors").read_bytes()[-65536:]
    if view is None:
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, view).astype(np.float64)
    assert np.isfinite(values).all()
    assert 0.001 < np.abs(values).min() <= np.abs(values).max() < 0.1
    assert (values < 0).any() and (values > 0).any()


def test_memory_does_not_grow_with_the_largest_tensor(tmp_path: Path) -> None:
    peaks = []
    for size in ("1M", "96M"):
        # VmHWM is of this program alone; ru_maxrss would begin with what the parent holds.
        program = (
            "import atexit, os, runpy, sys\n"
            "sys.argv = sys.argv[1:]\n"
            "sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
            "atexit.register(lambda: print(open('/proc/self/status').read()))\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        )
        command = [sys.executable, "-c", program, SCRIPT, tmp_path / size, "--dp", "1", "--mp", "1"]
        options = ["--tensors", "1", "--tensor-bytes", size]
        status = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
        peaks.append(int(status.stdout.split("VmHWM:")[1].split()[0]) * 1024)
    assert peaks[1] - peaks[0] < 16e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --size"),
        (("--size", "2.7Q"), "2.7Q"),
        (("--size", "-5M"), "--size"),
        (("--size", "20K"), "too small"),
        (("--size", "20000T"), "free"),
        (("--size", "1M", "--dp", "0"), "--dp"),
        (("--size", "1M", "--shared", "1.5"), "--shared"),
        (("--size", "1M", "--frozen", "x"), "'x'"),
        (("--size", "1M", "--largest", "2M"), "does not fit"),
        (("--size", "1M", "--unique", "--frozen", "0.5"), "--unique"),
        (("--size", "1M", "--tensor-bytes", "64"), "--size"),
        (("--tensor-bytes", "63"), "multiple of 4"),
        (("--size", "1M", "--slice-size", "3K"), "--slice-size"),
    ],
)
def test_bad_arguments_are_named_and_nothing_is_written(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run(tmp_path / "c", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    result = run(tmp_path, "--size", "1M")
    assert result.returncode == 2
    assert "not an empty directory" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("kind", ["torch", "paddle"])
def test_pickled_files_hold_the_bytes_of_the_flat_ones(tmp_path: Path, kind: str) -> None:
    options = ("--size", "3M", "--dp", 1, "--mp", 2, "--seed", 3)
    make(tmp_path / "flat", *options, "--format", "safetensors")
    make(tmp_path / "pickled", *options, "--format", kind)
    for rank in (0, 1):
        flat = {}
        for file in (tmp_path / "flat" / "checkpoint-100" / f"rank_{rank}").iterdir():
            whole = file.read_bytes()
            start = 8 + int.from_bytes(whole[:8], "little")
            for name, entry in json.loads(whole[8:start]).items():
                if name != "__metadata__":
                    first, last = entry["data_offsets"]
                    flat[name] = whole[start + first : start + last]
        (path,) = (tmp_path / "pickled").rglob(f"rank_{rank}.*")
        data = path.read_bytes()
        places = [data.find(body) for body in flat.values() if len(body) > 8]
        assert min(places) > 0
        if kind == "torch":
            assert all(at % 64 == 0 for at in places)
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None
                text = archive.read(f"rank_{rank}/data.pkl")
        else:
            text = data
        strings = {arg for op, arg, _ in pickletools.genops(text) if op.name == "BINUNICODE"}
        assert flat.keys() < strings
