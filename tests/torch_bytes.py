"""Files of torch and Paddle as bytes, made without either: pickles full of symbols, and torch's
way of writing zip archives."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True)
class Symbol:
    """A global."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """What a call of a symbol makes, by REDUCE or (``new``) by NEWOBJ or NEWOBJ_EX."""

    what: Any
    args: Any = ()
    new: bool = False
    kwargs: Any = None
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: dict[Any, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Storage:
    """A storage of torch: its key, class and bytes."""

    key: str
    cls: str
    body: bytes
    itemsize: int
    location: str = "cpu"
    view: Any = ()

    @property
    def id(self) -> tuple[Any, ...]:
        module = "torch.storage" if self.cls == "UntypedStorage" else "torch"
        count = len(self.body) // self.itemsize
        return ("storage", Symbol(module, self.cls), self.key, self.location, count, *self.view)


class Pickler(pickle._Pickler):  # type: ignore[misc,name-defined]
    """Writes symbols as globals, and what they make as calls."""

    storages: dict[str, Storage]

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Storage):
            self.storages[obj.key] = obj
            return obj.id
        return None

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, (Symbol, Made)) and id(obj) in self.memo:
            self.write(self.get(self.memo[id(obj)][0]))
        elif isinstance(obj, Symbol):
            if self.proto >= 4:
                self.save(obj.module)
                self.save(obj.name)
                self.write(pickle.STACK_GLOBAL)
            else:
                self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            self.memoize(obj)
        elif isinstance(obj, Made):
            self.save(obj.what)
            self.save(obj.args)
            if obj.kwargs is not None:
                self.save(obj.kwargs)
                self.write(pickle.NEWOBJ_EX)
            else:
                self.write(pickle.NEWOBJ if obj.new else pickle.REDUCE)
            self.memoize(obj)
            self._batch_appends(iter(obj.items))
            self._batch_setitems(iter(obj.pairs.items()))
            if obj.state is not None:
                self.save(obj.state)
                self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)


def pickled(obj: Any, protocol: int = 2) -> tuple[bytes, dict[str, Storage]]:
    """A pickle, and the storages that it refers to, by key."""
    memory = io.BytesIO()
    pickler = Pickler(memory, protocol)
    pickler.storages = {}
    pickler.dump(obj)
    return memory.getvalue(), pickler.storages


def torch_zip(
    members: Mapping[str, bytes],
    deflated: Iterable[str] = (),
    *,
    crc: bool = True,
    alignment: int = 64,
) -> bytes:
    """An archive as torch writes it: sizes behind the members, padded headers, two ends."""
    out, central = bytearray(), bytearray()
    for name, body in members.items():
        raw, method = name.encode(), 8 if name in deflated else 0
        stream = zlib.compressobj(9, zlib.DEFLATED, -15)
        data = stream.compress(body) + stream.flush() if method else body
        sum_ = zlib.crc32(body) if crc else 0
        flags, header = 0x0808 if body else 0x0800, len(out)
        padding = -(header + 30 + len(raw) + 4) % alignment
        out += struct.pack(
            "<4s5H3I2H", b"PK\3\4", 0, flags, method, 0, 0, 0, 0, 0, len(raw), padding + 4
        )
        out += raw + struct.pack("<2H", 0x4246, padding) + b"Z" * padding + data
        if body:
            out += struct.pack("<4s3I", b"PK\7\x08", sum_, len(data), len(body))
        central += struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, flags, method, 0, 0, sum_, len(data), len(body),
            len(raw), 0, 0, 0, 0, 0, header,
        )  # fmt: skip
        central += raw
    start, count, size = len(out), len(members), len(central)
    out += central
    end_64 = len(out)
    out += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, size, start)
    out += struct.pack("<4sIQI", b"PK\6\7", 0, end_64, 1)
    return bytes(out + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, 0))


def saved_members(
    obj: Any, prefix: str = "archive", *, protocol: int = 2, byteorder: str | None = "little"
) -> dict[str, bytes]:
    """The members of what torch.save writes of an object."""
    data, storages = pickled(obj, protocol)
    members = {"data.pkl": data, ".format_version": b"1", ".storage_alignment": b"64"}
    if byteorder:
        members["byteorder"] = byteorder.encode()
    members |= {f"data/{key}": storage.body for key, storage in storages.items()}
    members |= {"version": b"3\n", ".data/serialization_id": b"0" * 40}
    return {f"{prefix}/{name}": body for name, body in members.items()}


def saved(obj: Any, **options: Any) -> bytes:
    """What torch.save writes of an object."""
    return torch_zip(saved_members(obj, **options))


def saved_before_1_6(obj: Any) -> bytes:
    """What torch.save wrote before 1.6."""
    system = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    data, storages = pickled(obj)
    keys = sorted(storages)
    head = b"".join(pickled(part)[0] for part in (MAGIC, 1001, system))
    bodies = b"".join(
        struct.pack("<q", len(storages[key].body) // storages[key].itemsize) + storages[key].body
        for key in keys
    )
    return head + data + pickled(keys)[0] + bodies


ORDERED = Symbol("collections", "OrderedDict")


def torch_utils(name: str, *args: Any) -> Made:
    """A call of one of the functions of ``torch._utils``."""
    return Made(Symbol("torch._utils", name), args)


def rebuilt(
    storage: Any, shape: Iterable[int], strides: Iterable[int], offset: int = 0, *more: Any
) -> Made:
    """A tensor as torch writes it (``_rebuild_tensor_v2``)."""
    hooks = Made(ORDERED)
    args = (storage, offset, tuple(shape), tuple(strides), False, hooks, *more)
    return torch_utils("_rebuild_tensor_v2", *args)


def paddle_tensor(name: str, array: Any) -> Made:
    """A tensor in an object that is no state dict."""
    return Made(Symbol("builtins", "tuple"), ((name, array),))
