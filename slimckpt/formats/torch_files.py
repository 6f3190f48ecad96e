"""torch.save: zip archives, `.distcp` files (archives one after another) and the format before.

As torch 2.13 writes them (``torch/serialization.py``, ``caffe2/serialize``): ``P/data.pkl`` is the
object, ``P/data/N`` the storage with key N, ``P/byteorder`` says "little" or "big" (older files
have none and are little). The format before 1.6 is five pickles, then for each key of the fifth
the number of elements (int64) and the raw bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from slimckpt.errors import DamagedFileError, NotUnderstoodError
from slimckpt.formats.base import Format
from slimckpt.formats.collector import uncollected
from slimckpt.formats.located import Home, Inside, Located
from slimckpt.formats.objects import ITEM
from slimckpt.formats.pickles import Dict, PickleReader, Stored
from slimckpt.formats.torch_tensors import Storage, storage_of
from slimckpt.formats.zips import (
    DEFLATED,
    STORED,
    Member,
    archive_start,
    check_members,
    decoded_head,
    first_name,
    names_inside,
    read_members,
)
from slimckpt.model import RAW, TableBuilder
from slimckpt.sources.positioned import ByteSource, Section

_PICKLE = "data.pkl"
_MAX_INFLATED = 8 * 1024 * 1024
_FEW_NODES = 1 << 16
_MAX_ARCHIVES = 1 << 20
_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LEGACY = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?" + re.escape(_MAGIC), re.DOTALL)
"""The first of the five pickles: torch's magic number, in a frame from protocol 4 on."""
LONGEST_LEGACY = 2 + 9 + len(_MAGIC)


def is_legacy(head: bytes) -> bool:
    """Whether a file starts as torch wrote them before 1.6; also one that is cut so short that only
    a part of the magic number is there."""
    return bool(_LEGACY.match(head)) or (b"\x80\x02" + _MAGIC).startswith(head[: 2 + len(_MAGIC)])


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

    def found_inside(self, source: ByteSource) -> bool:
        return any(name.endswith(f"/{_PICKLE}") for name in names_inside(source))

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        archives = archives_of(source)
        facts: dict[str, Any] = {}
        with uncollected():
            for number, archive in enumerate(archives):
                start = [(number, ITEM)] if len(archives) > 1 else []
                facts = _locate_archive(archive, table, start)
        if len(archives) > 1:
            facts["items"] = len(archives)
        return facts

    def check(self, source: ByteSource) -> str | None:
        for archive in archives_of(source):
            wrong = check_members(archive, read_members(archive))
            if wrong:
                return wrong
        return None


def archives_of(source: ByteSource) -> list[Section]:
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


class Archive(NamedTuple):
    """One archive of torch: its pickle, and its storages by key.

    Offsets of members are relative to ``source``. ``members`` are all others, by their names
    without the archive's own prefix.
    """

    source: Section
    pickle: Member
    big_endian: bool
    storages: dict[str, Member]
    members: dict[str, Member]

    def opened(self) -> tuple[ByteSource, int, int, int | None]:
        """What a :class:`PickleReader` of its pickle takes."""
        pickle = self.pickle
        if pickle.method == STORED:
            return self.source, pickle.offset, pickle.offset + pickle.nbytes, None
        # What few bytes decode to may be many objects.
        most = _FEW_NODES + 2 * pickle.stored_nbytes
        return _inflated(self.source, pickle), 0, pickle.nbytes, most


def read_archive(source: Section) -> Archive:
    """The directory of an archive.

    Raises
    ------
    DamagedFileError
        It is none that torch could have written.
    """
    members = {member.name: member for member in read_members(source)}
    pickles = [n for n in members if n.endswith(f"/{_PICKLE}") and n.count("/") == 1]
    if len(pickles) != 1:
        raise DamagedFileError(
            f"{source.label}: expected one data.pkl in torch's archive, found {len(pickles)}"
        )
    prefix = pickles[0].removesuffix(_PICKLE)
    pickle = members.pop(pickles[0])
    inside = {name.removeprefix(prefix): member for name, member in members.items()}
    order = _small(source, inside.get("byteorder")).strip() or b"little"
    if order not in (b"little", b"big"):
        raise DamagedFileError(
            f"{source.label}: its byteorder is {order!r}, expected 'little' or 'big'"
        )
    storages = {
        name.removeprefix("data/"): inside.pop(name)
        for name in list(inside)
        if name.startswith("data/")
    }
    return Archive(source, pickle, order == b"big", storages, inside)


def _locate_archive(
    source: Section, table: TableBuilder, start: list[tuple[Any, str]]
) -> dict[str, Any]:
    archive = read_archive(source)
    pickle = archive.pickle
    homes = {key: _home(source, member, table) for key, member in archive.storages.items()}
    reader = PickleReader(*archive.opened())
    inside: Callable[[Stored], Home]
    if pickle.method == STORED:
        inside = Inside(table, source, source.start)
    else:
        whole: list[Home] = []

        def inside(stored: Stored) -> Home:
            if not whole:
                whole.append(_home(source, pickle, table))
            return whole[0]._replace(offset=stored.offset)

    root = reader.read()
    if reader.at != reader.end:
        raise DamagedFileError(
            f"{source.label}: {reader.end - reader.at} bytes follow the pickle in data.pkl"
        )
    located = Located(
        table, reader, _by_key(source, homes), inside, archived(inside), archive.big_endian
    )
    located.add(root, start)
    facts: dict[str, Any] = {"byteorder": "big" if archive.big_endian else "little"}
    version = _small(source, archive.members.get("version"))
    if version:
        facts["version"] = version.strip().decode("ascii", "replace")[:16]
    if located.dtensors:
        facts["dtensors"] = located.dtensors
    return facts


