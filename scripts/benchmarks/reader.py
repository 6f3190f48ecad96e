"""A process that reads one rank: ``reader.py HOW PATH [RANK [hold]]``.

It prints, as JSON, the seconds until the rank was open and its first array was there (``open``),
until all arrays were there (``views``) and until every page of them was touched (``touched``), each
counted from the end of the imports; and a sum that depends on the bytes touched.

With ``hold`` it prints an empty line and waits for one before it opens anything, and again before
it ends, so that its memory can be looked at.
"""

import json
import sys
import time

import numpy as np

PAGE = 4096


def with_slimckpt(path, rank):
    import slimckpt

    opener = slimckpt.open

    def start():
        view = opener(path).rank(rank)
        return list(view), view.__getitem__

    return start


def with_memmap(path, rank):
    with open(path) as listing:  # noqa: PTH123
        pieces = json.load(listing)

    def start():
        # As plain arrays: slices of the subclass numpy.memmap take five times as long.
        names = {piece[0] for piece in pieces}
        maps = {name: np.asarray(np.memmap(name, np.uint8, "r")) for name in names}
        return pieces, lambda piece: maps[piece[0]][piece[1] : piece[1] + piece[2]].view("<f4")

    return start


def with_safetensors(path, rank):
    from safetensors import safe_open

    def start():
        file = safe_open(path, "numpy")
        return list(file.keys()), file.get_tensor

    return start


def with_h5py(path, rank):
    import h5py

    def start():
        file = h5py.File(path, "r")
        return list(file), lambda name: file[name][()]

    return start


HOW = {
    "slimckpt": with_slimckpt,
    "memmap": with_memmap,
    "safetensors": with_safetensors,
    "h5py": with_h5py,
}


def touch(array):
    """Read a byte of every page, and the last one."""
    flat = array.reshape(-1).view(np.uint8)
    return int(flat[::PAGE].sum(dtype=np.int64)) + int(flat[-1])


def main(how, path, rank="0", hold=""):
    start = HOW[how](path, int(rank))
    if hold:
        print(flush=True)
        sys.stdin.readline()
    began = time.perf_counter()
    names, get = start()
    get(names[0])
    opened = time.perf_counter()
    arrays = [get(name) for name in names]
    viewed = time.perf_counter()
    total = sum(map(touch, arrays))
    touched = time.perf_counter()
    seconds = {"open": opened - began, "views": viewed - began, "touched": touched - began}
    print(json.dumps(seconds | {"sum": total, "arrays": len(arrays)}), flush=True)
    if hold:
        sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
