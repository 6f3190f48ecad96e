"""Write a synthetic checkpoint of any size, as a training run of many ranks leaves it behind.

The bytes look like weights (finite, near zero, incompressible mantissas) and depend only on the
arguments: a tensor is generated from the seed, its name, the shard and the step, so replicas on
other ranks come out equal without being kept, and memory stays at a few MB whatever the size.

Ranks are numbered ``dp_index * mp + mp_index``. Embedding, norms and output biases are replicated
on all ranks; the other matrices are sliced over the model-parallel ranks and replicated over the
data-parallel ones; Adam moments follow their weights; the rank's RNG seed is its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pickle_files import Tensor, write_paddle, write_torch

BLOCK = 1 << 20
SLICE = 512 << 20
"""Where MindSpore's ordinary writer cuts a tensor into records (``SLICE_SIZE``, 2.10)."""

EVERYWHERE, SLICED, PRIVATE = "everywhere", "sliced", "private"

DTYPES = {
    "F32": ("Float32", 4),
    "BF16": ("BFloat16", 2),
    "F16": ("Float16", 2),
    "I64": ("Int64", 8),
}
"""Our name: MindSpore's name, bytes of an element."""

PICKLES = {"torch": (write_torch, "pt"), "paddle": (write_paddle, "pdparams")}

KEEP_AND_SET = {
    "F32": (0x807F_FFFF, 0x3C00_0000),
    "BF16": (0x807F_807F, 0x3C00_3C00),
    "F16": (0x83FF_83FF, 0x2000_2000),
}
"""Bits of a random uint32 to keep and to set, so that every element is a number near 2**-7."""

EXAMPLES = """\
examples:
  2.7 GB on 8 ranks, of which 0.50 GB are distinct
      OUT --size 2.7G --dp 4 --mp 2
  2 GB, half of it one tensor
      OUT --size 2G --dp 1 --mp 1 --largest 1G --no-optimizer
  20,000 small tensors a file, half of them in both files
      OUT --tensors 20000 --tensor-bytes 4Ki --shared 0.5 --dp 1 --mp 2
  nothing shared
      OUT --size 1G --unique
  LoRA-like: 97 % of the weights never change
      OUT --format safetensors --size 300M --dp 1 --mp 1 --steps 3 --frozen 0.97 --dtype BF16
"""


