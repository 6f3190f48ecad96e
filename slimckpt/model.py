"""The nouns: plain data, no I/O.

A file *is* its skeleton plus its payloads. A :class:`Table` holds the tensors and payloads of one
file (or of many, joined) as numpy columns; :class:`Tensor` and :class:`Payload` objects are made
on demand. A :class:`Catalog` is a table with the files its rows came from.

How formats that come later sit in it:

- payloads inside a pickle stream, zips in zips: spans are absolute offsets in the file;
- deflated members, HDF5 chunks: the payload is the *stored* bytes (one span a chunk), and the
  tensor's ``encoding`` says how to decode them (``deflate``, ``hdf5-chunks:{...}``);
- flat optimizer buffers, views of a storage: many tensors on one payload, each with an ``offset``
  in its decoded stream and ``strides``;
- compact HDF5 datasets, scalars inside a pickle: a *pinned* payload, which never leaves the
  skeleton but is a tensor with a digest like any other;
- never-written HDF5 datasets: no payload but a fill value.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

FLOOR = 1024
"""Payloads of fewer bytes stay in the skeleton: they are not worth a place of their own."""

RAW = "raw"
"""The encoding of a payload whose bytes are the tensor's bytes."""

StepLabel = int | str
"""``1000``, or ``"2_5"`` where a number alone would not name the step."""

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

HOME_NONE, HOME_PAYLOAD, HOME_FILL = 0, 1, 2


class Span(NamedTuple):
    """A run of bytes in a source file."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Payload:
    """One run of tensor bytes as the file stores it: the unit of dedup."""

    spans: tuple[Span, ...]
    nbytes: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class Tensor:
    """A typed view of a payload.

    ``strides`` are in elements, ``None`` for C order. ``offset`` is in bytes of the decoded
    stream. ``payload`` is a row of the table the tensor came from; ``fill`` is the bytes of one
    element where there is no payload.
    """

    name: str
    path: str
    dtype: str
    big_endian: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    nbytes: int
    payload: int | None
    fill: bytes | None
    encoding: str


_TENSOR_COLUMNS = {
    "name_end": np.int64,
    "path_end": np.int64,
    "dtype": np.uint16,
    "big_endian": np.uint8,
    "dim_end": np.int64,
    "stride_end": np.int64,
    "offset": np.int64,
    "nbytes": np.int64,
    "home": np.uint8,
    "home_row": np.int64,
    "encoding": np.uint32,
}
_PAYLOAD_COLUMNS = {"span_end": np.int64, "payload_nbytes": np.int64, "pinned": np.uint8}
_OTHER_COLUMNS = {
    "span_offset": np.int64,
    "span_nbytes": np.int64,
    "dims": np.int64,
    "strides": np.int64,
    "names": np.uint8,
    "paths": np.uint8,
}
COLUMNS: dict[str, Any] = {**_TENSOR_COLUMNS, **_PAYLOAD_COLUMNS, **_OTHER_COLUMNS}
_ENDS = {
    "name_end": "names",
    "path_end": "paths",
    "dim_end": "dims",
    "stride_end": "strides",
    "span_end": "span_offset",
}
"""Columns that hold where a row's run in another column ends; it starts where the last ended."""
_LISTS = ("dtypes", "encodings", "fills")


