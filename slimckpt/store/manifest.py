"""The JSON of a slim checkpoint: root manifest, parts, entries, places."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from slimckpt.errors import NoOriginalError, StoreDamagedError, UnsupportedStoreError
from slimckpt.model import (
    SYNTHETIC,
    Condition,
    Role,
    SourceFile,
    Stat,
    StepLabel,
    decode_path,
    encode_path,
    show_path,
)

VERSION = 0
KNOWN: frozenset[str] = frozenset()
"""Features in ``requires`` that this code knows."""
ORIGINS = ("file", "link", SYNTHETIC)


@dataclass(slots=True)
class Container:
    """A container of the store. Digests are hex."""

    name: bytes
    nbytes: int = 0
    structure: str = ""
    contents_offset: int = 0
    contents_nbytes: int = 0
    contents_digest: str = ""


@dataclass(slots=True)
class Place:
    """Where a skeleton lives: ``stored``, ``fill``, ``parts`` or ``whole``."""

    kind: str
    nbytes: int
    digest: str
    container: int = 0
    offset: int = 0
    byte: int = 0
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    name: bytes = b""
    mtime: int = 0
    blocks: bytes = b""


@dataclass(slots=True)
class IndexPlace:
    """Where the index of a file lies."""

    container: int
    offset: int
    nbytes: int
    digest: str


@dataclass(slots=True)
class FileEntry:
    """One source file in a part.

    ``origin`` is ``file``; ``link`` for a further name whose step or rank is not that of the
    body's first name, which is then ``body``; or ``synthetic``. ``dropped`` are the exact paths of
    the tensors that were left out, ``dropped_nbytes`` what they took in the file.
    """

    file: SourceFile
    skeleton: Place
    index: IndexPlace | None = None
    origin: str = "file"
    body: bytes | None = None
    dropped: tuple[str, ...] = ()
    dropped_nbytes: int = 0

    @property
    def synthetic(self) -> bool:
        """Whether it was made of no file, so that there is nothing to restore."""
        return self.origin == SYNTHETIC


def refuse_synthetic(entries: Iterable[FileEntry], what: str) -> None:
    """Refuse to do ``what`` with entries that were made of no file.

    Raises
    ------
    NoOriginalError
        There are such among ``entries``; names the first of them.
    """
    found = [entry.file.label for entry in entries if entry.synthetic]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise NoOriginalError(
            f"cannot {what} {', '.join(found[:3])}{more}: made by resharding (origin"
            f" {SYNTHETIC!a}), there is no original file. `slimckpt export` writes the tensors as"
            " files of a framework; slimckpt.open(…).rank(r) reads them as they are"
        )


@dataclass(slots=True)
class OtherEntry:
    """A directory, or a symbolic link with its ``target``."""

    path: bytes
    stat: Stat
    target: bytes | None = None


@dataclass(slots=True)
class Part:
    """One run and step of a store."""

    run: str
    step: StepLabel | None
    containers: list[Container] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    others: list[OtherEntry] = field(default_factory=list)

    def pack(self) -> bytes:
        entries = [_other(e) for e in self.others] + [_file(e) for e in self.files]
        return _dump(
            {
                "format": "slimckpt-part",
                "version": VERSION,
                "requires": [],
                "run": self.run,
                "step": self.step,
                "containers": [_container(c) for c in self.containers],
                "entries": entries,
            }
        )

    @staticmethod
    def unpack(data: bytes, label: str) -> Part:
        """Read a part; :class:`StoreDamagedError` where it breaks the rules of FORMAT.md."""
        raw = _load(data, label, "slimckpt-part")
        try:
            part = Part(raw["run"], raw["step"])
            part.containers = [_read_container(c) for c in raw["containers"]]
            for entry in raw["entries"]:
                if entry["kind"] == "file":
                    part.files.append(_read_file(entry, part.run, part.step))
                else:
                    target = decode_path(entry["target"]) if entry["kind"] == "symlink" else None
                    path = safe_path(entry["path"], root=target is None)
                    part.others.append(OtherEntry(path, _read_stat(entry), target))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreDamagedError(
                f"{label}: not a part of a slim checkpoint: {error!r}"
            ) from None
        return part


@dataclass(slots=True)
class PartName:
    """A part as the root manifest lists it."""

    name: str
    run: str
    step: StepLabel | None
    nbytes: int
    digest: str


@dataclass(slots=True)
class Root:
    """The root manifest. ``digest`` is its own, of one that was read."""

    parts: list[PartName]
    totals: dict[str, int]
    extras: dict[str, dict[str, Any]]
    digest: str = ""

    def pack(self) -> bytes:
        parts = [
            {"name": p.name, "run": p.run, "step": p.step, "nbytes": p.nbytes, "digest": p.digest}
            for p in self.parts
        ]
        raw = {
            "format": "slimckpt",
            "version": VERSION,
            "requires": [],
            "totals": self.totals,
            "parts": parts,
            "extras": self.extras,
            "digest": "0" * 64,
        }
        data = _dump(raw)
        return _with_digest(data, blake3(data).hexdigest())

    @staticmethod
    def unpack(data: bytes, label: str) -> Root:
        """Read a root manifest, its digest checked."""
        raw = _load(data, label, "slimckpt")
        found = str(raw.get("digest"))
        if blake3(_with_digest(data, "0" * 64)).hexdigest() != found:
            raise StoreDamagedError(f"{label}: its digest does not match its bytes")
        try:
            parts = [
                PartName(p["name"], p["run"], p["step"], p["nbytes"], p["digest"])
                for p in raw["parts"]
            ]
            for part in parts:
                safe_path(part.name)
            return Root(parts, raw["totals"], raw["extras"], found)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreDamagedError(f"{label}: not a root manifest: {error!r}") from None


def safe_path(text: str, root: bool = False) -> bytes:
    """A path of a manifest as bytes; ``ValueError`` where it could leave its directory."""
    path = decode_path(text)
    if (root and path == b"") or (
        b"\0" not in path and all(p not in (b"", b".", b"..") for p in path.split(b"/"))
    ):
        return path
    raise ValueError(f"unsafe path {show_path(path)!r}")


def _with_digest(data: bytes, digest: str) -> bytes:
    at = data.rindex(b'"digest":"') + len(b'"digest":"')
    return data[:at] + digest.encode() + data[at + 64 :]


def _dump(raw: dict[str, Any]) -> bytes:
    return json.dumps(raw, separators=(",", ":")).encode() + b"\n"


def _load(data: bytes, label: str, kind: str) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreDamagedError(f"{label}: not JSON: {error}") from None
    if not isinstance(raw, dict) or raw.get("format") != kind:
        raise StoreDamagedError(f"{label}: expected a {kind} manifest")
    unknown = sorted(set(map(str, raw.get("requires", []))) - KNOWN)
    if raw.get("version") != VERSION or unknown:
        needs = f"needs {', '.join(unknown)}" if unknown else f"is of version {raw.get('version')}"
        raise UnsupportedStoreError(
            f"{label}: the slim checkpoint {needs}, this slimckpt reads version {VERSION};"
            " use a newer slimckpt, or the restore.py in the store"
        )
    return raw


def _stat(stat: Stat) -> dict[str, int]:
    return {"mode": stat.mode, "mtime": stat.mtime, "uid": stat.uid, "gid": stat.gid}


def _read_stat(raw: dict[str, Any]) -> Stat:
    return Stat(*(int(raw[name]) for name in ("mode", "mtime", "uid", "gid")))


def _other(entry: OtherEntry) -> dict[str, Any]:
    kind = "directory" if entry.target is None else "symlink"
    raw = {"kind": kind, "path": encode_path(entry.path), **_stat(entry.stat)}
    if entry.target is not None:
        raw["target"] = encode_path(entry.target)
    return raw


def _file(entry: FileEntry) -> dict[str, Any]:
    file = entry.file
    raw: dict[str, Any] = {
        "kind": "file",
        "path": encode_path(file.path),
        "nbytes": file.size,
        **_stat(file.stat),
        "origin": entry.origin,
        "format": file.format,
        "condition": file.condition,
        "problem": file.problem,
        "rank": file.role.rank,
        "coords": file.role.coords,
        "facts": file.facts,
        "links": [encode_path(link) for link in file.links],
        "skeleton": _place(entry.skeleton),
    }
    if entry.body is not None:
        raw["body"] = encode_path(entry.body)
    if entry.dropped:
        raw["dropped"] = {"tensors": entry.dropped, "nbytes": entry.dropped_nbytes}
    if entry.index:
        index = entry.index
        raw["index"] = {
            "container": index.container,
            "offset": index.offset,
            "nbytes": index.nbytes,
            "digest": index.digest,
        }
    return raw


def _read_file(raw: dict[str, Any], run: str, step: StepLabel | None) -> FileEntry:
    condition: Condition = raw["condition"]
    file = SourceFile(
        safe_path(raw["path"]),
        int(raw["nbytes"]),
        _read_stat(raw),
        Role(run, step, raw["rank"], dict(raw["coords"])),
        raw["format"],
        condition,
        raw["problem"],
        dict(raw["facts"]),
        tuple(safe_path(link) for link in raw["links"]),
    )
    index = raw.get("index")
    dropped = raw.get("dropped", {"tensors": (), "nbytes": 0})
    return FileEntry(
        file,
        _read_place(raw["skeleton"]),
        IndexPlace(index["container"], index["offset"], index["nbytes"], index["digest"])
        if index
        else None,
        raw["origin"],
        safe_path(raw["body"]) if raw["origin"] == "link" else None,
        tuple(map(str, dropped["tensors"])),
        int(dropped["nbytes"]),
    )


def _place(place: Place) -> dict[str, Any]:
    raw: dict[str, Any] = {"kind": place.kind, "nbytes": place.nbytes, "digest": place.digest}
    if place.kind == "stored":
        raw.update(container=place.container, offset=place.offset)
    elif place.kind == "fill":
        raw.update(byte=place.byte)
    elif place.kind == "parts":
        raw.update(parts=place.parts)
    elif place.kind == "whole":
        raw.update(name=encode_path(place.name), mtime=place.mtime)
        if place.blocks:
            raw["blocks"] = base64.b64encode(place.blocks).decode()
    return raw


def _read_place(raw: dict[str, Any]) -> Place:
    place = Place(raw["kind"], int(raw["nbytes"]), raw["digest"])
    if place.kind == "stored":
        place.container, place.offset = int(raw["container"]), int(raw["offset"])
    elif place.kind == "fill":
        place.byte = int(raw["byte"])
    elif place.kind == "parts":
        place.parts = [(int(c), int(o), int(n)) for c, o, n in raw["parts"]]
    elif place.kind == "whole":
        place.name, place.mtime = safe_path(raw["name"]), int(raw["mtime"])
        place.blocks = base64.b64decode(raw.get("blocks", ""))
    return place


def _container(container: Container) -> dict[str, Any]:
    return {
        "name": encode_path(container.name),
        "nbytes": container.nbytes,
        "structure": container.structure,
        "contents": {
            "offset": container.contents_offset,
            "nbytes": container.contents_nbytes,
            "digest": container.contents_digest,
        },
    }


def _read_container(raw: dict[str, Any]) -> Container:
    contents = raw["contents"]
    return Container(
        safe_path(raw["name"]),
        int(raw["nbytes"]),
        raw["structure"],
        int(contents["offset"]),
        int(contents["nbytes"]),
        contents["digest"],
    )
