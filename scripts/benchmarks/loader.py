"""A process that loads one rank into memory of its own: ``loader.py HOW PATH``.

It prints, as JSON, the seconds that loading took, and a sum that depends on the bytes. What is
``warm`` copies from memory into memory, twice: first into new memory, then into the same again,
as a trainer with pinned buffers does.
"""

import json
import random
import sys
import time

import numpy as np
from reader import touch

import slimckpt


def warm_with_copy_into(view, out):
    for name, memory in out.items():
        view.copy_into(name, memory)


def warm_with_copyto(view, out):
    for name, memory in out.items():
        np.copyto(memory, view[name])


def touched(view, names):
    return sum(touch(view[name]) for name in names)


def shuffled(view):
    names = list(view)
    random.Random(0).shuffle(names)
    return names


def in_random_order(view):
    return touched(view, shuffled(view))


def in_storage_order(view):
    return touched(view, view.in_storage_order())


def prefetched(view):
    view.prefetch()
    return touched(view, view.in_storage_order())


def prefetched_first(view):
    view.prefetch().wait()
    return touched(view, shuffled(view))


WARM = {"copy_into": warm_with_copy_into, "copyto": warm_with_copyto}
COLD = {
    "random": in_random_order,
    "order": in_storage_order,
    "prefetch": prefetched,
    "wait": prefetched_first,
}


def main(how, path):
    view = slimckpt.open(path).rank(0)
    seconds = {}
    if how in WARM:
        total = touched(view, view)  # maps every page
        out = {name: np.empty_like(array) for name, array in view.items()}
        for what in ("new memory", "same memory"):
            began = time.perf_counter()
            WARM[how](view, out)
            seconds[what] = time.perf_counter() - began
        if sum(map(touch, out.values())) != total:
            sys.exit("what was copied is not what is mapped")
    else:
        began = time.perf_counter()
        total = COLD[how](view)
        seconds["cold"] = time.perf_counter() - began
    print(json.dumps(seconds | {"sum": total, "arrays": len(view)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
