"""A process that reads one rank with MindSpore; arguments and output are those of ``reader.py``."""

import sys
from pathlib import Path

import mindspore
import reader

from slimckpt.frameworks.mindspore import load_checkpoint, tensors


def parameters(path, rank):
    """As somebody may make them of tensors, which copies."""
    found = tensors(path, rank)
    return {name: mindspore.Parameter(found[name], name) for name in found}


def own(path, rank):
    (file,) = Path(path, f"rank_{rank}").glob("*.ckpt")
    return mindspore.load_checkpoint(str(file))


def own_all(path, rank):
    ranks = range(sum(1 for _ in Path(path).glob("rank_*")))
    return {(rank, name): tensor for rank in ranks for name, tensor in own(path, rank).items()}


LOADERS = {
    "tensors": tensors,
    "load_checkpoint": load_checkpoint,
    "parameters": parameters,
    "own": own,
    "own-all": own_all,
}


def with_mindspore(load):
    """A way to read: tensors by name, whose memory numpy arrays share."""

    def prepared(path, rank):
        def start():
            found = load(path, rank)
            return list(found), lambda name: found[name].asnumpy()

        return start

    return prepared


if __name__ == "__main__":
    reader.HOW = {how: with_mindspore(load) for how, load in LOADERS.items()}
    reader.main(*sys.argv[1:])
