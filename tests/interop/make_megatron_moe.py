"""Make torch_dist checkpoints of a small Megatron mixture of experts: make_megatron_moe.py DST

Megatron's own model, optimizer and ``dist_checkpointing.save`` run in four gloo processes: tensor
parallel 2, data parallel 2, expert parallel 2. Under DST, for each format of the distributed
optimizer: the checkpoint ``<format>/iter_0000002``, and one ``expected.json`` with what Megatron
held in memory.

It has no GPU to run on: :class:`NoGpu` gives CPU tensors to whoever asks for those of a GPU, and
replaces ``torch.cuda.current_device()``. Not Megatron's here are: the state of the CUDA generators
(there are none), and what ``megatron.training`` adds to the saved dictionary (args, scheduler,
iteration), since megatron-core comes without it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

RANKS = 4
STEPS = 2
OPTIMIZER_FORMATS = ("dp_reshardable", "fully_reshardable")
VOCABULARY, LENGTH, HIDDEN = 64, 8, 16


class NoGpu(TorchFunctionMode):
    """The CPU in place of the GPU, in every call of torch that names one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron asks by this name whether a parameter is of a dtype it optimizes.
            return found.replace("torch.", "torch.cuda.")
        return found


def replace_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    for name in ("synchronize", "empty_cache", "manual_seed", "nvtx"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.Stream, cuda.current_stream = MagicMock(), MagicMock()
    cuda.stream = lambda stream: nullcontext()
    # Megatron keeps these states for dropout, and puts them into the checkpoint.
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    token_dispatcher.maybe_move_tensor_to_cpu = as_numbers
    # Without TransformerEngine megatron-core 0.16.1 asks for a name it never defined.
    moe_utils.te_general_gemm = None


def as_numbers(tensor: Any, as_numpy: bool = False, **options: Any) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def sha256(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Recorder(TorchDistSaveShardedStrategy):
    """Megatron's writer, which notes what it is handed."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        self.items = [
            described(value)
            for value in nested_values(sharded_state_dict)
            if is_main_replica(value.replica_id)
        ]
        return super().async_save(sharded_state_dict, checkpoint_dir)


def described(value: ShardedTensor | ShardedObject) -> dict[str, Any]:
    """A shard in memory."""
    if isinstance(value, ShardedObject):
        return {"object": value.unique_key}
    return {
        "key": value.key,
        "dtype": name_of(value.dtype),
        "global_shape": value.global_shape,
        "offset": value.global_offset,
        "shape": (1,) * value.prepend_axis_num + tuple(value.local_shape),
        "sha256": sha256(value.data),
    }


def optimizer_slices(optimizer: Any, name_of_parameter: Mapping[Any, str]) -> Iterator[Any]:
    """What this rank's distributed optimizers hold of each parameter, and where it belongs."""
    for at, single in enumerate(optimizer.chained_optimizers):
        for buffer_at, (ranges, buffer) in enumerate(
            zip(single.gbuf_ranges, single.buffers, strict=True)
        ):
            for buckets in ranges.values():
                for bucket_at, bucket in enumerate(buckets):
                    for parameter, place in bucket["param_map"].items():
                        held = single._get_main_param_and_optimizer_states(parameter)
                        start = (
                            place["gbuf_world_in_bucket"].start
                            if "gbuf_world_in_bucket" in place
                            else place["gbuf_world"].start - buffer.buckets[bucket_at].offset
                        )
                        yield {
                            "optimizer": at,
                            "buffer": buffer_at,
                            "bucket": bucket_at,
                            "group": single.data_parallel_group_idx,
                            "parameter": name_of_parameter[parameter],
                            "start_in_parameter": place["param"].start,
                            "start_in_bucket": start,
                            "numel": place["param"].size,
                            "sha256": {
                                key: sha256(tensor)
                                for key, tensor in held.items()
                                if isinstance(tensor, torch.Tensor) and tensor.dim()
                            },
                        }


def build() -> tuple[Any, Any]:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=HIDDEN,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    ).bfloat16()
    # Megatron wants experts and tensor parallelism to be trained with sequence parallelism, which
    # its norms have with TransformerEngine or Apex only. Nothing drops out: eval() is the same.
    model.eval()
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        ),
        model,
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        clip_grad=1.0,
    )
    return model, get_megatron_optimizer(settings, [model])


def train(model: Any, optimizer: Any) -> None:
    """A few steps, with other data on each data-parallel rank."""
    data = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    positions = torch.arange(LENGTH).repeat(2, 1)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=data)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:])
        loss.float().mean().backward()
        finalize_model_grads([model], None)
        successful, _, _ = optimizer.step()
        assert successful


def run(rank: int, rendezvous: str, target: str) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    torch.manual_seed(7)
    replace_cuda()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    with NoGpu():
        model_parallel_cuda_manual_seed(7)
        model, optimizer = build()
        train(model, optimizer)
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        truth = {
            "parameters": {name: sha256(parameter) for parameter, name in names.items()},
            "optimizer": list(optimizer_slices(optimizer, names)),
            "items": {
                kind: save(model, optimizer, kind, Path(target) / kind / f"iter_{STEPS:07d}")
                for kind in OPTIMIZER_FORMATS
            },
        }
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, truth)
    if rank == 0:
        expected = {
            "made_by": f"megatron-core {megatron.core.__version__}, torch {torch.__version__},"
            " GPTModel with experts, tp 2, dp 2, ep 2, gloo on CPU",
            "ranks": gathered,
        }
        (Path(target) / "expected.json").write_text(json.dumps(expected) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def save(model: Any, optimizer: Any, kind: str, target: Path) -> list[dict[str, Any]]:
    """Save as Megatron-LM's ``save_checkpoint`` does; what this rank gave to be written."""
    if dist.get_rank() == 0:
        target.mkdir(parents=True)
        (target.parent / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    metadata = {"distrib_optim_sharding_type": kind}
    tensors = model.module.sharded_state_dict(metadata=metadata)
    state = {
        "model": tensors,
        "optimizer": optimizer.sharded_state_dict(tensors, metadata=metadata),
        "iteration": STEPS,
    }
    recorder = Recorder("torch_dist", 1)
    strategy = FullyParallelSaveStrategyWrapper(
        recorder, parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    dist_checkpointing.save(state, str(target), strategy, content_metadata=metadata)
    return recorder.items


if __name__ == "__main__":
    (destination,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (f"file://{meeting}/meeting", destination)
        torch.multiprocessing.spawn(run, args=arguments, nprocs=RANKS)
