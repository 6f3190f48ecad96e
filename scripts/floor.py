"""The least that must be done: the floor of the benchmark.

``floor.py hash PIECES`` hashes every byte with BLAKE3. ``floor.py slim PIECES OUT`` then copies one
of each into OUT, forces it to disk, reads it back and compares: the least of any lossless dedup.
``floor.py copy PIECES OUT`` copies all, file by file, forces them to disk and hashes them: the
least of restoring. PIECES says where the bytes lie (JSON: a list of ``[path, offset, nbytes]``;
finding that out is not counted). No names, no headers, nothing that would restore a file.
"""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

from blake3 import blake3

BLOCK = 4 << 20
local = threading.local()


def digest(fd: int, offset: int, nbytes: int) -> bytes:
    """BLAKE3 of the digests of 4 MiB blocks, read into a buffer that the thread keeps."""
    if not hasattr(local, "buffer"):
        local.buffer = memoryview(bytearray(BLOCK))
    blocks = []
    for at in range(0, nbytes, BLOCK):
        length = min(BLOCK, nbytes - at)
        if os.preadv(fd, [local.buffer[:length]], offset + at) != length:
            raise OSError("short read")
        blocks.append(blake3(local.buffer[:length]).digest())
    return blake3(b"".join(blocks)).digest()


def copy(source: int, offset: int, out: int, at: int, nbytes: int) -> None:
    while nbytes:
        done = os.copy_file_range(source, out, nbytes, offset, at)
        if not done:
            raise OSError("short copy")
        offset, at, nbytes = offset + done, at + done, nbytes - done


def main(mode: str, listing: str, target: str = "") -> None:
    clock, digests = {"start": time.perf_counter()}, []
    with open(listing) as file:  # noqa: PTH123 # pathlib is 5 ms of import
        pieces = sorted(json.load(file), key=lambda piece: -piece[2])
    fds = {path: os.open(path, os.O_RDONLY) for path in sorted({piece[0] for piece in pieces})}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        if mode != "copy":
            digests = list(pool.map(lambda piece: digest(fds[piece[0]], *piece[1:]), pieces))
            clock["hash"] = time.perf_counter()
        if mode == "slim":
            unique = {(found, p[2]): p for found, p in zip(digests, pieces, strict=True)}
            digests, pieces = [found for found, _ in unique], list(unique.values())
        if mode != "hash":
            flags, ends = os.O_RDWR | os.O_CREAT | os.O_EXCL, [0, *accumulate(p[2] for p in pieces)]
            if mode == "copy":
                os.mkdir(target)
                outs = {path: os.open(f"{target}/{n}", flags) for n, path in enumerate(fds)}
            else:
                outs = dict.fromkeys(fds, os.open(target, flags))
            places = [
                (fds[path], offset, outs[path], offset if mode == "copy" else end, nbytes)
                for (path, offset, nbytes), end in zip(pieces, ends, strict=False)
            ]
            list(pool.map(lambda place: copy(*place), places))
            clock["copy"] = time.perf_counter()
            for out in set(outs.values()):
                os.fsync(out)
                if mode == "slim":  # what is published on its word must be read from the disk
                    os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
            clock["sync"] = time.perf_counter()
            again = list(pool.map(lambda place: digest(*place[2:]), places))
            clock["check"] = time.perf_counter()
            if mode == "slim" and digests != again:
                raise SystemExit("the copy differs from its source")
    steps = zip(list(clock)[1:], clock.values(), list(clock.values())[1:], strict=False)
    nbytes = sum(piece[2] for piece in pieces)
    print(json.dumps({"nbytes": nbytes} | {step: stop - start for step, start, stop in steps}))


if __name__ == "__main__":
    main(*sys.argv[1:])
