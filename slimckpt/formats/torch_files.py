"""torch.save: zip archives, `.distcp` files (archives one after another) and the format before.

As torch 2.13 writes them (``torch/serialization.py``, ``caffe2/serialize``): ``P/data.pkl`` is the
object, ``P/data/N`` the storage with key N, ``P/byteorder`` says "little" or "big" (older files
have none and are little). The format before 1.6 is five pickles, then for each key of the fifth
the number of elements (int64) and the raw bytes.
"""

from __future__ import annotations

import struct
from typing import Any

from slimckpt.errors import DamagedFileError
from slimckpt.formats.base import Format
from slimckpt.formats.located import Home, Located
from slimckpt.formats.objects import walk
from slimckpt.formats.pickles import Dict, Stored, read_pickle
from slimckpt.formats.torch_tensors import Storage, storage_of
from slimckpt.formats.zips import (
    DEFLATED,
    STORED,
    Member,
    archive_start,
    check_members,
    decoded_head,
    first_name,
    read_members,
)
from slimckpt.model import RAW, TableBuilder
from slimckpt.sources.positioned import ByteSource, Section

_PICKLE = "data.pkl"
_MAX_INFLATED = 256 * 1024 * 1024
_MAX_ARCHIVES = 1 << 20
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first of the five pickles: torch's magic number."""


class _Bytes:
    """A decoded member as a source."""

    def __init__(self, data: bytes, label: str) -> None:
        self.data, self.label, self.size = data, label, len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DamagedFileError(f"{self.label}: its pickle was cut")
        return self.data[offset : offset + nbytes]


class TorchZip(Format):
    """What torch.save writes, and torch.distributed.checkpoint."""

    name = "torch"

    def matches(self, head: bytes, size: int) -> bool:
        return first_name(head).endswith(
            (b"/data.pkl", b"/byteorder", b"/version", b"/.format_version")
        )

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        archives = _archives(source)
        facts: dict[str, Any] = {}
        for number, archive in enumerate(archives):
            where = (str(number), f"[{number}]") if len(archives) > 1 else ("", "")
            facts = _locate_archive(archive, table, *where)
        if len(archives) > 1:
            facts["items"] = len(archives)
        return facts

    def check(self, source: ByteSource) -> str | None:
        for archive in _archives(source):
            wrong = check_members(archive, read_members(archive))
            if wrong:
                return wrong
        return None


def _archives(source: ByteSource) -> list[Section]:
    """All archives of a file, one after another without gaps."""
    found: list[Section] = []
    end = source.size
    while end > 0:
        start = archive_start(source, end)
        found.append(Section(source, start, end - start))
        end = start
        if len(found) > _MAX_ARCHIVES:
            raise DamagedFileError(f"{source.label}: more than {_MAX_ARCHIVES} archives")
    return found[::-1]


def _locate_archive(source: Section, table: TableBuilder, name: str, path: str) -> dict[str, Any]:
    members = {member.name: member for member in read_members(source)}
    pickles = [n for n in members if n.endswith(f"/{_PICKLE}") and n.count("/") == 1]
    if len(pickles) != 1:
        raise DamagedFileError(
            f"{source.label}: expected one data.pkl in torch's archive, found {len(pickles)}"
        )
    prefix = pickles[0].removesuffix(_PICKLE)
    order = _small(source, members.get(prefix + "byteorder")) or b"little"
    homes: dict[str, Home] = {}
    for member in members.values():
        if member.name.startswith(prefix + "data/"):
            key = member.name.removeprefix(prefix + "data/")
            homes[key] = _home(source, member, table)

    def storages(storage: Storage) -> Home:
        home = homes.get(storage.key)
        if home is None:
            raise DamagedFileError(
                f"{source.label}: storage {storage.key} is not in the archive; it looks damaged"
            )
        if home.nbytes < storage.nbytes:
            raise DamagedFileError(
                f"{source.label}: storage {storage.key} has {home.nbytes} bytes, expected"
                f" {storage.nbytes}"
            )
        return home

    member = members[pickles[0]]
    arrays: dict[int, Home] = {}
    if member.method == STORED:
        stop = member.offset + member.nbytes
        root, end = read_pickle(source, member.offset, stop)

        def inside(stored: Stored) -> Home:
            if stored.offset not in arrays:
                row = table.payload([(source.start + stored.offset, stored.nbytes)])
                arrays[stored.offset] = Home(row, stored.nbytes)
            return arrays[stored.offset]

    else:
        decoded = _inflated(source, member)
        root, end = read_pickle(_Bytes(decoded, source.label), 0, len(decoded))
        stop = len(decoded)

        def inside(stored: Stored) -> Home:
            if not arrays:
                arrays[0] = _home(source, member, table)
            return arrays[0]._replace(offset=stored.offset)

    if end != stop:
        raise DamagedFileError(f"{source.label}: {stop - end} bytes follow the pickle in data.pkl")
    Located(table, source.label, storages, inside, order.strip() == b"big").add(root, name, path)
    facts: dict[str, Any] = {"byteorder": order.strip().decode("ascii", "replace")[:16]}
    version = _small(source, members.get(prefix + "version"))
    if version:
        facts["version"] = version.strip().decode("ascii", "replace")[:16]
    return facts


