"""Digests: against BLAKE3 by hand, in units of any size and order."""

import os
import pickle
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from slimckpt.errors import UnfaithfulSourceError
from slimckpt.model import Span
from slimckpt.sources import digest as module
from slimckpt.sources.digest import (
    BLOCK,
    SAMPLE,
    Digests,
    Unit,
    digest_of,
    digest_of_blocks,
    hash_unit,
    run_units,
    sample_unit,
    units_of,
)


def by_hand(data: bytes) -> bytes:
    """The definition, written out."""
    if len(data) <= 4194304:
        return blake3(data).digest()
    tree = blake3(derive_key_context="slimckpt block tree")
    tree.update(len(data).to_bytes(8, "little"))
    for at in range(0, len(data), 4194304):
        tree.update(blake3(data[at : at + 4194304]).digest())
    return tree.digest()


BIG = random.Random(1).randbytes(2 * BLOCK + 12345)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("digest") / "data"
    file.write_bytes(BIG)
    return os.fsencode(file)


def digests_by_units(path: bytes, bodies: list[tuple[Span, ...]], unit: int) -> Digests:
    found = Digests([sum(span.nbytes for span in spans) for spans in bodies])
    units = list(units_of(path, "it", enumerate(bodies), unit))
    random.Random(2).shuffle(units)
    for one in units:
        found.add(hash_unit(pickle.loads(pickle.dumps(one))))
    return found


@pytest.mark.parametrize(
    "nbytes", [0, 1, 1023, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 12345]
)
def test_the_digest_in_memory_is_the_one_by_hand(nbytes: int) -> None:
    assert digest_of(BIG[:nbytes]) == by_hand(BIG[:nbytes])
    assert digest_of(memoryview(bytearray(BIG[:nbytes]))) == by_hand(BIG[:nbytes])


def test_the_digest_of_nothing_is_blake3s() -> None:
    official = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest_of(b"").hex() == official


def test_a_body_that_holds_the_block_digests_of_another_has_another_digest() -> None:
    blocks = [blake3(BIG[at : at + BLOCK]).digest() for at in range(0, len(BIG), BLOCK)]
    digest = digest_of(BIG)
    length = struct.pack("<Q", len(BIG))
    for forged in (b"".join(blocks), length + b"".join(blocks), b"".join(blocks) + length):
        assert digest_of(forged) != digest
        assert blake3(forged).digest() != digest


def test_the_length_is_part_of_a_long_digest() -> None:
    blocks = bytes(64)
    assert digest_of_blocks(BLOCK + 1, blocks) != digest_of_blocks(BLOCK + 2, blocks)


@pytest.mark.parametrize("unit", [0, BLOCK, 2 * BLOCK, 64 * BLOCK])
def test_units_of_any_size_in_any_order_give_the_same_digests(path: bytes, unit: int) -> None:
    n = len(BIG)
    bodies = [
        (Span(0, n),),
        (Span(5, 100),),
        (),
        (Span(BLOCK - 7, BLOCK + 3), Span(3, 11), Span(2 * BLOCK, 12000)),
        (Span(0, BLOCK),),
        (Span(9, BLOCK + 1),),
    ]
    found = digests_by_units(path, bodies, unit)
    assert found.known.all()
    for row, spans in enumerate(bodies):
        data = b"".join(BIG[at : at + nbytes] for at, nbytes in spans)
        assert found.digests[row].tobytes() == by_hand(data), row
        parts = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        blocks = b"".join(blake3(part).digest() for part in parts) if len(parts) > 1 else b""
        assert found.blocks_of(row) == blocks, row


