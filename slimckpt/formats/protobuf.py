"""The little of protobuf that files of records need: numbers, texts, keys."""

from __future__ import annotations

from collections.abc import Iterator


class Broken(Exception):
    """A rule of the format is broken at index ``at`` of the bytes at hand."""

    def __init__(self, at: int, why: str) -> None:
        self.at = at
        self.why = why


def varint(data: bytes, i: int) -> tuple[int, int]:
    """The varint at ``data[i]`` and the index behind it; below 2^63."""
    value = data[i]
    if value < 0x80:
        return value, i + 1
    value &= 0x7F
    for k in range(1, 9):
        byte = data[i + k]
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            return value, i + k + 1
    raise Broken(i, "expected a number below 2^63")


def is_text(raw: bytes, cut: bool = False) -> bool:
    """Whether bytes are UTF-8; the last character may be cut off when ``cut``."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return cut and error.start >= len(raw) - 3 and error.reason == "unexpected end of data"
    return True


def keys_of(body: bytes) -> set[int]:
    """The keys of the fields of a whole message."""
    found, i = set(), 0
    try:
        while i < len(body):
            key = body[i]
            found.add(key)
            i += 1
            if key & 7 == 0:
                # Not `varint`: a negative number takes all 64 bits.
                while body[i] >= 0x80:
                    i += 1
                i += 1
            elif key & 7 == 2:
                length, i = varint(body, i)
                i += length
            else:
                raise Broken(i, "neither a number nor bytes")
    except IndexError:
        i = -1
    if i != len(body):
        raise Broken(len(body), "a field does not end where its message does")
    return found


def fields_of(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a whole message, by number; numbers are signed 64-bit ones."""
    i = 0
    try:
        while i < len(body):
            key, i = varint(body, i)
            if key & 7 == 0:
                value, i = _signed(body, i)
                yield key >> 3, value
            elif key & 7 == 2:
                length, i = varint(body, i)
                yield key >> 3, body[i : i + length]
                i += length
            else:
                raise Broken(i, "neither a number nor bytes")
    except IndexError:
        i = -1
    if i != len(body):
        raise Broken(len(body), "a field does not end where its message does")


def numbers_in(body: bytes) -> list[int]:
    """All numbers of a message that consists of the repeated field 1, packed or not."""
    found = []
    for number, value in fields_of(body):
        if number == 1 and isinstance(value, int):
            found.append(value)
        elif number == 1 and isinstance(value, bytes):
            i = 0
            while i < len(value):
                one, i = _signed(value, i)
                found.append(one)
    return found


def _signed(data: bytes, i: int) -> tuple[int, int]:
    """The varint at ``data[i]``, of up to 64 bits, as a signed number."""
    value = 0
    for k in range(10):
        byte = data[i + k]
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            value &= 2**64 - 1
            return value - 2**64 * (value >> 63), i + k + 1
    raise Broken(i, "expected a number of at most 64 bits")
