"""Copying tensors into memory of the caller's."""

import array
import mmap
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mindspore_bytes import record
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES, expected
from test_arrays import DATA, HoldingByHand, stream_of
from trees import body

from slimckpt import views
from slimckpt.errors import (
    ClosedError,
    DamagedFileError,
    DroppedTensorError,
    OpaqueTensorError,
    UnknownTensorError,
    UsageError,
)
from slimckpt.model import TableBuilder
from slimckpt.rewrite.slim import slim
from slimckpt.sources import backends
from slimckpt.sources.backends import Backend, MmapBackend, PreadBackend
from slimckpt.views import Checkpoint, copying
from slimckpt.views.arrays import Arrays
from slimckpt.views.copying import LARGE, copy_tensor

Open = Callable[[Path], Checkpoint]
FOLDERS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
BIG = body(5, 5 * LARGE + 8)


def model(root: Path, *tensors: Any) -> Path:
    root.mkdir(exist_ok=True)
    (root / "model.safetensors").write_bytes(safetensors_file(tensors))
    return root


def same(found: Any, wanted: bytes) -> bool:
    return bytes(memoryview(found).cast("B")) == wanted


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_tensor_of_every_sample_is_copied_as_its_array_is(folder: str, backend: Any) -> None:
    with views.open(SAMPLES / folder, backend) as ckpt:
        for file in ckpt.files.values():
            if file.condition != "understood":
                continue
            for name, view in ((name, file.by_path) for name in file.by_path):
                wanted = view[name]
                like = np.full(wanted.shape, 1).astype(wanted.dtype)
                view.copy_into(name, like)
                assert like.tobytes() == wanted.tobytes()
                buffer = bytearray(wanted.nbytes)
                view.copy_into(name, buffer)
                assert buffer == wanted.tobytes()
                apart = np.zeros((2, *wanted.shape[::-1]), wanted.dtype)
                view.copy_into(name, apart[1, ...].T)
                assert apart[1, ...].T.tobytes() == wanted.tobytes()
                assert not any(apart[0, ...].tobytes())


