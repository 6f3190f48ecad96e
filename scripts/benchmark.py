"""Measure ``slimckpt`` against the least that must be done, and against other tools if installed.

Every contender is timed as a whole process, start-up included, the contenders taking turns. The
source is read once before every turn, so that all work from the page cache, and what a turn wrote
is deleted after it. Numbers of different machines do not compare; ratios do, roughly.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slimckpt.formats import examine
from slimckpt.model import FLOOR as SMALLEST
from slimckpt.sources.positioned import FileSource

SCRIPTS = Path(__file__).parent


@dataclass(frozen=True)
class Contender:
    """A program that is given a source directory and a place to write to.

    ``prepare`` is run before the clock starts. A contender whose ``program`` is not installed is
    named and left out.
    """

    name: str
    program: str
    command: Callable[[Path, Path], list[object]]
    prepare: Callable[[Path, Path], list[object]] | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One question: which source, made how, and who is timed on it. The first is the yardstick."""

    what: str
    size: str
    make: tuple[str, ...]
    contenders: tuple[Contender, ...]


def beside(program: str) -> str:
    """A program of the environment that this one runs in."""
    return str(Path(sys.executable).parent / program)


FLOOR = Contender(
    "floor",
    sys.executable,
    lambda source, out: [sys.executable, SCRIPTS / "floor.py", payloads_of(source), out],
)
SLIM = Contender(
    "slimckpt slim",
    beside("slimckpt"),
    lambda source, out: [beside("slimckpt"), "slim", source, out],
)
PEERS = (
    Contender(
        "borg create",
        "borg",
        lambda source, out: ["borg", "create", "-C", "none", f"{out}::one", source],
        lambda source, out: ["borg", "init", "-e", "none", out],
        {"BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"},
    ),
    Contender(
        "restic backup",
        "restic",
        lambda source, out: ["restic", "-r", out, "backup", "--quiet", source],
        lambda source, out: ["restic", "-r", out, "init", "--quiet"],
        {"RESTIC_PASSWORD": "benchmark"},
    ),
)

MEASUREMENTS = {
    "slim": Measurement(
        "slim one step of 8 ranks, dp4 x mp2, 82 % redundant",
        "2.7G",
        ("--dp", "4", "--mp", "2"),
        (FLOOR, SLIM, *PEERS),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmark", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}")
    parser.add_argument("--size", help="make the source smaller or larger than it is by default")
    parser.add_argument("--runs", type=int, default=7, help="turns of every contender (7)")
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic checkpoint (0)")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MEASUREMENTS):
        parser.error(f"no measurement {', '.join(sorted(unknown))}")
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    report: dict[str, object] = {"machine": machine(), "seed": options.seed}
    print("\n".join(f"{key}: {value}" for key, value in machine().items()))
    for name in options.names or MEASUREMENTS:
        measurement = MEASUREMENTS[name]
        size = options.size or measurement.size
        report[name] = measure(measurement, size, options.runs, options.seed)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(measurement: Measurement, size: str, runs: int, seed: int) -> dict[str, object]:
    print(f"\n{measurement.what}, {size}")
    here: list[Contender] = []
    missing: list[Contender] = []
    for contender in measurement.contenders:
        (here if shutil.which(contender.program) else missing).append(contender)
    seconds: dict[str, list[float]] = {contender.name: [] for contender in here}
    written: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="slimckpt-benchmark.") as place:
        source, out = Path(place, "source"), Path(place, "out")
        make = [source, "--size", size, "--seed", seed, *measurement.make]
        made = call([sys.executable, SCRIPTS / "make_checkpoint.py", *make])
        print(made.partition(": ")[2].strip())
        for turn in range(runs):
            for contender in here if turn % 2 == 0 else reversed(here):
                seconds[contender.name].append(run_once(contender, source, out))
                written[contender.name] = bytes_on_disk(out)
                shutil.rmtree(out) if out.is_dir() else out.unlink()
    yardstick = here[0].name
    print(f"{'':16}{'min s':>8}{'median s':>10}{'x ' + yardstick:>10}{'MB written':>12}")
    for name, times in seconds.items():
        ratio = statistics.median(times) / statistics.median(seconds[yardstick])
        print(
            f"{name:16}{min(times):8.2f}{statistics.median(times):10.2f}{ratio:10.2f}"
            f"{written[name] / 1e6:12.1f}"
        )
    for contender in missing:
        print(f"{contender.name:16} not measured: {contender.program} is not installed")
    return {
        "what": measurement.what,
        "size": size,
        "make": measurement.make,
        "seconds": seconds,
        "written": written,
        "missing": [contender.name for contender in missing],
    }


def run_once(contender: Contender, source: Path, out: Path) -> float:
    """Seconds of one turn of a contender, on a source that lies in the page cache."""
    environment = {**os.environ, **contender.environment}
    command = contender.command(source, out)
    if contender.prepare:
        call(contender.prepare(source, out), environment)
    os.sync()
    read_all(source)
    start = time.perf_counter()
    call(command, environment)
    return time.perf_counter() - start


def call(command: list[object], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"benchmark: {command[0]} failed with {done.returncode}\n{done.stderr}")
    return done.stdout


def payloads_of(source: Path) -> Path:
    """Write down for the floor program where the payloads lie, once for each source."""
    listing = source.with_suffix(".json")
    if not listing.exists():
        found: list[tuple[str, int, int]] = []
        for path in sorted(source.rglob("*.*")):
            with FileSource(os.fsencode(path)) as file:
                table = examine(file).table
            for row in range(table.n_payloads):
                spans = table.spans(row)
                if table.payload_nbytes[row] >= SMALLEST:
                    found.extend((str(path), span.offset, span.nbytes) for span in spans)
        listing.write_text(json.dumps(found))
    return listing


def read_all(source: Path) -> None:
    buffer = bytearray(8 << 20)
    for path in source.rglob("*.*"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def bytes_on_disk(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


def machine() -> dict[str, object]:
    cpu = [
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    packages = ("slimckpt", "numpy", "h5py", "blake3")
    temporary = tempfile.gettempdir()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu[0] if cpu else platform.machine(),
        "kernel": platform.release(),
        "file system": call(["stat", "-f", "-c", "%T", temporary]).strip(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "commit": call(["git", "-C", SCRIPTS, "describe", "--always", "--dirty"]).strip(),
    }


if __name__ == "__main__":
    main()
