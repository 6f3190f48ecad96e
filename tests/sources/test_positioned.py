"""Reading by position."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.errors import DamagedFileError, UnfaithfulSourceError
from slimckpt.model import Span
from slimckpt.sources.positioned import WINDOW, FileSource, cut, read_spans_into

DATA = bytes(n * 7 % 251 for n in range(3 * WINDOW + 11))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("positioned") / "data"
    file.write_bytes(DATA)
    return os.fsencode(file)


def test_any_sequence_of_reads_gives_the_bytes_of_the_file(path: bytes) -> None:
    edges = st.integers(0, len(DATA)) | st.sampled_from([0, WINDOW, 2 * WINDOW, len(DATA)])

    @given(st.lists(st.tuples(edges, edges | st.integers(0, 99)), max_size=8))
    def search(reads: list[tuple[int, int]]) -> None:
        with FileSource(path) as source:
            assert source.size == len(DATA)
            for offset, nbytes in reads:
                nbytes = min(nbytes, len(DATA) - offset)
                assert source.read(offset, nbytes) == DATA[offset : offset + nbytes]

    search()


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (0, -1), (len(DATA), 1), (0, len(DATA) + 1), (2**70, 1)]
)
def test_a_range_outside_the_file_is_damage_that_names_the_file(
    path: bytes, offset: int, nbytes: int
) -> None:
    with FileSource(path, "rank_0/x") as source, pytest.raises(DamagedFileError, match="rank_0/x"):
        source.read(offset, nbytes)


def test_a_file_that_shrinks_while_it_is_read_is_not_damage(tmp_path: Path) -> None:
    file = tmp_path / "shrinks"
    file.write_bytes(DATA)
    with FileSource(os.fsencode(file)) as source:
        os.truncate(file, 100)
        with pytest.raises(UnfaithfulSourceError, match="being written"):
            source.read(50, 100)
        with pytest.raises(UnfaithfulSourceError, match="byte 100"):
            source.read(0, 2 * WINDOW)


def test_small_reads_in_order_cost_few_system_calls(
    path: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    pread = os.pread

    def counted(fd: int, nbytes: int, offset: int) -> bytes:
        calls.append((offset, nbytes))
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    with FileSource(path) as source:
        for at in range(0, len(DATA) - 64, 64):
            source.read(at, 64)
    assert len(calls) <= len(DATA) // WINDOW + 1


def test_a_symbolic_link_is_not_followed(tmp_path: Path, path: bytes) -> None:
    link = tmp_path / "link"
    link.symlink_to(os.fsdecode(path))
    with pytest.raises(OSError, match="symbolic links"):
        FileSource(os.fsencode(link))


def test_the_file_is_closed_behind_the_block(path: bytes) -> None:
    with FileSource(path) as source:
        fd = source.fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def spans_strategy() -> st.SearchStrategy[list[Span]]:
    return st.lists(
        st.builds(Span, st.integers(0, len(DATA) - 300), st.integers(0, 300)), max_size=6
    )


def stream_of(spans: list[Span]) -> bytes:
    return b"".join(DATA[offset : offset + nbytes] for offset, nbytes in spans)


def test_spans_are_read_one_after_another(path: bytes) -> None:
    @given(spans_strategy())
    def search(spans: list[Span]) -> None:
        expected = stream_of(spans)
        buffer = bytearray(b"\xee" * (len(expected) + 5))
        fd = os.open(path, os.O_RDONLY)
        try:
            assert read_spans_into(fd, spans, memoryview(buffer), "it") == len(expected)
        finally:
            os.close(fd)
        assert bytes(buffer) == expected + b"\xee" * 5

    search()


def test_a_span_beyond_the_end_of_the_file_is_not_faithful(path: bytes) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(UnfaithfulSourceError, match=f"rank_0/x.*byte {len(DATA)}, 7 bytes"):
            read_spans_into(fd, [Span(len(DATA) - 3, 10)], memoryview(bytearray(10)), "rank_0/x")
    finally:
        os.close(fd)


@given(spans_strategy(), st.integers(0, 900), st.integers(0, 900))
def test_a_cut_stream_is_the_slice_of_the_stream(
    spans: list[Span], start: int, nbytes: int
) -> None:
    assert stream_of(cut(spans, start, nbytes)) == stream_of(spans)[start : start + nbytes]
