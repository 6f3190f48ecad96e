"""Damage pickles and archives of torch and Paddle, and examine what came of it.

Whatever a file holds, examining it must end in five seconds, in 500 MB, and never with an
exception. Inputs are the small samples and the files that tests/torch_bytes.py can make, with
opcodes, lengths, memo indices, directory fields and plain bytes changed, and bombs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import pickle
import pickletools
import random
import resource
import signal
import struct
import subprocess
import sys
import time
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from torch_bytes import (  # noqa: E402
    Made,
    Storage,
    Symbol,
    pickled,
    rebuilt,
    saved,
    saved_before_1_6,
    torch_zip,
)

from slimckpt.errors import DamagedFileError, SlimckptError  # noqa: E402
from slimckpt.formats import check, examine  # noqa: E402
from slimckpt.formats.dcp_metadata import read_metadata  # noqa: E402
from slimckpt.formats.paddle_metadata import read_paddle_metadata  # noqa: E402

SECONDS = 5
MEMORY = 500 * 1000 * 1000
LARGEST = 1_000_000
"""Bytes of an input, to which the limits above belong."""
BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, LookupError, OSError, EOFError,
          RuntimeError, StopIteration, OverflowError, MemoryError)  # fmt: skip
"""What Python's own readers raise for files that are damaged."""
OPCODES = {op.code.encode("latin-1"): op for op in pickletools.opcodes}
NUMBERS = [
    0,
    1,
    2,
    3,
    127,
    255,
    256,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


class Source:
    """An input in memory."""

    label = "it"

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DamagedFileError(f"it: {offset}+{nbytes} of {self.size}")
        return self.data[offset : offset + nbytes]


def seeds() -> list[bytes]:
    """Sound files to begin with."""
    found = []
    for path in sorted((ROOT / "tests" / "samples").rglob("*")):
        if path.is_file() and path.stat().st_size <= 40_000 and path.suffix != ".json":
            data = path.read_bytes()
            if data[:2] == b"PK" or data[:1] == b"\x80":
                found.append(data)
    return found + list(_made())


def _made() -> Iterator[bytes]:
    storage = Storage("0", "FloatStorage", bytes(range(48)), 4)
    tensor = rebuilt(storage, (3, 4), (4, 1))
    wrapped = Made(
        Symbol("torch._tensor", "_rebuild_from_type_v2"),
        (
            Symbol("torch._utils", "_rebuild_wrapper_subclass"),
            Symbol("torch.distributed.tensor", "DTensor"),
            (),
            {"_local_tensor": tensor},
        ),
    )
    inner = saved_before_1_6(storage)
    outer = rebuilt(Made(Symbol("torch.storage", "_load_from_bytes"), (inner,)), (2, 2), (2, 1))
    objects = {"a": tensor, "b": [tensor, {"c": (wrapped, 1, 2.5, None, True)}], ("t", 1): {1, 2}}
    for protocol in range(2, 6):
        yield saved(objects, protocol=protocol)
        yield pickled({"plain": [1, 2**70, "x", b"y" * 300], "o": outer}, protocol)[0]
    yield saved_before_1_6(objects)
    yield saved({"a": tensor}) + saved([tensor]) + saved(tensor)


class Mutator:
    """Makes inputs of seeds."""

    def __init__(self, files: list[bytes], seed: int) -> None:
        self.files, self.random = files, random.Random(seed)
        self.steps: dict[bytes, list[bytes]] = {}
        self.pool: list[bytes] = []
        for data in files:
            self.pool += self.opcodes(_pickle_of(data))[:400]

    def next(self) -> bytes:
        """An input, and sometimes one that was damaged more than once."""
        data = self.random.choice(self.files)
        for _ in range(self.random.choice((1, 1, 1, 2, 3, 8))):
            data = self._once(data)[:LARGEST]
        return data

    def _once(self, data: bytes) -> bytes:
        kind = self.random.random()
        if data[:2] == b"PK" and kind < 0.2:
            return self._directory(data)
        if data[:2] == b"PK" and kind < 0.85:
            return self._rezipped(data)
        if data[:1] == b"\x80" and kind < 0.75:
            return self._pickle(data)
        return self._bytes(data)

    def _number(self) -> int:
        number = self.random.choice(NUMBERS) + self.random.randint(-2, 2)
        return number if self.random.random() < 0.6 else self.random.randrange(300)

    def _bytes(self, data: bytes) -> bytes:
        r = self.random
        at = r.randrange(len(data) + 1)
        way = r.randrange(5)
        if way == 0:
            return data[:at]
        if way == 1:
            return data[:at] + r.randbytes(r.randint(1, 8)) + data[at:]
        if way == 2:
            return data[:at] + data[at + r.randint(1, 40) :]
        if way == 3:
            other = r.choice(self.files)
            return data[:at] + other[r.randrange(len(other) + 1) :]
        changed = bytearray(data)
        for _ in range(r.choice((1, 1, 2, 5))):
            if changed:
                changed[r.randrange(len(changed))] = r.choice((0, 255, r.randrange(256)))
        return bytes(changed)

    def _directory(self, data: bytes) -> bytes:
        """One field of one header of a zip archive."""
        r = self.random
        places, at = [], 0
        while (at := data.find(b"PK", at)) >= 0:
            places.append(at)
            at += 2
        width, layout = r.choice(((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")))
        at = r.choice(places) + 4 + r.randrange(48)
        value = struct.pack(layout, self._number() % (1 << 8 * width))
        return data[:at] + value + data[at + width :]

    def _rezipped(self, data: bytes) -> bytes:
        """A sound archive with another pickle, other members or deflated ones."""
        r = self.random
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                members = {about.filename: archive.read(about) for about in archive.infolist()}
        except BROKEN:
            return self._bytes(data)
        for name in list(members):
            if name.endswith("/data.pkl"):
                members[name] = self._pickle(members[name])
            elif r.random() < 0.05:
                del members[name]
            elif r.random() < 0.05:
                members[name] = members[name][: r.randrange(len(members[name]) + 1)]
        deflated = [name for name in members if r.random() < 0.15]
        if sum(map(len, members.values())) > 4 * LARGEST:
            deflated = list(members)
        return torch_zip(members, deflated)

    def opcodes(self, data: bytes) -> list[bytes]:
        """The opcodes of a pickle with their arguments; what is broken is in one piece."""
        found = self.steps.get(data)
        if found is None:
            starts: list[int] = []
            with contextlib.suppress(*BROKEN):
                for _, _, at in pickletools.genops(data):
                    starts.append(at or 0)
            starts = starts or [0]
            ends = [*starts[1:], len(data)]
            found = [data[a:b] for a, b in zip(starts, ends, strict=True)]
            if len(data) < 50_000 and len(self.steps) < 2000:
                self.steps[data] = found
        return found

    def _pickle(self, data: bytes) -> bytes:
        r = self.random
        steps = list(self.opcodes(data))
        for _ in range(r.choice((1, 1, 2, 4))):
            at = r.randrange(len(steps) + 1)
            way = r.randrange(8)
            if way == 0:
                del steps[at : at + r.choice((1, 1, 2, 10))]
            elif way == 1:
                steps[at:at] = steps[at - r.randint(1, 20) : at]
            elif way == 2 and self.pool:
                steps.insert(at, r.choice(self.pool))
            elif way == 3:
                steps[at : at + 1] = [self._opcode()]
            elif way == 4 and at < len(steps):
                other = r.randrange(len(steps))
                steps[at], steps[other] = steps[other], steps[at]
            elif way == 5 and at < len(steps):
                steps[at] = self._argument(steps[at])
            elif way == 6 and r.random() < 0.02:
                some = steps[at : at + r.randint(1, 12)]
                room = r.choice((LARGEST, 20_000, 20_000)) // max(len(b"".join(some)), 1)
                steps[at:at] = some * room
            else:
                steps.insert(at, self._opcode())
        return b"".join(steps)

    def _opcode(self) -> bytes:
        """Any opcode with any argument that it can have."""
        r = self.random
        code = r.choice(list(OPCODES))
        argument = OPCODES[code].arg
        if argument is None:
            return code
        if argument.n > 0:
            return code + (self._number() % (1 << 8 * argument.n)).to_bytes(argument.n, "little")
        if argument.n == pickletools.UP_TO_NEWLINE:
            lines = {b"c": 2, b"i": 2}.get(code, 1)
            return code + b"".join(
                r.choice((b"torch", b"_rebuild", b"0", b"-1", b"'x'", b"9" * 2000, b"", b"nan"))
                + b"\n"
                for _ in range(lines)
            )
        width = {b"C": 1, b"U": 1, b"\x8a": 1, b"\x8c": 1}.get(code, 4)
        width = 8 if code in (b"\x8d", b"\x8e", b"\x96") else width
        body = r.randbytes(r.choice((0, 1, 4, 40))) if r.random() < 0.9 else b"a" * 70_000
        length = len(body) if r.random() < 0.8 else self._number()
        return code + (length % (1 << 8 * width)).to_bytes(width, "little") + body

    def _argument(self, step: bytes) -> bytes:
        width = min(max(len(step) - 1, 0), self.random.choice((1, 2, 4, 8)))
        value = (self._number() % (1 << 8 * width)).to_bytes(width, "little")
        return step[:1] + value + step[1 + width :]


def _pickle_of(data: bytes) -> bytes:
    if data[:2] != b"PK":
        return data
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return next(archive.read(n) for n in archive.namelist() if n.endswith("data.pkl"))
    except BROKEN:
        return pickle.dumps(None)


class TooSlow(BaseException):
    """An input took longer than it may."""


def examined(data: bytes) -> str:
    """What a file turns out to be, by every way that leads into a pickle."""
    found = examine(Source(data))
    if found.condition == "understood":
        check(found.format, Source(data))
    if found.format == "pickle":
        for read in (read_metadata, read_paddle_metadata):
            with contextlib.suppress(SlimckptError):
                read(Source(data))
    return f"{found.format} {found.condition}"


def run(mutator: Mutator, count: int, failures: Path) -> dict[str, Any]:
    """Examine ``count`` inputs; those that fail are written to ``failures``."""

    def too_slow(*_: Any) -> None:
        raise TooSlow(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGPROF, too_slow)
    outcomes: Counter[str] = Counter()
    slowest, failed = 0.0, 0
    for _ in range(count):
        data = mutator.next()
        before = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            outcomes[examined(data)] += 1
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            signal.setitimer(signal.ITIMER_PROF, 0)
            failed += 1
            outcomes[f"FAILED {type(error).__name__}"] += 1
            failures.mkdir(parents=True, exist_ok=True)
            path = failures / f"{os.getpid()}-{failed}"
            path.with_suffix(".input").write_bytes(data)
            path.with_suffix(".txt").write_text(traceback.format_exc())
        signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - before)
    return {"outcomes": outcomes, "slowest": slowest}


def limit_memory() -> None:
    """From here on this process may have no more than :data:`MEMORY` on top of what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500_000, help="inputs in all")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=Path, default=ROOT / "fuzz-failures")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        mutator = Mutator(seeds(), options.seed)
        limit_memory()
        print(json.dumps(run(mutator, options.count, options.failures)))
        return 0
    began = time.monotonic()
    each = -(-options.count // options.jobs)
    children = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--child", f"--count={each}", f"--seed={seed}"),
                f"--failures={options.failures}",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(options.seed, options.seed + options.jobs)
    ]
    outcomes: Counter[str] = Counter()
    slowest, died = 0.0, 0
    for child in children:
        told, _ = child.communicate()
        if child.returncode:
            died += 1
            continue
        result = json.loads(told)
        outcomes.update(result["outcomes"])
        slowest = max(slowest, result["slowest"])
    for outcome, number in outcomes.most_common():
        print(f"{number:>9,}  {outcome}")
    total, seconds = sum(outcomes.values()), time.monotonic() - began
    print(f"{total:>9,}  inputs in {seconds:.0f} s; the slowest took {slowest:.2f} s")
    failed = sum(number for outcome, number in outcomes.items() if outcome.startswith("FAILED"))
    if failed or died:
        print(f"{failed} failed and {died} processes died; see {options.failures}")
    return 1 if failed or died else 0


if __name__ == "__main__":
    sys.exit(main())
