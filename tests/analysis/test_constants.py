"""One number over and over: candidates by samples, proofs by digests."""

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors_bytes import safetensors_file

import slimckpt
from slimckpt.analysis.constants import constant_classes
from slimckpt.analysis.scan import scan
from slimckpt.analysis.sharing import Bodies, classes, hash_files, sample
from slimckpt.analysis.tree import walk
from slimckpt.sources.digest import BLOCK, Digests


def constants(folder: Path, exact: bool) -> set[str]:
    """Names of the tensors found constant."""
    with ThreadPoolExecutor(2) as executor:
        tree = walk(os.fsencode(folder))
        bodies = Bodies(scan(tree, executor), tree.root)
        if exact:
            digests = Digests(bodies.nbytes)
            hash_files(bodies, range(bodies.n_files), executor, digests)
        else:
            digests = sample(bodies, executor)
        class_of = classes(bodies, digests)
        found = constant_classes(bodies, class_of, digests if exact else None, executor)
    table = bodies.catalog.table
    return {table.name(n) for n in range(table.n_tensors) if found[class_of[n]]}


def written(folder: Path, *tensors: tuple[str, str, bytes]) -> Path:
    widths = {"F32": 4, "BF16": 2, "U8": 1, "F64": 8, "C64": 8, "I32": 4}
    rows = [(name, dtype, [len(body) // widths[dtype]], body) for name, dtype, body in tensors]
    (folder / "model.safetensors").write_bytes(safetensors_file(rows))
    return folder


ONE = struct.pack("<f", 1.0)
ALMOST = bytearray(ONE * 4000)
ALMOST[4 * 1000] ^= 1


@pytest.mark.parametrize("exact", [False, True])
def test_constants_of_every_width_are_found(tmp_path: Path, exact: bool) -> None:
    folder = written(
        tmp_path,
        ("zeros", "F32", bytes(4096)),
        ("ones", "F32", ONE * 1024),
        ("bytes", "U8", b"\x07" * 1031),
        ("halves", "BF16", b"\x80\x3f" * 777),
        ("doubles", "F64", struct.pack("<d", 0.1) * 500),
        ("complex", "C64", struct.pack("<ff", 0.1, 0.2) * 200),
        ("large", "F32", ONE * ((2 * BLOCK + 4000) // 4)),
        ("ramp", "F32", np.arange(1024, dtype="<f4").tobytes()),
        ("alternating", "F32", (ONE + bytes(4)) * 512),
        ("alternating bytes", "U8", b"\x01\x02" * 1024),
        ("last differs", "F32", ONE * 1023 + bytes(4)),
        ("first differs", "F32", bytes(4) + ONE * 1023),
        ("short", "F32", bytes(1020)),
    )
    expected = {"zeros", "ones", "bytes", "halves", "doubles", "complex", "large"}
    assert constants(folder, exact) == expected


def test_samples_may_be_wrong_and_digests_are_not(tmp_path: Path) -> None:
    folder = written(tmp_path, ("almost", "F32", bytes(ALMOST)))
    assert constants(folder, exact=False) == {"almost"}
    assert constants(folder, exact=True) == set()


def test_the_report_counts_every_copy(tmp_path: Path) -> None:
    for rank in range(3):
        folder = tmp_path / f"rank_{rank}"
        folder.mkdir()
        written(folder, ("zeros", "F32", bytes(4096)), ("w", "F32", os.urandom(4096)))
    found = slimckpt.analyze(tmp_path, exact=True).constants
    assert (found.payloads, found.nbytes) == (3, 3 * 4096)
    assert found.example == "zeros in rank_0/model.safetensors"


def test_a_tree_without_payloads_has_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    assert slimckpt.analyze(tmp_path).constants.payloads == 0
