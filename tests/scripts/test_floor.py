"""The floor program does the work it is the yardstick of."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

FLOOR = Path(__file__).parents[2] / "scripts" / "floor.py"


def run(payloads: list[tuple[Path, int, int]], place: Path) -> subprocess.CompletedProcess[str]:
    listing = place / "payloads.json"
    listing.write_text(json.dumps([(str(path), offset, size) for path, offset, size in payloads]))
    command = [sys.executable, FLOOR, listing, place / "out"]
    return subprocess.run(command, capture_output=True, text=True)


def test_one_of_each_payload_is_copied(tmp_path: Path) -> None:
    large = bytes(range(251)) * 40_000  # more than two blocks of 4 MiB
    other = large[:-1] + b"\0"
    (tmp_path / "a").write_bytes(b"head" + large + b"x" * 2000)
    (tmp_path / "b").write_bytes(b"longer head" + large + other)
    size = len(large)
    result = run(
        [
            (tmp_path / "a", 4, size),
            (tmp_path / "a", 4 + size, 2000),
            (tmp_path / "b", 11, size),
            (tmp_path / "b", 11 + size, size),
        ],
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report.pop("unique") == 2 * size + 2000
    assert list(report) == ["hash", "copy", "sync", "check"]
    assert min(report.values()) >= 0
    out = (tmp_path / "out").read_bytes()
    assert len(out) == 2 * size + 2000
    assert {hashlib.sha256(out[at : at + size]).digest() for at in (0, size)} == {
        hashlib.sha256(content).digest() for content in (large, other)
    }
    assert out[2 * size :] == b"x" * 2000


def test_a_payload_beyond_the_end_of_its_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    assert run([(tmp_path / "a", 0, 5001)], tmp_path).returncode != 0
