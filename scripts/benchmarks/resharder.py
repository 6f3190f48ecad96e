"""Read what one rank has by a new layout, every byte once; print what that took.

resharder.py STORE LAYOUT_OF_IT NEW_LAYOUT RANK
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

import slimckpt


def bytes_read() -> int:
    """From storage by this process, read ahead included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def main(store: str, layout: str, target: str, rank: str) -> None:
    before, start = bytes_read(), time.perf_counter()
    total = own = 0
    with slimckpt.open(store) as checkpoint:
        view = checkpoint.reshard(target, layout)[int(rank)]
        for name in view:
            for stretch in view.stretches(name):
                total += int(stretch.view(np.uint8).sum(dtype=np.uint64))
                own += stretch.nbytes
    seconds = time.perf_counter() - start
    read = bytes_read() - before
    print(json.dumps({"sum": total, "own": own, "read": read, "s": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
