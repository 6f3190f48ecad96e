"""transformers opens merged models whose names are already its own.

Models are tiny, made from a configuration. Run by ``scripts/interop``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import slimckpt

TOKENS = torch.arange(32)[None] % 128
RANKS = 3


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4))


def in_parts(model: Any, place: Path) -> None:
    """What each tensor-parallel rank would save: rows of every matrix, the rest whole."""
    place.mkdir()
    for rank in range(RANKS):
        state = {
            name: tensor.chunk(RANKS)[rank].clone() if tensor.ndim > 1 else tensor.clone()
            for name, tensor in model.state_dict().items()
        }
        torch.save(state, place / f"checkpoint_rank{rank}.pt")


def same(found: Any, model: Any) -> None:
    one, other = found.state_dict(), model.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert one[name].dtype == tensor.dtype and torch.equal(one[name], tensor), name
    with torch.no_grad():
        assert torch.equal(found.eval()(TOKENS).logits, model.eval()(TOKENS).logits)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("shards", ["5GB", "50KB"])
def test_from_pretrained_opens_what_was_merged_of_parts(
    make: Any, shards: str, tmp_path: Path
) -> None:
    model = make()
    in_parts(model, tmp_path / "run")
    matrices = [name for name, tensor in model.state_dict().items() if tensor.ndim > 1]
    rules = tmp_path / "layout.toml"
    rules.write_text(
        f"[mesh]\ntp = {RANKS}\n[[rule]]\nmatch = {matrices}\n"
        'dim = 0\naxis = "tp"\nsplit = "ceil"\n'
    )
    out = tmp_path / "out"
    slimckpt.merge(tmp_path / "run", out, layout=rules, max_shard_size=shards)
    assert (len(list(out.glob("*.safetensors"))) > 1) == (shards == "50KB")
    model.config.save_pretrained(out)
    same(AutoModelForCausalLM.from_pretrained(out), model)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_from_pretrained_opens_a_merged_torch_distributed_checkpoint(
    make: Any, tmp_path: Path
) -> None:
    model = make()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run", no_dist=True)
    rules = tmp_path / "rename.toml"
    rules.write_text("[[rule]]\nmatch = 'model\\.(.+)'\nto = '\\1'\n")
    slimckpt.merge(tmp_path / "run", tmp_path / "out", rename=rules, only="weights")
    model.config.save_pretrained(tmp_path / "out")
    same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


def test_tied_embeddings_are_written_once_and_tied_again(tmp_path: Path) -> None:
    model = gpt2()
    (tmp_path / "run").mkdir()
    torch.save(model.state_dict(), tmp_path / "run" / "pytorch_model.pt")
    result = slimckpt.merge(tmp_path / "run", tmp_path / "out", dtype="bf16")
    assert result.tied == {"lm_head.weight": "transformer.wte.weight"}
    model.config.save_pretrained(tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.lm_head.weight.data_ptr() == found.transformer.wte.weight.data_ptr()
    same(found, model.to(torch.bfloat16))