def _home(source: Section, member: Member, table: TableBuilder) -> Home:
    if member.method not in (STORED, DEFLATED):
        raise DamagedFileError(
            f"{source.label}: member {member.name!a} is compressed by method {member.method},"
            " expected 0 (stored) or 8 (deflated)"
        )
    if not member.stored_nbytes:
        return Home(None, 0)
    row = table.payload([(source.start + member.offset, member.stored_nbytes)])
    encoding = RAW if member.method == STORED else f"deflate:{member.nbytes}"
    return Home(row, member.nbytes, 0, encoding)


def _small(source: ByteSource, member: Member | None) -> bytes:
    return b"" if member is None else decoded_head(source, member, 64)


def _inflated(source: ByteSource, member: Member) -> bytes:
    if member.method != DEFLATED or member.nbytes > _MAX_INFLATED:
        raise DamagedFileError(
            f"{source.label}: its pickle is compressed by method {member.method} to"
            f" {member.nbytes} bytes; expected method 8 and at most {_MAX_INFLATED}"
        )
    found = decoded_head(source, member, member.nbytes)
    if len(found) != member.nbytes:
        raise DamagedFileError(f"{source.label}: its deflated pickle was cut")
    return found


class TorchLegacy(Format):
    """What torch.save wrote before 1.6, and still does on request."""

    name = "torch-legacy"

    def matches(self, head: bytes, size: int) -> bool:
        return head.startswith(_LEGACY)

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        roots, at = [], 0
        for _ in range(5):
            root, at = read_pickle(source, at, source.size)
            roots.append(root)
        _, protocol, system, root, keys = roots
        if protocol != 1001 or type(keys) is not list or type(system) is not Dict:
            raise DamagedFileError(f"{source.label}: not as torch wrote it before 1.6")
        little = {k: v for k, v in system.pairs if type(k) is str}.get("little_endian", True)
        wanted: dict[str, Storage] = {}

        def visit(name: str, path: str, node: Any) -> bool:
            storage = storage_of(node)
            if storage is not None:
                wanted.setdefault(storage.key, storage)
            return storage is not None

        walk(root, visit, source.label)
        homes: dict[str, Home] = {}
        for key in keys:
            storage = wanted.get(key) if type(key) is str else None
            if storage is None or key in homes:
                raise DamagedFileError(f"{source.label}: storage {str(key)[:64]!a} is of no tensor")
            (count,) = struct.unpack("<q", source.read(at, 8))
            itemsize = storage.nbytes // max(storage.elements, 1) or 1
            if count != storage.elements:
                raise DamagedFileError(
                    f"{source.label}: storage {key} has {count} elements, expected"
                    f" {storage.elements}"
                )
            at += 8
            nbytes = count * itemsize
            homes[key] = Home(table.payload([(at, nbytes)]) if nbytes else None, nbytes)
            at += nbytes
        if at != source.size:
            raise DamagedFileError(
                f"{source.label}: expected {at} bytes, found {source.size}; it looks"
                f" {'truncated' if at > source.size else 'longer than it should be'}"
            )

        def storages(storage: Storage) -> Home:
            home = homes.get(storage.key)
            if home is None or home.nbytes < storage.nbytes:
                raise DamagedFileError(f"{source.label}: storage {storage.key} is not in the file")
            return home

        arrays: dict[int, Home] = {}

        def inside(stored: Stored) -> Home:
            if stored.offset not in arrays:
                row = table.payload([(stored.offset, stored.nbytes)])
                arrays[stored.offset] = Home(row, stored.nbytes)
            return arrays[stored.offset]

        Located(table, source.label, storages, inside, not little).add(root)
        return {"byteorder": "little" if little else "big"}
