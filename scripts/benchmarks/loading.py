"""How long it takes to load a rank: from memory into buffers, and from the disk."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.processes import read_all
from benchmarks.turns import Contender, Figures, Result, stop
from benchmarks.workshop import PYTHON, SCRIPTS, Workshop, call, files_of

LOADER = SCRIPTS / "benchmarks" / "loader.py"
COLD = {
    "random": "random order",
    "order": "storage order",
    "prefetch": "storage order, prefetch beside it",
    "wait": "prefetch first, then random order",
}


@dataclass
class Loading:
    """One turn of the loader, in a fresh process; all turns of one source must agree."""

    how: str
    path: Path
    agreed: dict[str, int]
    prepare: Callable[[Path], object] = read_all

    def __call__(self) -> Figures:
        self.prepare(self.path)
        found = json.loads(call([PYTHON, LOADER, self.how, self.path]))
        read = {key: found.pop(key) for key in ("sum", "arrays")}
        if self.agreed and self.agreed != read:
            stop(f"{self.how} reads {read} in {self.path}, others {self.agreed}")
        self.agreed |= read
        return {f"s {key}": seconds for key, seconds in found.items()}


def copy(workshop: Workshop) -> Result:
    """One rank of 512 MiB in 32 tensors, from the page cache into buffers."""
    nbytes = workshop.options.nbytes(512 << 20)
    result = Result(f"copy a rank of {nbytes / 2**20:.3g} MiB, all pages mapped, seconds")
    source = workshop.many_tensors(32, nbytes)
    for kind, path in (("store", workshop.store(source)), ("mindspore", source)):
        ours, theirs, agreed = f"copy_into, {kind}", f"numpy.copyto, {kind}", {}
        contenders = [
            Contender(ours, Loading("copy_into", path, agreed)),
            Contender(theirs, Loading("copyto", path, agreed)),
        ]
        result.take_turns(contenders, workshop.options.runs)
        for memory in ("new memory", "same memory"):
            what = f"copy_into of 32 tensors, {memory} ({kind})"
            result.judge_ratio(what, ours, 1.2, theirs, f"s {memory}")
    return result


def cold(workshop: Workshop) -> Result:
    """One rank of 512 MiB in 4,096 tensors, from the disk, every page touched."""
    nbytes = workshop.options.nbytes(512 << 20)
    tensors = workshop.options.count(4096, 256)
    result = Result(f"load a rank of {nbytes / 2**20:.3g} MiB from the disk, seconds")
    path = workshop.store(workshop.many_tensors(tensors, nbytes))
    os.sync()
    if not evict(path):
        result.missing["all"] = "this file system keeps its pages in memory"
        return result
    agreed: dict[str, int] = {}
    turns = {name: Loading(how, path, agreed, evict) for how, name in COLD.items()}
    contenders = [Contender(name, turn) for name, turn in turns.items()]
    result.take_turns(contenders, workshop.options.runs)
    return result


def evict(tree: Path) -> bool:
    """Have the kernel drop a tree from the page cache; whether it did."""
    for path in files_of(tree):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return not any(map(_cached_pages, files_of(tree)))


def _cached_pages(path: Path) -> int:
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        memory = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(memory) // mmap.PAGESIZE), np.uint8)
        address, length = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory))
        ctypes.CDLL(None).mincore(address, length, ctypes.c_void_p(pages.ctypes.data))
        del memory
    return int((pages & 1).sum())
