"""Where measurements find what they work on: sources, stores, listings, and a place to write to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import h5py
import numpy as np

import slimckpt
from benchmarks.turns import stop
from slimckpt.formats import examine
from slimckpt.model import FLOOR as SMALLEST
from slimckpt.sources.positioned import FileSource

SCRIPTS = Path(__file__).parents[1]
PYTHON = sys.executable
SLIMCKPT = str(Path(PYTHON).parent / "slimckpt")
PIECE = 16 << 20
"""All bytes of a tree are cut into pieces of this many, so that every core has something to do."""


@dataclass(frozen=True)
class Options:
    """``scale`` shrinks bytes, ``quick`` numbers of things too."""

    runs: int
    seed: int
    scale: Fraction
    quick: bool

    @property
    def few(self) -> int:
        """Turns of what is slow."""
        return min(self.runs, 3)

    def nbytes(self, full: float) -> int:
        return int(full * self.scale)

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full


class Workshop:
    """Makes what is asked for, once."""

    def __init__(self, place: Path, options: Options) -> None:
        self.place, self.options = place, options
        self._made: dict[tuple[str, ...], Path] = {}
        self._number = 0

    def new(self, name: str) -> Path:
        """A path where nothing is."""
        self._number += 1
        return self.place / f"{self._number}-{name}"

    def checkpoint(self, *arguments: object) -> Path:
        """A synthetic checkpoint, of these arguments of ``make_checkpoint``."""
        key = ("checkpoint", *map(str, arguments))
        if key not in self._made:
            path = self.new("source")
            make = [PYTHON, SCRIPTS / "make_checkpoint.py", path, *arguments]
            call([*make, "--seed", self.options.seed])
            self._made[key] = path
        return self._made[key]

    def redundant(self, full: float = 2.7e9) -> Path:
        """One step of 8 ranks, dp4 x mp2, 82 % redundant."""
        return self.checkpoint("--size", self.options.nbytes(full), "--dp", 4, "--mp", 2)

    def unique(self) -> Path:
        """As large, but with nothing shared."""
        size = self.options.nbytes(2.7e9)
        return self.checkpoint("--size", size, "--dp", 4, "--mp", 2, "--unique")

    def large_tensor(self) -> Path:
        """Two equal ranks, 90 % of each one tensor."""
        size, largest = self.options.nbytes(2.2e9), self.options.nbytes(1e9)
        make = ["--largest", largest, "--no-optimizer"]
        return self.checkpoint("--size", size, *make, "--dp", 2, "--mp", 1)

    def many_tensors(self, tensors: int, nbytes: int, kind: str = "mindspore") -> Path:
        """Two ranks of equal tensors, half of them on both; ``nbytes`` of a rank."""
        size = max(nbytes // tensors // 4 * 4, 4096)
        make = ["--tensors", tensors, "--tensor-bytes", size, "--shared", 0.5]
        return self.checkpoint("--format", kind, *make, "--dp", 1, "--mp", 2)

    def store(self, source: Path) -> Path:
        """The slim checkpoint of a source."""
        key = ("store", str(source))
        if key not in self._made:
            path = self.new("store")
            call([SLIMCKPT, "slim", "--quiet", source, path])
            self._made[key] = path
        return self._made[key]

    def converted(self, rank: Path, kind: str) -> Path:
        """A directory with the F32 tensors of a rank in one HDF5 or npz file."""
        key = (kind, str(rank))
        if key not in self._made:
            path = self.new(kind) / "rank_0"
            path.mkdir(parents=True)
            arrays = {}
            for file in files_of(rank):
                memory = np.memmap(file, np.uint8, "r")
                with FileSource(os.fsencode(file)) as source:
                    table = examine(source).table
                for row in range(table.n_tensors):
                    tensor = table.tensor(row)
                    (span,) = table.spans(tensor.payload)
                    data = memory[span.offset : span.offset + span.nbytes]
                    arrays[tensor.name] = data.view("<f4").reshape(tensor.shape)
            if kind == "hdf5":
                with h5py.File(path / "model.h5", "w") as out:
                    for name, array in arrays.items():
                        out.create_dataset(name, data=array)
            else:
                np.savez(path / "model.npz", **arrays)
            self._made[key] = path.parent
        return self._made[key]

    def payloads(self, source: Path, smallest: int = SMALLEST) -> Path:
        """Lists for the floor program where the payloads of at least ``smallest`` bytes lie."""
        found: list[tuple[str, int, int]] = []
        for path in files_of(source):
            with FileSource(os.fsencode(path)) as file:
                table = examine(file).table
            for row in range(table.n_payloads):
                if table.payload_nbytes[row] >= smallest:
                    spans = table.spans(row)
                    found.extend((str(path), span.offset, span.nbytes) for span in spans)
        return self.listing(found)

    def all_bytes(self, *trees: Path) -> Path:
        """Lists for the floor program all bytes of some trees."""
        found = []
        for path in (path for tree in trees for path in files_of(tree)):
            size = path.stat().st_size
            for at in range(0, size, PIECE):
                found.append((str(path), at, min(PIECE, size - at)))
        return self.listing(found)

    def mapped(self, checkpoint: Path) -> Path:
        """Lists where the arrays of rank 0 lie, as the kernel says where their memory is from."""
        found = []
        with slimckpt.open(checkpoint) as opened:
            arrays = list(opened.rank(0).values())
            maps = []
            for line in Path("/proc/self/maps").read_text().splitlines():
                addresses, _, offset, _, _, path = (*line.split(maxsplit=5), "")[:6]
                first, last = (int(address, 16) for address in addresses.split("-"))
                maps.append((first, last, int(offset, 16), path))
            starts = [first for first, *_ in maps]
            for array in arrays:
                at = array.__array_interface__["data"][0]
                first, last, offset, path = maps[bisect_right(starts, at) - 1]
                if not (first <= at and at + array.nbytes <= last and path.startswith("/")):
                    stop(f"an array of {checkpoint} is not mapped from a file")
                found.append((path, offset + at - first, array.nbytes))
        return self.listing(found)

    def listing(self, found: object) -> Path:
        path = self.new("listing.json")
        path.write_text(json.dumps(found))
        return path


def call(command: list[object], code: int = 0, **options: object) -> str:
    """What a command prints; the end of the benchmark if it ends in another code."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode != code:
        stop(f"{' '.join(words)} ended in {done.returncode}, not {code}\n{done.stderr}")
    return str(done.stdout)


def files_of(tree: Path) -> Iterator[Path]:
    return (path for path in sorted(tree.rglob("*")) if path.is_file())


def read_all(tree: Path) -> None:
    """Bring a tree into the page cache."""
    buffer = bytearray(8 << 20)
    for path in files_of(tree):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def bytes_on_disk(path: Path) -> int:
    files = [path] if path.is_file() else files_of(path)
    return sum(file.stat().st_blocks * 512 for file in files)
