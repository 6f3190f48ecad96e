"""How long it takes to open a rank, to make its arrays, and to touch every page of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import slimckpt
from benchmarks.processes import read_all
from benchmarks.turns import Contender, Figures, Result, stop
from benchmarks.workshop import PYTHON, SCRIPTS, Workshop, call

READER = SCRIPTS / "benchmarks" / "reader.py"
SAFETENSORS = SCRIPTS.parent / ".venvs" / "benchmark" / "bin" / "python"
"""safetensors is a peer, no dependency: it has an environment of its own."""
KINDS = ("store", "mindspore", "safetensors")
MEMMAP = "numpy.memmap"
SAFE_OPEN = "safetensors"


@dataclass
class Reading:
    """One turn of the reader, in a fresh process; all readers of one source must agree."""

    how: str
    path: Path
    source: Path
    agreed: dict[str, float]
    python: str = PYTHON
    reader: Path = READER

    def __call__(self) -> Figures:
        read_all(self.source)
        found: Figures = json.loads(call([self.python, self.reader, self.how, self.path]))
        sum_and_count = {key: found.pop(key) for key in ("sum", "arrays")}
        if self.agreed and self.agreed != sum_and_count:
            stop(f"{self.how} reads {sum_and_count} in {self.path}, others {self.agreed}")
        self.agreed |= sum_and_count
        return {f"s {key}": seconds for key, seconds in found.items()}


def read(workshop: Workshop) -> Result:
    """One rank of 512 MiB, in 100, 1,000 and 20,000 tensors."""
    nbytes = workshop.options.nbytes(512 << 20)
    result = Result(f"read a rank of {nbytes / 2**20:.3g} MiB, seconds after import")
    for tensors in (100, 1000, workshop.options.count(20_000, 2000)):
        _take_turns(workshop, result, tensors, nbytes)
        what = f"{tensors:,} tensors"
        # The bars are for 1,000 tensors; the others show how that scales.
        if tensors == 1000:
            for kind in KINDS:
                name = f"{tensors:,}: slimckpt, {kind}"
                memmap, safetensors = f"{tensors:,}: {MEMMAP}, {kind}", f"{tensors:,}: {SAFE_OPEN}"
                read_what = f"open, views, every page, {what} ({kind})"
                result.judge_ratio(read_what, name, 1.15, memmap, "s touched")
                result.judge_ratio(
                    f"views alone, {what} ({kind})", name, 0.3, safetensors, "s views"
                )
    return result


def open_rank(workshop: Workshop) -> Result:
    """One rank of 20,000 tensors of 4 KiB, from a store and from directories of each format."""
    tensors = workshop.options.count(20_000, 2000)
    result = Result(f"open a rank of {tensors:,} tensors of 4 KiB, seconds after import")
    source = workshop.many_tensors(tensors, tensors * 4096)
    (rank,) = source.glob("rank_0")
    directories = {
        "store": workshop.store(source),
        "mindspore": source,
        "safetensors": workshop.many_tensors(tensors, tensors * 4096, "safetensors"),
        "hdf5": workshop.converted(rank, "hdf5"),
        "npz": workshop.converted(rank, "npz"),
    }
    agreed: dict[str, float] = {}
    contenders = []
    for name, path in directories.items():
        if formats_of(path) == {"unknown"}:
            result.missing[f"slimckpt, {name}"] = "not a format that slimckpt reads"
        else:
            contenders.append(
                Contender(f"slimckpt, {name}", Reading("slimckpt", path, path, agreed))
            )
    result.take_turns(contenders, workshop.options.runs)
    for contender in contenders:
        figure = 1000 * result.median(contender.name, "s open")
        what = f"open a rank of {tensors:,} tensors ({contender.name.partition(', ')[2]})"
        result.judge(what, figure, 60, "ms", 1000 * min(result.all_of(contender.name, "s open")))
    return result


def formats_of(path: Path) -> set[str]:
    """What slimckpt takes the files of a checkpoint for."""
    with slimckpt.open(path) as checkpoint:
        return {file.format for file in checkpoint.files.values()}


def _take_turns(workshop: Workshop, result: Result, tensors: int, nbytes: int) -> None:
    source = workshop.many_tensors(tensors, nbytes)
    safetensors = workshop.many_tensors(tensors, nbytes, "safetensors")
    (model,) = safetensors.rglob("rank_0/model.safetensors")
    (rank,) = source.glob("rank_0")
    (hdf5,) = workshop.converted(rank, "hdf5").rglob("*.h5")
    agreed: dict[str, float] = {}

    def contender(
        name: str, how: str, path: Path, warm: Path | None = None, python: str = PYTHON
    ) -> Contender:
        turn = Reading(how, path, warm or path.parent, agreed, python)
        return Contender(f"{tensors:,}: {name}", turn, python)

    ours = dict(zip(KINDS, (workshop.store(source), source, safetensors), strict=True))
    # Each of ours has its own memmap, of the same files: how long pages take to map depends on how
    # their file was written.
    contenders = [
        contender(f"{MEMMAP}, {kind}", "memmap", workshop.mapped(path), path)
        for kind, path in ours.items()
    ]
    contenders += [
        contender(f"slimckpt, {kind}", "slimckpt", path, path) for kind, path in ours.items()
    ]
    contenders += [
        contender(SAFE_OPEN, "safetensors", model, python=str(SAFETENSORS)),
        contender("h5py", "h5py", hdf5),
    ]
    result.take_turns(contenders, workshop.options.runs)