class Table:
    """Tensors and payloads as columns.

    ``columns`` has one array for each name in :data:`COLUMNS`. ``path_end`` adds nothing for a
    tensor whose exact path is its name, ``stride_end`` nothing for C order. ``dtypes``,
    ``encodings`` and ``fills`` (hex) are what the columns ``dtype``, ``encoding`` and, for
    ``HOME_FILL``, ``home_row`` number.
    """

    __slots__ = ("columns", "dtypes", "encodings", "fills")

    def __init__(
        self,
        columns: dict[str, npt.NDArray[Any]],
        dtypes: Sequence[str],
        encodings: Sequence[str],
        fills: Sequence[str],
    ) -> None:
        self.columns = columns
        self.dtypes = tuple(dtypes)
        self.encodings = tuple(encodings)
        self.fills = tuple(fills)

    @property
    def n_tensors(self) -> int:
        return len(self.columns["name_end"])

    @property
    def n_payloads(self) -> int:
        return len(self.columns["span_end"])

    @property
    def payload_nbytes(self) -> Ints:
        return self.columns["payload_nbytes"]

    @property
    def stored_apart(self) -> npt.NDArray[np.bool_]:
        """For each payload, whether a rewriter takes it out of the skeleton."""
        large: npt.NDArray[np.bool_] = self.columns["payload_nbytes"] >= FLOOR
        large[self.columns["pinned"] != 0] = False
        return large

    def _run(self, ends: str, row: int) -> tuple[int, int]:
        column = self.columns[ends]
        return (int(column[row - 1]) if row else 0), int(column[row])

    def name(self, row: int) -> str:
        start, end = self._run("name_end", row)
        return self.columns["names"][start:end].tobytes().decode()

    def path(self, row: int) -> str:
        """The exact path of the tensor inside its file; its name where the format is flat."""
        start, end = self._run("path_end", row)
        return (
            self.columns["paths"][start:end].tobytes().decode() if end > start else self.name(row)
        )

    def names(self) -> list[str]:
        """All names, in row order."""
        blob = self.columns["names"].tobytes()
        ends = self.columns["name_end"].tolist()
        runs = zip([0, *ends], ends, strict=False)
        if blob.isascii():
            text = blob.decode()
            return [text[start:end] for start, end in runs]
        return [blob[start:end].decode() for start, end in runs]

    def shape(self, row: int) -> tuple[int, ...]:
        start, end = self._run("dim_end", row)
        return tuple(self.columns["dims"][start:end].tolist())

    def dtype(self, row: int) -> str:
        return self.dtypes[int(self.columns["dtype"][row])]

    def tensor(self, row: int) -> Tensor:
        columns = self.columns
        start, end = self._run("stride_end", row)
        home, home_row = int(columns["home"][row]), int(columns["home_row"][row])
        return Tensor(
            name=self.name(row),
            path=self.path(row),
            dtype=self.dtype(row),
            big_endian=bool(columns["big_endian"][row]),
            shape=self.shape(row),
            strides=tuple(columns["strides"][start:end].tolist()) if end > start else None,
            offset=int(columns["offset"][row]),
            nbytes=int(columns["nbytes"][row]),
            payload=home_row if home == HOME_PAYLOAD else None,
            fill=bytes.fromhex(self.fills[home_row]) if home == HOME_FILL else None,
            encoding=self.encodings[int(columns["encoding"][row])],
        )

    def renamed(self, names: Sequence[str]) -> Table:
        """The same rows under other names; exact paths stay what they were."""
        columns = dict(self.columns)
        for blob, ends, texts in (
            ("paths", "path_end", [self.path(row) for row in range(self.n_tensors)]),
            ("names", "name_end", names),
        ):
            encoded = [text.encode() for text in texts]
            columns[blob] = np.frombuffer(b"".join(encoded), np.uint8)
            columns[ends] = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return Table(columns, self.dtypes, self.encodings, self.fills)

    def retyped(self, rows: Sequence[tuple[int, str]]) -> Table:
        """The same rows, some of them of another dtype of the same width."""
        dtypes = list(self.dtypes)
        column = self.columns["dtype"].copy()
        for row, dtype in rows:
            if dtype not in dtypes:
                dtypes.append(dtype)
            column[row] = dtypes.index(dtype)
        return Table({**self.columns, "dtype": column}, dtypes, self.encodings, self.fills)

    def spans(self, row: int) -> tuple[Span, ...]:
        start, end = self._run("span_end", row)
        offsets = self.columns["span_offset"][start:end].tolist()
        return tuple(map(Span, offsets, self.columns["span_nbytes"][start:end].tolist()))

    def all_spans(self, rows: slice) -> list[tuple[Span, ...]]:
        """The spans of many payloads at once."""
        ends = self.columns["span_end"][rows].tolist()
        first = int(self.columns["span_end"][rows.start - 1]) if rows.start else 0
        last = ends[-1] if ends else first
        columns = (
            self.columns[name][first:last].tolist() for name in ("span_offset", "span_nbytes")
        )
        spans = list(map(Span, *columns))
        if len(spans) == len(ends):
            return [(span,) for span in spans]
        starts = [first, *ends[:-1]]
        return [tuple(spans[a - first : b - first]) for a, b in zip(starts, ends, strict=True)]

    def payload(self, row: int) -> Payload:
        return Payload(
            self.spans(row), int(self.payload_nbytes[row]), bool(self.columns["pinned"][row])
        )

    def tensors_of_payloads(self) -> tuple[Ints, Ints]:
        """Which tensors view which payload.

        Returns
        -------
        starts, rows
            The tensors on payload ``p`` are ``rows[starts[p]:starts[p + 1]]``, in row order.
        """
        on_payload = np.flatnonzero(self.columns["home"] == HOME_PAYLOAD)
        homes = self.columns["home_row"][on_payload]
        order = np.argsort(homes, kind="stable")
        starts = np.zeros(self.n_payloads + 1, np.int64)
        np.cumsum(np.bincount(homes, minlength=self.n_payloads), out=starts[1:])
        return starts, on_payload[order]

    def select(self, tensors: slice, payloads: slice) -> Table:
        """The given rows as a table of their own (columns are views where they can be).

        ``tensors`` and ``payloads`` must be of the same files.
        """
        picked: dict[str, npt.NDArray[Any]] = {}
        for group, rows in ((_TENSOR_COLUMNS, tensors), (_PAYLOAD_COLUMNS, payloads)):
            for name in group:
                picked[name] = self.columns[name][rows]
        for ends, target in _ENDS.items():
            first = (payloads if ends == "span_end" else tensors).start
            low = int(self.columns[ends][first - 1]) if first else 0
            high = int(picked[ends][-1]) if len(picked[ends]) else low
            picked[ends] = picked[ends] - low
            picked[target] = self.columns[target][low:high]
            if target == "span_offset":
                picked["span_nbytes"] = self.columns["span_nbytes"][low:high]
        on_payload = picked["home"] == HOME_PAYLOAD
        picked["home_row"] = picked["home_row"] - np.where(on_payload, payloads.start, 0)
        return Table(picked, self.dtypes, self.encodings, self.fills)

    @staticmethod
    def concatenate(tables: Iterable[Table]) -> Table:
        """The rows of all tables, in order. Each table is let go when its rows are copied."""
        lists: dict[str, dict[str, int]] = {name: {} for name in _LISTS}
        joined = {name: bytearray() for name in COLUMNS}
        base = dict.fromkeys(_ENDS.values(), 0)
        payloads = 0
        for table in tables:
            remaps = {}
            for name in _LISTS:
                known = lists[name]
                codes = [known.setdefault(text, len(known)) for text in getattr(table, name)]
                remaps[name] = np.array(codes, np.int64)
            for name, column in table.columns.items():
                if name in _ENDS:
                    column = column + base[_ENDS[name]]
                elif name in ("dtype", "encoding"):
                    column = remaps[name + "s"][column]
                elif name == "home_row":
                    column = column + np.where(table.columns["home"] == HOME_PAYLOAD, payloads, 0)
                    filled = table.columns["home"] == HOME_FILL
                    column[filled] = remaps["fills"][column[filled]]
                joined[name] += column.astype(COLUMNS[name], copy=False).tobytes()
            for target in base:
                base[target] += len(table.columns[target])
            payloads += table.n_payloads
        columns = {name: np.frombuffer(joined[name], COLUMNS[name]) for name in COLUMNS}
        return Table(columns, *(tuple(lists[name]) for name in _LISTS))