def _by_key(source: ByteSource, homes: dict[str, Home]) -> Callable[[Storage], Home]:
    """Homes of storages by their keys, if they have as many bytes as they should."""

    def storages(storage: Storage) -> Home:
        home = homes.get(storage.key)
        if home is None:
            raise DamagedFileError(
                f"{source.label}: storage {storage.key[:64]!a} is not in the file; it looks damaged"
            )
        if home.nbytes < storage.nbytes:
            raise DamagedFileError(
                f"{source.label}: storage {storage.key[:64]!a} has {home.nbytes} bytes, expected"
                f" {storage.nbytes}; it looks damaged"
            )
        return home

    return storages


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


def _inflated(source: ByteSource, member: Member) -> _Bytes:
    if member.method != DEFLATED or member.nbytes > _MAX_INFLATED:
        raise NotUnderstoodError(
            f"{source.label}: its pickle is compressed by method {member.method} to"
            f" {member.nbytes} bytes; expected method 8 and at most {_MAX_INFLATED}; it is kept as"
            " a whole"
        )
    found = decoded_head(source, member, member.nbytes)
    if len(found) != member.nbytes:
        raise DamagedFileError(f"{source.label}: its deflated pickle was cut")
    return _Bytes(found, source.label)


class TorchLegacy(Format):
    """What torch.save wrote before 1.6, and still does on request."""

    name = "torch-legacy"

    def matches(self, head: bytes, size: int) -> bool:
        return bool(_LEGACY.match(head))

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        with uncollected():
            found = read_legacy(source)
            inside = Inside(table, source)
            homes = {key: inside.home(*span) for key, span in found.spans.items()}
            storages = _by_key(source, homes)
            located = Located(table, found.reader, storages, inside, archived(inside))
            located.add(found.root)
        return {"dtensors": located.dtensors} if located.dtensors else {}


class Legacy(NamedTuple):
    """An object, and where its storages lie, in the format before 1.6.

    The object's pickle begins at ``start``.
    """

    root: Any
    reader: PickleReader
    start: int
    spans: dict[str, tuple[int, int]]


def read_legacy(source: ByteSource) -> Legacy:
    """Storages are always little-endian (``torch/csrc/generic/StorageMethods``), whatever
    ``sys_info`` says of the machine."""

    def damaged(why: str) -> NoReturn:
        raise DamagedFileError(f"{source.label}: {why}; it looks damaged")

    reader = PickleReader(source, 0, source.size)
    _, protocol, system = [reader.read() for _ in range(3)]
    start = reader.at
    root, keys = reader.read(), reader.read()
    if protocol != 1001 or type(keys) is not list or type(system) is not Dict:
        damaged("not as torch wrote it before 1.6")
    storages = {s.key: s for node in reader.persistent if (s := storage_of(node))}
    spans: dict[str, tuple[int, int]] = {}
    at = reader.at
    for key in keys:
        storage = storages.get(key) if type(key) is str else None
        if storage is None or key in spans:
            damaged(f"storage {key[:64] if type(key) is str else type(key)!a} is of no tensor")
        (count,) = struct.unpack("<q", source.read(at, 8))
        if count != storage.elements:
            damaged(f"storage {key[:64]!a} has {count} elements, expected {storage.elements}")
        at += 8
        if storage.nbytes > source.size - at:
            damaged(
                f"{source.size - at} bytes are left where storage {key[:64]!a} has {storage.nbytes}"
            )
        spans[key] = (at, storage.nbytes)
        at += storage.nbytes
    if at != source.size:
        damaged(f"expected {at} bytes, found {source.size}")
    return Legacy(root, reader, start, spans)


def archived(inside: Callable[[Stored], Home]) -> Callable[[Stored], tuple[Storage, Home] | None]:
    """What finds the storage in bytes that torch wrote into a plain pickle: a whole file, in the
    format before 1.6, of one storage. Nothing is found in bytes that are encoded."""
    found: dict[int, tuple[Storage, Home] | None] = {}

    def find(stored: Stored) -> tuple[Storage, Home] | None:
        if stored.offset not in found:
            found[stored.offset] = _only_storage(inside, stored)
        return found[stored.offset]

    return find


def _only_storage(inside: Callable[[Stored], Home], stored: Stored) -> tuple[Storage, Home] | None:
    if not isinstance(inside, Inside):
        return None
    section = Section(inside.source, stored.offset, stored.nbytes)
    if not _LEGACY.match(section.read(0, min(LONGEST_LEGACY, section.size))):
        return None
    found = read_legacy(section)
    storage = storage_of(found.root)
    if storage is None or storage.key not in found.spans:
        return None
    at, nbytes = found.spans[storage.key]
    return storage, inside.home(stored.offset + at, nbytes)
