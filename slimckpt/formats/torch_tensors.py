"""What torch's rebuild functions say of a tensor: storage, dtype, shape, strides.

Names and arguments are those of torch 2.13, ``torch/_utils.py``, ``torch/_tensor.py`` and
``torch/storage.py``, and of the versions before it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from slimckpt.dtypes import BY_NAME, OPAQUE
from slimckpt.formats.numpy_arrays import Array, array_of, is_shape
from slimckpt.formats.pickles import Call, Dict, Global, Persistent
from slimckpt.model import RAW

_CLASSES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32",
    "Short": "I16", "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexDouble": "C128",
    "ComplexFloat": "C64", "QInt8": "I8", "QUInt8": "U8", "QInt32": "I32",
    "QUInt4x2": f"{OPAQUE}quint4x2", "QUInt2x4": f"{OPAQUE}quint2x4", "Untyped": "U8",
}  # fmt: skip
DTYPES = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16",
    "half": "F16", "bfloat16": "BF16", "int64": "I64", "long": "I64", "int32": "I32", "int": "I32",
    "int16": "I16", "short": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "bool": "BOOL", "complex64": "C64", "cfloat": "C64", "complex128": "C128",
    "cdouble": "C128", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_OPAQUE_NBYTES = {"complex32": 4, "float4_e2m1fn_x2": 1, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
                  "bits8": 1, "bits16": 2, "quint8": 1, "qint8": 1, "qint32": 4}  # fmt: skip
_MAX_WRAPPED = 8


class Storage(NamedTuple):
    """A storage by its key. ``dtype`` is what its class says; ``elements`` in ``nbytes``."""

    key: str
    dtype: str
    elements: int
    nbytes: int


class TorchTensor(NamedTuple):
    """A tensor. ``suffix`` is what is added to the path of the object it is a part of.

    ``storage`` is an :class:`Array` where its bytes are inside the pickle, and ``None`` where it
    has none at all. ``itemsize`` is in bytes, ``offset`` and ``strides`` in elements.
    ``encoding`` is how the bytes of the storage become those of the tensor.
    """

    suffix: str
    storage: Storage | Array | None
    dtype: str
    itemsize: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    encoding: str = RAW


def storage_of(node: Any) -> Storage | None:
    """A persistent id as a storage: ``("storage", class, key, location, elements)``."""
    pid = node.id if type(node) is Persistent else None
    if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage":
        return None
    _, cls, key, _, count = pid[:5]
    if type(cls) is not Global or type(count) is not int or not 0 <= count < 2**62:
        return None
    if not cls.name.endswith("Storage") or type(key) not in (str, int):
        return None
    dtype = _CLASSES.get(cls.name.removesuffix("Storage"))
    if dtype is None:
        return None
    return Storage(str(key), dtype, count, count * (_itemsize(dtype) or 1))


def tensors_of(node: Any, suffix: str = "", wrapped: int = 0) -> list[TorchTensor] | None:
    """The tensors that a rebuild call stands for; ``None`` where it is no such call."""
    if type(node) is not Call or type(node.what) is not Global or type(node.args) is not tuple:
        return None
    if wrapped > _MAX_WRAPPED:
        return None
    module, name, args = node.what.module, node.what.name, node.args
    if module in ("torch._tensor", "torch.tensor") and name in (
        "_rebuild_from_type_v2",
        "_rebuild_from_type",
    ):
        return _of_type(node, suffix, wrapped)
    if not module.startswith(("torch.", "torch_")):
        return None
    if name in ("_rebuild_tensor_v2", "_rebuild_tensor", "_rebuild_tensor_v3") and len(args) >= 4:
        third = name == "_rebuild_tensor_v3"
        found = _one(suffix, args[:4], args[6] if third and len(args) > 6 else None)
        return _marked(found, args[6 + third :])
    if name in ("_rebuild_parameter", "_rebuild_parameter_with_state") and args:
        return tensors_of(args[0], suffix, wrapped + 1)
    if name == "_rebuild_device_tensor_from_cpu_tensor" and args:
        return tensors_of(args[0], suffix, wrapped + 1)
    if name == "_rebuild_device_tensor_from_numpy" and args:
        array = array_of(args[0])
        return None if array is None else [_of_array(suffix, array)]
    if name == "_rebuild_qtensor" and len(args) >= 5:
        parts = args[4] if type(args[4]) is tuple else ()
        more = _parts(suffix, parts[1:3], ("scales", "zero_points"), wrapped)
        found = _one(suffix, args[:4], None)
        return None if found is None else found + more
    if name == "_rebuild_sparse_tensor" and len(args) == 2 and type(args[1]) is tuple:
        return _parts(suffix, args[1], _sparse_parts(args), wrapped)
    if name == "_rebuild_nested_tensor":
        return _parts(suffix, args, ("buffer", "sizes", "strides", "offsets"), wrapped)
    if name == "_rebuild_meta_tensor_no_storage" and len(args) >= 3 and is_shape(args[1]):
        return [TorchTensor(suffix, None, f"{OPAQUE}meta", 0, 0, args[1], ())]
    return None


def _of_type(node: Call, suffix: str, wrapped: int) -> list[TorchTensor] | None:
    """``_rebuild_from_type_v2(function, class, arguments, state)``: a tensor with attributes, or a
    wrapper (DTensor) whose tensors are attributes."""
    args = node.args
    if len(args) < 3 or type(args[0]) is not Global:
        return None
    inner = tensors_of(Call(args[0], args[2]), suffix, wrapped + 1) or []
    state = args[3] if len(args) > 3 else None
    states = state if type(state) is tuple else (state,)
    for pairs in (part.pairs for part in states if type(part) is Dict):
        for key, value in pairs:
            if type(key) is not str:
                continue
            # The local part of a DTensor stands for it; others are attributes.
            where = suffix if key == "_local_tensor" and not inner else f"{suffix}.{key}"
            inner += tensors_of(value, where, wrapped + 1) or []
    return inner


def _sparse_parts(args: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of the tensors of a sparse one, by its layout (the argument of ``_get_layout``)."""
    layout = args[0].args[0] if type(args[0]) is Call and args[0].args else None
    if layout == "torch.sparse_coo":
        return ("indices", "values")
    if layout in ("torch.sparse_csc", "torch.sparse_bsc"):
        return ("ccol_indices", "row_indices", "values")
    return ("crow_indices", "col_indices", "values")


