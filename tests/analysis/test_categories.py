"""What tensors are: by structure first, by name second."""

import re
import time
from fnmatch import fnmatchcase

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_files import expected

from slimckpt.analysis.categories import (
    CATEGORIES,
    OPTIMIZER,
    WEIGHTS,
    categorize,
    parameter_of,
)
from slimckpt.errors import UsageError
from slimckpt.model import Table, TableBuilder


def table_of(*tensors):
    """A table of (name, shape, dtype) with the last two optional."""
    builder = TableBuilder()
    for name, *rest in tensors:
        shape, dtype = (*rest, *((4, 6), "F32")[len(rest) :])
        builder.tensor(name, dtype, shape, 0)
    return builder.build()


def categories(*tensors, overrides=()):
    return [CATEGORIES[code] for code in categorize(table_of(*tensors), overrides)]


SHAPE = (4, 6)


def category(name, shape=SHAPE, dtype="F32", *others, overrides=()):
    return categories((name, shape, dtype), *others, overrides=overrides)[0]


MEGATRON = (
    "chained_0.optimizer.distributed.dp_group_idx_0.gbuf_idx_0"
    ".dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
)

BY_NAME_ALONE = {
    # MindSpore
    "adam_m.backbone.embedding.weight": "moment",
    "adam_v.layers.0.qkv": "moment",
    "exp_avg.model.layers.0.attention.wq.weight": "moment",
    "exp_avg_sq.model.norm_out.weight": "moment",
    "accu_grads.layers.0.qkv": "gradient",
    # Paddle
    "linear_0.w_0_moment1_0": "moment",
    "linear_0.b_0_moment2_12": "moment",
    "linear_0.w_0_velocity_0": "moment",
    "linear_0.w_0_fp32_master_0": "master weight",
    "linear_0.w_0_fp32_master_0_moment1_0": "moment",
    "embedding_0.w_0_fp32_master_0_velocity_0": "moment",
    "master_weights.linear_0.w_0": "master weight",
    "llama.layers.0.mlp.up_proj.weight/moment1_0": "moment",
    "llama.layers.0.mlp.up_proj.weight/fp32_master_0": "master weight",
    # PyTorch
    "state.0.exp_avg": "moment",
    "state.0.momentum_buffer": "moment",
    "optimizer.state.0.exp_avg": "moment",
    "optimizer.state.12.exp_avg_sq": "moment",
    "optim.state.wte.weight.exp_avg": "moment",
    "optim.state.0.weight.exp_avg_sq": "moment",
    "optimizer_states.0.state.0.exp_avg": "moment",
    "optimizer.state.0.master_param": "master weight",
    # bitsandbytes, torchao
    "state.0.state1": "moment",
    "optimizer/state/0/state2": "moment",
    "optimizer.state.0.absmax1": "moment",
    "optimizer.state.0.qmap1": "moment",
    "state.0.exp_avg.codes": "moment",
    # Megatron-LM
    "optimizer.optimizer.state.0.exp_avg": "moment",
    "optimizer.fp32_from_fp16_params.0.1": "master weight",
    "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": "moment",
    "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight": "master weight",
    f"{MEGATRON}.exp_avg": "moment",
    f"{MEGATRON}.param": "master weight",
    # DeepSpeed
    "optimizer_state_dict.base_optimizer_state.state.0.exp_avg": "moment",
    "optimizer_state_dict.optimizer_state_dict.state.0.exp_avg_sq": "moment",
    "optimizer_state_dict.single_partition_of_fp32_groups.0": "master weight",
    "optimizer_state_dict.fp32_flat_groups.0": "master weight",
    # Keras, JAX
    "optimizer/vars/3": "moment",
    "layers/dense/vars/0": "weight",
    "opt_state/0/mu/dense/kernel": "moment",
    # exponential moving averages are weights, whatever they average
    "ema.layers.0.weight": "weight",
    "module_ema.head.weight": "weight",
}

WEIGHTS_THAT_SOUND_LIKE_STATE = (
    "momentum_encoder.layer.weight",
    "optimizer_head.weight",
    "step.weight",
    "master_head.weight",
    "adam_model.weight",
    "my_optimizer.weight",
    "moment10.weight",
    "w_moment1_",
    "w_moment1_0_proj",
    "w_moment1_0\n",
    "masters.weight",
    "master_mind.weight",
    "epoch.proj.kernel",
    "Adam_M.weight",
    "layers.exp_avg.proj.weight",
    "encoder.optimizer.state.proj",
    "state.0.weight",
    "state.proj.sum",
    "vars.3",
    "proj.absmax",
    "layers.0.state2",
    "net_velocity_0",
    # single words that models use too, and nothing of which they would be the state
    *(f"{word}.weight" for word in ("moment", "moments", "moment1", "velocity", "momentum")),
    *(f"{word}.weight" for word in ("master", "optim", "optimizer", "accum", "grad", "nu")),
    *(f"proj.{word}" for word in ("moment", "velocity", "master", "accum", "m", "nu", "param")),
)