def test_a_digest_is_known_only_when_all_its_blocks_are(path: bytes) -> None:
    found = Digests([len(BIG)])
    units = list(units_of(path, "it", [(0, (Span(0, len(BIG)),))], BLOCK))
    assert len(units) == 3
    for unit in units:
        assert not found.known[0]
        found.add(hash_unit(unit))
    assert found.known[0]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 400)), max_size=3), max_size=9)
)
@settings(max_examples=50)
def test_units_hold_every_body_once_and_state_their_bytes(
    given_bodies: list[list[tuple[int, int]]],
) -> None:
    bodies = [tuple(Span(*span) for span in spans) for spans in given_bodies]
    for size in (0, BLOCK):
        units = list(units_of(b"p", "it", enumerate(bodies), size))
        pieces = [piece for unit in units for piece in unit.pieces]
        assert [(piece.row, piece.spans) for piece in pieces] == list(enumerate(bodies))
        for unit in units:
            spans = [span for piece in unit.pieces for span in piece.spans]
            assert unit.nbytes == sum(span.nbytes for span in spans)


def samples(path: bytes, bodies: list[tuple[Span, ...]]) -> list[bytes]:
    found = []
    for unit in units_of(path, "it", enumerate(bodies), 0):
        found += [hashed.blocks for hashed in sample_unit(unit)]
    return found


def test_a_sample_of_a_short_body_reads_all_of_it(tmp_path: Path) -> None:
    for nbytes in (0, 1, SAMPLE, 3 * SAMPLE - 1, 3 * SAMPLE):
        file = tmp_path / "short"
        data = bytearray(BIG[:nbytes])
        file.write_bytes(data)
        body = [(Span(0, nbytes),)]
        (before,) = samples(os.fsencode(file), body)
        assert before == blake3(struct.pack("<Q", nbytes) + data).digest()
        for at in range(0, nbytes, 37):
            changed = bytearray(data)
            changed[at] ^= 1
            file.write_bytes(changed)
            assert samples(os.fsencode(file), body) != [before]


def test_a_sample_of_a_long_body_reads_its_start_middle_and_end(path: bytes) -> None:
    spans = (Span(100, 1000), Span(5000, 1001))
    data = BIG[100:1100] + BIG[5000:6001]
    middle = (2001 - 256) // 2
    picked = data[:256] + data[middle : middle + 256] + data[-256:]
    assert samples(path, [spans]) == [blake3(struct.pack("<Q", 2001) + picked).digest()]


def test_bodies_of_other_lengths_have_other_samples(tmp_path: Path) -> None:
    file = tmp_path / "zeros"
    file.write_bytes(bytes(5000))
    found = samples(os.fsencode(file), [(Span(0, n),) for n in (0, 1, 767, 768, 769, 5000)])
    assert len(set(found)) == 6


def test_a_file_that_was_cut_stops_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "cut"
    file.write_bytes(b"abc")
    (unit,) = units_of(os.fsencode(file), "rank_0/x", [(0, (Span(0, 5),))])
    for work in (hash_unit, sample_unit):
        with pytest.raises(UnfaithfulSourceError, match="rank_0/x"):
            work(unit)


def test_units_run_on_an_executor_and_all_come_back() -> None:
    with ThreadPoolExecutor(2) as pool:
        found = dict(run_units(pool, lambda n: n * n, range(200), ahead=3))
    assert found == {n: n * n for n in range(200)}


def test_the_first_error_stops_the_rest() -> None:
    started = []

    def work(n: int) -> int:
        started.append(n)
        if n == 3:
            raise KeyError(n)
        return n

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
        for _ in run_units(pool, work, range(10_000), ahead=4):
            pass
    assert len(started) < 20


def test_no_more_units_wait_than_asked_for() -> None:
    taken = 0

    def units() -> "list[int]":
        nonlocal taken
        for n in range(50):
            taken += 1
            yield n

    with ThreadPoolExecutor(2) as pool:
        for done, _ in enumerate(run_units(pool, lambda n: n, units(), ahead=5)):
            assert taken <= done + 1 + 5


def test_each_thread_keeps_one_buffer() -> None:
    first = module.reusable_buffer(10)
    assert module.reusable_buffer(10).obj is first.obj
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: module.reusable_buffer(10).obj).result() is not first.obj


def test_a_unit_is_plain_and_picklable() -> None:
    (unit,) = units_of(b"p", "it", [(0, (Span(0, 5),))])
    assert pickle.loads(pickle.dumps(unit)) == unit
    assert isinstance(unit, Unit)
