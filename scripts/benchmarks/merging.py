"""How long it takes to merge the files of all ranks, and in what memory, beside MindSpore."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import slimckpt
from benchmarks.processes import SAMPLE_EVERY
from benchmarks.turns import Contender, Figures, Result, stop
from benchmarks.workshop import SCRIPTS, SLIMCKPT, Workshop, call, read_all

RANKS, RANK = 8, 128 << 20
MATRIX = [2, 4]
FASTER, LEANER = 1, 0.1
OURS, OF_FILES = "slimckpt merge, store", "slimckpt merge, originals"
UNIFIED, TRANSFORM = "unified_safetensors", "transform_checkpoints"
MERGER = SCRIPTS / "benchmarks" / "mindspore_merger.py"
MINDSPORE = SCRIPTS.parent / ".venvs" / "mindspore" / "bin" / "python"
QUIET = {"OMP_NUM_THREADS": "1", "GLOG_v": "3"}
PSS = re.compile(r"^Pss:\s+(\d+) kB.*^Pss_Anon:\s+(\d+) kB", re.DOTALL | re.MULTILINE)
ROWS = ["*.qkv.*", "*.mapping.*", "head.weight", "*.head.weight"]
COLUMNS = ["*.projection.weight"]


def rules(**mesh: int) -> str:
    """The layout of what ``make_checkpoint`` makes, in TOML."""
    parts = ["[mesh]", *(f"{name} = {size}" for name, size in mesh.items())]
    own = ["global_step", "learning_rate", "rng_seed"]
    parts += ["[[rule]]", f"match = {json.dumps(own)}", "per_rank = true"]
    for dim, names in enumerate((ROWS, COLUMNS)):
        parts += ["[[rule]]", f"match = {json.dumps(names)}", f"dim = {dim}", 'axis = "mp"']
    return "\n".join(parts) + "\n"


def merge(workshop: Workshop) -> Result:
    """Eight ranks of 128 MB, dp2 x mp4: time of whole processes, and their memory with that of all
    their children. ``s call`` of MindSpore is without its import; that is what bars are held to."""
    nbytes = workshop.options.nbytes(RANKS * RANK)
    source = workshop.checkpoint("--size", nbytes, "--dp", MATRIX[0], "--mp", MATRIX[1])
    result = Result(f"merge 8 ranks of {nbytes / RANKS / 1e6:.0f} MB")
    place = workshop.new("merge")
    place.mkdir()
    layout_of_it = place / "layout.toml"
    layout_of_it.write_text(rules(dp=MATRIX[0], mp=MATRIX[1]))
    store = workshop.store(source)
    out = place / "out"
    found = {}

    def ours(path: Path) -> Figures:
        command = [SLIMCKPT, "merge", "--quiet", "--layout", layout_of_it, path, out]
        figures = _turn(command, path, out)
        figures["s call"] = figures["s"]
        found[OURS] = found.get(OURS) or _values(out)
        shutil.rmtree(out)
        return figures

    contenders = [
        Contender(OURS, lambda: ours(store)),
        Contender(OF_FILES, lambda: ours(source), most=workshop.options.few),
    ]
    if MINDSPORE.exists():
        safetensors, strategy = place / "safetensors", place / "strategy.ckpt"
        layout = place / "layout.json"
        layout.write_text(json.dumps([MATRIX, _maps(source)]))
        call([MINDSPORE, MERGER, "prepare", source, safetensors, strategy, layout])

        def theirs(how: str, path: Path) -> Figures:
            figures = _turn([MINDSPORE, MERGER, how, path, out, strategy], path, out)
            if how == "unified":
                found[UNIFIED] = found.get(UNIFIED) or _values(out)
            shutil.rmtree(out)
            return figures

        few = workshop.options.few
        contenders += [
            Contender(UNIFIED, lambda: theirs("unified", safetensors), most=few),
            Contender(TRANSFORM, lambda: theirs("transform", source), most=few),
        ]
    else:
        why = f"there is no {MINDSPORE}; scripts/interop mindspore makes it"
        result.missing |= dict.fromkeys((UNIFIED, TRANSFORM), why)
    result.take_turns(contenders, workshop.options.runs)
    if UNIFIED in found and any(
        found[OURS].get(name) != value for name, value in found[UNIFIED].items()
    ):
        stop("slimckpt merge and unified_safetensors do not agree")
    for other in (UNIFIED, TRANSFORM):
        result.judge_ratio("merge, time", OURS, FASTER, other, "s call")
        result.judge_ratio("merge, private memory", OURS, LEANER, other, "MB private")
        result.judge_ratio("merge, memory with mapped files", OURS, LEANER, other, "MB PSS")
    return result


def _maps(source: Path) -> dict[str, list[int]]:
    """Which axis of each tensor is split along the second axis of the device matrix (``0``), as
    MindSpore writes it."""
    maps = {}
    with slimckpt.open(source) as checkpoint:
        view = checkpoint.rank(0)
        for name in view:
            found = [-1] * len(view.info(name).shape)
            for dim, globs in enumerate((ROWS, COLUMNS)):
                if found and any(fnmatchcase(name, glob) for glob in globs):
                    found[dim] = 0
            if found:
                maps[name] = found
    return maps


def _turn(command: list[object], source: Path, out: Path) -> Figures:
    """Run a command whose source lies in the page cache: its time and, at most, the proportional
    set size of it and its children, all of it and without files."""
    read_all(source)
    start = time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET},
    )
    output: list[str] = []
    reader = threading.Thread(target=lambda: output.extend(process.communicate()))
    reader.start()
    whole = private = 0
    while reader.is_alive():
        sums = [0, 0]
        for pid in _tree(process.pid):
            with contextlib.suppress(OSError):  # it has ended
                match = PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
                if match:
                    sums = [sums[0] + int(match[1]), sums[1] + int(match[2])]
        whole, private = max(whole, sums[0]), max(private, sums[1])
        reader.join(SAMPLE_EVERY * 5)
    figures = {"s": time.perf_counter() - start}
    if process.returncode or not out.exists():
        stop(f"{' '.join(map(str, command))} ended in {process.returncode}\n{output[1]}")
    printed = output[0].splitlines()
    if printed and printed[-1].startswith("{"):
        figures["s call"] = json.loads(printed[-1])["s"]
    return figures | {"MB private": private * 1024 / 1e6, "MB PSS": whole * 1024 / 1e6}


def _tree(pid: int) -> Iterator[int]:
    """A process and all below it."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _values(out: Path) -> dict[str, int]:
    """A digest of each tensor in safetensors files, without scalars."""
    found = {}
    for path in sorted(out.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        for name, entry in header.items():
            if name != "__metadata__" and entry["shape"]:
                low, high = entry["data_offsets"]
                key = entry["dtype"], tuple(entry["shape"]), data[start + low : start + high]
                found[name] = hash(key)
    return found
