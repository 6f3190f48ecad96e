"""A process that reads one rank with torch; arguments and output are those of ``reader.py``."""

import sys
from pathlib import Path

import reader
import torch

from slimckpt.frameworks.torch import load, state_dict


def flat(found):
    """Tensors by name, of a state dict that may lie inside of others."""
    inner = [value for value in found.values() if isinstance(value, dict)]
    tensors = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
    return tensors if tensors or not inner else flat(inner[0])


def own(path, rank, **how):
    (file,) = Path(path).rglob(f"rank_{rank}.pt")
    return flat(torch.load(file, map_location="cpu", weights_only=False, **how))


LOADERS = {
    "load": lambda path, rank: flat(load(path, rank=rank)),
    "state_dict": state_dict,
    "own": own,
    "own-mmap": lambda path, rank: own(path, rank, mmap=True),
}


def with_torch(get):
    """A way to read: tensors by name, whose memory numpy arrays share."""

    def prepared(path, rank):
        def start():
            found = get(path, rank)
            return list(found), lambda name: found[name].numpy()

        return start

    return prepared


if __name__ == "__main__":
    reader.HOW |= {how: with_torch(get) for how, get in LOADERS.items()}
    reader.main(*sys.argv[1:])
