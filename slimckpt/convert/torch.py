"""What ``torch.save`` writes of a dict of tensors (torch 2.13, ``torch/serialization.py``).

Tensors that share elements in the file they come from share one storage here too. The object is
one that ``torch.load(weights_only=True)`` takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from slimckpt.convert.blueprint import Blueprint
from slimckpt.convert.entries import Contents, Entry, LocalEntry, StreamEntry
from slimckpt.convert.pickling import pickled
from slimckpt.convert.zips import ALIGNMENT, Archive
from slimckpt.formats.pickles import Call, Global, Persistent
from slimckpt.formats.torch_tensors import DTYPES as NAMES
from slimckpt.formats.torch_tensors import c_order

_CLASSES = {
    "F64": "Double", "F32": "Float", "F16": "Half", "BF16": "BFloat16", "I64": "Long", "I32": "Int",
    "I16": "Short", "I8": "Char", "U8": "Byte", "BOOL": "Bool", "C128": "ComplexDouble",
    "C64": "ComplexFloat",
}  # fmt: skip
"""Storage classes; dtypes that are younger have none."""
SPELLED = {ours: name for name, ours in reversed(NAMES.items())} | {"F4": "float4_e2m1fn_x2"}
DTYPES = frozenset(SPELLED)
_UNTYPED = Global("torch.storage", "UntypedStorage")
_HOOKS = Call(Global("collections", "OrderedDict"), ())


class View(NamedTuple):
    """A tensor: the number of its storage, offset and strides there, in elements."""

    entry: Entry
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def node(self, storages: Sequence[Entry]) -> Call:
        """The call that makes it."""
        dtype, storage = self.entry.dtype, storages[self.storage]
        cls = _CLASSES.get(dtype)
        count = storage.nbytes // (self.entry.itemsize if cls else 1)
        kind = Global("torch", f"{cls}Storage") if cls else _UNTYPED
        pid = Persistent(("storage", kind, str(self.storage), "cpu", count))
        args: tuple[Any, ...] = (pid, self.offset, self.shape, self.strides, False, _HOOKS)
        if cls:
            return Call(Global("torch._utils", "_rebuild_tensor_v2"), args)
        args = (*args, Global("torch", SPELLED[dtype]))
        return Call(Global("torch._utils", "_rebuild_tensor_v3"), args)


def plan(contents: Contents) -> dict[str, Blueprint]:
    """The file by name: a dict from names to tensors, and texts."""
    blueprint = Blueprint()
    storages, views = storages_of(contents.entries)
    value = {view.entry.name: view.node(storages) for view in views}
    put_archive(blueprint, "model", value | contents.texts, storages)
    return {"model.pt": blueprint}


def put_archive(
    blueprint: Blueprint, prefix: str, value: Any, storages: Sequence[Entry] = ()
) -> None:
    """One file of ``torch.save``, behind what the blueprint has already."""
    archive = Archive(blueprint)
    archive.put(f"{prefix}/data.pkl", pickled(value))
    archive.put(f"{prefix}/.format_version", b"1")
    archive.put(f"{prefix}/.storage_alignment", str(ALIGNMENT).encode())
    archive.put(f"{prefix}/byteorder", b"little")
    for number, storage in enumerate(storages):
        archive.put(f"{prefix}/data/{number}", storage)
    archive.put(f"{prefix}/version", b"3\n")
    archive.close()


def storages_of(entries: Iterable[Entry]) -> tuple[list[Entry], list[View]]:
    """The storages that tensors need, and the tensors as views of them, in order."""
    entries = list(entries)
    shared = _shared(entries)
    numbers: dict[Entry, int] = {}
    views = []
    for entry in entries:
        storage = shared.get(entry, entry)
        number = numbers.setdefault(storage, len(numbers))
        shape = entry.stored
        if isinstance(storage, StreamEntry) and isinstance(entry, LocalEntry):
            offset = (entry.tensor.offset - storage.at) // entry.itemsize
            strides = entry.tensor.strides or c_order(shape)
            views.append(View(entry, number, offset, shape, strides))
        else:
            views.append(View(entry, number, 0, shape, c_order(shape)))
    return list(numbers), views


def _shared(entries: Iterable[Entry]) -> dict[Entry, StreamEntry]:
    """The run of elements that each tensor shares with others, or with itself."""
    groups: dict[object, list[tuple[int, int, LocalEntry]]] = {}
    for entry in entries:
        if isinstance(entry, LocalEntry) and (extent := _extent(entry)) is not None:
            tensor = entry.tensor
            kind = (tensor.encoding, tensor.dtype, tensor.big_endian, extent[0] % entry.itemsize)
            groups.setdefault((entry.holding, tensor.payload, kind), []).append((*extent, entry))
    found: dict[Entry, StreamEntry] = {}
    for group in groups.values():
        for start, stop, members in _runs(group):
            if len(members) > 1 or stop - start < members[0].nbytes:
                found |= dict.fromkeys(members, StreamEntry(members[0], start, stop))
    return found


def _extent(entry: LocalEntry) -> tuple[int, int] | None:
    """The bytes of its stream that a tensor reaches; ``None`` where torch could not view them."""
    tensor = entry.tensor
    if tensor.payload is None or not entry.nbytes or entry.stored != entry.shape:
        return None
    strides = tensor.strides or c_order(entry.shape)
    if min(strides, default=0) < 0:
        return None
    last = sum((dim - 1) * stride for dim, stride in zip(entry.shape, strides, strict=True))
    return tensor.offset, tensor.offset + (last + 1) * entry.itemsize


def _runs(
    group: list[tuple[int, int, LocalEntry]],
) -> Iterator[tuple[int, int, list[LocalEntry]]]:
    """Tensors of a payload, those that overlap joined."""
    members: list[LocalEntry] = []
    low = high = 0
    for start, stop, entry in sorted(group, key=lambda one: one[:2]):
        if members and start >= high:
            yield low, high, members
            members = []
        low = start if not members else low
        high = max(high, stop) if members else stop
        members.append(entry)
    if members:
        yield low, high, members
