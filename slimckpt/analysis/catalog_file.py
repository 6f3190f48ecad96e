"""A catalog as bytes, so that rank directories can be scanned where they are and merged later."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from slimckpt import columns
from slimckpt.model import (
    COLUMNS,
    Catalog,
    Role,
    SourceFile,
    Stat,
    Table,
    decode_path,
    encode_path,
)

FORMAT = "slimckpt-catalog/1"


def pack_catalog(catalog: Catalog) -> bytes:
    """Everything a scan found, as packed columns."""
    table = catalog.table
    found = {name: table.columns[name] for name in COLUMNS}
    found["tensor_start"], found["payload_start"] = catalog.tensor_start, catalog.payload_start
    header = {
        "format": FORMAT,
        "dtypes": table.dtypes,
        "encodings": table.encodings,
        "fills": table.fills,
        "files": [_to_json(file) for file in catalog.files],
    }
    return columns.pack(found, header)


def unpack_catalog(data: bytes) -> Catalog:
    """The catalog again; columns are views of ``data``.

    Raises
    ------
    ValueError
        The bytes are not a catalog of this version.
    """
    found, header = columns.unpack(data)
    if header.get("format") != FORMAT:
        raise ValueError(f"expected a {FORMAT}, found {header.get('format')!r}")
    table = Table(
        {name: found[name] for name in COLUMNS},
        header["dtypes"],
        header["encodings"],
        header["fills"],
    )
    files = [_from_json(raw) for raw in header["files"]]
    return Catalog(files, table, found["tensor_start"], found["payload_start"])


def _to_json(file: SourceFile) -> dict[str, Any]:
    raw = asdict(file)
    raw["path"] = encode_path(file.path)
    raw["links"] = [encode_path(link) for link in file.links]
    return raw


def _from_json(raw: dict[str, Any]) -> SourceFile:
    raw["path"] = decode_path(raw["path"])
    raw["links"] = tuple(decode_path(link) for link in raw["links"])
    raw["stat"], raw["role"] = Stat(**raw["stat"]), Role(**raw["role"])
    return SourceFile(**raw)
