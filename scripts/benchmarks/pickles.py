"""Pickles: how long it takes to find the tensors in them, and to slim a run of them."""

from __future__ import annotations

import json
import os
import pickle
from functools import partial
from pathlib import Path

from benchmarks.commands import floor
from benchmarks.processes import Command, gives_back
from benchmarks.turns import Contender, Figures, Result
from benchmarks.workshop import PYTHON, SLIMCKPT, Workshop, call, read_all

SCAN = """
import json, os, sys, time
from slimckpt.formats import examine
from slimckpt.sources.positioned import FileSource

path = os.fsencode(sys.argv[1])
with FileSource(path) as source:
    source.read(0, min(source.size, 4096))
start = time.perf_counter()
with FileSource(path) as source:
    found = examine(source)
seconds = time.perf_counter() - start
status = open("/proc/self/status").read()
mb = int(status.split("VmHWM:")[1].split()[0]) / 1000
print(json.dumps({"s": seconds, "MB": mb, "tensors": found.table.n_tensors}))
"""


def pickles(workshop: Workshop) -> Result:
    """Scanning files of 512 MiB and 200 MB of metadata; slimming 2.7 GB of torch files."""
    result = Result("pickles: torch and Paddle")
    nbytes = workshop.options.nbytes(512 << 20)
    contenders = []
    for kind in ("torch", "paddle"):
        make = ("--format", kind, "--size", nbytes, "--dp", 1, "--mp", 1)
        (path,) = workshop.checkpoint(*make).rglob("rank_0.*")
        contenders.append(Contender(f"scan, {kind}", partial(_scan, path)))
    metadata = _metadata(workshop)
    contenders.append(Contender("scan, metadata", partial(_scan, metadata), most=1))
    source = workshop.checkpoint(
        *("--format", "torch", "--size", workshop.options.nbytes(2.7e9), "--dp", 4, "--mp", 2)
    )
    out = workshop.new("out")
    give_back = gives_back(
        workshop, source, lambda back: [SLIMCKPT, "restore", "--quiet", out, back]
    )
    command = [SLIMCKPT, "slim", "--quiet", source, out]
    contenders += [
        Contender("floor", Command(floor("slim", workshop.payloads(source), out), source, out)),
        Contender("slimckpt slim", Command(command, source, out, check=give_back)),
    ]
    result.take_turns(contenders, workshop.options.runs)
    for kind in ("torch", "paddle"):
        name = f"scan, {kind}"
        least = min(result.all_of(name)) * 1000
        result.judge(f"scan 512 MiB, {kind}", result.median(name) * 1000, 20, "ms", least)
    what = f"scan a pickle of {metadata.stat().st_size / 1e6:.0f} MB of metadata"
    result.judge(what, result.median("scan, metadata"), 60, "s")
    result.judge_ratio("slim 2.7 GB of torch files", "slimckpt slim", 1.6, "floor")
    return result


def _scan(path: Path) -> Figures:
    read_all(path.parent)
    found: Figures = json.loads(call([PYTHON, "-c", SCAN, path]))
    return found


def _metadata(workshop: Workshop) -> Path:
    """A pickle of nothing but names and numbers."""
    path = workshop.new("metadata")
    path.mkdir()
    count = workshop.options.nbytes(200e6) // 48
    state = [{f"layer.{at}.weight": (at, f"rank_{at % 64}", [at, at * 2])} for at in range(count)]
    file = path / "0.metadata"
    with file.open("wb") as out:
        pickle.dump(state, out, protocol=4)
    os.sync()
    return file