def _parts(
    suffix: str, parts: tuple[Any, ...], names: tuple[str, ...], wrapped: int
) -> list[TorchTensor]:
    found: list[TorchTensor] = []
    for part, name in zip(parts, names, strict=False):
        found += tensors_of(part, f"{suffix}.{name}", wrapped + 1) or []
    return found


def _one(suffix: str, args: tuple[Any, ...], dtype: Any) -> list[TorchTensor] | None:
    """A tensor of ``(storage, offset, size, stride)``."""
    place, offset = storage_of(args[0]), args[1]
    shape, strides = _plain(args[2]), _plain(args[3])
    if place is None or type(offset) is not int or offset < 0 or not is_shape(shape):
        return None
    if type(strides) is not tuple or len(strides) != len(shape):
        return None
    if not all(type(stride) is int and abs(stride) < 2**62 for stride in strides):
        return None
    name = place.dtype
    if type(dtype) is Global and dtype.module == "torch":
        name = DTYPES.get(dtype.name, f"{OPAQUE}{dtype.name[:64]}")
    itemsize = _itemsize(name)
    if itemsize is None:
        return None
    return [TorchTensor(suffix, place, name, itemsize, offset, shape, strides)]


def _marked(found: list[TorchTensor] | None, metadata: tuple[Any, ...]) -> list[TorchTensor] | None:
    """Tensors with the marks of the last argument: ``{"conj": True, "neg": True}``."""
    pairs = metadata[0].pairs if metadata and type(metadata[0]) is Dict else []
    marks = {key for key, value in pairs if type(key) is str and value is True}
    if not found or not marks & {"conj", "neg"}:
        return found
    (tensor,) = found
    nbytes = tensor.itemsize // 2 if tensor.dtype[0] == "C" else tensor.itemsize
    if len(marks) == 1 and tensor.dtype[0] in "CFB":
        mark = marks.pop()
        if mark == "neg" or tensor.dtype[0] == "C":
            return [tensor._replace(encoding=f"{mark}:{nbytes}")]
    return [tensor._replace(dtype=f"{OPAQUE}{tensor.dtype}-{'-'.join(sorted(marks))}"[:64])]


def _of_array(suffix: str, array: Array) -> TorchTensor:
    itemsize = array.nbytes // max(math.prod(array.shape), 1)
    return TorchTensor(suffix, array, array.dtype, itemsize, 0, array.shape, array.strides or ())


def _plain(value: Any) -> Any:
    """``torch.Size((2, 3))`` is a tuple."""
    if type(value) is Call and value.is_a("torch.Size") and len(value.args) == 1:
        return value.args[0]
    return tuple(value) if type(value) is list else value


def _itemsize(dtype: str) -> int | None:
    if dtype in BY_NAME:
        return BY_NAME[dtype].bits // 8
    return _OPAQUE_NBYTES.get(dtype.removeprefix(OPAQUE))


def c_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements follow each other in C order (strides of single rows say nothing)."""
    return 0 in shape or all(
        dim == 1 or stride == wanted
        for dim, stride, wanted in zip(shape, strides, c_order(shape), strict=True)
    )
