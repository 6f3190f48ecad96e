"""MindSpore ``.ckpt``: a run of protobuf records, one for each tensor or piece of one.

As MindSpore 2.10 writes it (``serialization.py``, ``checkpoint.proto``)::

    file    0A <length> record, again and again        [ "crc_num" <10 bytes, big endian> ]
    record  0A <length> name   then   12 <length> tensor   or   1A <length> map
    tensor  08 <dim>, for each dimension   12 <length> type   1A <length> bytes
    map     0A <length> tensor, again and again

Fields come in the order of their numbers; anything else is damage. Two other files of MindSpore
have the same suffix, the parallel strategy and the communication groups; they are recognised so
that they are not taken for damaged checkpoints.
"""

from __future__ import annotations

import math
import re
import zlib
from typing import Any, NoReturn

from slimckpt.dtypes import BY_MINDSPORE, OPAQUE
from slimckpt.errors import DamagedFileError, NotUnderstoodError, RefusedFileError
from slimckpt.formats.base import Format
from slimckpt.formats.mindspore_parallel import is_group_map, is_strategy
from slimckpt.formats.protobuf import Broken, is_text, varint
from slimckpt.model import TableBuilder
from slimckpt.sources.positioned import ByteSource

_CIPHERS = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
_HEAD = 4096
_TRAILER = b"crc_num"
_TRAILER_SIZE = len(_TRAILER) + 10
_BLOCK = 4 * 1024 * 1024
_MAX_NAME = 1024 * 1024
_MAX_TYPE = 256
_MAX_DIMS = 1024
_MAX_UNKNOWN_TYPES = 1000
_STEP = 64 * 1024
"""Bytes asked for at once, where records are short."""
_FAR = 16 * 1024
"""Where the next record is further away, only its head is asked for."""
_BITS = {name.encode(): (row.name, row.bits // 8) for name, row in BY_MINDSPORE.items()}
_MAP = OPAQUE + "MapParameter"

_VARINT = rb"[\x80-\xff]{0,8}[\x00-\x7f]"
_START = re.compile(rb"\x0a(%b)\x0a[\x00-\x7f]" % _VARINT)
"""A record up to its name of less than 128 bytes."""
_HEADER = re.compile(
    rb"\x12%b(?:\x08%b)*\x12(?:%b)\x1a%b"
    % (_VARINT, _VARINT, b"|".join(re.escape(bytes([len(t)]) + t) for t in _BITS), _VARINT)
)
"""A tensor of a known type, up to its bytes."""


class MindSpore(Format):
    """MindSpore's own checkpoint format."""

    name = "mindspore"

    def matches(self, head: bytes, size: int) -> bool:
        return (
            int.from_bytes(head[:4], "little") in _CIPHERS
            or _starts_checkpoint(head)
            or is_strategy(head, size)
            or is_group_map(head, size)
        )

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        head = source.read(0, min(_HEAD, source.size))
        cipher = _CIPHERS.get(int.from_bytes(head[:4], "little"))
        if cipher:
            raise RefusedFileError(
                f"{source.label}: MindSpore encrypted it with {cipher}, so its tensors cannot be"
                " found; to slim it, load it with its key and save it without enc_key"
            )
        if not _starts_checkpoint(head):
            if is_strategy(head, source.size):
                raise NotUnderstoodError(
                    f"{source.label} is a MindSpore parallel strategy file, not a checkpoint"
                )
            if is_group_map(head, source.size):
                raise NotUnderstoodError(
                    f"{source.label} is a MindSpore communication group file, not a checkpoint"
                )
        end, crc = _body(source)
        _Walk(source, table, end).run()
        return {} if crc is None else {"crc32": crc}

    def check(self, source: ByteSource) -> str | None:
        end, stated = _body(source)
        if stated is None:
            return None
        found = 0
        for at in range(0, end, _BLOCK):
            found = zlib.crc32(source.read(at, min(_BLOCK, end - at)), found)
        if found == stated:
            return None
        return (
            f"{source.label}: its trailer says CRC32 {stated:#010x}, but its bytes have"
            f" {found:#010x}; the file was damaged before it was slimmed, or its trailer was"
        )


def _body(source: ByteSource) -> tuple[int, int | None]:
    """Where the records end, and the CRC32 that the file states of them."""
    if source.size >= _TRAILER_SIZE:
        trailer = source.read(source.size - _TRAILER_SIZE, _TRAILER_SIZE)
        if trailer.startswith(_TRAILER):
            return source.size - _TRAILER_SIZE, int.from_bytes(trailer[len(_TRAILER) :], "big")
    return source.size, None


class _Walk:
    """One pass over the records of a file.

    A record is parsed inside a window; an ``IndexError`` says that the window ends first.
    Indexes are relative to the window, and a ``stop`` may lie behind its end.
    """

    def __init__(self, source: ByteSource, table: TableBuilder, end: int) -> None:
        self.source = source
        self.table = table
        self.end = end
        self.tag = b""
        self.dims: tuple[int, ...] = ()
        self.type = b""
        self.expected: int | None = None
        self.found = 0
        self.spans: list[tuple[int, int]] | None = None
        """The pieces so far of a tensor that may go on; ``None`` when there is none."""
        self.unknown: set[bytes] = set()
        self.names: list[str] = []
        """Of ordinary tensors that are not in the table yet, as the lists that follow."""
        self.dtypes: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.places: list[tuple[int, int]] = []
        self.headers: dict[bytes, tuple[str, tuple[int, ...], int] | None] = {}
        self.lengths: dict[bytes, int] = {}

    def run(self) -> None:
        source, end = self.source, self.end
        at = base = record = 0
        wanted, window = _STEP, b""
        while at < end:
            try:
                i, count = self._ordinary(window, at - base, base)
                if not count:
                    i, count = self._record(window, i, base, record), 1
                at, record = base + i, record + count
            except IndexError:
                if base == at and window:
                    if base + len(window) >= end:
                        self._damaged(at, "the record has no end; the file looks truncated")
                    wanted *= 4
                else:
                    wanted = _STEP if at - base <= len(window) + _FAR else _HEAD
                base = at
                window = source.read(base, min(wanted, end - base))
            except Broken as broken:
                self._damaged(base + broken.at, broken.why)
        self._finish()
        self._flush()

    def _ordinary(self, window: bytes, i: int, base: int) -> tuple[int, int]:
        """Take in whole tensors of known types in a row, fast, up to where something is unusual.

        Returns
        -------
        index behind the last, count
        """
        count, end = 0, self.end - base
        headers, lengths = self.headers, self.lengths
        if self.spans is not None:
            return i, count
        while record := _START.match(window, i):
            name = record.end()
            name_end = name + window[name - 1]
            header = _HEADER.match(window, name_end)
            if header is None:
                break
            text, length = header.group(), record.group(1)
            if text not in headers:
                headers[text] = _whole_tensor(text)
            if length not in lengths:
                lengths[length] = varint(length, 0)[0]
            whole = headers[text]
            if whole is None:
                break
            dtype, shape, nbytes = whole
            at = header.end()
            if at + nbytes > end or lengths[length] != at + nbytes - record.end(1):
                break
            try:
                self.names.append(window[name:name_end].decode())
            except UnicodeDecodeError:
                break
            self.dtypes.append(dtype)
            self.shapes.append(shape)
            self.places.append((base + at, nbytes))
            i, count = at + nbytes, count + 1
        return i, count

    def _flush(self) -> None:
        """Put the ordinary tensors so far into the table."""
        lists = (self.names, self.dtypes, self.shapes, self.places)
        self.table.plain(*lists)
        for some in lists:
            some.clear()

    def _record(self, window: bytes, i: int, base: int, record: int) -> int:
        """Take one record in; returns the index behind it."""
        if window[i] != 0x0A:
            raise Broken(i, f"expected a record (0x0a), found {window[i]:#04x}")
        start = i
        length, i = varint(window, i + 1)
        stop = i + length
        if window[i] != 0x0A:
            raise Broken(i, f"expected a name (0x0a), found {window[i]:#04x}")
        length, i = varint(window, i + 1)
        tag_end = i + length
        if tag_end >= stop or length > _MAX_NAME:
            raise Broken(i, f"a name of {length} bytes does not fit in its record")
        kind = window[tag_end]
        tag = window[i:tag_end]
        if base + stop > self.end:
            raise Broken(
                start,
                f"tensor {_show(tag)} ends at byte {base + stop}, but the records of the file end"
                f" at {self.end}; it looks truncated",
            )
        length, i = varint(window, tag_end + 1)
        if i + length != stop:
            raise Broken(tag_end, f"tensor {_show(tag)} does not fill its record")
        if kind == 0x1A:
            self._finish()
            self._map(tag, base + i, base + stop, record)
            return stop
        if kind != 0x12:
            raise Broken(tag_end, f"expected a tensor (0x12 or 0x1a), found {kind:#04x}")
        dims, kind_name, i, nbytes = _tensor_header(window, i, stop)
        self._piece(tag, dims, kind_name, base + i, nbytes)
        return stop

    def _piece(
        self, tag: bytes, dims: tuple[int, ...], kind: bytes, offset: int, nbytes: int
    ) -> None:
        """A tensor, or the next piece of one that was cut."""
        if self.spans is not None:
            if tag == self.tag and dims == self.dims and kind == self.type:
                self.found += nbytes
                if nbytes:
                    self.spans.append((offset, nbytes))
                if self.found == self.expected:
                    self._finish()
                elif self.expected is not None and self.found > self.expected:
                    self._incomplete()
                return
            self._finish()
        self.expected = _expected(kind, dims, nbytes)
        if nbytes == self.expected:
            name, _ = _BITS[kind]
            self._add(tag, name, dims, [(offset, nbytes)] if nbytes else [], nbytes)
            return
        if self.expected is None:
            self.unknown.add(kind)
            if len(self.unknown) > _MAX_UNKNOWN_TYPES:
                self._damaged(offset, f"more than {_MAX_UNKNOWN_TYPES} unknown tensor types")
        self.tag, self.dims, self.type = tag, dims, kind
        self.found, self.spans = nbytes, [(offset, nbytes)] if nbytes else []
        if self.expected is not None and nbytes > self.expected:
            self._incomplete()

    def _finish(self) -> None:
        """No further piece comes."""
        if self.spans is None:
            return
        if self.expected is None:
            kind = OPAQUE + self._text(self.type)
        elif self.found == self.expected:
            kind = _BITS[self.type][0]
        else:
            self._incomplete()
        self._add(self.tag, kind, self.dims, self.spans, self.found)
        self.spans = None

    def _incomplete(self) -> NoReturn:
        raise DamagedFileError(
            f"{self.source.label}: tensor {_show(self.tag)}: {self._text(self.type)}"
            f" {_show_dims(self.dims)} takes {self.expected} bytes, found {self.found}"
        )

    def _add(
        self,
        tag: bytes,
        dtype: str,
        dims: tuple[int, ...],
        spans: list[tuple[int, int]],
        nbytes: int,
        path: str = "",
    ) -> None:
        self._flush()
        payload = self.table.payload(spans) if spans else None
        shape = _shape(dtype, dims, nbytes)
        self.table.tensor(self._text(tag), dtype, shape, nbytes, payload=payload, path=path)

    def _map(self, tag: bytes, at: int, stop: int, record: int) -> None:
        """The tensors of a MapParameter (keys, values, status)."""
        part = 0
        while at < stop:
            window = self.source.read(at, min(_STEP, stop - at))
            try:
                if window[0] != 0x0A:
                    raise Broken(0, f"expected a tensor of a map (0x0a), found {window[0]:#04x}")
                length, i = varint(window, 1)
                if at + i + length > stop:
                    raise Broken(0, f"a tensor of map {_show(tag)} does not fit in its record")
                dims, _, i, nbytes = _tensor_header(window, i, i + length)
            except IndexError:
                self._damaged(at, f"a tensor of map {_show(tag)} does not fit in its record")
            except Broken as broken:
                self._damaged(at + broken.at, broken.why)
            spans = [(at + i, nbytes)] if nbytes else []
            path = f"{self._text(tag)}#{record}.{part}"
            self._add(tag, _MAP, dims, spans, nbytes, path)
            at += i + nbytes
            part += 1

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise DamagedFileError(
                f"{self.source.label}: {_show(raw)} is not UTF-8, as names and types must be"
            ) from None

    def _damaged(self, offset: int, why: str) -> NoReturn:
        raise DamagedFileError(f"{self.source.label}: at byte {offset}: {why}") from None


def _expected(kind: bytes, dims: tuple[int, ...], nbytes: int) -> int | None:
    """Bytes that a tensor takes in all its pieces, of which ``nbytes`` are in the first; ``None``
    for an unknown type."""
    if kind not in _BITS:
        return None
    return math.prod(() if nbytes and dims == (0,) else dims) * _BITS[kind][1]


def _shape(dtype: str, dims: tuple[int, ...], nbytes: int) -> tuple[int, ...]:
    """Older writers say [0] for the shape (), and all do for strings."""
    return () if dims == (0,) and (nbytes or dtype == "opaque:str") else dims


def _whole_tensor(header: bytes) -> tuple[str, tuple[int, ...], int] | None:
    """Dtype, shape and bytes of a tensor that starts with ``header`` (key and length included), if
    it is sound and all in one piece."""
    try:
        length, i = varint(header, 1)
        dims, kind, _, nbytes = _tensor_header(header, i, i + length)
    except Broken:
        return None
    if nbytes != _expected(kind, dims, nbytes):
        return None
    dtype, _ = _BITS[kind]
    return dtype, _shape(dtype, dims, nbytes), nbytes


def _tensor_header(data: bytes, i: int, stop: int) -> tuple[tuple[int, ...], bytes, int, int]:
    """Parse a tensor that fills ``data[i:stop]``.

    Returns
    -------
    dims, type, index of its content, bytes of its content
    """
    dims = []
    while i < stop and data[i] == 0x08:
        dim, i = varint(data, i + 1)
        dims.append(dim)
        if len(dims) > _MAX_DIMS:
            raise Broken(i, f"more than {_MAX_DIMS} dimensions")
    if i >= stop or data[i] != 0x12:
        raise Broken(i, "expected the type of a tensor (0x12)")
    length, i = varint(data, i + 1)
    kind_end = i + length
    if kind_end > stop or not 0 < length <= _MAX_TYPE:
        raise Broken(i, f"a type of {length} bytes does not fit in its tensor")
    data[kind_end - 1]  # an IndexError when the window ends first
    kind = data[i:kind_end]
    if kind_end == stop:
        return tuple(dims), kind, stop, 0
    if data[kind_end] != 0x1A:
        raise Broken(kind_end, f"expected bytes (0x1a), found {data[kind_end]:#04x}")
    length, i = varint(data, kind_end + 1)
    if i + length != stop:
        raise Broken(kind_end, f"{length} bytes of content do not fill their tensor")
    return tuple(dims), kind, i, length


def _starts_checkpoint(head: bytes) -> bool:
    """Whether ``head`` starts with a record of a checkpoint, whole or cut off in its content."""
    try:
        if head[0] != 0x0A:
            return False
        length, i = varint(head, 1)
        stop = i + length
        if head[i] != 0x0A:
            return False
        length, i = varint(head, i + 1)
        tag_end = i + length
        if tag_end >= stop or length > _MAX_NAME:
            return False
        if tag_end >= _HEAD - 64 and len(head) >= _HEAD:
            # The name alone fills the head: a newline in it speaks for a text file.
            return b"\n" not in head[i:tag_end] and is_text(head[i:tag_end], cut=True)
        kind = head[tag_end]
        length, inner = varint(head, tag_end + 1)
        if inner + length != stop or kind not in (0x12, 0x1A) or not is_text(head[i:tag_end]):
            return False
        if kind == 0x1A:
            if head[inner] != 0x0A:
                return False
            length, inner = varint(head, inner + 1)
            stop = inner + length
        _, kind_name, _, _ = _tensor_header(head, inner, stop)
        return is_text(kind_name)
    except (IndexError, Broken):
        return False


def _show(raw: bytes) -> str:
    text = raw[:200].decode("utf-8", "backslashreplace")
    return ascii(text) if len(raw) <= 200 else ascii(text) + "..."


def _show_dims(dims: tuple[int, ...]) -> str:
    return str(list(dims)) if len(dims) <= 16 else f"of {len(dims)} dimensions"