WITH_ANY_WITNESS = (
    # copies of a network: nothing but the word tells them from moments
    "momentum.encoder.w",
    "velocity.layers.0.weight",
    "opt.decoder.fc1.weight",
    "layer.weight.v",
    "layer.weight.m",
)
NEVER_STATE = (
    *WITH_ANY_WITNESS,
    # modules and buffers
    "adam_m.fc.weight",
    "exp_avg.encoder.w",
    "lamb_m.weight",
    "codebook.exp_avg",
    "enc.momentum_buffer",
    "exp_avg",
    "head.moment1_0",
    "pool/moment2_0",
    # a list of modules called state
    *(f"state.0.{key}" for key in ("mu", "variance", "scale", "codes", "sum", "weight", "z")),
    "optimizer.state.encoder.weight",
    "opt.state.x",
    "opt.vars.weight",
    # weights in an optimizer's state
    *(f"optimizer.state.0.{key}" for key in ("main_param", "shard_main_param", "weight")),
    *(f"optimizer.state.0.{k}_param" for k in ("hp", "full", "slow", "ema")),
    "optimizer_state_dict.bit16_groups.0",
    "optimizer_states.0.ema_weights",
    "optimizer_state_dict.ema.encoder.weight",
    "opt_state/ema_params/dense/kernel",
)

STRUCTURE = {
    "backbone.embedding.weight": ((64, 32), "embedding"),
    "emb.embedding_table": ((64, 16), "embedding"),
    "model.tok_embeddings.embedding_weight": ((64, 16), "embedding"),
    "model.embed_tokens.weight": ((64, 16), "embedding"),
    "transformer.wte.weight": ((64, 16), "embedding"),
    "transformer.wpe.weight": ((64, 16), "embedding"),
    "embedding.word_embeddings.weight": ((64, 16), "embedding"),
    "embedding.position_embeddings.weight": ((64, 16), "embedding"),
    "embedding_0.w_0": ((64, 16), "embedding"),
    "vit.embeddings.patch_embeddings.projection.weight": ((64, 3, 4, 4), "embedding"),
    "model.layers.0.self_attn.q_proj.weight": ((8, 8), "attention"),
    "model.layers.0.self_attn.q_proj.lora_A.default.weight": ((2, 8), "attention"),
    "model.layers.0.attention.wo.weight": ((8, 8), "attention"),
    "model.layers.0.attention.w_qkv.weight": ((8, 8), "attention"),
    "h.0.attn.c_proj.weight": ((8, 8), "attention"),
    "decoder.layers.0.self_attention.linear_qkv.weight": ((8, 8), "attention"),
    "decoder.layers.0.self_attention.linear_proj.weight": ((8, 8), "attention"),
    "bert.encoder.layer.0.attention.self.query.weight": ((8, 8), "attention"),
    "bert.encoder.layer.0.attention.output.dense.weight": ((8, 8), "attention"),
    "embedder.layers.0.self_attn.k_proj.weight": ((8, 8), "attention"),
    "layers.0.qkv": ((24, 8), "attention"),
    "backbone.blocks.0.attention.projection.weight": ((8, 8), "attention"),
    "model.layers.0.mlp.gate_proj.weight": ((8, 8), "mlp"),
    "model.layers.0.mlp.experts.3.down_proj.weight": ((8, 8), "mlp"),
    "model.layers.0.feed_forward.w1.weight": ((8, 8), "mlp"),
    "h.0.mlp.c_proj.weight": ((8, 8), "mlp"),
    "decoder.layers.0.mlp.linear_fc1.weight": ((8, 8), "mlp"),
    "encoder.block.0.layer.1.DenseReluDense.wo.weight": ((8, 8), "mlp"),
    "backbone.blocks.0.output.mapping.weight": ((8, 8), "mlp"),
    "layers.0.mlp.dense_h_to_4h.weight": ((8, 8), "mlp"),
    "layers.0.up": ((8, 8), "mlp"),
    "model.norm.weight": ((8,), "norm"),
    "model.layers.0.input_layernorm.weight": ((8,), "norm"),
    "model.layers.0.attention_norm.weight": ((8,), "norm"),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": ((8,), "norm"),
    "h.0.ln_1.bias": ((8,), "norm"),
    "bert.embeddings.LayerNorm.weight": ((8,), "norm"),
    "bn.running_mean": ((8,), "norm"),
    "backbone.layernorm1.beta": ((8,), "norm"),
    "layer_norm_0.w_0": ((8,), "norm"),
    "batch_norm2d_0.w_1": ((8,), "norm"),
    "model.layers.0.self_attn.q_norm.weight": ((8,), "norm"),
    "decoder.layers.0.self_attention.linear_proj.bias": ((8,), "bias"),
    "fc.bias": ((8,), "bias"),
    "linear_0.b_0": ((8,), "bias"),
    "layers.0.qkv_b": ((24,), "bias"),
    "model.layers.0.mlp.gate.e_score_correction_bias": ((8,), "bias"),
    # a name alone does not make a norm or a bias of a matrix
    "normalizer.norm": ((8, 8), "weight"),
    "relative_bias": ((8, 8), "weight"),
    "lm_head.weight": ((64, 8), "weight"),
    "output_layer.weight": ((64, 8), "weight"),
    "linear_0.w_0": ((8, 8), "weight"),
    "": ((8, 8), "weight"),
    "..": ((8, 8), "weight"),
    "learning_rate": ((), "scalar"),
    "global_step": ((1,), "scalar"),
    "bn.num_batches_tracked": ((), "scalar"),
    "logit_scale": ((), "scalar"),
    "head.bias": ((1,), "bias"),
    "beta1_power": ((), "step state"),
    "linear_0.w_0_beta1_pow_acc_0": ((1,), "step state"),
    "optimizer.state.0.step": ((), "step state"),
    "optim.state.wte.weight.step": ((), "step state"),
    "optimizer/vars/0": ((), "step state"),
    "opt_state/0/count": ((), "step state"),
    "optim.param_groups.0.lr": ((), "scalar"),
    "beta1_power.weight": ((8, 8), "weight"),
}


