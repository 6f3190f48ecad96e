"""What memory a node needs for all its ranks where a training framework loads them.

Frameworks live in environments of their own, which ``scripts/interop`` makes; where there is none,
its framework is not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import sums_of_ranks, unique_bytes
from benchmarks.processes import memory_held
from benchmarks.turns import Result
from benchmarks.workshop import SCRIPTS, Workshop

RANKS = 8
SHARED = 8
"""Tensors of a rank that all ranks have; one more is its own."""
ALLOWED = 1.15
SMALL, LARGE = 64 << 20, 1 << 30
"""Unique bytes; by its own loader a framework would not fit the larger ones into this memory."""


@dataclass(frozen=True)
class Loader:
    """A way of a framework's reader program; ``judged`` ones are held to the bar."""

    how: str
    of_store: bool = True
    judged: bool = False
    all_ranks: bool = False


@dataclass(frozen=True)
class Framework:
    """``kind`` is a format of ``make_checkpoint``, ``reader`` a program like ``reader.py``."""

    kind: str
    reader: str
    loaders: dict[str, Loader]


FRAMEWORKS = {
    "mindspore": Framework(
        "mindspore",
        "mindspore_reader.py",
        {
            "tensors": Loader("tensors", judged=True),
            "load_checkpoint": Loader("load_checkpoint", judged=True),
            "Parameter of a tensor": Loader("parameters"),
            "own loader, own file": Loader("own", of_store=False),
            "own loader, all files": Loader("own-all", of_store=False, all_ranks=True),
        },
    ),
    "torch": Framework(
        "torch",
        "torch_reader.py",
        {
            "load": Loader("load", judged=True),
            "state_dict": Loader("state_dict"),
            "own loader, mmap": Loader("own-mmap", of_store=False),
            "own loader": Loader("own", of_store=False),
        },
    ),
}


def frameworks(workshop: Workshop) -> Result:
    """Eight processes, a rank each: proportional set sizes (PSS) above the imports'."""
    result = Result("memory of a node, MB above that of the imports, by the framework that loads")
    for name, framework in FRAMEWORKS.items():
        python = SCRIPTS.parent / ".venvs" / name / "bin" / "python"
        if not python.exists():
            result.missing[name] = f"there is no {python}; scripts/interop {name} makes it"
            continue
        for unique in (SMALL, LARGE):
            _measure(workshop, result, name, framework, python, unique)
    return result


def _measure(
    workshop: Workshop, result: Result, name: str, framework: Framework, python: Path, unique: int
) -> None:
    count = workshop.options.count(RANKS, 2)
    source = _source(workshop, framework.kind, unique)
    store = workshop.store(source)
    sums = sums_of_ranks(workshop, source, range(RANKS))
    needed = unique_bytes(workshop, [source / f"rank_{rank}" for rank in range(count)])
    for label, loader in framework.loaders.items():
        if unique == LARGE and not loader.judged:
            continue
        path = store if loader.of_store else source
        command = [python, SCRIPTS / "benchmarks" / framework.reader, loader.how, path]
        every = [sum(sums.values())] * count if loader.all_ranks else list(sums.values())[:count]
        readers: list[list[object]] = [[*command, rank, "hold"] for rank in range(count)]
        taken = memory_held(readers, every, {"OMP_NUM_THREADS": "1", "GLOG_v": "3"})
        figures = {"MB PSS": taken / 1e6, "MB unique": needed / 1e6, "x unique": taken / needed}
        result.turns[f"{name}: {label}, {needed / 1e6:.0f} MB"] = [figures]
        if loader.judged and unique == LARGE:
            what = f"memory of a node, {count} x {name}, {label}, {needed / 1e9:.2g} GB unique"
            result.judge(what, taken / needed, ALLOWED, "x unique bytes")


def _source(workshop: Workshop, kind: str, unique: int) -> Path:
    """A rank has ``SHARED`` tensors that all have, and one of its own; all are of one size."""
    nbytes = workshop.options.nbytes(unique) // (SHARED + RANKS) // 4096 * 4096
    make = ["--tensors", SHARED + 1, "--tensor-bytes", nbytes, "--shared", f"{SHARED}/{SHARED + 1}"]
    source = workshop.checkpoint("--format", kind, *make, "--dp", 1, "--mp", RANKS)
    for path in source.rglob("rank_*.pt"):
        # A directory for each rank, as other formats have it.
        (source / path.stem).mkdir()
        path.rename(source / path.stem / path.name)
    return source
