"""How long the commands take, beside the floor and beside other tools."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.processes import Command, gives_back, same_trees
from benchmarks.turns import Contender, Result, stop
from benchmarks.workshop import PYTHON, SCRIPTS, SLIMCKPT, Workshop, call

HASH = "hashing all bytes"
NOTHING_TO_GAIN = 3
BORG = {"BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}
RESTIC = {"RESTIC_PASSWORD": "benchmark"}
TAR = 'set -o pipefail; tar -C "$0" -cf - . | zstd -q --long=31 -T0 -o "$1"'
UNTAR = 'set -o pipefail; mkdir "$1"; zstd -q -d --long=31 -c "$0" | tar -C "$1" -xf -'


def floor(*arguments: object) -> list[object]:
    return [PYTHON, SCRIPTS / "floor.py", *arguments]


def slim(workshop: Workshop) -> Result:
    source, out = workshop.redundant(), workshop.new("out")
    result = Result(f"slim one step of 8 ranks, {_size(source)}, 82 % redundant")
    give_back = gives_back(
        workshop, source, lambda back: [SLIMCKPT, "restore", "--quiet", out, back]
    )
    command = [SLIMCKPT, "slim", "--quiet", source, out]
    result.take_turns(
        [
            Contender("floor", Command(floor("slim", workshop.payloads(source), out), source, out)),
            Contender("slimckpt slim", Command(command, source, out, check=give_back)),
            *_peers(workshop, source),
        ],
        workshop.options.runs,
    )
    result.judge_ratio("slim, 82 % redundant", "slimckpt slim", 1.5, "floor")
    result.judge_ratio("slim, 82 % redundant", "slimckpt slim", 0.35, "borg create")
    result.judge_ratio("slim, 82 % redundant", "slimckpt slim", 0.3, "restic backup")
    return result


def _peers(workshop: Workshop, source: Path) -> list[Contender]:
    few, out = workshop.options.few, workshop.new("peer")
    stored = str(source).removeprefix("/")
    index, chunks = out / "one.caidx", f"--store={out / 'one.castr'}"
    borg = Command(
        ["borg", "create", "-C", "none", f"{out}::one", source],
        source,
        out,
        ["borg", "init", "-e", "none", out],
        environment=BORG,
    )
    restic = Command(
        ["restic", "-r", out, "backup", "--quiet", source],
        source,
        out,
        ["restic", "-r", out, "init", "--quiet"],
        environment=RESTIC,
    )
    casync = Command(["casync", "make", chunks, index, source], source, out, ["mkdir", out])
    tar = Command(["bash", "-c", TAR, source, out], source, out)
    cp = Command(["cp", "-r", source, out], source, out)

    borg.check = gives_back(
        workshop,
        source,
        lambda back: ["bash", "-c", 'mkdir "$0"; cd "$0"; borg extract "$1"', back, f"{out}::one"],
        stored,
        env={**os.environ, **BORG},
    )
    restic.check = gives_back(
        workshop,
        source,
        lambda back: ["restic", "-r", out, "restore", "--quiet", "latest", "--target", back],
        stored,
        env={**os.environ, **RESTIC},
    )
    casync.check = gives_back(
        workshop, source, lambda back: ["casync", "extract", chunks, index, back]
    )
    tar.check = gives_back(workshop, source, lambda back: ["bash", "-c", UNTAR, out, back])
    cp.check = lambda _: same_trees(source, out)
    return [
        Contender("borg create", borg, "borg", few),
        Contender("restic backup", restic, "restic", few),
        Contender("casync make", casync, "casync", few),
        Contender("tar | zstd --long=31 -T0", tar, "zstd", few),
        Contender("cp -r", cp, "cp"),
    ]


def nothing(workshop: Workshop) -> Result:
    source, out = workshop.unique(), workshop.new("out")
    result = Result(f"slim, nothing shared, {_size(source)}: the decision to do nothing")
    command = [SLIMCKPT, "slim", "--quiet", source, out]
    result.take_turns(
        [
            Contender(HASH, Command(floor("hash", workshop.all_bytes(source)), source)),
            Contender("slimckpt slim", Command(command, source, code=NOTHING_TO_GAIN)),
        ],
        workshop.options.runs,
    )
    if out.exists():
        stop("slim wrote something where nothing was to be gained")
    result.judge_ratio("slim, nothing shared", "slimckpt slim", 1.3, HASH)
    return result


def restore(workshop: Workshop) -> Result:
    source, out = workshop.redundant(), workshop.new("out")
    store = workshop.store(source)
    result = Result(f"restore of {_size(source)}")
    copies = Command(floor("copy", workshop.all_bytes(source), out), source, out)
    command = [SLIMCKPT, "restore", "--quiet", store, out]
    back = Command(command, store, out, check=lambda _: same_trees(source, out))
    result.take_turns(
        [Contender("copy, fsync, hash", copies), Contender("slimckpt restore", back)],
        workshop.options.runs,
    )
    result.judge_ratio("restore", "slimckpt restore", 1.4, "copy, fsync, hash")
    return result


def verify(workshop: Workshop) -> Result:
    source = workshop.redundant()
    store = workshop.store(source)
    result = Result(f"verify, alone and against {_size(source)}; no bar")
    both, against = f"{HASH} of both", "slimckpt verify --against"
    command = [SLIMCKPT, "verify", "--quiet", store]
    result.take_turns(
        [
            Contender(HASH, Command(floor("hash", workshop.all_bytes(store)), store)),
            Contender("slimckpt verify", Command(command, store)),
            Contender(both, Command(floor("hash", workshop.all_bytes(store, source)), source)),
            Contender(against, Command([*command, "--against", source], source)),
        ],
        workshop.options.runs,
    )
    return result


def analyze(workshop: Workshop) -> Result:
    source = workshop.redundant()
    result = Result(f"analyze {_size(source)}, from samples")
    imports, cat = "import numpy, blake3, click", "cat to /dev/null"
    cats: list[object] = ["bash", "-c", 'find "$0" -type f -exec cat {} + >/dev/null', source]
    command = [SLIMCKPT, "analyze", "--quiet", "--json", source]
    result.take_turns(
        [
            Contender(imports, Command([PYTHON, "-c", imports])),
            Contender(cat, Command(cats, source)),
            Contender("slimckpt analyze", Command(command, source, check=_is_82_percent)),
        ],
        workshop.options.runs,
    )
    figures = [
        of("slimckpt analyze") / (of(imports) + 0.3 * of(cat))
        for of in (result.median, lambda name: min(result.all_of(name)))
    ]
    result.judge("analyze, sampled", figures[0], 1, "x (imports + 0.3 x cat)", figures[1])
    return result


def exact(workshop: Workshop) -> Result:
    source = workshop.redundant()
    result = Result(f"analyze --exact {_size(source)}")
    command = [SLIMCKPT, "analyze", "--exact", "--quiet", "--json", source]
    result.take_turns(
        [
            Contender(HASH, Command(floor("hash", workshop.all_bytes(source)), source)),
            Contender("slimckpt analyze", Command(command, source, check=_is_82_percent)),
        ],
        workshop.options.runs,
    )
    result.judge_ratio("analyze --exact", "slimckpt analyze", 1.3, HASH)
    return result


def _is_82_percent(printed: str) -> None:
    total = json.loads(printed)["total"]
    if not 0.75 < 1 - total["after"] / total["before"] < 0.85:
        stop(f"analyze finds {total}, where 82 % are redundant")


def _size(source: Path) -> str:
    return f"{int(call(['du', '-bs', source]).split()[0]) / 1e9:.3g} GB"
