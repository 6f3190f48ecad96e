"""The fuzzer makes what it should, counts it, and says so where something breaks."""

import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

SCRIPT = Path(fuzz.__file__)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )


def test_a_short_run_finds_nothing_and_counts_every_input(tmp_path: Path) -> None:
    result = run("--count", 600, "--jobs", 2, "--failures", tmp_path / "failures")
    assert (result.returncode, result.stderr) == (0, "")
    *outcomes, total = result.stdout.splitlines()
    assert total.split()[0] == "600" and "the slowest took" in total
    assert sum(int(line.split()[0].replace(",", "")) for line in outcomes) == 600
    assert any("torch understood" in line for line in outcomes)
    assert any("pickle damaged" in line for line in outcomes)
    assert not (tmp_path / "failures").exists()


def test_the_same_seed_makes_the_same_inputs_and_another_one_others() -> None:
    seeds = fuzz.seeds()
    assert len(seeds) > 50
    made = [[fuzz.Mutator(seeds, seed).next() for _ in range(1)] for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, RecursionError])
def test_what_breaks_is_kept_with_its_traceback(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(data: bytes) -> str:
        raise error(f"{len(data)} bytes")

    monkeypatch.setattr(fuzz, "examined", breaks)
    result = fuzz.run(fuzz.Mutator(fuzz.seeds()[:3], 0), 2, tmp_path / "failures")
    assert result["outcomes"] == {f"FAILED {error.__name__}": 2}
    kept = sorted(path.suffix for path in (tmp_path / "failures").iterdir())
    assert kept == [".input", ".input", ".txt", ".txt"]


def test_what_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(data: bytes) -> str:
        while data:
            pass
        return "never"

    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    monkeypatch.setattr(fuzz, "examined", hangs)
    mutator = fuzz.Mutator(fuzz.seeds()[:3], 0)
    mutator.next = lambda: b"x"  # type: ignore[method-assign]
    assert fuzz.run(mutator, 1, tmp_path)["outcomes"] == {"FAILED TooSlow": 1}


def test_every_opcode_is_made_in_a_form_that_pickles_have() -> None:
    mutator = fuzz.Mutator(fuzz.seeds()[:3], 0)
    made = {mutator._opcode()[:1] for _ in range(5000)}
    assert made == set(fuzz.OPCODES)
