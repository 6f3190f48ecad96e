"""transformers, its Trainer, peft and safetensors run from a mounted slim checkpoint.

Truth is what they do with the originals. Models are tiny, made from a configuration. Run by
``scripts/interop``.
"""

import json
from pathlib import Path

import pytest
import torch
from mounts import skip_without_fuse
from peft import LoraConfig, inject_adapter_in_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from slimckpt.mount import mounted
from slimckpt.rewrite.slim import slim

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TOKENS = torch.arange(32)[None] % 128


@pytest.fixture
def point(tmp_path: Path) -> Path:
    skip_without_fuse()
    (tmp_path / "point").mkdir()
    return tmp_path / "point"


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


def assert_equal_states(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A model saved twice, whole and in shards, in two precisions; beside it the store."""
    model = new_model()
    for name in ("a", "b"):
        model.save_pretrained(tmp_path / "source" / name)
        model.save_pretrained(tmp_path / "source" / f"{name}_sharded", max_shard_size="50KB")
    model.bfloat16().save_pretrained(tmp_path / "source" / "half")
    slim(tmp_path / "source", tmp_path / "store")
    return tmp_path


@pytest.mark.parametrize("name", ["a", "b_sharded", "half"])
def test_from_pretrained_gives_the_model_that_was_saved(
    name: str, models: Path, point: Path
) -> None:
    expected = AutoModelForCausalLM.from_pretrained(models / "source" / name)
    with mounted(models / "store", point):
        found = AutoModelForCausalLM.from_pretrained(point / name)
        assert_equal_states(found.state_dict(), expected.state_dict())
        with torch.no_grad():
            logits = found(TOKENS).logits
    with torch.no_grad():
        assert torch.equal(logits, expected(TOKENS).logits)
    if name == "a":
        assert_equal_states(found.state_dict(), new_model().state_dict())


def test_safetensors_maps_and_loads_mounted_files(models: Path, point: Path) -> None:
    with mounted(models / "store", point):
        for path in sorted((models / "source").rglob("*.safetensors")):
            expected = load_file(path)
            inside = point / path.relative_to(models / "source")
            assert_equal_states(load_file(inside), expected)
            with safe_open(inside, "pt") as opened:
                names = opened.keys()  # not a dict: it cannot be iterated
                assert_equal_states({k: opened.get_tensor(k) for k in names}, expected)


class Sequences(torch.utils.data.Dataset):
    """The same random sequences every time."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 128, (16,), generator=made)
        return {"input_ids": tokens, "labels": tokens}


def train(output: Path, resume: Path | None = None) -> list[float]:
    """The losses of a LoRA training of six steps, or of those after the checkpoint."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    trainer = Trainer(
        inject_adapter_in_model(lora, new_model()),
        TrainingArguments(
            output_dir=str(output),
            max_steps=6,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=1,
        ),
        train_dataset=Sequences(),
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_a_trainer_resumes_a_lora_step_with_the_losses_it_has_from_the_original(
    tmp_path: Path, point: Path
) -> None:
    losses = train(tmp_path / "source")
    assert len(set(losses)) == 6
    saved = slim(tmp_path / "source", tmp_path / "store")
    assert saved.store_nbytes < 0.7 * saved.source_nbytes
    with mounted(tmp_path / "store", point):
        resumed = train(tmp_path / "from the mount", point / "checkpoint-4")
    assert resumed == train(tmp_path / "from the original", tmp_path / "source" / "checkpoint-4")
    assert resumed == losses
    kept = json.loads((tmp_path / "from the mount/checkpoint-6/trainer_state.json").read_text())
    assert kept["global_step"] == 6
    weights = "checkpoint-6/model.safetensors"
    assert_equal_states(
        load_file(tmp_path / "from the mount" / weights), load_file(tmp_path / "source" / weights)
    )
