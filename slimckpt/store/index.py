"""The index of a file and the table of contents of a container, as packed columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slimckpt import columns
from slimckpt.errors import StoreDamagedError
from slimckpt.model import COLUMNS, HOME_PAYLOAD, Ints, Span, Table, gaps

IN_SKELETON, STORED, FILL, PARTS, DROPPED = 0, 1, 2, 3, 4
"""Kinds of places. FORMAT.md says what each means."""


@dataclass(slots=True)
class Places:
    """Where each payload of a file lives, as columns; ``digest`` is (payloads, 32) uint8."""

    kind: npt.NDArray[np.uint8]
    container: npt.NDArray[np.uint32]
    offset: Ints
    digest: npt.NDArray[np.uint8]
    part_end: Ints
    part_container: npt.NDArray[np.uint32]
    part_offset: Ints
    part_nbytes: Ints

    @staticmethod
    def none(n_payloads: int) -> Places:
        """All payloads in the skeleton, no digest known."""
        empty = np.zeros(0, np.int64)
        return Places(
            np.zeros(n_payloads, np.uint8),
            np.zeros(n_payloads, np.uint32),
            np.zeros(n_payloads, np.int64),
            np.zeros((n_payloads, 32), np.uint8),
            empty,
            empty.astype(np.uint32),
            empty,
            empty,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """``nbytes`` bytes at ``offset`` of container number ``container``.

    ``container`` is :data:`SKELETON` for bytes of the file's own skeleton, :data:`FILLED` where
    every byte is ``offset``, and :data:`LEFT_OUT` where the bytes are nowhere.
    """

    container: int
    offset: int
    nbytes: int


SKELETON, FILLED, LEFT_OUT = -1, -2, -3


class FileIndex:
    """The tensors of one file and where their payloads live."""

    def __init__(self, table: Table, places: Places) -> None:
        self.table = table
        self.places = places
        self._taken: npt.NDArray[np.int64] | None = None

    def pack(self) -> bytes:
        table, places = self.table, self.places
        found: dict[str, npt.NDArray[Any]] = {name: table.columns[name] for name in COLUMNS}
        found["digest"] = places.digest.reshape(-1)
        found["place_kind"], found["place_container"] = places.kind, places.container
        found["place_offset"] = places.offset
        for name in ("part_end", "part_container", "part_offset", "part_nbytes"):
            found[name] = getattr(places, name)
        lists = {"dtypes": table.dtypes, "encodings": table.encodings, "fills": table.fills}
        return columns.pack(found, lists)

    @staticmethod
    def unpack(data: Any, label: str) -> FileIndex:
        """Read an index in place.

        Raises
        ------
        StoreDamagedError
            The bytes are not an index; ``label`` says whose.
        """
        try:
            found, header = columns.unpack(data)
            table = Table(
                {name: found[name] for name in COLUMNS},
                header["dtypes"],
                header["encodings"],
                header["fills"],
            )
            places = Places(
                found["place_kind"],
                found["place_container"],
                found["place_offset"],
                found["digest"].reshape(-1, 32),
                *(found[f"part_{name}"] for name in ("end", "container", "offset", "nbytes")),
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise StoreDamagedError(f"{label}: its index cannot be read: {error}") from None
        return FileIndex(table, places)

    def apart_spans(self) -> npt.NDArray[np.int64]:
        """(n, 2) offsets and lengths of source bytes that are not in the skeleton, ordered."""
        table = self.table
        counts = np.diff(table.columns["span_end"], prepend=0)
        apart = np.repeat(self.places.kind != IN_SKELETON, counts)
        spans = np.stack([table.columns["span_offset"], table.columns["span_nbytes"]], axis=1)
        found: npt.NDArray[np.int64] = spans[apart]
        return found[np.argsort(found[:, 0], kind="stable")]

    def dropped_tensors(self) -> list[int]:
        """Rows of tensors whose payload was left out."""
        if not (self.places.kind == DROPPED).any():
            return []
        homes = self.table.columns["home_row"]
        on_payload = np.flatnonzero(self.table.columns["home"] == HOME_PAYLOAD)
        found: list[int] = on_payload[self.places.kind[homes[on_payload]] == DROPPED].tolist()
        return found

    def skeleton_spans(self, nbytes: int) -> list[Span]:
        """Where the skeleton's bytes lie in the source file of ``nbytes`` bytes."""
        return gaps(self.apart_spans(), nbytes)

    def pieces(self, row: int, label: str) -> list[Piece]:
        """Where the bytes of a payload are, in stream order.

        Raises
        ------
        StoreDamagedError
            The kind of place is unknown, or its parts are not as long as the payload.
        """
        places, table = self.places, self.table
        kind, nbytes = int(places.kind[row]), int(table.payload_nbytes[row])
        if kind == STORED:
            return [Piece(int(places.container[row]), int(places.offset[row]), nbytes)]
        if kind == FILL:
            return [Piece(FILLED, int(places.offset[row]), nbytes)]
        if kind == DROPPED:
            return [Piece(LEFT_OUT, 0, nbytes)]
        if kind == IN_SKELETON:
            spans = table.spans(row)
            starts = self.in_skeleton(np.array([span.offset for span in spans], np.int64))
            return [
                Piece(SKELETON, start, span.nbytes)
                for start, span in zip(starts.tolist(), spans, strict=True)
            ]
        if kind != PARTS:
            raise StoreDamagedError(
                f"{label}: payload {row} is stored in a way (kind {kind}) that this slimckpt does"
                " not know; a newer one wrote it"
            )
        part = int(places.offset[row])
        start = int(places.part_end[part - 1]) if part else 0
        parts = [
            Piece(
                int(places.part_container[i]),
                int(places.part_offset[i]),
                int(places.part_nbytes[i]),
            )
            for i in range(start, int(places.part_end[part]))
        ]
        total = sum(p.nbytes for p in parts)
        if total != nbytes:
            raise StoreDamagedError(
                f"{label}: the parts of payload {row} have {total} bytes, expected {nbytes}"
            )
        return parts

    def in_skeleton(self, offsets: Ints) -> Ints:
        """Where bytes of the source file lie in its skeleton."""
        if self._taken is None:
            spans = self.apart_spans()
            self._taken = np.stack([spans[:, 0], np.cumsum(spans[:, 1])], axis=1)
        before = np.searchsorted(self._taken[:, 0], offsets)
        taken = np.concatenate([[0], self._taken[:, 1]])
        found: Ints = offsets - taken[before]
        return found