class TableBuilder:
    """Collects the rows of one file; a format module's only way to say what it found."""

    def __init__(self) -> None:
        self._columns: dict[str, Any] = {}
        for name, dtype in COLUMNS.items():
            code = {np.int64: "q", np.uint32: "I", np.uint16: "H", np.uint8: "B"}[dtype]
            self._columns[name] = bytearray() if name in ("names", "paths") else array(code)
        self._lists: dict[str, dict[str, int]] = {name: {} for name in _LISTS}
        self._n_payloads = 0

    def payload(self, spans: Iterable[tuple[int, int]], *, pinned: bool = False) -> int:
        """Add a payload of ``(offset, nbytes)`` spans in stream order; returns its row."""
        columns = self._columns
        total = 0
        for offset, nbytes in spans:
            columns["span_offset"].append(offset)
            columns["span_nbytes"].append(nbytes)
            total += nbytes
        columns["span_end"].append(len(columns["span_offset"]))
        columns["payload_nbytes"].append(total)
        columns["pinned"].append(pinned)
        self._n_payloads += 1
        return self._n_payloads - 1

    def tensor(
        self,
        name: str,
        dtype: str,
        shape: Sequence[int],
        nbytes: int,
        *,
        payload: int | None = None,
        fill: bytes | None = None,
        path: str = "",
        big_endian: bool = False,
        strides: Sequence[int] = (),
        offset: int = 0,
        encoding: str = RAW,
    ) -> None:
        """Add a tensor that views ``payload`` (a row), repeats ``fill``, or is empty."""
        columns = self._columns
        columns["names"] += name.encode()
        columns["paths"] += path.encode()
        columns["name_end"].append(len(columns["names"]))
        columns["path_end"].append(len(columns["paths"]))
        columns["dims"].extend(shape)
        columns["dim_end"].append(len(columns["dims"]))
        columns["strides"].extend(strides)
        columns["stride_end"].append(len(columns["strides"]))
        columns["dtype"].append(self._code("dtypes", dtype))
        columns["big_endian"].append(big_endian)
        columns["offset"].append(offset)
        columns["nbytes"].append(nbytes)
        columns["encoding"].append(self._code("encodings", encoding))
        if payload is not None:
            columns["home"].append(HOME_PAYLOAD)
            columns["home_row"].append(payload)
        elif fill is not None:
            columns["home"].append(HOME_FILL)
            columns["home_row"].append(self._code("fills", fill.hex()))
        else:
            columns["home"].append(HOME_NONE)
            columns["home_row"].append(0)

    def plain(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        spans: Sequence[tuple[int, int]],
    ) -> None:
        """Add many tensors at once, each the whole of a payload of one span, or empty.

        The same as :meth:`payload` and :meth:`tensor` for each, in a tenth of the time.
        """
        columns, count = self._columns, len(names)
        encoded = [name.encode() for name in names]
        codes = {dtype: self._code("dtypes", dtype) for dtype in dict.fromkeys(dtypes)}
        places = np.fromiter(chain.from_iterable(spans), np.int64, 2 * count).reshape(count, 2)
        filled = places[:, 1] > 0
        offsets, lengths = places[filled].T
        rows = self._n_payloads + np.cumsum(filled) - 1
        spans_before = len(columns["span_offset"])
        added: dict[str, Any] = {
            "name_end": len(columns["names"]) + _ends(encoded),
            "dim_end": len(columns["dims"]) + _ends(shapes),
            "path_end": np.full(count, len(columns["paths"])),
            "stride_end": np.full(count, len(columns["strides"])),
            "dtype": list(map(codes.__getitem__, dtypes)),
            "encoding": np.full(count, self._code("encodings", RAW)),
            "big_endian": np.zeros(count),
            "offset": np.zeros(count),
            "nbytes": places[:, 1],
            "home": np.where(filled, HOME_PAYLOAD, HOME_NONE),
            "home_row": np.where(filled, rows, 0),
            "span_offset": offsets,
            "span_nbytes": lengths,
            "span_end": spans_before + 1 + np.arange(len(offsets)),
            "payload_nbytes": lengths,
            "pinned": np.zeros(len(offsets)),
        }
        columns["names"] += b"".join(encoded)
        columns["dims"].extend(chain.from_iterable(shapes))
        for name, column in added.items():
            columns[name].frombytes(np.asarray(column, COLUMNS[name]).tobytes())
        self._n_payloads += len(offsets)

    def _code(self, name: str, text: str) -> int:
        known = self._lists[name]
        return known.setdefault(text, len(known))

    def build(self) -> Table:
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, dtype in COLUMNS.items():
            columns[name] = np.frombuffer(bytes(self._columns[name]), dtype)
        return Table(columns, *(tuple(self._lists[name]) for name in _LISTS))


