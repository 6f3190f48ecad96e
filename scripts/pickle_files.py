"""Files as torch.save and paddle.save write them, without either: for ``make_checkpoint``.

A tensor is given as ``(name, dtype, shape, nbytes, blocks)``, where ``blocks`` gives its bytes when
they are wanted, so that memory stays small whatever the size.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

STORAGES = {"F32": "Float", "BF16": "BFloat16", "F16": "Half", "I64": "Long"}
ARRAYS = {"F32": b"f4", "BF16": b"u2", "F16": b"f2", "I64": b"i8"}
ITEMSIZE = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}
ALIGNMENT = 64
WIDE = 0xFFFFFFFF


class Tensor(NamedTuple):
    """What is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    blocks: Callable[[], Iterator[Any]]


def write_torch(path: Path, tensors: list[Tensor]) -> None:
    """A zip archive: ``P/data.pkl``, ``P/byteorder``, ``P/data/N`` and ``P/version`` (torch 2.13).

    Every member starts at a multiple of 64, by padding in its local header, and its sizes and
    CRC32 follow it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as out:
        archive = _Archive(out, path.stem)
        archive.add("data.pkl", [_torch_pickle(tensors)])
        archive.add("byteorder", [b"little"])
        for number, tensor in enumerate(tensors):
            archive.add(f"data/{number}", tensor.blocks())
        archive.add("version", [b"3\n"])
        archive.finish()


def write_paddle(path: Path, tensors: list[Tensor]) -> None:
    """One pickle of protocol 4, the arrays inside it (Paddle 3.3)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as out:
        out.write(b"\x80\x04}(")
        for tensor in tensors:
            out.write(
                _text(tensor.name) + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
            )
            out.write(b"K\x00\x85C\x01b\x87R(K\x01" + _shape(tensor.shape))
            out.write(
                b"cnumpy\ndtype\n" + _text(ARRAYS[tensor.dtype].decode()) + b"\x89\x88\x87R(K\x03"
            )
            out.write(_text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
            wide = tensor.nbytes > WIDE
            out.write(
                struct.pack("<cQ" if wide else "<cI", b"\x8e" if wide else b"B", tensor.nbytes)
            )
            for block in tensor.blocks():
                out.write(block)
            out.write(b"tb")
        out.write(_text("StructuredToParameterName@@") + b"}u.")


def _torch_pickle(tensors: list[Tensor]) -> bytes:
    parts = [b"\x80\x02}("]
    for number, (name, dtype, shape, nbytes, _) in enumerate(tensors):
        parts += [
            _text(name),
            b"ctorch._utils\n_rebuild_tensor_v2\n((",
            _text("storage"),
            f"ctorch\n{STORAGES[dtype]}Storage\n".encode(),
            _text(str(number)) + _text("cpu") + _int(nbytes // ITEMSIZE[dtype]) + b"tQK\x00",
            _shape(shape) + _shape(_strides(shape)),
            b"\x89ccollections\nOrderedDict\n)RtR",
        ]
    return b"".join([*parts, b"u."])


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _int(number: int) -> bytes:
    if number < 2**31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


def _shape(shape: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, shape)) + b"t"


class _Archive:
    """A zip archive being written, every member stored."""

    def __init__(self, out: BinaryIO, prefix: str) -> None:
        self.out, self.prefix = out, prefix
        self.directory: list[bytes] = []

    def add(self, name: str, blocks: Iterable[Any]) -> None:
        full, header = f"{self.prefix}/{name}".encode(), self.out.tell()
        padding = -(header + 30 + len(full) + 4) % ALIGNMENT
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        self.out.write(
            struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(full), len(extra))
        )
        self.out.write(full + extra)
        crc = size = 0
        for block in blocks:
            crc, size = zlib.crc32(block, crc), size + len(block)
            self.out.write(block)
        wide = size >= WIDE or header >= WIDE
        self.out.write(struct.pack("<4sI2Q" if wide else "<4s3I", b"PK\7\x08", crc, size, size))
        sizes = (WIDE, WIDE, WIDE) if wide else (size, size, header)
        more = struct.pack("<2H3Q", 1, 24, size, size, header) if wide else b""
        fixed = (b"PK\1\2", 0, 0, 0x808, 0, 0, 0, crc, *sizes[:2], len(full), len(more), 0, 0, 0, 0)
        self.directory.append(struct.pack("<4s6H3I5H2I", *fixed, sizes[2]) + full + more)

    def finish(self) -> None:
        start, count = self.out.tell(), len(self.directory)
        data = b"".join(self.directory)
        end = start + len(data)
        self.out.write(data)
        wide = (b"PK\6\6", 44, 0, 45, 0, 0, count, count, len(data), start)
        self.out.write(
            struct.pack("<4sQ2H2I4Q", *wide) + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        )
        narrow = (min(count, 0xFFFF),) * 2 + (min(len(data), WIDE), min(start, WIDE))
        self.out.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *narrow, 0))
