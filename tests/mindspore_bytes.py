"""MindSpore checkpoints made by hand, byte for byte, as its protobuf messages say."""

import zlib
from collections.abc import Sequence


def varint(number: int) -> bytes:
    """A number as protobuf writes it; a negative one as 64 bits."""
    number &= 2**64 - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(key: int, body: bytes) -> bytes:
    """A field of bytes: its key, its length, its body."""
    return bytes([key]) + varint(len(body)) + body


def tensor_proto(kind: str, dims: Sequence[int], content: bytes) -> bytes:
    numbers = b"".join(b"\x08" + varint(dim) for dim in dims)
    return numbers + field(0x12, kind.encode()) + field(0x1A, content)


def record(name: str | bytes, kind: str, dims: Sequence[int], content: bytes) -> bytes:
    """One tensor, or one piece of it."""
    tag = name.encode() if isinstance(name, str) else name
    return field(0x0A, field(0x0A, tag) + field(0x12, tensor_proto(kind, dims, content)))


def map_record(name: str, parts: Sequence[tuple[str, Sequence[int], bytes]]) -> bytes:
    """A MapParameter: keys, values, status."""
    inner = b"".join(field(0x0A, tensor_proto(*part)) for part in parts)
    return field(0x0A, field(0x0A, name.encode()) + field(0x1A, inner))


def with_crc(body: bytes) -> bytes:
    """What ``crc_check=True`` appends."""
    return body + b"crc_num" + zlib.crc32(body).to_bytes(10, "big")
