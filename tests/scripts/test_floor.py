"""The floor program does the work it is the yardstick of."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

FLOOR = Path(__file__).parents[2] / "scripts" / "floor.py"
LARGE = bytes(range(251)) * 40_000
"""More than two blocks of 4 MiB."""
OTHER = LARGE[:-1] + b"\0"


def run(
    mode: str, pieces: list[tuple[Path, int, int]], place: Path
) -> subprocess.CompletedProcess[str]:
    listing = place / "pieces.json"
    listing.write_text(json.dumps([(str(path), offset, size) for path, offset, size in pieces]))
    command = [sys.executable, FLOOR, mode, listing]
    return subprocess.run(
        command if mode == "hash" else [*command, place / "out"], capture_output=True, text=True
    )


def test_one_of_each_payload_is_copied(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"head" + LARGE + b"x" * 2000)
    (tmp_path / "b").write_bytes(b"longer head" + LARGE + OTHER)
    size = len(LARGE)
    result = run(
        "slim",
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
    assert report.pop("nbytes") == 2 * size + 2000
    assert list(report) == ["hash", "copy", "sync", "check"]
    assert min(report.values()) >= 0
    out = (tmp_path / "out").read_bytes()
    assert len(out) == 2 * size + 2000
    assert {hashlib.sha256(out[at : at + size]).digest() for at in (0, size)} == {
        hashlib.sha256(content).digest() for content in (LARGE, OTHER)
    }
    assert out[2 * size :] == b"x" * 2000


def test_every_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(LARGE)
    (tmp_path / "b").write_bytes(OTHER)
    half = len(LARGE) // 2
    pieces = [
        (tmp_path / name, at, length)
        for at, length in ((half, len(LARGE) - half), (0, half))
        for name in ("b", "a")
    ]
    result = run("copy", pieces, tmp_path)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report.pop("nbytes") == 2 * len(LARGE)
    assert list(report) == ["copy", "sync", "check"]
    assert [path.read_bytes() for path in sorted((tmp_path / "out").iterdir())] == [LARGE, OTHER]


def test_hashing_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(LARGE)
    result = run("hash", [(tmp_path / "a", 0, len(LARGE))], tmp_path)
    assert result.returncode == 0, result.stderr
    assert list(json.loads(result.stdout)) == ["nbytes", "hash"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "pieces.json"]


def test_a_payload_beyond_the_end_of_its_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    for mode in ("hash", "slim", "copy"):
        assert run(mode, [(tmp_path / "a", 0, 5001)], tmp_path).returncode != 0