def _ends(runs: Sequence[Sequence[Any]]) -> Ints:
    """Where each of some runs ends when they are joined."""
    return np.cumsum(np.fromiter(map(len, runs), np.int64, len(runs)))


@dataclass(slots=True)
class Stat:
    """What a restore gives back besides bytes. ``mtime`` in nanoseconds."""

    mode: int
    mtime: int
    uid: int
    gid: int


@dataclass(slots=True)
class Role:
    """What a path says of a file: its run, step, rank and other coordinates (tp, pp, dp, ep)."""

    run: str = ""
    step: StepLabel | None = None
    rank: int | None = None
    coords: dict[str, int] = field(default_factory=dict)


SYNTHETIC = "synthetic"
"""Format, and origin, of entries of a slim checkpoint that were no files: what resharding makes."""

Condition = Literal["understood", "opaque", "damaged", "refused", "store"]
"""``opaque``: of no known format. ``refused``: known, but not readable here (encrypted).
``store``: belongs to a slim checkpoint inside the tree."""


@dataclass(slots=True)
class SourceFile:
    """One file of the source tree.

    ``path`` is relative to the root, as bytes. ``links`` are further names of the same inode.
    ``problem`` says why the file is not ``understood``. ``facts`` are worth showing.
    """

    path: bytes
    size: int
    stat: Stat
    role: Role
    format: str = "unknown"
    condition: Condition = "opaque"
    problem: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    links: tuple[bytes, ...] = ()

    @property
    def understood(self) -> bool:
        return self.condition == "understood"

    @property
    def label(self) -> str:
        """The path as text, for people."""
        return show_path(self.path)


