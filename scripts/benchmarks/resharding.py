"""What one rank of another number of ranks reads, and in what memory."""

from __future__ import annotations

import json
import os

from benchmarks.loading import evict
from benchmarks.merging import rules
from benchmarks.processes import watch
from benchmarks.turns import Contender, Figures, Result
from benchmarks.workshop import PYTHON, SCRIPTS, SLIMCKPT, Workshop

RESHARDER = SCRIPTS / "benchmarks" / "resharder.py"
OLD, NEW, RANK = 8, 4, 1
MORE, MOST_MB = 1.05, 300
LIBRARY, COMMAND = "one rank, lazily", "slimckpt reshard --only-ranks"


def reshard(workshop: Workshop) -> Result:
    """2 GB on 8 ranks, each tensor split along rows, columns or not at all; one rank of 4."""
    nbytes = workshop.options.nbytes(2e9)
    source = workshop.checkpoint("--size", nbytes, "--dp", 1, "--mp", OLD)
    store = workshop.store(source)
    place = workshop.new("reshard")
    place.mkdir()
    layouts = {}
    for ranks in (OLD, NEW):
        layouts[ranks] = place / f"{ranks}.toml"
        layouts[ranks].write_text(rules(mp=ranks))
    result = Result(f"reshard {nbytes / 1e9:.2g} GB from {OLD} ranks to {NEW}: one rank")
    os.sync()
    if not evict(store):
        result.missing[LIBRARY] = "this file system keeps its pages in memory"
        return result

    def lazily() -> Figures:
        evict(store)
        command = [PYTHON, RESHARDER, store, layouts[OLD], layouts[NEW], RANK]
        printed, figures = watch(command, 0)
        found = json.loads(printed)
        sizes = {"MB own": found["own"] / 1e6, "MB read": found["read"] / 1e6}
        return {**figures, **sizes, "s": found["s"], "x own": found["read"] / found["own"]}

    def command() -> Figures:
        evict(store)
        out = workshop.new("out")
        words = ["reshard", "--quiet", "--source-layout", layouts[OLD], "--layout", layouts[NEW]]
        figures = watch([SLIMCKPT, *words, "--only-ranks", RANK, store, out], 0)[1]
        return figures

    few = workshop.options.few
    result.take_turns([Contender(LIBRARY, lazily), Contender(COMMAND, command)], few)
    what = "one rank of 8 to 4"
    result.judge(
        f"{what}: bytes read from the disk", result.median(LIBRARY, "x own"), MORE, "x own"
    )
    for name in (LIBRARY, COMMAND):
        most = max(result.all_of(name, "MB private"))
        result.judge(f"{what}: private memory, {name}", most, MOST_MB, "MB")
    return result
