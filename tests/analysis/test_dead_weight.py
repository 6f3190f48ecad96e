"""Bytes no tensor views, counted by marking them one by one."""

import math
import zipfile
from pathlib import Path

import h5py
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import slimckpt
from slimckpt.analysis.dead_weight import dead_nbytes
from slimckpt.model import TableBuilder

Views = list[tuple[tuple[int, ...], tuple[int, ...], int, int]]


def table_of(nbytes: int, views: Views, encoding: str = "raw"):
    """One payload under views of (shape, strides, first element, bytes of an element)."""
    builder = TableBuilder()
    payload = builder.payload([(100, nbytes)])
    for number, (shape, strides, first, width) in enumerate(views):
        builder.tensor(
            f"t{number}",
            "F32",
            shape,
            math.prod(shape) * width,
            payload=payload,
            strides=strides,
            offset=first * width,
            encoding=encoding,
        )
    return builder.build()


def marked(nbytes: int, views: Views) -> int:
    seen = np.zeros(nbytes, np.bool_)
    for shape, strides, first, width in views:
        for index in np.ndindex(*shape):
            steps = strides or [math.prod(shape[at + 1 :]) for at in range(len(shape))]
            at = (first + sum(i * s for i, s in zip(index, steps, strict=True))) * width
            seen[at : at + width] = True
    return int((~seen).sum())


def test_a_tensor_that_covers_its_payload_leaves_nothing() -> None:
    assert dead_nbytes(table_of(400, [((10, 10), (), 0, 4)])).tolist() == [0]


def test_a_slice_of_a_large_storage_leaves_the_rest() -> None:
    # torch.save of the first three of four thousand floats
    assert dead_nbytes(table_of(16_000, [((3,), (), 0, 4)])).tolist() == [16_000 - 12]


def test_a_column_touches_its_elements_only() -> None:
    assert dead_nbytes(table_of(400, [((10, 2), (10, 1), 3, 4)])).tolist() == [400 - 80]


def test_a_transposed_matrix_covers_everything() -> None:
    assert dead_nbytes(table_of(400, [((10, 10), (1, 10), 0, 4)])).tolist() == [0]


def test_tied_and_overlapping_views_count_once() -> None:
    views = [((50,), (), 0, 4), ((50,), (), 0, 4), ((30,), (), 40, 4)]
    assert dead_nbytes(table_of(400, views)).tolist() == [400 - 70 * 4]


def test_an_encoded_payload_counts_as_viewed_if_anything_views_it() -> None:
    assert dead_nbytes(table_of(400, [((3,), (), 0, 4)], "deflate")).tolist() == [0]
    assert dead_nbytes(table_of(400, [])).tolist() == [400]


def test_payloads_are_counted_each_for_itself() -> None:
    builder = TableBuilder()
    rows = [builder.payload([(at * 100, 100)]) for at in range(3)]
    builder.tensor("a", "F32", (25,), 100, payload=rows[0])
    builder.tensor("c", "F32", (5,), 20, payload=rows[2])
    builder.tensor("empty", "F32", (0,), 0)
    assert dead_nbytes(builder.build()).tolist() == [0, 100, 80]


def test_padding_of_the_last_chunk_of_hdf5_is_no_dead_weight(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "log.h5", "w") as file:
        file.create_dataset("loss", data=np.arange(300.0), chunks=(500,), maxshape=(None,))
    assert slimckpt.analyze(tmp_path).dead.payloads == 0
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "{}")
        archive.write(tmp_path / "log.h5", "model.weights.h5")
    report = slimckpt.analyze(tmp_path)
    assert (report.formats, report.dead.payloads) == ({"hdf5": 1, "keras": 1}, 0)


def test_more_runs_than_are_told_apart_are_counted_by_their_ends() -> None:
    elements = 1 << 22
    views = [((elements // 2, 1), (2, 1), 0, 1)]
    # Every other byte: the last one is beyond the last run.
    assert dead_nbytes(table_of(elements, views)).tolist() == [1]


@st.composite
def _views(draw: st.DrawFn) -> tuple[int, Views]:
    width = draw(st.sampled_from([1, 2, 4]))
    views = []
    for _ in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        strided = draw(st.booleans()) and shape
        strides = tuple(draw(st.integers(0, 9)) for _ in shape) if strided else ()
        views.append((shape, strides, draw(st.integers(0, 5)), width))
    reach = [
        first
        + (
            sum(s * (n - 1) for n, s in zip(shape, strides, strict=True))
            if strides
            else math.prod(shape)
        )
        for shape, strides, first, _ in views
        if 0 not in shape
    ]
    return (max(reach, default=0) + 1 + draw(st.integers(0, 9))) * width, views


@given(_views())
def test_any_views_leave_what_marking_leaves(made: tuple[int, Views]) -> None:
    nbytes, views = made
    assert dead_nbytes(table_of(nbytes, views)).tolist() == [marked(nbytes, views)]