def test_the_categories_have_an_order():
    assert (
        *("embedding", "attention", "mlp", "norm", "bias", "weight", "moment", "step state"),
        *("master weight", "gradient", "rng", "scalar", "other"),
    ) == CATEGORIES
    assert {"moment", "step state"} == OPTIMIZER


@pytest.mark.parametrize(("name", "kind"), BY_NAME_ALONE.items())
def test_names_of_every_family_say_what_their_tensors_are(name, kind):
    owner = parameter_of(name)
    beside = [(owner, SHAPE)] if owner else []
    assert category(name, SHAPE, "F32", *beside) == kind
    wrapped = [(f"model.{owner}", SHAPE)] if owner else []
    assert category(name, SHAPE, "F32", *wrapped) == kind


@pytest.mark.parametrize("name", [n for n, k in BY_NAME_ALONE.items() if k == "moment"])
def test_a_moment_that_names_its_parameter_needs_it(name):
    owner = parameter_of(name)
    if owner and not re.search(r"\.[wb]_[0-9]+", owner):
        for others in ((), ((owner, (3, 5)),), ((f"{owner}.more", SHAPE),)):
            assert category(name, SHAPE, "F32", *others) != "moment"


@pytest.mark.parametrize("name", NEVER_STATE)
def test_what_a_model_or_an_optimizer_holds_of_weights_is_no_moment(name):
    """Each beside every tensor that its name could be taken for the moment of."""
    segments = name.replace("/", ".").split(".")
    others = {".".join(segments[a:b]) for a in range(8) for b in range(a + 1, 9)} - {name}
    others = {other for other in others if other} if name in WITH_ANY_WITNESS else set()
    found = category(name, SHAPE, "F32", *((other, SHAPE) for other in sorted(others)))
    assert found not in ("moment", "step state")


@pytest.mark.parametrize("name", WEIGHTS_THAT_SOUND_LIKE_STATE)
def test_a_weight_that_sounds_like_state_is_a_weight(name):
    assert category(name) == "weight"


@pytest.mark.parametrize(("name", "shape", "kind"), [(n, *rest) for n, rest in STRUCTURE.items()])
def test_weights_are_told_apart_by_segments_and_dimensions(name, shape, kind):
    assert category(name, shape) == kind