@dataclass(frozen=True)
class Entry:
    """One tensor of a rank's file; ``value`` holds the bytes of a scalar."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: str = EVERYWHERE
    frozen: bool = False
    value: bytes | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    try:
        _check(options)
        weights, moments = plan(options)
        payload = sum(entry.nbytes for entry in weights + moments)
        _check_room(options.out, payload * options.dp * options.mp * options.steps)
        n_files, distinct = write(options, weights, moments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    total = payload * options.dp * options.mp * options.steps
    print(
        f"{options.out}: {n_files} files, {total / 1e9:.3f} GB of tensors,"
        f" {distinct / 1e9:.3f} GB of them distinct"
    )


def plan(options: argparse.Namespace) -> tuple[list[Entry], list[Entry]]:
    """The weights and the Adam moments in the file(s) of every rank."""
    if options.tensor_bytes is not None:
        return _equal_tensors(options), []
    weights = _transformer(options)
    weights = _freeze(weights, options.frozen)
    moments = []
    if options.optimizer:
        moments = [
            Entry(f"{moment}.{weight.name}", "F32", weight.shape, weight.place)
            for moment in ("adam_m", "adam_v")
            for weight in weights
            if not weight.frozen
        ]
    return weights, moments


def write(
    options: argparse.Namespace, weights: list[Entry], moments: list[Entry]
) -> tuple[int, int]:
    """Write all files; how many they are, and how many distinct payload bytes they hold."""
    n_files = 0
    distinct: dict[str, int] = {}
    for step in range(100, 100 * options.steps + 1, 100):
        for rank in range(options.dp * options.mp):
            contents = Contents(options, rank, step)
            scalars = [] if options.tensor_bytes is not None else _scalars(options.seed, rank, step)
            if options.format == "mindspore":
                path = options.out / f"rank_{rank}" / f"net-1_{step}.ckpt"
                entries = weights + moments + scalars
                _write_mindspore(path, entries, contents, options.slice_size)
                n_files += 1
            elif options.format in PICKLES:
                writer, suffix = PICKLES[options.format]
                path = options.out / f"checkpoint-{step}" / f"rank_{rank}.{suffix}"
                writer(path, [_tensor(contents, e) for e in weights + moments + scalars])
                n_files += 1
            else:
                folder = options.out / f"checkpoint-{step}" / f"rank_{rank}"
                files = {"model": weights, "optimizer": moments + scalars}
                for name, entries in files.items():
                    if entries:
                        _write_safetensors(folder / f"{name}.safetensors", entries, contents)
                        n_files += 1
            distinct |= {contents.key(entry): entry.nbytes for entry in weights + moments}
    return n_files, sum(distinct.values())


class Contents:
    """The bytes of the entries in the files of one rank at one step."""

    def __init__(self, options: argparse.Namespace, rank: int, step: int) -> None:
        self.seed, self.step, self.unique = options.seed, step, options.unique
        self.owners = {EVERYWHERE: 0, SLICED: rank % options.mp, PRIVATE: rank}

    def key(self, entry: Entry) -> str:
        """What decides the bytes of an entry: equal keys, equal bytes."""
        place = PRIVATE if self.unique else entry.place
        when = "always" if entry.frozen else self.step
        return f"{self.seed}/{entry.name}/{place}/{self.owners[place]}/{when}"

    def blocks(self, entry: Entry) -> Iterator[bytes | np.ndarray]:
        """The bytes, in blocks of ``BLOCK``."""
        if entry.value is not None:
            yield entry.value
            return
        key = hashlib.blake2b(self.key(entry).encode(), digest_size=16).digest()
        generator = np.random.SFC64(int.from_bytes(key, "little"))
        keep, put = map(np.uint32, KEEP_AND_SET[entry.dtype])
        for start in range(0, entry.nbytes, BLOCK):
            length = min(BLOCK, entry.nbytes - start)
            block = generator.random_raw(-(-length // 8)).view(np.uint32)
            block &= keep
            block |= put
            yield block.view(np.uint8)[:length]


def _transformer(options: argparse.Namespace) -> list[Entry]:
    """The weights of one rank of a decoder, of the asked size to within a row of its embedding."""
    width = DTYPES[options.dtype][1]
    ranks_and_steps = options.dp * options.mp * options.steps
    per_weight = 1 + (Fraction(8, width) * (1 - options.frozen) if options.optimizer else 0)
    budget = int(options.size / ranks_and_steps / per_weight)
    sliced = (1 - options.shared) * budget
    if options.largest is not None:
        sliced = Fraction(budget - options.largest)
        if sliced < 0:
            raise ValueError(
                f"--largest {options.largest} does not fit: the weights of one rank have"
                f" {budget} bytes"
            )
    n_weights = options.tensors / (3 if options.optimizer else 1)
    layers = max(1, round((n_weights - 3) / 12))
    grain = math.lcm(8, options.mp)
    hidden = math.isqrt(int(sliced * options.mp / (12 * layers * width))) // grain * grain
    hidden = max(grain, hidden)

    def norm(name: str) -> list[Entry]:
        return [Entry(f"{name}.{part}", options.dtype, (hidden,)) for part in ("gamma", "beta")]

    part = hidden // options.mp
    entries = []
    for layer in range(layers):
        block = f"backbone.blocks.{layer}"
        entries += [
            *norm(f"{block}.layernorm1"),
            Entry(f"{block}.attention.qkv.weight", options.dtype, (3 * part, hidden), SLICED),
            Entry(f"{block}.attention.qkv.bias", options.dtype, (3 * part,), SLICED),
            Entry(f"{block}.attention.projection.weight", options.dtype, (hidden, part), SLICED),
            Entry(f"{block}.attention.projection.bias", options.dtype, (hidden,)),
            *norm(f"{block}.layernorm2"),
            Entry(f"{block}.mlp.mapping.weight", options.dtype, (4 * part, hidden), SLICED),
            Entry(f"{block}.mlp.mapping.bias", options.dtype, (4 * part,), SLICED),
            Entry(f"{block}.mlp.projection.weight", options.dtype, (hidden, 4 * part), SLICED),
            Entry(f"{block}.mlp.projection.bias", options.dtype, (hidden,)),
        ]
    entries += norm("backbone.layernorm")
    row = hidden * width
    left = budget - sum(entry.nbytes for entry in entries)
    if options.largest is not None:
        # The head takes what rounding the layers left over, as the embedding does otherwise.
        head = (left - options.largest) // row
        if head > 0:
            entries.append(Entry("head.weight", options.dtype, (head, hidden), SLICED))
        left = options.largest
    if left < row:
        raise ValueError(
            f"--size {options.size} is too small for {options.tensors} tensors on each of"
            f" {options.dp * options.mp} ranks in {options.steps} step(s)"
        )
    return [Entry("backbone.embedding.weight", options.dtype, (left // row, hidden)), *entries]


def _equal_tensors(options: argparse.Namespace) -> list[Entry]:
    """Tensors of one size; ``--shared`` of them on every rank, the others sliced."""
    width = DTYPES[options.dtype][1]
    if options.tensor_bytes < width or options.tensor_bytes % width:
        raise ValueError(
            f"--tensor-bytes must be a multiple of {width}, not {options.tensor_bytes}"
        )

    def picked(at: int, share: Fraction) -> bool:
        return int((at + 1) * share) > int(at * share)

    return [
        Entry(
            f"layers.{at:06}.weight",
            options.dtype,
            (options.tensor_bytes // width,),
            EVERYWHERE if picked(at, options.shared) else SLICED,
            picked(at, options.frozen),
        )
        for at in range(options.tensors)
    ]


def _freeze(weights: list[Entry], share: Fraction) -> list[Entry]:
    """Mark up to ``share`` of the bytes as the same in every step, large tensors first."""
    room = share * sum(entry.nbytes for entry in weights)
    frozen = set()
    for entry in sorted(weights, key=lambda entry: (-entry.nbytes, entry.name)):
        if entry.nbytes <= room:
            room -= entry.nbytes
            frozen.add(entry.name)
    return [
        Entry(entry.name, entry.dtype, entry.shape, entry.place, entry.name in frozen)
        for entry in weights
    ]


def _scalars(seed: int, rank: int, step: int) -> list[Entry]:
    rng = int.from_bytes(hashlib.blake2b(f"{seed}/{rank}".encode(), digest_size=7).digest(), "big")
    return [
        Entry("global_step", "I64", (), value=struct.pack("<q", step)),
        Entry("learning_rate", "F32", (), value=struct.pack("<f", 1e-4 / step)),
        Entry("rng_seed", "I64", (), value=struct.pack("<q", rng)),
    ]


def _write_mindspore(path: Path, entries: list[Entry], contents: Contents, slice_size: int) -> None:
    """A run of ``Checkpoint.value`` records: ``checkpoint.proto`` of MindSpore 2.10."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as out:
        for entry in entries:
            left = contents.blocks(entry)
            for start in range(0, entry.nbytes, slice_size):
                length = min(slice_size, entry.nbytes - start)
                out.write(_record_head(entry, length))
                _write_all(out, islice(left, -(-length // BLOCK)))
    path.chmod(0o400)  # as MindSpore leaves it


def _record_head(entry: Entry, length: int) -> bytes:
    """All of a record but its content: field tags and lengths end where the payload begins."""
    content = b"\x1a" + _varint(length)
    tensor = b"".join(b"\x08" + _varint(dim) for dim in entry.shape)
    tensor += _field(0x12, DTYPES[entry.dtype][0].encode()) + content
    value = _field(0x0A, entry.name.encode()) + b"\x12" + _varint(len(tensor) + length) + tensor
    return b"\x0a" + _varint(len(value) + length) + value


def _field(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _write_safetensors(path: Path, entries: list[Entry], contents: Contents) -> None:
    """Wide elements first, then by name, as the safetensors library orders them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = sorted(entries, key=lambda entry: (-DTYPES[entry.dtype][1], entry.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            _write_all(out, contents.blocks(entry))


def _tensor(contents: Contents, entry: Entry) -> Tensor:
    return Tensor(
        entry.name, entry.dtype, entry.shape, entry.nbytes, lambda: contents.blocks(entry)
    )


def _write_all(out: BinaryIO, blocks: Iterator[bytes | np.ndarray]) -> None:
    for block in blocks:
        out.write(block)


def _check(options: argparse.Namespace) -> None:
    for name in ("dp", "mp", "steps", "tensors", "tensor_bytes", "size", "largest"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("frozen", "shared"):
        if not 0 <= getattr(options, name) <= 1:
            raise ValueError(f"--{name} must be between 0 and 1, not {getattr(options, name)}")
    if options.slice_size < 1 or options.slice_size % BLOCK:
        raise ValueError(f"--slice-size must be a multiple of 1Mi, not {options.slice_size}")
    if options.unique and options.frozen:
        raise ValueError("--unique shares nothing, --frozen shares weights between steps")
    if options.tensor_bytes is not None and options.size is not None:
        raise ValueError("--size follows from --tensors and --tensor-bytes; give it or those")
    if options.tensor_bytes is not None and options.largest is not None:
        raise ValueError("--largest means nothing where --tensor-bytes makes all tensors equal")
    if options.size is None and options.tensor_bytes is None:
        raise ValueError("give --size, or --tensors and --tensor-bytes")
    if options.out.exists() and not (options.out.is_dir() and not any(options.out.iterdir())):
        raise ValueError(f"{options.out} exists and is not an empty directory")


def _check_room(out: Path, nbytes: int) -> None:
    parent = out.absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if nbytes > free:
        raise ValueError(f"{out} needs {nbytes} bytes, {parent} has {free} free")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make_checkpoint",
        usage="make_checkpoint OUT [option ...]",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="a new or empty directory")
    add("--format", choices=("mindspore", "safetensors", *PICKLES), default="mindspore")
    add("--size", type=size, help="tensor bytes of all ranks and steps together: 2.7G, 50M, 1Gi")
    add("--dp", type=int, default=4, help="data-parallel ranks (4)")
    add("--mp", type=int, default=2, help="model-parallel ranks (2)")
    add("--steps", type=int, default=1, help="steps 100, 200, ... (1)")
    add("--dtype", choices=("F32", "BF16", "F16"), default="F32", help="of the weights (F32)")
    add(
        "--tensors",
        type=int,
        default=196,
        help="in each rank's file(s), to the nearest whole layer; exact with --tensor-bytes (196)",
    )
    add("--tensor-bytes", type=size, help="make --tensors equal ones of this size, and no model")
    add("--largest", type=size, help="size of the embedding, in bytes to the nearest row below")
    add(
        "--shared",
        type=_share,
        default=Fraction(52, 100),
        help="share of a rank's bytes that all ranks hold (0.52)",
    )
    add(
        "--frozen",
        type=_share,
        default=Fraction(0),
        help="share of the weight bytes that is the same in every step, and has no moments (0)",
    )
    add("--optimizer", action=argparse.BooleanOptionalAction, default=True, help="Adam moments")
    add("--unique", action="store_true", help="share nothing between ranks")
    add("--slice-size", type=size, default=SLICE, help="where MindSpore records are cut (512Mi)")
    add("--seed", type=int, default=0)
    return parser


def size(text: str) -> int:
    """Bytes: ``2.7G``, ``50M`` or ``4Ki``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(i?)B?", text)
    if match is None or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 2.7G, 50M or 4Ki")
    power = "KMGT".index(match[2]) + 1 if match[2] else 0
    return int(Fraction(match[1]) * (1024 if match[3] else 1000) ** power)


def _share(text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share like 0.5") from None


if __name__ == "__main__":
    main()
