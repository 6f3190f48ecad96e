"""Samples: the fast way says what the slow way says, and reads little."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore_bytes import record
from safetensors_bytes import safetensors_file

from slimckpt.analysis import sampling
from slimckpt.analysis.sampling import FlatUnit, sample_flat_unit
from slimckpt.analysis.scan import scan
from slimckpt.analysis.sharing import Bodies, sample
from slimckpt.analysis.tree import walk
from slimckpt.errors import UnfaithfulSourceError
from slimckpt.model import Span
from slimckpt.sources.digest import Digests, sample_unit, units_of

LENGTHS = st.one_of(st.integers(0, 40), st.integers(700, 800), st.integers(800, 9000))


def unit_of(path: Path, spans: list[tuple[int, int]]) -> FlatUnit:
    offsets, nbytes = np.array(spans, np.int64).reshape(-1, 2).T
    return FlatUnit(os.fsencode(path), path.name, np.arange(len(spans)), offsets, nbytes)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 900), LENGTHS), min_size=1, max_size=12), st.data())
def test_the_fast_way_samples_what_the_slow_way_samples(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, int]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("samples") / "file"
    spans, at = [], 0
    for gap, nbytes in pieces:
        spans.append((at + gap, nbytes))
        at += gap + nbytes
    path.write_bytes(np.random.default_rng(at).bytes(at + data.draw(st.integers(0, 800))))
    spans = data.draw(st.permutations(spans))
    pairs = [(row, (Span(*span),)) for row, span in enumerate(spans)]
    slow = [
        hashed.blocks
        for unit in units_of(os.fsencode(path), "file", pairs, unit=0)
        for hashed in sample_unit(unit)
    ]
    assert sample_flat_unit(unit_of(path, spans)) == b"".join(slow)


def test_a_file_that_became_shorter_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shrunk"
    path.write_bytes(bytes(3000))
    with pytest.raises(UnfaithfulSourceError, match="shrunk"):
        sample_flat_unit(unit_of(path, [(0, 4000)]))


def test_under_a_kib_is_read_of_each_payload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100 * 65536))
    reads = []
    pread = os.pread

    def counting(fd: int, nbytes: int, at: int) -> bytes:
        reads.append(nbytes)
        return pread(fd, nbytes, at)

    monkeypatch.setattr(sampling.os, "pread", counting)
    sample_flat_unit(unit_of(path, [(n * 65536, 65536) for n in range(100)]))
    assert sum(reads) < 100 * 1024
    assert len(reads) <= 201


def test_every_body_is_sampled_whatever_its_form(tmp_path: Path) -> None:
    body = np.random.default_rng(0).bytes(5000)
    cut = record("cut", "UInt8", [5000], body[:3000]) + record("cut", "UInt8", [5000], body[3000:])
    (tmp_path / "rank_0.ckpt").write_bytes(cut + record("small", "UInt8", [3], b"abc"))
    (tmp_path / "rank_1.safetensors").write_bytes(safetensors_file([("w", "U8", [5000], body)]))
    (tmp_path / "notes.txt").write_bytes(b"notes" * 1000)
    with ThreadPoolExecutor(2) as executor:
        tree = walk(os.fsencode(tmp_path))
        bodies = Bodies(scan(tree, executor), tree.root)
        found = sample(bodies, executor)
    slow = Digests(np.minimum(bodies.nbytes, 1))
    for body_number in range(len(bodies)):
        path = bodies.path(int(bodies.file[body_number]))
        pairs = [(body_number, bodies.spans(body_number))]
        for unit in units_of(path, "", pairs, unit=0):
            slow.add(sample_unit(unit))
    assert (found.digests == slow.digests).all()
    assert (found.known == slow.known).all()
    payloads = found.digests[: bodies.n_payloads]
    assert (payloads[0] == payloads[2]).all(), "cut in two or not, the bytes are the same"
