"""What memory a node needs for all its ranks, and what every command needs for itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from benchmarks.processes import Command, memory_held
from benchmarks.reading import READER
from benchmarks.turns import Contender, Result
from benchmarks.workshop import PYTHON, SCRIPTS, SLIMCKPT, Workshop, call

ALLOWED_MB = 200
ALLOWED_BYTES_A_RECORD = 300


def node(workshop: Workshop) -> Result:
    """1, 2, 4 and 8 processes, a rank each: proportional set sizes (PSS) above the imports'."""
    source = workshop.redundant(6.2e9)
    store = workshop.store(source)
    result = Result("memory of a node, MB above that of the imports, every page touched")
    sums = sums_of_ranks(workshop, source, range(8))
    for count in (1, 2, 4, 8):
        ranks = {rank: sums[rank] for rank in range(count)}
        readers = [[PYTHON, READER, "slimckpt", store, rank, "hold"] for rank in ranks]
        taken = memory_held(readers, list(ranks.values()))
        needed = unique_bytes(workshop, [source / f"rank_{rank}" for rank in ranks])
        name = f"{count} processes"
        result.turns[name] = [{"MB PSS": taken / 1e6, "MB unique": needed / 1e6}]
        what = f"memory of a node, {count} {'process' if count == 1 else 'processes'}"
        result.judge(f"{what}, {needed / 1e9:.2g} GB unique", taken / needed, 1.1, "x unique bytes")
    return result


def sums_of_ranks(workshop: Workshop, source: Path, ranks: Iterable[int]) -> dict[int, int]:
    """What readers of some ranks of a checkpoint must print as their sum, by a plain mapping."""
    sums = {}
    for rank in ranks:
        listing = workshop.payloads(source / f"rank_{rank}", smallest=1)
        sums[rank] = json.loads(call([PYTHON, READER, "memmap", listing]))["sum"]
    return sums


def unique_bytes(workshop: Workshop, ranks: list[Path]) -> int:
    """Bytes of the distinct payloads of some ranks, as the floor program finds them."""
    listings = [json.loads(workshop.payloads(rank).read_text()) for rank in ranks]
    pieces = workshop.listing([piece for listing in listings for piece in listing])
    out = workshop.new("out")
    unique = json.loads(call([PYTHON, SCRIPTS / "floor.py", "slim", pieces, out]))["nbytes"]
    out.unlink()
    return int(unique)


def private(workshop: Workshop) -> Result:
    """Largest private memory of every command, on few large tensors and on many small ones."""
    tensors = workshop.options.count(20_000, 2000)
    result = Result("private memory of commands: largest RssAnon, looked at every millisecond")
    worst: dict[str, tuple[float, float, str]] = {}
    sources = {
        "2.7 GB": workshop.redundant(),
        "one tensor of 1 GB": workshop.large_tensor(),
        f"{tensors:,} tensors x 2": workshop.many_tensors(tensors, tensors * 4096),
    }
    for source_name, source in sources.items():
        store, out = workshop.store(source), workshop.new("out")
        records = json.loads(call([SLIMCKPT, "analyze", "--quiet", "--json", source]))["tensors"]
        allowed = ALLOWED_MB + ALLOWED_BYTES_A_RECORD * records / 1e6
        commands: dict[str, list[object]] = {
            "analyze": ["analyze", "--json", source],
            "analyze --exact": ["analyze", "--exact", "--json", source],
            "slim": ["slim", source, out],
            "slim --dry-run": ["slim", "--dry-run", source, out],
            "verify": ["verify", store],
            "verify --against": ["verify", store, "--against", source],
            "restore": ["restore", store, out],
            "ls": ["ls", store],
            "ls --rank": ["ls", "--rank", 0, store],
            "ls --rank, directory": ["ls", "--rank", 0, source],
            "doctor": ["doctor", workshop.place],
        }
        for name, command in commands.items():
            turn = Command([SLIMCKPT, *command], source, out, memory=True)
            label = f"{name}, {source_name}"
            result.take_turns([Contender(label, turn)], workshop.options.few)
            peak = max(result.all_of(label, "MB private"))
            worst[name] = max(worst.get(name, (0, 0, "")), (peak / allowed, peak, source_name))
    for name, (share, peak, source_name) in worst.items():
        what = f"private memory of {name} ({source_name})"
        result.judge(what, peak, round(peak / share), "MB")
    return result
