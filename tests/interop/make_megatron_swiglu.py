"""Make checkpoints of a small Megatron model with SwiGLU and grouped queries, and what Megatron
loads of them at other sizes: make_megatron_swiglu.py DST

Megatron's own model, optimizer and ``dist_checkpointing`` run in gloo processes, as in
``make_megatron_moe.py``, which says what stands in for a GPU. Tensor parallel 2 and data parallel 2
train a few steps and save ``torch_dist``, which Megatron loads at other sizes. Under DST:

- ``tp2``, ``tp2_pp2``: the state in the legacy format, at tensor parallel 2, without pipeline and
  with two stages;
- ``torch_dist``: its weights in that format (with the optimizer it is four times as large);
- ``expected.json``: what each rank's model and optimizer held, tensor by tensor, after Megatron had
  loaded the state at tensor parallel 1 and 4.

Not Megatron's here is the dictionary of the legacy format around model and optimizer: it is that of
``megatron/training/checkpointing.py``, which does not come with megatron-core. Of ``args`` it has
what says how the model is made and split. There are no states of generators and no scheduler.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import megatron.core
import torch
import torch.distributed as dist
from make_megatron_moe import NoGpu, name_of, replace_cuda, sha256
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

STEPS = 2
LAYERS, HIDDEN, FFN, HEADS, GROUPS, CHANNELS = 2, 16, 24, 8, 4, 4
VOCABULARY, DIVISIBLE_BY, LENGTH = 50, 8, 8


class Sizes(NamedTuple):
    """How many parts there are of each kind."""

    tensor: int
    pipeline: int = 1
    data: int = 1

    @property
    def name(self) -> str:
        return f"tp{self.tensor}" + (f"_pp{self.pipeline}" if self.pipeline > 1 else "")


SAVED = Sizes(2, data=2)
LEGACY = (Sizes(2), Sizes(2, 2))
LOADED = (Sizes(1), Sizes(4))
STEP = f"iter_{STEPS:07d}"


def padded(sizes: Sizes) -> int:
    """Rows of the word embedding, as ``megatron/training/tokenizer`` pads the vocabulary."""
    unit = DIVISIBLE_BY * sizes.tensor
    return -(-VOCABULARY // unit) * unit


def build(sizes: Sizes) -> tuple[Any, Any]:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        add_bias_linear=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
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
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=padded(sizes),
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    ).bfloat16()
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=False, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        ),
        model,
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        weight_decay=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=False,
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


def sharded(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    tensors = model.module.sharded_state_dict()
    return {
        "model": tensors,
        "optimizer": optimizer.sharded_state_dict(tensors, is_loading=is_loading),
        "iteration": STEPS,
    }


def save(state: dict[str, Any], directory: Path) -> None:
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
        (directory.parent / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    dist.barrier()
    dist_checkpointing.save(state, str(directory))


def held(model: Any, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a rank has: weights by their names, and the optimizer's state of each of them."""
    yield from model.module.named_parameters()
    (single,) = optimizer.chained_optimizers
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    for group, masters in zip(single.float16_groups, single.fp32_from_float16_groups, strict=True):
        for parameter, master in zip(group, masters, strict=True):
            name = names.pop(parameter)
            state = single.optimizer.state[master]
            yield f"fp32_param.{name}", master
            yield from ((f"{key}.{name}", state[key]) for key in ("exp_avg", "exp_avg_sq"))
    assert not names


def save_legacy(model: Any, optimizer: Any, sizes: Sizes, target: Path) -> None:
    """``save_checkpoint`` of Megatron-LM with ``--ckpt-format torch``."""
    args = argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
        kv_channels=CHANNELS,
        swiglu=True,
        add_bias_linear=True,
        add_qkv_bias=False,
        normalization="RMSNorm",
        position_embedding_type="rope",
        max_position_embeddings=LENGTH,
        seq_length=LENGTH,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=DIVISIBLE_BY,
        padded_vocab_size=padded(sizes),
        untie_embeddings_and_output_weights=False,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
        num_experts=None,
        use_distributed_optimizer=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        ckpt_format="torch",
    )
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        "model": model.module.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.state_dict(),
        "num_floating_point_operations_so_far": 0,
    }
    tensor = parallel_state.get_tensor_model_parallel_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    place = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if sizes.pipeline > 1 else "")
    directory = target / STEP / place
    directory.mkdir(parents=True)
    torch.save(state, directory / "model_optim_rng.pt")
    (target / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def run(rank: int, target: str, state: str, sizes: Sizes) -> None:
    """One process: train and save, or load, and note what it held."""
    count = sizes.tensor * sizes.pipeline * sizes.data
    meeting = f"file://{state}/meeting_{sizes}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    torch.manual_seed(7 if sizes == SAVED else 8)
    replace_cuda()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor, pipeline_model_parallel_size=sizes.pipeline
    )
    with NoGpu():
        model_parallel_cuda_manual_seed(7)
        model, optimizer = build(sizes)
        if sizes == SAVED:
            train(model, optimizer)
            save(sharded(model, optimizer, False), Path(state) / STEP)
            save({"model": model.module.sharded_state_dict()}, Path(target) / "torch_dist" / STEP)
        else:
            loaded = dist_checkpointing.load(
                sharded(model, optimizer, True), str(Path(state) / STEP)
            )
            model.module.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        if sizes in LEGACY:
            save_legacy(model, optimizer, sizes, Path(target) / sizes.name)
    truth = {
        name: [name_of(tensor.dtype), list(tensor.shape), sha256(tensor)]
        for name, tensor in held(model, optimizer)
    }
    gathered: list[Any] = [None] * count
    dist.all_gather_object(gathered, truth)
    if rank == 0:
        (Path(state) / f"{sizes}.json").write_text(json.dumps(gathered))
    dist.barrier()
    dist.destroy_process_group()


def main(target: Path) -> None:
    held: dict[Sizes, list[Any]] = {}
    with tempfile.TemporaryDirectory() as state:
        for sizes in (SAVED, *LEGACY, *LOADED):
            count = sizes.tensor * sizes.pipeline * sizes.data
            arguments = (str(target), state, sizes)
            torch.multiprocessing.spawn(run, args=arguments, nprocs=count)
            held[sizes] = json.loads((Path(state) / f"{sizes}.json").read_text())
    # Ranks vary fastest along tensor parallelism.
    assert held[LEGACY[0]] == held[SAVED][:2] == held[SAVED][2:]
    expected = {
        "made_by": f"megatron-core {megatron.core.__version__}, torch {torch.__version__},"
        " GPTModel with SwiGLU and grouped queries, saved at tp 2, dp 2, gloo on CPU",
        "loads": {sizes.name: held[sizes] for sizes in LOADED},
    }
    (target / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    (destination,) = sys.argv[1:]
    main(Path(destination))
