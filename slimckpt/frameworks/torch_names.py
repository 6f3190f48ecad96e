"""What files of torch may name: what torch itself writes, and what trainers add to it.

Names are those of torch 2.13, ``torch/_utils.py`` and ``torch/_tensor.py``, of versions before it,
and of DeepSpeed 0.19, megatron-core 0.16, transformers 5.24 and accelerate 1.15 where their
checkpoints were seen to hold them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from slimckpt.frameworks.allowed import Allowed, Found, enumerations_of

_TENSOR = "torch.distributed.tensor"
_CHECKPOINT = "torch.distributed.checkpoint"
_NAMES = {
    "torch": ("Size", "Tensor", "device"),
    "torch._dynamo.decorators": ("_DimRange",),
    "torch._utils": (
        "_rebuild_device_tensor_from_cpu_tensor", "_rebuild_device_tensor_from_numpy",
        "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor", "_rebuild_parameter",
        "_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_csr_tensor",
        "_rebuild_sparse_tensor", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
        "_rebuild_wrapper_subclass", "_rebuild_xla_tensor",
    ),
    "torch.distributed._mesh_layout": ("_FlatLayout", "_MeshLayout"),
    "torch.nested._internal.nested_tensor": ("NestedTensor", "_rebuild_njt"),
    "torch.nn.parameter": (
        "Buffer", "Parameter", "UninitializedBuffer", "UninitializedParameter",
    ),
    "torch.serialization": ("_get_layout",),
    "torch.torch_version": ("TorchVersion",),
    _TENSOR: ("DTensor",),
    f"{_TENSOR}._api": ("DTensor",),
    f"{_TENSOR}._dtensor_spec": ("DTensorSpec", "ShardOrderEntry", "TensorMeta"),
    f"{_TENSOR}.placement_types": ("Partial", "Replicate", "Shard", "_StridedShard"),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo",),
    f"{_CHECKPOINT}.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    f"{_CHECKPOINT}.planner": (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    ),
    "accelerate.utils.dataclasses": ("DistributedType", "DynamoBackend"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "megatron.core.enums": ("ModelType",),
    "megatron.core.transformer.enums": ("AttnBackend", "AttnMaskType", "AttnType", "LayerType"),
    "transformers.trainer_utils": (
        "EvaluationStrategy", "HubStrategy", "IntervalStrategy", "SaveStrategy", "SchedulerType",
    ),
    "transformers.training_args": ("OptimizerNames", "ParallelMode"),
}  # fmt: skip
_CLASSES = {
    "accelerate.state": ("AcceleratorState", "PartialState"),
    "deepspeed.runtime.fp16.loss_scaler": ("DynamicLossScaler", "LossScaler"),
    "torch.distributed.device_mesh": ("DeviceMesh",),
    "transformers.trainer_pt_utils": ("AcceleratorConfig",),
    "transformers.training_args": ("TrainingArguments",),
}
"""Those that join process groups, read files or change the process when they are created anew."""
_MOVED = {
    "torch.distributed._tensor": _TENSOR,
    "torch.distributed._tensor.api": f"{_TENSOR}._api",
    "torch.distributed._tensor._dtensor_spec": f"{_TENSOR}._dtensor_spec",
    "torch.distributed._tensor.placement_types": f"{_TENSOR}.placement_types",
    "torch.tensor": "torch._tensor",
}
_SAVED_WHOLE = ("torch.nn.modules.", "torch.optim.")
_FUNCTIONS = ("torch.nn.functional", "torch._C._nn")


def allowed_of_torch(torch: Any, load_from_bytes: Any, allow: Iterable[Any]) -> Allowed:
    """The allow-list of torch's files; ``load_from_bytes`` stands for the function of that name,
    which would unpickle."""

    def of_type(name: str) -> Found:
        # Torch calls the function that the file gives to it.
        def rebuild(function: Any, cls: Any, *arguments: Any) -> Any:
            if not allowed.may_call(function):
                raise TypeError(f"{function!r:.100} makes no tensors")
            if not isinstance(cls, type) or not issubclass(cls, torch.Tensor):
                raise TypeError(f"{cls!r:.100} is no class of tensors")
            return getattr(torch._tensor, name)(function, cls, *arguments)

        rebuild.__module__, rebuild.__qualname__ = "torch._tensor", name
        return Found(rebuild, True)

    stand_ins = {
        ("torch.storage", "_load_from_bytes"): Found(load_from_bytes, True),
        ("torch._tensor", "_rebuild_from_type"): of_type("_rebuild_from_type"),
        ("torch._tensor", "_rebuild_from_type_v2"): of_type("_rebuild_from_type_v2"),
    }

    def rule(module: str, name: str) -> Found | None:
        if "Storage" in name and module.startswith("torch"):
            return _storage(torch, name)
        if module in _MOVED:
            return Found(allowed.find(_MOVED[module], name, module), True)
        if module == "torch" or (module.startswith("torch.") and name.startswith("torch.")):
            # A memory format says its whole name, and pickle looks for a module that has it.
            name = name.removeprefix("torch.")
            kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
            found = getattr(torch, name, None)
            return Found(found, False) if isinstance(found, kinds) else None
        if module.startswith(_SAVED_WHOLE):
            found = getattr(sys.modules.get(module), name, None)
            bases = (torch.nn.Module, torch.optim.Optimizer)
            is_one = isinstance(found, type) and issubclass(found, bases)
            known = is_one and found.__module__ == module
            return Found(found, True, initialized=False) if known else None
        if module in _FUNCTIONS:
            # Activations that a module keeps: named, never called.
            found = getattr(sys.modules.get(module), name, None)
            return Found(found, False) if callable(found) else None
        return None

    families = ("accelerate", "deepspeed", "megatron", "peft", "torch", "transformers")
    rules = (rule, enumerations_of(*families))
    allowed = Allowed(_NAMES, _CLASSES, stand_ins, rules, allow)
    return allowed


def _storage(torch: Any, name: str) -> Found | None:
    """A storage class, as torch's own loading takes it."""
    if name in ("UntypedStorage", "TypedStorage"):
        return Found(getattr(torch.storage, name), False)
    try:
        return Found(torch.serialization.StorageType(name), False)
    except KeyError:
        return None
