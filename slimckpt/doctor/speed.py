"""How fast this machine hashes, and a file system writes and reads."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slimckpt import effects
from slimckpt.sources.digest import BLOCK, reusable_buffer
from slimckpt.sources.threads import default_jobs

HASHED = 256 * 1024 * 1024
WRITTEN = 256 * 1024 * 1024
_LONGEST = 5.0
"""Seconds of writing before what was written has to do."""


@dataclass(frozen=True, slots=True)
class HashSpeed:
    """Bytes a second of BLAKE3 in memory, on one thread and on ``threads``."""

    one: float
    all: float
    threads: int


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second written and synced, and read again after the page cache let go of them."""

    nbytes: int
    write: float
    read: float


def hash_speed() -> HashSpeed:
    """Hash 256 MiB, from a buffer of 64 MiB per call, in blocks as slimckpt does."""
    from blake3 import blake3

    # Random, because pages that were never written are all the same page, and stay in a cache.
    memory = memoryview(os.urandom(BLOCK) * 16)

    def work(_: int) -> None:
        for at in range(0, len(memory), BLOCK):
            blake3(memory[at : at + BLOCK]).digest()

    def measure(threads: int) -> float:
        rounds = max(HASHED // len(memory), threads)
        with ThreadPoolExecutor(threads) as executor:
            start = time.perf_counter()
            list(executor.map(work, range(rounds)))
            return rounds * len(memory) / (time.perf_counter() - start)

    threads = default_jobs()
    return HashSpeed(measure(1), measure(threads), threads)


def disk_speed(at: bytes, free: int) -> DiskSpeed | None:
    """Write and re-read a file in ``at`` of at most 256 MiB and a tenth of ``free`` bytes.

    Returns
    -------
    DiskSpeed or None
        ``None`` where a tenth of what is free is less than a block of 4 MiB.
    """
    wanted = min(WRITTEN, free // 10) // BLOCK * BLOCK
    if not wanted:
        return None
    path = os.path.join(at, b"speed")
    block = os.urandom(BLOCK)
    fd = effects.create_file(path)
    try:
        start, nbytes = time.perf_counter(), 0
        while nbytes < wanted and time.perf_counter() - start < _LONGEST:
            effects.write_at(fd, block, nbytes, path)
            nbytes += BLOCK
        effects.sync(fd, path)
        written = time.perf_counter()
        effects.forget_pages(fd)
        buffer = reusable_buffer()
        reading = time.perf_counter()
        for offset in range(0, nbytes, BLOCK):
            os.preadv(fd, [buffer], offset)
        read = time.perf_counter()
    finally:
        os.close(fd)
    return DiskSpeed(nbytes, nbytes / (written - start), nbytes / (read - reading))
