"""Arrays of tensors that lie anywhere: the fast path equals the slow one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.errors import DamagedFileError
from slimckpt.model import Role, SourceFile, Stat, Table, TableBuilder
from slimckpt.sources.backends import Backend, MmapBackend, PreadBackend
from slimckpt.sources.positioned import FileSource
from slimckpt.views.arrays import Arrays
from slimckpt.views.plain import PlainTensors
from slimckpt.views.providers import Holding, Places, Stretch

DATA = np.random.default_rng(5).bytes(4096)
DTYPES = {"U8": "<u1", "I16": "<i2", "U32": "<u4", "I64": "<i8"}


class HoldingByHand(Holding):
    """One payload in the given stretches of one file."""

    damaged = DamagedFileError

    def __init__(self, path: bytes, table: Table, stretches: list[tuple[bool, int, int]]) -> None:
        stat = Stat(0o600, 0, 0, 0)
        super().__init__(SourceFile(b"m", 10**6, stat, Role(), "made", "understood"))
        self._table = table
        self._stretches = [
            Stretch(path, offset, nbytes, len(DATA))
            if in_file
            else Stretch(None, offset % 256, nbytes, 0)
            for in_file, offset, nbytes in stretches
        ]

    @property
    def file(self) -> SourceFile:
        return self._file

    @property
    def table(self) -> Table:
        return self._table

    def stretches(self, payload: int) -> list[Stretch]:
        return self._stretches

    def source(self) -> FileSource:
        raise NotImplementedError

    def places(self) -> Places:
        path, offset, nbytes, size = self._stretches[0]
        alone = len(self._stretches) == 1 and path is not None and offset + nbytes <= size
        number = np.full(1, 0 if alone else -1)
        return Places([(path or b"", size)], number, np.full(1, offset))

    def digest(self, payload: int) -> bytes | None:
        return None


def stream_of(stretches: list[tuple[bool, int, int]]) -> bytes:
    return b"".join(
        DATA[offset : offset + nbytes] if in_file else bytes([offset % 256]) * nbytes
        for in_file, offset, nbytes in stretches
    )


def element(stream: bytes, dtype: str, at: int) -> bytes | None:
    """The bytes of one element, ``None`` where it is not inside the stream."""
    size = np.dtype(dtype).itemsize
    return stream[at : at + size] if at >= 0 and at + size <= len(stream) else None


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("kind", [MmapBackend, PreadBackend])
def test_any_tensor_of_any_payload_has_the_elements_that_one_by_one_give(
    tmp_path: Path, kind: type[Backend], writable: bool
) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    stretch = st.tuples(st.booleans(), st.integers(0, 4000), st.integers(0, 96))
    axis = st.tuples(st.integers(0, 4), st.integers(-9, 9))

    @given(
        st.lists(stretch, min_size=1, max_size=5),
        st.sampled_from(sorted(DTYPES)),
        st.integers(-4, 150),
        st.lists(axis, max_size=3),
        st.booleans(),
    )
    def search(
        stretches: list[tuple[bool, int, int]],
        name: str,
        offset: int,
        axes: list[tuple[int, int]],
        strided: bool,
    ) -> None:
        dtype, stream = DTYPES[name], stream_of(stretches)
        shape = tuple(dim for dim, _ in axes)
        size = np.dtype(dtype).itemsize
        c_order = [int(np.prod(shape[n + 1 :])) for n in range(len(shape))]
        strides = [stride for _, stride in axes] if strided else c_order
        wanted = [
            element(
                stream, dtype, offset + size * sum(i * s for i, s in zip(at, strides, strict=True))
            )
            for at in np.ndindex(shape)
        ]
        builder = TableBuilder()
        payload = builder.payload([(0, len(stream))])
        builder.tensor(
            "w",
            name,
            shape,
            size * len(wanted),
            payload=payload,
            offset=offset,
            strides=strides if strided else (),
        )
        holding = HoldingByHand(os.fsencode(path), builder.build(), stretches)
        arrays = Arrays(kind(DamagedFileError), writable)
        plain = PlainTensors(holding, MmapBackend()).array(0)
        if None in wanted:
            assert plain is None
            with pytest.raises(DamagedFileError, match="m: tensor 'w'"):
                arrays.array(holding, 0)
            return
        found = arrays.array(holding, 0)
        assert (found.shape, found.dtype) == (shape, np.dtype(dtype))
        assert found.tobytes() == b"".join(body for body in wanted if body is not None)
        assert found.flags.writeable == writable
        if plain is not None:
            assert (plain.shape, plain.dtype, plain.tobytes()) == (
                found.shape,
                found.dtype,
                found.tobytes(),
            )
            assert not plain.flags.writeable
            assert plain.flags.aligned or plain.nbytes >= 1024
        assert arrays.raw(holding, 0) == found.tobytes()
        if not writable and 0 < found.nbytes < 1024:
            assert found.flags.aligned
        if writable and found.size:
            found[...] = 1
            assert (arrays.array(holding, 0) == 1).all()
            fresh = Arrays(kind(DamagedFileError), False).array(holding, 0)
            assert fresh.tobytes() == b"".join(body for body in wanted if body is not None)

    search()
    assert path.read_bytes() == DATA
