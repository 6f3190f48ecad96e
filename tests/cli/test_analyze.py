"""What ``slimckpt analyze`` tells a user to do, and what comes of doing it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors_bytes import safetensors_file

import slimckpt

RANDOM = np.random.default_rng(11)
N = 1 << 20


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slimckpt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(path: Path, tensors: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, body in tensors.items():
        dtype, itemsize = (
            ("BF16", 2) if name == "fc.kernel" and "checkpoint" in str(path) else ("F32", 4)
        )
        rows.append((name, dtype, [len(body) // itemsize], body))
    path.write_bytes(safetensors_file(rows))


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on two ranks: a frozen weight, one that is trained, its moments and master."""
    folder = tmp_path_factory.mktemp("training") / "run"
    frozen = RANDOM.bytes(N)
    for step in (10, 20, 30):
        values = RANDOM.standard_normal(N // 4, np.float32)
        trained = {"fc.kernel": values.astype(ml_dtypes.bfloat16).tobytes()}
        trained["adam_m.fc.kernel"] = RANDOM.bytes(N)
        master = {"master_weights.fc.kernel": values.tobytes()}
        for rank in (0, 1):
            write(
                folder / f"checkpoint-{step}" / f"rank_{rank}.safetensors",
                {"base.kernel": frozen, **trained, **master},
            )
    return folder


def saving(source: Path, *options: str) -> int:
    """Tensor bytes slim would leave out, structure not counted: measured on a real store."""
    store = source.with_name("store" + "".join(options).replace(":", "-").replace(",", "-"))
    ran = run("slim", source, store, *options)
    assert ran.returncode == 0, ran.stderr
    kept = sum(path.stat().st_size for path in store.rglob("*.h5"))
    return sum(path.stat().st_size for path in source.rglob("*.safetensors")) - kept


def test_what_it_promises_is_what_slim_does(training: Path) -> None:
    savings = {s.options: s.saved for s in slimckpt.analyze(training, exact=True).savings}
    assert list(savings) == [
        "",
        "--drop optimizer --keep-full last:1",
        "--drop optimizer",
        "--drop master",
    ]
    plain = saving(training)
    assert savings[""] == pytest.approx(plain, rel=0.01)
    for options, more in savings.items():
        if options:
            assert more == pytest.approx(saving(training, *options.split()) - plain, rel=0.01)
    assert savings["--drop optimizer"] == 3 * N
    assert savings["--drop optimizer --keep-full last:1"] == 2 * N


def test_it_names_the_command_and_calls_dropping_no_redundancy(training: Path) -> None:
    ran = run("analyze", training)
    assert f"\n  slimckpt slim {training} {training}.slim\n" in ran.stdout
    after = ran.stdout[ran.stdout.index("What is not repeated") :]
    assert "  --drop optimizer --keep-full last:1  saves about 2.10 MB more\n" in after
    assert "  --drop master " in after


def test_moments_and_masters_are_rows_of_their_own(training: Path) -> None:
    found = json.loads(run("analyze", training, "--json").stdout)
    assert found["schema"] == "slimckpt.analyze/2"
    assert found["by_category"]["moment"] == {"before": 6 * N, "after": 3 * N}
    assert found["by_category"]["master weight"] == {"before": 6 * N, "after": 3 * N}
    assert found["by_category"]["weight"] == {"before": 9 * N, "after": 5 * N // 2}
    assert [cost["parameters"] for cost in found["step_costs"]] == [2 * N // 4] * 3
    table = run("analyze", training).stdout
    assert "bytes per parameter of step 30 (at least 524,288 parameters)" in table
    assert "gradient" not in table, "categories without bytes have no row"


def test_a_step_saved_twice_is_named(tmp_path: Path) -> None:
    body = RANDOM.bytes(50_000)
    for step in (1, 2, 3):
        other = {"step_own": RANDOM.bytes(4000)} if step == 2 else {}
        write(tmp_path / f"step_{step}" / "a.safetensors", {"w": body, **other})
    assert "note: step 3 has all tensors of step 1" in run("analyze", tmp_path, "--exact").stdout
    assert "seems to have" in run("analyze", tmp_path).stdout


def test_nothing_to_gain_but_something_to_drop(tmp_path: Path) -> None:
    write(
        tmp_path / "run" / "model.safetensors",
        {"fc.kernel": RANDOM.bytes(N), "exp_avg.fc.kernel": RANDOM.bytes(N)},
    )
    ran = run("analyze", tmp_path / "run")
    assert "There is nothing to gain" in ran.stdout
    command = next(line for line in ran.stdout.splitlines() if line.endswith("OPTIONS")).split()
    assert command[:2] == ["slimckpt", "slim"]
    assert "  --drop optimizer  saves about 1.05 MB in all" in ran.stdout
    command[-1:] = ["--drop", "optimizer"]
    done = run(*command[1:])
    assert done.returncode == 0, done.stderr


def test_constants_and_their_bound(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": RANDOM.bytes(9000), "zeros": bytes(8000)})
    sampled, exact = run("analyze", tmp_path).stdout, run("analyze", tmp_path, "--exact").stdout
    what = "1 tensor (8.00 KB) are one number over and over, such as zeros in a.safetensors"
    assert f"note: up to {what}" in sampled
    assert f"note: {what}" in exact


def test_several_roots_have_rows_and_no_command(tmp_path: Path) -> None:
    body = RANDOM.bytes(50_000)
    for name in "abc":
        write(tmp_path / name / "m.safetensors", {"w": body})
    roots = [tmp_path / name for name in "abc"]
    ran = run("analyze", *roots)
    assert ran.returncode == 0, ran.stderr
    for root in roots:
        assert f"\n  {root} " in ran.stdout
    assert "takes one directory" in ran.stdout
    assert run("analyze", roots[0], roots[0]).returncode == 2
    assert run("analyze").returncode == 2


def test_an_unknown_category_lists_those_there_are(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": bytes(8000)})
    ran = run("analyze", tmp_path, "--category", "optimizer=*")
    assert ran.returncode == 2
    assert "embedding, attention, mlp, norm, bias, weight, moment, step state" in ran.stderr


def test_a_quick_look_needs_neither_hdf5_nor_a_progress_bar(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"w": os.urandom(8000)})
    code = (
        "import sys; from slimckpt.__main__ import main; sys.argv[1:] = ['analyze', sys.argv[1]]\n"
        "try: main()\n"
        "finally: print(sorted({'h5py', 'tqdm', 'ml_dtypes'} & set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert ran.stderr.strip().splitlines()[-1] == "[]", ran.stderr