@pytest.mark.parametrize("word", ["moments", "moment1", "accum", "vhat", "adam_m", "exp_avg"])
def test_a_word_that_could_be_a_module_needs_its_parameter(word):
    weight = ("fc.kernel", (4, 6))
    assert category(f"{word}.fc.kernel", (4, 6), "F32", weight) == "moment"
    assert category(f"fc.kernel.{word}", (4, 6), "F32", weight) == "moment"
    assert category(f"{word}.fc.kernel", (4, 5), "F32", weight) == "weight"
    assert category(f"{word}.head.kernel", (4, 6), "F32", weight) == "weight"


def test_the_parameter_may_be_in_another_file_of_another_shape_too():
    half, whole = ("fc.kernel", (2, 6)), ("fc.kernel", (4, 6))
    assert category("moments.fc.kernel", (4, 6), "F32", half, whole) == "moment"
    assert category("moments.fc.kernel", (24,), "F32", half, whole) == "moment"
    assert category("moments.fc.kernel", (6, 4), "F32", half, whole) == "weight"


def test_masters_and_gradients_with_module_names_need_their_parameter():
    weight = ("fc.kernel", (4, 6))
    assert category("master.fc.kernel", (4, 6), "F32", weight) == "master weight"
    assert category("grads.fc.kernel", (4, 6), "F32", weight) == "gradient"
    assert category("grads.fc.kernel") == "weight"


def test_a_flat_buffer_called_param_is_a_master_beside_its_moments():
    group = "0.(torch.bfloat16, torch.float32)"
    beside = (f"{group}.exp_avg", (100,))
    assert category(f"{group}.param", (100,), "F32", beside) == "master weight"
    assert category(f"{group}.param", (100,), "F32") == "weight"
    assert category(f"{group}.param", (99,), "F32", beside) == "weight"


def test_one_tensor_that_is_its_own_witness_is_none():
    assert categories(("velocity", (3, 3)), ("m", (3, 3))) == ["weight", "weight"]


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("rng.seed", (), "I64"),
        ("rng_state.0.cuda_rng_state", (16,), "U8"),
        ("rng_state.0.rng_tracker_states.model-parallel-rng", (16,), "U8"),
        ("rank_2.rng", (5056,), "U8"),
        ("cpu", (5056,), "U8"),
        ("numpy.1", (624,), "U32"),
    ],
)
def test_generator_states_are_told_by_name_or_by_their_form(name, shape, dtype):
    assert category(name, shape, dtype) == "rng"


@pytest.mark.parametrize("name", ["layer.weight", "adam_m.layer.weight", "master.weight"])
def test_entries_that_are_no_arrays_are_other(name):
    assert category(name, (), "opaque:str") == "other"


def test_masks_and_indices_are_other():
    assert category("drop.mask", (2, 3), "BOOL") == "other"
    assert category("position_ids", (1, 512), "I64") == "other"
    assert category("layer.qweight", (8, 512), "I32") == "weight"


def test_a_real_mindspore_training_is_divided():
    params = expected("ms_dp4_real_ckpt")["files"]["rank_0/net-1_2.ckpt"]["params"]
    tensors = [(name, tuple(p.get("shape") or ())) for name, p in params.items()]
    found = dict(zip(params, categories(*tensors), strict=True))
    for name, kind in found.items():
        assert (kind == "moment") == name.startswith(("moment1.", "moment2.")), name
        assert (kind == "step state") == name.startswith("beta"), name
    assert found["emb.embedding_table"] == "embedding"
    assert found["d1.bias"] == "bias"
    assert {found[n] for n in ("global_step", "learning_rate", "epoch_num")} == {"scalar"}


def torch_tensors(folder):
    """Names as paths, with the truth's shapes, of all files of a torch sample."""
    for file in expected(folder)["files"].values():
        for name, tensor in file.get("tensors", {}).items():
            keys = re.findall(r"\['?(.*?)'?\](?=\[|$)", name)  # ['optimizer']['state'][0]['step']
            yield ".".join(keys), tuple(tensor["shape"])


@pytest.mark.parametrize(
    "folder",
    ["torch_ddp4", "megatron_tp2_pp2", "deepspeed_zero1_dp4", "deepspeed_zero3_dp4", "lora_steps"],
)
def test_real_torch_checkpoints_are_divided(folder):
    tensors = sorted(set(torch_tensors(folder)))
    assert len(tensors) > 10
    kinds = categories(*tensors)
    for (name, shape), kind in zip(tensors, kinds, strict=True):
        leaf = name.rsplit(".", 1)[-1]
        assert (kind == "moment") == (leaf in ("exp_avg", "exp_avg_sq")), name
        assert (kind == "step state") == (leaf == "step"), name
        assert (kind == "master weight") == ("fp32" in name), name
        if name.startswith(("model.", "module.")) and shape not in ((), (0,)):
            assert kind in WEIGHTS, name
    assert {"moment", "step state"} <= set(kinds)


