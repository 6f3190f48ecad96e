"""What torch's rebuild functions say of a tensor: storage, dtype, shape, strides.

Names and arguments are those of torch 2.13, ``torch/_utils.py``, ``torch/_tensor.py`` and
``torch/storage.py``, and of the versions before it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from slimckpt.dtypes import BY_NAME, OPAQUE
from slimckpt.formats.numpy_arrays import Array, Shape, array_of, is_shape
from slimckpt.formats.objects import ATTRIBUTE, Part, may_hold
from slimckpt.formats.pickles import Call, Dict, Global, Persistent, Stored
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
DTENSOR_NAMESPACES = ("torch.distributed.tensor", "torch.distributed._tensor")
"""What the modules of DTensor are called, from torch 2.5 on and before."""
META = f"{OPAQUE}meta"
"""The dtype of tensors that have no bytes."""
_MAKERS = ("_reconstruct", "_frombuffer", "_load_from_bytes")
_OPAQUE_NBYTES = {"complex32": 4, "float4_e2m1fn_x2": 1, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
                  "bits8": 1, "bits16": 2, "quint8": 1, "qint8": 1, "qint32": 4}  # fmt: skip
_SIGNED = ("F64", "F32", "F16", "BF16", "C128", "C64")
_MAX_INT = 1 << 62


class Storage(NamedTuple):
    """A storage by its key. ``dtype`` is what its class says; ``elements`` in ``nbytes``.

    ``view`` is the part that is meant where torch before 0.4 wrote a storage that is a view of
    another: first element and elements.
    """

    key: str
    dtype: str
    elements: int
    nbytes: int
    view: tuple[int, int]


class TorchTensor(NamedTuple):
    """A tensor. ``offset`` and ``strides`` are in elements.

    ``storage`` is an :class:`Array` where its bytes are inside the pickle, :class:`Stored` where
    they lie there in an archive of torch (which says the dtype, if this does not), and ``None``
    where it has none at all. ``marks`` are ``conj`` and ``neg``, where the numbers are to be
    conjugated or negated.
    """

    storage: Storage | Array | Stored | None
    dtype: str
    offset: int
    shape: Shape
    strides: Shape
    marks: frozenset[str] = frozenset()


def storage_of(node: Any) -> Storage | None:
    """A persistent id as a storage: ``("storage", class, key, location, elements[, view])``."""
    pid = node.id if type(node) is Persistent else None
    if type(pid) is not tuple or len(pid) not in (5, 6) or pid[0] != "storage":
        return None
    _, cls, key, _, count = pid[:5]
    if type(cls) is not Global or not _is_count(count) or type(key) is not str:
        return None
    if not cls.name.endswith("Storage"):
        return None
    dtype = _CLASSES.get(cls.name.removesuffix("Storage"))
    view = pid[5] if len(pid) == 6 else None
    first, elements = (0, count) if view is None else _view(view)
    if dtype is None or first + elements > count:
        return None
    return Storage(key, dtype, count, count * (itemsize_of(dtype) or 1), (first, elements))


def _view(view: Any) -> tuple[int, int]:
    """``(key, first element, elements)``; where it is something else, more than any storage has."""
    if type(view) is tuple and len(view) == 3 and all(map(_is_count, view[1:])):
        return view[1], view[2]
    return _MAX_INT, _MAX_INT


def archive_of(node: Any) -> Stored | None:
    """Where a storage lies that torch wrote as an archive into a pickle that is not its own."""
    if type(node) is Call and node.is_a("torch.storage._load_from_bytes") and _n_args(node) == 1:
        data = node.args[0]
        return data if type(data) is Stored and not data.text else None
    return None


def makes_tensors(symbol: Global) -> bool:
    """Whether a call of it can be a tensor, a storage or an array."""
    return symbol.name.startswith("_rebuild_") or symbol.name in _MAKERS


def rebuilt(node: Any) -> tuple[TorchTensor | None, list[Part]]:
    """The tensor that a rebuild call stands for, and what else of it is to be looked at."""
    if type(node) is Call and type(node.what) is Global and type(node.args) is tuple:
        return _rebuilt(node.what, node.args)
    return None, []


def _rebuilt(what: Global, args: tuple[Any, ...]) -> tuple[TorchTensor | None, list[Part]]:
    name, count = what.name, len(args)
    if not name.startswith("_rebuild_") or not f"{what.module}.".startswith("torch."):
        return None, []
    if name in ("_rebuild_from_type_v2", "_rebuild_from_type") and count >= 3:
        return _of_type(args)
    if name == "_rebuild_tensor_v3" and count >= 7:
        return _one(args[:4], args[6], args[7:]), []
    if name in ("_rebuild_tensor_v2", "_rebuild_tensor") and count >= 4:
        return _one(args[:4], None, args[6:]), []
    if name in ("_rebuild_parameter", "_rebuild_device_tensor_from_cpu_tensor") and args:
        return None, _named(args[:1], ("",))
    if name == "_rebuild_parameter_with_state" and count >= 4:
        return None, _named(args[:1], ("",)) + _attributes(args[3])
    if name == "_rebuild_device_tensor_from_numpy" and args:
        array = array_of(args[0])
        return array and TorchTensor(array, array.dtype, 0, array.shape, ()), []
    if name == "_rebuild_qtensor" and count >= 5:
        scheme = args[4] if type(args[4]) is tuple else ()
        return _one(args[:4], None, ()), _named(scheme[1:3], ("scales", "zero_points"))
    if name == "_rebuild_sparse_tensor" and count == 2 and type(args[1]) is tuple:
        return None, _named(args[1], _sparse_parts(args[0]))
    if name == "_rebuild_nested_tensor":
        return None, _named(args, ("buffer", "sizes", "strides", "offsets"))
    if name == "_rebuild_njt" and args and type(args[0]) is Dict:
        return None, _attributes(args[0])
    if name == "_rebuild_meta_tensor_no_storage" and count >= 3:
        shape = plain(args[1])
        return TorchTensor(None, META, 0, shape, ()) if is_shape(shape) else None, []
    return None, []


def _of_type(args: tuple[Any, ...]) -> tuple[TorchTensor | None, list[Part]]:
    """``_rebuild_from_type_v2(function, class, arguments, state)``: a tensor with attributes, or a
    wrapper (DTensor) whose tensors are attributes."""
    known = type(args[0]) is Global and type(args[2]) is tuple
    tensor, parts = _rebuilt(args[0], args[2]) if known else (None, [])
    state = args[3] if len(args) > 3 else None
    for key, style, value in _attributes(state):
        # The local part of a DTensor stands for it; others are attributes.
        alone = key == "_local_tensor" and tensor is None and not parts
        parts = [*parts, (key, "" if alone else style, value)]
    return tensor, parts


def is_dtensor(node: Any) -> bool:
    """Whether an object is a DTensor: a local tensor, and a spec of how it lies on ranks."""
    args = node.args if type(node) is Call and type(node.what) is Global else None
    if type(args) is not tuple or len(args) < 4 or node.what.name != "_rebuild_from_type_v2":
        return False
    cls = args[1]
    return (
        type(cls) is Global and cls.name == "DTensor" and cls.module.startswith(DTENSOR_NAMESPACES)
    )


def _attributes(state: Any) -> list[Part]:
    """Tensors among the attributes of a tensor: a dict, or with it one of its slots."""
    dicts = [part for part in (state if type(state) is tuple else (state,)) if type(part) is Dict]
    return [
        (key, ATTRIBUTE, value)
        for part in dicts
        for key, value in part.pairs
        if type(key) is str
        and type(value) is Call
        and type(value.what) is Global
        and makes_tensors(value.what)
    ]


def _named(parts: tuple[Any, ...], names: tuple[str, ...]) -> list[Part]:
    """Parts by name; an empty one stands for the whole."""
    found = zip(names, parts, strict=False)
    return [(name, name and ATTRIBUTE, part) for name, part in found if may_hold(part)]


def _sparse_parts(layout: Any) -> tuple[str, ...]:
    """The names of the tensors of a sparse one, by its layout (the argument of ``_get_layout``)."""
    name = layout.args[0] if type(layout) is Call and _n_args(layout) else None
    if name == "torch.sparse_coo":
        return ("indices", "values")
    if name in ("torch.sparse_csc", "torch.sparse_bsc"):
        return ("ccol_indices", "row_indices", "values")
    return ("crow_indices", "col_indices", "values")


def _one(args: tuple[Any, ...], dtype: Any, metadata: tuple[Any, ...]) -> TorchTensor | None:
    """A tensor of ``(storage, offset, size, stride)``; ``metadata`` is empty or
    ``({"conj": True, "neg": True},)``."""
    place, offset = storage_of(args[0]) or archive_of(args[0]), args[1]
    shape, strides = plain(args[2]), plain(args[3])
    if place is None or not _is_count(offset) or not is_shape(shape):
        return None
    if type(strides) is not tuple or len(strides) != len(shape):
        return None
    if not all(type(stride) is int and abs(stride) < _MAX_INT for stride in strides):
        return None
    name = place.dtype if type(place) is Storage else ""
    if dtype is not None:
        name = spelled(dtype)
    if name and itemsize_of(name) is None:
        return None
    pairs = metadata[0].pairs if metadata and type(metadata[0]) is Dict else ()
    marks = frozenset(key for key, value in pairs if type(key) is str and value is True)
    return TorchTensor(place, name, offset, shape, strides, marks & {"conj", "neg"})


def decoding(dtype: str, marks: frozenset[str]) -> tuple[str, str]:
    """The dtype and encoding of numbers with marks; an opaque dtype where they cannot be undone."""
    if not marks:
        return dtype, RAW
    mark, *more = sorted(marks)
    if more or dtype not in _SIGNED or (mark == "conj" and dtype[0] != "C"):
        return f"{OPAQUE}{dtype}-{'-'.join(sorted(marks))}", RAW
    return dtype, f"{mark}:{BY_NAME[dtype].bits // (16 if dtype[0] == 'C' else 8)}"


def spelled(dtype: Any) -> str:
    """Our name of a dtype of torch; :data:`META` for what is none."""
    if type(dtype) is not Global or dtype.module != "torch" or not dtype.name.isascii():
        return META
    return DTYPES.get(dtype.name, f"{OPAQUE}{dtype.name[:64]}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_INT


def _n_args(node: Call) -> int:
    return len(node.args) if type(node.args) is tuple else 0


def plain(value: Any) -> Any:
    """A ``torch.Size``, a tuple or a list, as a tuple; anything else as it is."""
    if type(value) is Call and value.is_a("torch.Size") and _n_args(value) == 1:
        return value.args[0]
    return tuple(value) if type(value) is list else value


def itemsize_of(dtype: str) -> int | None:
    """Bytes of an element; ``None`` where they are not whole bytes, or it is not known."""
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
