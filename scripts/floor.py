"""The least that any lossless dedup of a checkpoint must do: the floor of the benchmark.

``floor.py PAYLOADS OUT`` reads where the payloads lie (JSON: a list of ``[path, offset, nbytes]``;
finding that out is not counted), hashes every byte with BLAKE3, copies one of each into the file
OUT, forces it to disk and reads it back to compare. It keeps no names, no headers and nothing that
would restore a file.
"""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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


def main(payloads: str, target: str) -> None:
    marks = [time.perf_counter()]
    with open(payloads) as file:  # noqa: PTH123 # pathlib is 5 ms of import
        wanted = json.load(file)
    fds = {path: os.open(path, os.O_RDONLY) for path in {path for path, _, _ in wanted}}
    wanted = sorted(((nbytes, fds[path], offset) for path, offset, nbytes in wanted), reverse=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        digests = pool.map(lambda each: digest(each[1], each[2], each[0]), wanted)
        unique = {(found, each[0]): each for each, found in zip(wanted, digests, strict=True)}
        marks.append(time.perf_counter())

        out = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        places, end = [], 0
        for nbytes, fd, offset in unique.values():
            places.append((fd, offset, out, end, nbytes))
            end += nbytes
        list(pool.map(lambda place: copy(*place), places))
        marks.append(time.perf_counter())

        os.fsync(out)
        os.posix_fadvise(out, 0, 0, os.POSIX_FADV_DONTNEED)
        marks.append(time.perf_counter())

        again = pool.map(lambda place: digest(*place[2:]), places)
        if [found for found, _ in unique] != list(again):
            raise SystemExit("the copy differs from its source")
        marks.append(time.perf_counter())
    steps = zip(("hash", "copy", "sync", "check"), marks, marks[1:], strict=False)
    print(json.dumps({"unique": end} | {step: stop - start for step, start, stop in steps}))


if __name__ == "__main__":
    main(*sys.argv[1:])