def test_a_real_dcp_checkpoint_is_divided():
    items = expected("fsdp_dcp_4")["file_item_order"]
    names = sorted({name for order in items.values() for name in order})
    found = dict(zip(names, categories(*((n, (4, 6)) for n in names)), strict=True))
    for name, kind in found.items():
        state = name.startswith("optim.state.")
        assert (kind in ("moment", "step state")) == state, name
        assert (kind == "step state") == (state and name.endswith(".step")), name
        assert not name.startswith("model.") or kind in WEIGHTS


def paddle_tensors(file):
    for tensor in expected("paddle_dp4")["tensors"][file]:
        yield ".".join(map(str, tensor["path"])), tuple(tensor["shape"])


def test_real_paddle_optimizer_files_are_divided():
    for file in ("rank_00/model.pdopt", "rank_00/model_fp32.pdopt"):
        tensors = list(paddle_tensors(file))
        for (name, _), kind in zip(tensors, categories(*tensors), strict=True):
            if "_moment" in name:
                assert kind == "moment", name
            elif "_pow_acc" in name:
                assert kind == "step state", name
            else:
                assert kind == "master weight", name


def test_an_override_wins_over_name_and_dtype():
    assert category("teacher.weight", overrides=[("other", "teacher.*")]) == "other"
    assert category("adam_m.weight", overrides=[("weight", "adam_m.*")]) == "weight"
    assert category("blob", (), "opaque:str", overrides=[("weight", "blob")]) == "weight"


def test_the_first_override_that_matches_wins():
    overrides = [("moment", "a.b.*"), ("other", "a.*")]
    found = categories(("a.b.c",), ("a.c",), ("b",), overrides=overrides)
    assert found == ["moment", "other", "weight"]


def test_an_override_is_for_the_whole_name_in_its_case():
    overrides = [("other", "Teacher.[ac]?")]
    names = ("Teacher.a1", "teacher.a1", "Teacher.a12", "x.Teacher.a1", "Teacher.d1")
    found = categories(*((name,) for name in names), overrides=overrides)
    assert found == ["other", "weight", "weight", "weight", "weight"]


def test_an_unknown_category_is_an_error_that_lists_those_there_are():
    with pytest.raises(UsageError, match=r"'optimizer'.*embedding, attention, .*master weight"):
        categorize(table_of(), [("optimizer", "*")])


def test_no_tensors_have_no_categories():
    codes = categorize(table_of())
    assert codes.dtype == np.uint8
    assert codes.shape == (0,)


@given(
    st.lists(st.text("xyX.*?[]!\n", max_size=5), max_size=4),
    st.text("xyX.\n", max_size=5),
    st.integers(0, 3),
)
def test_globs_match_as_the_standard_library_says(globs, name, code):
    overrides = [(CATEGORIES[(code + n) % 13], glob) for n, glob in enumerate(globs)]
    wanted = [kind for kind, glob in overrides if fnmatchcase(name, glob)]
    assert category(name, overrides=overrides) == (wanted[0] if wanted else "weight")


_WORDS = st.sampled_from(
    [
        "optimizer",
        "state",
        "exp_avg",
        "moments",
        "w",
        "0",
        "3",
        "param",
        "fp32_param",
        "master",
        "step",
        "bucket_idx_0",
        "vars",
        "m",
        "codes",
        "chained_0",
        "x_moment1_0",
        "x_fp32_master_0",
        "rng",
        "norm",
    ]
)


@given(st.lists(st.lists(_WORDS, max_size=5).map(".".join), max_size=8))
def test_replicas_and_order_change_nothing(names):
    tensors = [(name, (4, 6)) for name in names]
    found = categories(*tensors)
    assert categories(*tensors[::-1], *tensors) == found[::-1] + found


@given(st.lists(st.text(max_size=20)))
def test_any_text_is_a_name(names):
    codes = categorize(table_of(*((name,) for name in names)))
    assert codes.dtype == np.uint8
    assert len(codes) == len(names)
    assert all(code < len(CATEGORIES) for code in codes)


def test_two_hundred_thousand_names_take_no_time_to_speak_of():
    one = table_of(*((f"backbone.layers.{n % 96}.experts.{n}.w_{n}", (8, 8)) for n in range(1000)))
    many = Table.concatenate([one] * 200)
    start = time.process_time()
    categorize(many)
    assert time.process_time() - start < 2
