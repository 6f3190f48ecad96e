"""How long it takes to read a whole file through a mount, beside the original.

And beside bindfs, which shows a directory as it is: what is slow there too is what any file system
in user space costs on this kernel.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.turns import Contender, Figures, Result
from benchmarks.workshop import Workshop, read_all
from slimckpt.errors import MountError
from slimckpt.mount import mounted
from slimckpt.mount.place import detach, widen_readahead

CAT = "cat, original"
MOUNT = "cat, mount"
BINDFS = "cat, bindfs of the original"
TIMES = ("s first", "s again", "s third")


def mount(workshop: Workshop) -> Result:
    """One file of 512 MiB in 1,000 tensors, three times through a new mount and three times as it
    was; the originals and the store are in the page cache, what a new mount reads is not."""
    nbytes = workshop.options.nbytes(512 << 20)
    source = workshop.many_tensors(1000, nbytes)
    store = workshop.store(source)
    (original,) = source.rglob("rank_0/*.ckpt")
    point = workshop.new("mountpoint")
    point.mkdir()
    result = Result(f"read a file of {original.stat().st_size / 2**20:.3g} MiB through a mount")

    def through_mount() -> Figures:
        read_all(store)
        with mounted(store, point):
            return _read(point / original.relative_to(source))

    def as_it_was() -> Figures:
        read_all(source)
        return _read(original)

    def through_bindfs() -> Figures:
        read_all(source)
        subprocess.run(["bindfs", "-r", "-o", "kernel_cache", source, point], check=True)
        try:
            widen_readahead(os.fsencode(point))
            return _read(point / original.relative_to(source))
        finally:
            detach(os.fsencode(point))

    contenders = [Contender(CAT, as_it_was)]
    try:
        through_mount()
        contenders.append(Contender(MOUNT, through_mount))
        contenders.append(Contender(BINDFS, through_bindfs, "bindfs"))
    except MountError as error:
        print(error, file=sys.stderr)
        result.missing[MOUNT] = str(error)
    result.take_turns(contenders, workshop.options.runs)
    result.judge_ratio("read a file through a mount, first", MOUNT, 4, CAT, TIMES[0])
    result.judge_ratio("read a file through a mount, again", MOUNT, 1.15, CAT, TIMES[1])
    result.judge_ratio("read a file through a mount, first", MOUNT, 1, BINDFS, TIMES[0])
    result.judge_ratio("read a file through a mount, again", MOUNT, 1.15, BINDFS, TIMES[1])
    return result


def _read(path: Path) -> Figures:
    """Seconds of ``cat``, three times."""
    found = {}
    for key in TIMES:
        start = time.perf_counter()
        subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True)
        found[key] = time.perf_counter() - start
    return found
