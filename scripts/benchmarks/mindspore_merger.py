"""A process that merges a checkpoint with MindSpore itself, or prepares one for that::

    mindspore_merger.py prepare CKPTS SAFETENSORS STRATEGY LAYOUT
    mindspore_merger.py unified SAFETENSORS OUT STRATEGY
    mindspore_merger.py transform CKPTS OUT STRATEGY

``LAYOUT`` is JSON: the device matrix, and for each tensor its tensor map. The merging ones print as
JSON how long the call itself took, without the import.
"""

import json
import sys
import time
from pathlib import Path

import mindspore
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap


def prepare(ckpts, safetensors, strategy, layout):
    matrix, maps = json.loads(Path(layout).read_text())
    found = ParallelStrategyMap(current_stage=0)
    for name, tensor_map in maps.items():
        item = found.parallel_layout_item.add(param_name=name)
        layouts = item.parallel_layouts
        layouts.dev_matrix.add(dim=matrix)
        layouts.tensor_map.add(dim=tensor_map)
        layouts.param_split_shape.add()
        layouts.indices_offset.add()
        layouts.field = layouts.opt_weight_shard_step = layouts.opt_weight_shard_size = 0
    Path(strategy).write_bytes(found.SerializeToString())
    mindspore.ckpt_to_safetensors(ckpts, safetensors)


def unified(source, out, strategy):
    mindspore.unified_safetensors(source, strategy, out)


def transform(source, out, strategy):
    mindspore.transform_checkpoints(source, out, "merged", strategy, None)


if __name__ == "__main__":
    start = time.perf_counter()
    {"prepare": prepare, "unified": unified, "transform": transform}[sys.argv[1]](*sys.argv[2:])
    print(json.dumps({"s": time.perf_counter() - start}))
