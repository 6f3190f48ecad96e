"""Tables, catalogs and the small arithmetic of the model."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.model import (
    COLUMNS,
    FLOOR,
    Catalog,
    Payload,
    Role,
    SourceFile,
    Span,
    Stat,
    Table,
    TableBuilder,
    Tensor,
    compact_ranks,
    gaps,
    show_path,
)

LARGEST = 2**63 - 1
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTS = st.integers(0, LARGEST)


@dataclass
class Rows:
    """What a table should hold, as plain objects."""

    payloads: list[Payload] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def build(self) -> Table:
        builder = TableBuilder()
        for row, payload in enumerate(self.payloads):
            assert builder.payload(payload.spans, pinned=payload.pinned) == row
        for tensor in self.tensors:
            builder.tensor(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                tensor.nbytes,
                payload=tensor.payload,
                fill=tensor.fill,
                path="" if tensor.path == tensor.name else tensor.path,
                big_endian=tensor.big_endian,
                strides=tensor.strides or (),
                offset=tensor.offset,
                encoding=tensor.encoding,
            )
        return builder.build()


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    spans = draw(st.lists(st.builds(Span, INTS, st.integers(0, 2**40)), max_size=3))
    return Payload(tuple(spans), sum(span.nbytes for span in spans), draw(st.booleans()))


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    found = Rows(draw(st.lists(payloads(), max_size=4)))
    for _ in range(draw(st.integers(0, 4))):
        name = draw(NAMES)
        home = draw(st.sampled_from(["none", "fill", *(["payload"] if found.payloads else [])]))
        shape = tuple(draw(st.lists(INTS, max_size=3)))
        strided = bool(shape) and draw(st.booleans())
        strides = draw(st.lists(INTS, min_size=len(shape), max_size=len(shape)))
        row = draw(st.integers(0, len(found.payloads) - 1)) if home == "payload" else None
        found.tensors.append(
            Tensor(
                name=name,
                path=draw(st.sampled_from([name, f"{name}/0"])),
                dtype=draw(st.sampled_from(["F32", "BF16", "opaque:str"])),
                big_endian=draw(st.booleans()),
                shape=shape,
                strides=tuple(strides) if strided else None,
                offset=draw(INTS),
                nbytes=draw(INTS),
                payload=row,
                fill=draw(st.sampled_from([b"\0", b"\0\0\x80?"])) if home == "fill" else None,
                encoding=draw(st.sampled_from(["raw", "deflate"])),
            )
        )
    return found


def held(table: Table) -> Rows:
    return Rows(
        [table.payload(row) for row in range(table.n_payloads)],
        [table.tensor(row) for row in range(table.n_tensors)],
    )


def joined(parts: list[Rows]) -> Rows:
    found = Rows()
    for part in parts:
        first = len(found.payloads)
        found.payloads += part.payloads
        for t in part.tensors:
            moved = None if t.payload is None else first + t.payload
            values = {name: getattr(t, name) for name in Tensor.__slots__}
            found.tensors.append(Tensor(**{**values, "payload": moved}))
    return found


def a_file(index: int) -> SourceFile:
    return SourceFile(b"f%d" % index, 9, Stat(0o644, 0, 0, 0), Role())


@given(rows())
def test_a_table_gives_back_what_was_put_in(given_rows: Rows) -> None:
    table = given_rows.build()
    assert held(table) == given_rows
    assert table.names() == [tensor.name for tensor in given_rows.tensors]
    assert [table.path(n) for n in range(table.n_tensors)] == [t.path for t in given_rows.tensors]
    assert set(table.columns) == set(COLUMNS)
    assert all(table.columns[name].dtype == dtype for name, dtype in COLUMNS.items())


@given(st.lists(rows(), max_size=4))
def test_tables_joined_hold_the_rows_of_all_in_order(parts: list[Rows]) -> None:
    table = Table.concatenate([part.build() for part in parts])
    assert held(table) == joined(parts)
    assert all(table.columns[name].dtype == dtype for name, dtype in COLUMNS.items())


@given(st.lists(rows(), min_size=1, max_size=4))
def test_a_catalog_gives_back_the_table_of_each_file(parts: list[Rows]) -> None:
    files = [a_file(index) for index in range(len(parts))]
    catalog = Catalog.of(files, [part.build() for part in parts])
    for index, part in enumerate(parts):
        assert held(catalog.table_of(index)) == part


@given(st.lists(st.lists(rows(), max_size=3), max_size=3))
def test_catalogs_merged_are_the_catalog_of_all_files(groups: list[list[Rows]]) -> None:
    catalogs = []
    for number, group in enumerate(groups):
        files = [a_file(10 * number + index) for index in range(len(group))]
        catalogs.append(Catalog.of(files, [part.build() for part in group]))
    merged = Catalog.merge(catalogs)
    parts = [part for group in groups for part in group]
    assert held(merged.table) == joined(parts)
    assert [held(merged.table_of(index)) for index in range(len(parts))] == parts
    assert [file.path for file in merged.files] == [f.path for c in catalogs for f in c.files]


@given(st.lists(rows(), min_size=1, max_size=4))
def test_the_tensors_of_a_payload_are_those_that_name_it(parts: list[Rows]) -> None:
    table = Table.concatenate([part.build() for part in parts])
    starts, on = table.tensors_of_payloads()
    whole = joined(parts)
    for row in range(table.n_payloads):
        expected = [n for n, tensor in enumerate(whole.tensors) if tensor.payload == row]
        assert on[starts[row] : starts[row + 1]].tolist() == expected


def test_only_unpinned_payloads_from_the_floor_on_are_stored_apart() -> None:
    builder = TableBuilder()
    builder.payload([(0, FLOOR - 1)])
    builder.payload([(0, FLOOR)])
    builder.payload([(0, FLOOR // 2), (9000, FLOOR // 2)])
    builder.payload([(0, FLOOR)], pinned=True)
    assert builder.build().stored_apart.tolist() == [False, True, True, False]


def test_a_tensor_of_an_ordinary_name_takes_less_than_200_bytes() -> None:
    builder = TableBuilder()
    for n in range(20_000):
        row = builder.payload([(n, 1)])
        builder.tensor(f"layers.{n}.attention.weight", "F32", (4096, 4096), 1, payload=row)
    table = builder.build()
    total = sum(column.nbytes for column in table.columns.values())
    assert total / 20_000 < 200


@given(st.integers(0, 60), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=8))
def test_gaps_are_the_bytes_that_no_span_covers(extra: int, wanted: list[tuple[int, int]]) -> None:
    taken: set[int] = set()
    spans = []
    for offset, nbytes in wanted:
        run = set(range(offset, offset + nbytes))
        inside = any(at < offset < at + n for at, n in spans)
        if not run & taken and not inside:
            taken |= run
            spans.append((offset, nbytes))
    size = max(taken, default=0) + 1 + extra
    found = gaps(np.array(spans, np.int64).reshape(-1, 2), size)
    covered = [at for offset, nbytes in found for at in range(offset, offset + nbytes)]
    if all(offset + nbytes <= size for offset, nbytes in spans):
        assert covered == sorted(set(range(size)) - taken)
        assert all(nbytes > 0 for _, nbytes in found)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([0, 4], "0,4"),
        (range(8), "0-7"),
        ([8, 0, 1, 2, 3], "0-3,8"),
        ([5, 5, 6], "5-6"),
        ([0, 2, 3, 4, 9, 10], "0,2-4,9-10"),
    ],
)
def test_ranks_are_written_as_people_write_them(ranks: list[int], text: str) -> None:
    assert compact_ranks(ranks) == text


@given(st.sets(st.integers(0, 40)))
def test_written_ranks_name_exactly_the_ranks(ranks: set[int]) -> None:
    named: set[int] = set()
    for run in filter(None, compact_ranks(ranks).split(",")):
        first, _, last = run.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (b"rank_0/net.ckpt", "rank_0/net.ckpt"),
        ("名字".encode(), "名字"),
        (b"a\nb\x1b[31m", "a\\nb\\x1b[31m"),
        (b"\xff\xfe", "\\xff\\xfe"),
        ("a\u202eb".encode(), "a\\u202eb"),
    ],
)
def test_a_path_is_shown_without_anything_a_terminal_would_obey(path: bytes, text: str) -> None:
    assert show_path(path) == text


def test_plain_tensors_added_at_once_are_as_if_added_one_by_one() -> None:
    names = ["a", "", "größe", "b.c"]
    dtypes, shapes = ["F32", "BF16", "F32", "I8"], [[2, 3], [], [0, 4], [5]]
    spans = [(100, 24), (124, 2), (126, 0), (126, 5)]
    at_once, singly = TableBuilder(), TableBuilder()
    for builder in (at_once, singly):
        builder.tensor(
            "before", "U8", [7], 7, payload=builder.payload([(0, 3), (50, 4)]), path="x/y"
        )
    at_once.plain(names, dtypes, shapes, spans)
    for name, dtype, shape, span in zip(names, dtypes, shapes, spans, strict=True):
        payload = singly.payload([span]) if span[1] else None
        singly.tensor(name, dtype, shape, span[1], payload=payload)
    for builder in (at_once, singly):
        builder.tensor("after", "F32", [1], 4, payload=builder.payload([(200, 4)]))
    one, other = at_once.build(), singly.build()
    assert (one.dtypes, one.encodings, one.fills) == (other.dtypes, other.encodings, other.fills)
    for name, column in one.columns.items():
        assert column.dtype == other.columns[name].dtype, name
        assert column.tolist() == other.columns[name].tolist(), name
