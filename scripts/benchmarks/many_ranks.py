"""Analyzing very many ranks: real safetensors headers, payloads that are mostly holes."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from benchmarks.processes import Command
from benchmarks.turns import Contender, Result, stop
from benchmarks.workshop import SLIMCKPT, Workshop

SLICES = 8
"""Model-parallel size: sliced tensors are the same on every eighth rank."""
COLUMNS = 256
RANK = b"RANK-0000"


class Layout:
    """One header for all ranks, patched with the rank, and where payloads differ.

    Tensors have lengths of their own, as holes would else make them all the same. Of four, two are
    the same on all ranks and two are sliced; the last two of all are the rank's own. Those that
    differ have a mark where two of them meet, so that one page of the disk does for both.
    """

    def __init__(self, tensors: int) -> None:
        header: dict[str, object] = {"__metadata__": {"rank": RANK.decode()}}
        self.nbytes = [2 * COLUMNS * (256 + row) for row in range(tensors)]
        self.ends = []
        end = 0
        for row, nbytes in enumerate(self.nbytes):
            header[f"model.layers.{row // 10}.part.{row % 10}.weight"] = {
                "dtype": "BF16",
                "shape": [256 + row, COLUMNS],
                "data_offsets": [end, end + nbytes],
            }
            end += nbytes
            self.ends.append(end)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.head = struct.pack("<Q", len(text)) + text
        self.size = len(self.head) + end
        self.sliced = range(2, tensors - 2, 4)
        self.own = tensors - 2

    def write(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True)
        with path.open("xb") as out:
            out.write(self.head.replace(RANK, b"RANK-%04d" % rank))
            out.truncate(self.size)
            out.flush()
            for row in self.sliced:
                self._mark(out.fileno(), row, rank % SLICES)
            self._mark(out.fileno(), self.own, rank)

    def _mark(self, fd: int, row: int, number: int) -> None:
        mark = struct.pack("<II", number + 1, number + 1)
        os.pwrite(fd, mark, len(self.head) + self.ends[row] - len(mark) // 2)

    def distinct(self, ranks: int) -> int:
        """Bytes that are left when every payload is stored once."""
        copies = dict.fromkeys(range(len(self.nbytes)), 1)
        for row in self.sliced:
            copies |= dict.fromkeys((row, row + 1), min(SLICES, ranks))
        copies |= dict.fromkeys((self.own, self.own + 1), ranks)
        return sum(self.nbytes[row] * count for row, count in copies.items())


def ranks(workshop: Workshop) -> Result:
    """Time and memory at 2,048 ranks, and time per record beside that at 20."""
    options = workshop.options
    tensors, many, few = options.count(1000, 40), options.count(2048, 64), 20
    layout = Layout(tensors)
    trees: dict[int, Path] = {}
    for count in (1, few, many):
        trees[count] = workshop.new(f"{count}-ranks")
        for rank in range(count):
            path = trees[count] / "checkpoint-100" / f"rank_{rank}" / "model.safetensors"
            layout.write(path, rank)
    result = Result(f"analyze of {tensors:,} tensors on each of {many:,} ranks")
    contenders = []
    for count, most in ((1, None), (few, None), (many, options.few)):
        command = [SLIMCKPT, "analyze", "--quiet", "--json", trees[count]]
        turn = Command(command, check=_finds(layout, count), memory=True)
        contenders.append(Contender(f"{count:,} ranks", turn, most=most))
    result.take_turns(contenders, options.runs)
    large, small = f"{many:,} ranks", f"{few} ranks"
    what = f"analyze {many:,} ranks x {tensors:,} tensors"
    result.judge(f"{what}: time", result.median(large), 180, "s")
    private = max(result.all_of(large, "MB private"))
    whole = max(result.all_of(large, "MB whole"))
    result.judge(f"{what}: memory", whole, 1000, "MB")
    allowed = 200 + 300 * many * tensors / 1e6
    result.judge(f"{what}: private memory", private, round(allowed), "MB")
    # What start-up takes is not a matter of records; the tree of one rank stands for it.
    ratios = []
    for of in (result.median, lambda name: min(result.all_of(name))):
        start = of("1 ranks")
        ratios.append((of(large) - start) / (many - 1) / ((of(small) - start) / (few - 1)))
    result.judge(f"{what}: time per record", ratios[0], 1.5, f"x that of {few} ranks", ratios[1])
    for tree in trees.values():
        shutil.rmtree(tree)
    return result


def _finds(layout: Layout, count: int) -> Callable[[str], None]:
    def check(printed: str) -> None:
        after = json.loads(printed)["total"]["after"]
        distinct = layout.distinct(count)
        heads = count * len(layout.head)
        if not distinct <= after <= distinct + heads:
            stop(f"analyze finds {after} bytes distinct, of {count} ranks {distinct} are")

    return check
