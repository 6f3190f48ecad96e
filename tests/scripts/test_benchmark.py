"""The benchmark measures what it says, and its smoke run works."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.many_ranks import Layout
from benchmarks.processes import watch
from benchmarks.reader import touch
from benchmarks.turns import Contender, Result
from mounts import no_fuse

SCRIPTS = Path(__file__).parents[2] / "scripts"
MEASUREMENTS = {
    *("slim", "nothing", "restore", "verify", "analyze", "exact"),
    *("read", "open", "copy", "cold", "mount", "node", "private", "ranks", "pickles"),
    *("torch", "frameworks", "merge", "reshard"),
}
BESIDE_PEERS = {"merge"}
"""Whose only bars are peers."""
WITHOUT_A_BAR = {"verify", "cold"} | ({"mount"} if no_fuse() else set())


@pytest.mark.slow
def test_the_smoke_run_measures_everything(tmp_path: Path) -> None:
    report, table = tmp_path / "report.json", tmp_path / "table.md"
    command = [sys.executable, SCRIPTS / "benchmark.py", "--quick"]
    done = subprocess.run(
        [*command, "--json", report, "--markdown", table], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert set(found) == {"machine", "options", "measurements"}
    assert {"cores", "cpu", "kernel", "file system", "load", "libhdf5"} < set(found["machine"])
    assert found["options"]["seed"] == 0
    assert set(found["measurements"]) == MEASUREMENTS
    verdicts = []
    for name, measurement in found["measurements"].items():
        assert measurement["turns"] or measurement["missing"], name
        for turns in measurement["turns"].values():
            assert turns and all(figure >= 0 for turn in turns for figure in turn.values())
        judged = name not in WITHOUT_A_BAR and bool(measurement["turns"])
        judged &= name not in BESIDE_PEERS or not measurement["missing"]
        assert bool(measurement["verdicts"]) == judged, name
        verdicts += measurement["verdicts"]
    for verdict in verdicts:
        assert verdict["holds"] == (verdict["figure"] <= verdict["bar"])
        assert verdict["what"] in done.stdout
    assert len(table.read_text().splitlines()) == len(verdicts) + 2
    kept = {name for m in found["measurements"].values() for name in (*m["turns"], *m["missing"])}
    assert kept >= {"borg create", "restic backup", "casync make", "cp -r", "1,000: h5py"}
    assert kept >= {"1,000: numpy.memmap, store", "1,000: safetensors", "tar | zstd --long=31 -T0"}


def test_an_unknown_measurement_is_named() -> None:
    command = [sys.executable, SCRIPTS / "benchmark.py", "slimm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no measurement slimm" in done.stderr


def test_contenders_take_turns_back_and_forth_and_slow_ones_fewer() -> None:
    seen = []

    def contender(name: str, most: int | None = None) -> Contender:
        return Contender(name, lambda: seen.append(name) or {"s": float(len(seen))}, most=most)

    result = Result("what")
    absent = Contender("c", lambda: {"s": 0.0}, program="no-such-program")
    result.take_turns([contender("a"), contender("b", most=2), absent], 3)
    assert seen == ["a", "b", "b", "a", "a"]
    assert result.all_of("a") == [1, 4, 5] and result.median("a") == 4
    assert result.missing == {"c": "no-such-program is not installed"}
    result.judge_ratio("a in b", "a", 1.6, "b")
    result.judge_ratio("a in c", "a", 1.0, "c")
    assert [(v.figure, v.unit, v.holds) for v in result.verdicts] == [(1.6, "x b", True)]


def test_the_private_memory_of_a_command_is_seen() -> None:
    held = 100_000_000
    program = f"import time; b = bytearray(b'x') * {held}; time.sleep(0.1); print(len(b))"
    printed, figures = watch([sys.executable, "-c", program], 0)
    assert int(printed) == held
    assert held / 1e6 < figures["MB private"] < held / 1e6 + 30
    assert figures["MB whole"] > figures["MB private"]


def test_touching_reads_a_byte_of_every_page() -> None:
    array = np.zeros((3, 4096), np.uint8)
    array[:, 0], array[-1, -1] = (1, 2, 4), 8
    assert touch(array) == 15


def test_many_ranks_differ_where_they_should(tmp_path: Path) -> None:
    layout = Layout(14)
    distinct: dict[str, int] = {}
    for rank in range(10):
        path = tmp_path / f"rank_{rank}" / "model.safetensors"
        layout.write(path, rank)
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"rank": f"RANK-{rank:04}"}
        assert len(header) == 14
        for tensor in header.values():
            start, stop = (8 + length + at for at in tensor["data_offsets"])
            assert stop - start == 2 * tensor["shape"][0] * tensor["shape"][1]
            assert stop <= len(data)
            distinct[hashlib.sha256(data[start:stop]).hexdigest()] = stop - start
        assert path.stat().st_blocks * 512 < len(data) / 2
    assert len(distinct) == 6 + 6 * 8 + 2 * 10
    assert sum(distinct.values()) == layout.distinct(10)