class Catalog:
    """The files of a tree and their table.

    Rows of file ``f`` are ``tensor_start[f]`` to ``tensor_start[f + 1]`` and likewise for
    payloads.
    """

    __slots__ = ("files", "payload_start", "table", "tensor_start")

    def __init__(
        self, files: list[SourceFile], table: Table, tensor_start: Ints, payload_start: Ints
    ) -> None:
        self.files = files
        self.table = table
        self.tensor_start = tensor_start
        self.payload_start = payload_start

    @staticmethod
    def of(files: list[SourceFile], tables: Iterable[Table]) -> Catalog:
        """Join one table a file."""
        counts = [(0, 0)]

        def counted() -> Iterator[Table]:
            for table in tables:
                counts.append((table.n_tensors, table.n_payloads))
                yield table

        table = Table.concatenate(counted())
        starts = np.cumsum(np.array(counts, np.int64), axis=0)
        return Catalog(files, table, starts[:, 0].copy(), starts[:, 1].copy())

    @staticmethod
    def merge(catalogs: Sequence[Catalog]) -> Catalog:
        """One catalog of several, scanned apart (on other machines, say)."""
        files = [file for catalog in catalogs for file in catalog.files]
        return Catalog.of(files, (c.table_of(f) for c in catalogs for f in range(len(c.files))))

    def tensors(self, file: int) -> slice:
        return slice(int(self.tensor_start[file]), int(self.tensor_start[file + 1]))

    def payloads(self, file: int) -> slice:
        return slice(int(self.payload_start[file]), int(self.payload_start[file + 1]))

    def files_of(self, tensors: npt.ArrayLike) -> Ints:
        """The file of each of some rows of tensors."""
        found: Ints = np.searchsorted(self.tensor_start, tensors, "right") - 1
        return found

    def table_of(self, file: int) -> Table:
        return self.table.select(self.tensors(file), self.payloads(file))


def gaps(spans: npt.NDArray[np.int64], size: int) -> list[Span]:
    """What ``size`` bytes hold outside ``spans``.

    Parameters
    ----------
    spans : (n, 2) int64
        Offsets and lengths, disjoint, in any order.
    """
    found, at = [], 0
    for offset, nbytes in spans[np.argsort(spans[:, 0], kind="stable")].tolist():
        if offset > at:
            found.append(Span(at, offset - at))
        at = max(at, offset + nbytes)
    if size > at:
        found.append(Span(at, size - at))
    return found


def show_path(path: bytes) -> str:
    """A path for people: control characters and bytes that are not UTF-8 escaped."""
    text = path.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def lies_in(path: bytes, directory: bytes) -> bool:
    """Whether a path is a directory or lies below it; both absolute, links resolved."""
    return path == directory or path.startswith(os.path.join(directory, b""))


def compact_ranks(ranks: Iterable[int]) -> str:
    """``0-7``, ``0,4``, ``0-3,8``: ranks as people write them."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks as people write them, ``0-3,8``, in order.

    Raises
    ------
    ValueError
        It is not written so.
    """
    found: set[int] = set()
    for part in text.split(","):
        ends = part.strip().split("-")
        if len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise ValueError(f"{text!a} is no set of ranks; expected one like 0-3,8")
        low, high = int(ends[0]), int(ends[-1])
        if not low <= high < _MOST_RANKS:
            raise ValueError(f"{part.strip()!a} is no range of ranks")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


_MOST_RANKS = 2**24

ROOT_MANIFEST = b"slimckpt.json"
ROOT_COPY = b"slimckpt.json.2"
STORE_MARK = b'{"format":"slimckpt",'
"""How the root manifest of a slim checkpoint starts."""


def encode_path(path: bytes) -> str:
    """A path as JSON holds it: bytes that are not UTF-8 as lone surrogates (PEP 383)."""
    return path.decode("utf-8", "surrogateescape")


def decode_path(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