@dataclass(slots=True)
class Contents:
    """What is stored in a container: columns, and block digests of the long ones."""

    offset: Ints
    nbytes: Ints
    digest: npt.NDArray[np.uint8]
    blocks: tuple[bytes, ...]

    @staticmethod
    def of(
        offsets: Sequence[int], nbytes: Sequence[int], digests: Any, blocks: Sequence[bytes]
    ) -> Contents:
        return Contents(
            np.array(offsets, np.int64),
            np.array(nbytes, np.int64),
            np.asarray(digests, np.uint8).reshape(-1, 32),
            tuple(blocks),
        )

    def pack(self) -> bytes:
        ends = np.cumsum([len(b) // 32 for b in self.blocks], dtype=np.int64)
        found: dict[str, npt.NDArray[Any]] = {
            "offset": self.offset,
            "nbytes": self.nbytes,
            "digest": self.digest.reshape(-1),
            "block_end": ends.astype(np.int64),
            "blocks": np.frombuffer(b"".join(self.blocks), np.uint8),
        }
        return columns.pack(found, {})

    @staticmethod
    def unpack(data: Any, label: str) -> Contents:
        """Read a table of contents; :class:`StoreDamagedError` where it is none."""
        try:
            found, _ = columns.unpack(data)
            blob, start, blocks = found["blocks"].tobytes(), 0, []
            for end in found["block_end"].tolist():
                blocks.append(blob[32 * start : 32 * end])
                start = end
            return Contents(
                found["offset"], found["nbytes"], found["digest"].reshape(-1, 32), tuple(blocks)
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StoreDamagedError(
                f"{label}: its table of contents cannot be read: {error}"
            ) from None