def test_large_tensors_are_what_was_written(
    tmp_path: Path, open_any: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = BIG[: 4 * LARGE]
    root = model(
        tmp_path / "source",
        ("odd", "U8", [3], b"abc"),
        ("large", "F32", [len(BIG) // 4], BIG),
        ("matrix", "BF16", [64, len(matrix) // 128], matrix),
        ("zeros", "F64", [LARGE // 4], bytes(2 * LARGE)),
    )
    monkeypatch.setattr(backends, "WARM", 300_001)  # many blocks, none of which ends on an element
    view = open_any(root).rank(0)
    out = np.empty(len(BIG) // 4, np.float32)
    view.copy_into("large", out)
    assert out.tobytes() == BIG
    wanted = np.frombuffer(matrix, ml_dtypes.bfloat16).reshape(64, -1)
    fortran = np.empty(wanted.shape, wanted.dtype, "F")
    view.copy_into("matrix", fortran)
    assert fortran.tobytes() == matrix
    zeros = np.ones(LARGE // 4)
    view.copy_into("zeros", zeros)
    assert not zeros.any()
    pages = mmap.mmap(-1, len(BIG))
    view.copy_into("large", pages)
    assert pages[:] == BIG
    words = array.array("Q", bytes(len(BIG)))
    view.copy_into("large", words)
    assert words.tobytes() == BIG
    part = bytearray(len(BIG) + 2)
    view.copy_into("large", memoryview(part)[1:-1])
    assert part == b"\0" + BIG + b"\0"
    flat = np.empty(len(matrix), np.uint8)
    view.copy_into("matrix", flat)
    assert flat.tobytes() == matrix


def test_a_tensor_in_several_records_is_copied_as_one(tmp_path: Path, open_any: Open) -> None:
    cut = [BIG[: 2 * LARGE], BIG[2 * LARGE : 3 * LARGE + 4], BIG[3 * LARGE + 4 :]]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "net-1_1.ckpt").write_bytes(
        b"".join(record("w", "Float32", [len(BIG) // 4], piece) for piece in cut)
    )
    out = np.empty(len(BIG) // 4, np.float32)
    open_any(tmp_path / "source").rank(0).copy_into("w", out)
    assert out.tobytes() == BIG


def test_encoded_filled_and_swapped_tensors_are_copied_as_their_library_reads_them(
    tmp_path: Path, open_any: Open
) -> None:
    (tmp_path / "source").mkdir()
    path = tmp_path / "source" / "data.h5"
    numbers = np.frombuffer(BIG, "<f4")[: LARGE // 4 * 4].reshape(64, -1)
    with h5py.File(path, "w") as file:
        options = {"chunks": (10, 9000), "compression": 1, "shuffle": True}
        file.create_dataset("chunked", data=numbers, **options)
        file.create_dataset("swapped", data=numbers.astype(">f4"))
        file.create_dataset("never written", (3, LARGE), "<i2", fillvalue=7)
    view = open_any(tmp_path / "source").rank(0)
    with h5py.File(path) as file:
        for name in ("chunked", "swapped", "never written"):
            wanted = file[name][()]
            out = np.zeros(wanted.shape, wanted.dtype)
            view.copy_into(name, out)
            assert np.array_equal(out, wanted, equal_nan=wanted.dtype.kind == "f"), name
            buffer = bytearray(wanted.nbytes)
            view.copy_into(name, buffer)
            assert same(buffer, wanted.tobytes())


@pytest.mark.parametrize("kind", [MmapBackend, PreadBackend])
def test_any_tensor_is_the_bytes_of_its_pieces(
    tmp_path: Path, kind: type[Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    monkeypatch.setattr(copying, "LARGE", 1)
    monkeypatch.setattr(copying, "WARM", 16)
    monkeypatch.setattr(backends, "WARM", 7)
    stretch = st.tuples(st.booleans(), st.integers(0, 4000), st.integers(0, 96))

    @given(st.lists(stretch, min_size=1, max_size=5), st.integers(0, 30), st.booleans())
    def search(stretches: list[tuple[bool, int, int]], offset: int, transposed: bool) -> None:
        stream = stream_of(stretches)
        count = max(len(stream) - offset, 0) // 2
        builder = TableBuilder()
        payload = builder.payload([(0, len(stream))])
        strides = (1, count // 2) if transposed else ()
        shape = (count // 2, 2)
        builder.tensor(
            "w", "I16", shape, 4 * (count // 2), payload=payload, offset=offset, strides=strides
        )
        holding = HoldingByHand(bytes(path), builder.build(), stretches)
        wanted = np.frombuffer(stream[offset:], np.int16, count // 2 * 2)
        wanted = wanted.reshape(2, -1).T if transposed else wanted.reshape(shape)
        for out in (np.full(shape, -1, np.int16), np.full(shape, -1, np.int16, "F")):
            copy_tensor(Arrays(kind(), False), holding, 0, out, "w")
            assert np.array_equal(out, wanted)

    search()


def test_packed_elements_are_copied_packed(open_any: Open) -> None:
    (truth,) = expected("ms_dtypes")["files"]["t_qint4x2.ckpt"]["params"].values()
    view = open_any(SAMPLES / "ms_dtypes").files["t_qint4x2.ckpt"]
    (name,) = view
    assert view.info(name).dtype == "I4X2"
    for out in (np.empty_like(view[name]), bytearray(view[name].nbytes)):
        view.copy_into(name, out)
        assert sha256(out).hexdigest() == truth["sha256"]


def test_what_does_not_fit_is_refused_and_said(tmp_path: Path, open_any: Open) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    large = np.zeros((2, LARGE // 4), np.float32)
    root = model(
        tmp_path / "source",
        ("w", "F32", [2, 3], values.tobytes()),
        ("large", "F32", list(large.shape), large.tobytes()),
    )
    view = open_any(root).rank(0)
    frozen = np.zeros((2, 3), np.float32)
    frozen.flags.writeable = False
    cases: list[tuple[Any, str]] = [
        (np.zeros((3, 2), np.float32), r"found an array float32 \[3, 2\]"),
        (np.zeros((2, 3), np.int32), r"found an array int32 \[2, 3\]"),
        (np.zeros((2, 3), ">f4"), r"found an array >f4 \[2, 3\]"),
        (np.zeros((4, 6), np.uint8), r"found an array uint8 \[4, 6\]"),
        (frozen, "read-only"),
        (np.zeros(25, np.uint8), "found 25 bytes"),
        (bytearray(23), "found 23 bytes"),
        (memoryview(bytearray(48))[::2], "lie apart"),
        (bytes(24), "read-only"),
        ([0.0] * 6, r"found list; .* tensor\.numpy\(\)"),
        (None, "found NoneType"),
    ]
    for out, found in cases:
        with pytest.raises(UsageError, match=found) as caught:
            view.copy_into("w", out)
        assert "tensor 'w'" in str(caught.value) and "rank 0" in str(caught.value)
        assert "float32 [2, 3]" in str(caught.value) and "24 bytes" in str(caught.value)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(UsageError, match=f"float32 .2, {LARGE // 4}. .* found an array float32"):
        view.copy_into("large", large.T.copy())
    assert not frozen.any()


def test_what_cannot_be_read_cannot_be_copied(tmp_path: Path) -> None:
    with views.open(SAMPLES / "ms_edge") as ckpt:
        file = next(file for file in ckpt.files.values() if file.opaque)
        with pytest.raises(OpaqueTensorError):
            file.copy_into(file.opaque[0], bytearray(1))
        with pytest.raises(UnknownTensorError):
            file.copy_into("no such", bytearray(1))
    with pytest.raises(ClosedError):
        file.copy_into("no such", bytearray(1))
    run = tmp_path / "run"
    run.mkdir()
    moments = [("w", "F32", [512], body(1, 2048)), ("exp_avg.w", "F32", [512], body(2, 2048))]
    model(run, *moments)
    slim(run, tmp_path / "slim", drop=["optimizer"], min_saving=0)
    with views.open(tmp_path / "slim") as ckpt:
        (dropped,) = ckpt.rank(0).dropped
        with pytest.raises(DroppedTensorError):
            ckpt.rank(0).copy_into(dropped, bytearray(2048))


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_file_that_was_cut_is_an_error_that_says_so(tmp_path: Path, backend: Any) -> None:
    root = model(tmp_path / "source", ("w", "U8", [len(BIG)], BIG))
    with views.open(root, backend) as ckpt:
        view = ckpt.rank(0)
        path = root / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DamagedFileError, match="looks truncated"):
            view.copy_into("w", bytearray(len(BIG)))


def test_a_tensor_may_be_copied_over_itself(
    tmp_path: Path, open_any: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "WARM", 4096)
    shape = [len(BIG) // 8, 8]
    view = open_any(model(tmp_path / "source", ("w", "U8", shape, BIG))).rank(0, writable=True)
    view.copy_into("w", view["w"][::-1])
    assert np.array_equal(view["w"], np.frombuffer(BIG, np.uint8).reshape(shape)[::-1])


def test_a_writable_view_gives_what_it_holds_now(tmp_path: Path, open_any: Open) -> None:
    root = model(tmp_path / "source", ("w", "U8", [len(BIG)], BIG), ("s", "U8", [4], b"abcd"))
    view = open_any(root).rank(0, writable=True)
    view["w"][1] = view["s"][1] = 0
    for name, stored in (("w", BIG), ("s", b"abcd")):
        out = bytearray(len(stored))
        view.copy_into(name, out)
        assert out == stored[:1] + b"\0" + stored[2:]
