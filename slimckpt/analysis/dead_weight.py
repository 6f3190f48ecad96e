"""Bytes of payloads that no tensor views: what a slice of a large storage drags along."""

from __future__ import annotations

import math

import numpy as np

from slimckpt.model import RAW, Catalog, Ints, Table, Tensor

_MOST_RUNS = 1 << 20
"""Runs of one strided view that are told apart; of more, all between the first and last counts."""

_PADDED = ("hdf5", "keras")
"""Formats in which no tensor is cut out of a larger one: what follows it pads its last chunk."""


def dead_in(catalog: Catalog) -> Ints:
    """:func:`dead_nbytes` of all files; padding of the chunks of HDF5 is none."""
    padded = np.array([file.format in _PADDED for file in catalog.files], np.bool_)
    dead = dead_nbytes(catalog.table)
    dead[np.repeat(padded, np.diff(catalog.payload_start))] = 0
    return dead


def dead_nbytes(table: Table) -> Ints:
    """For each payload, how many of its bytes lie outside every view.

    Strides and offsets are respected. A payload whose bytes are encoded counts as viewed, unless
    no tensor is on it at all.
    """
    columns = table.columns
    starts, rows = table.tensors_of_payloads()
    viewed = np.flatnonzero(starts[1:] > starts[:-1])
    first = rows[starts[viewed]]
    raw = np.array([encoding == RAW for encoding in table.encodings], np.bool_)
    # Nearly always one tensor covers all of its payload.
    rest = table.payload_nbytes[viewed] - columns["nbytes"][first]
    rest[~raw[columns["encoding"][first]]] = 0
    strided = np.diff(columns["stride_end"], prepend=0)[first] > 0
    dead: Ints = table.payload_nbytes.copy()
    dead[viewed] = 0
    for payload in viewed[(rest > 0) | strided | (columns["offset"][first] > 0)].tolist():
        tensors = [table.tensor(row) for row in rows[starts[payload] : starts[payload + 1]]]
        if all(tensor.encoding == RAW for tensor in tensors):
            size = int(table.payload_nbytes[payload])
            dead[payload] = size - covered(tensors, size)
    return dead


def covered(tensors: list[Tensor], size: int) -> int:
    """How many of ``size`` bytes are inside at least one of the views."""
    runs = np.concatenate([np.zeros((0, 2), np.int64), *map(_runs, tensors)])
    runs = np.clip(runs[np.argsort(runs[:, 0], kind="stable")], 0, size)
    # Of a run, what lies beyond the furthest end so far is new.
    reached = (
        np.maximum.accumulate(np.concatenate([[0], runs[:-1, 1]])) if len(runs) else runs[:, 0]
    )
    return int(np.maximum(runs[:, 1] - np.maximum(runs[:, 0], reached), 0).sum())


def _runs(tensor: Tensor) -> Ints:
    """The bytes a view touches, as (start, end), in the decoded stream."""
    count = math.prod(tensor.shape)
    if tensor.strides is None or not count:
        return np.array([[tensor.offset, tensor.offset + tensor.nbytes]], np.int64)
    width = tensor.nbytes // count
    dims = [
        (n, s * width) for n, s in zip(tensor.shape, tensor.strides, strict=True) if n > 1 and s
    ]
    dims.sort(key=lambda dim: abs(dim[1]))
    run = width
    while dims and dims[0][1] == run:
        run *= dims.pop(0)[0]
    low = tensor.offset + sum(min(0, (n - 1) * step) for n, step in dims)
    high = tensor.offset + sum(max(0, (n - 1) * step) for n, step in dims) + run
    if math.prod(n for n, _ in dims) > _MOST_RUNS:
        return np.array([[low, high]], np.int64)
    starts = np.full(1, tensor.offset, np.int64)
    for n, step in dims:
        starts = (starts[:, None] + np.arange(n) * step).reshape(-1)
    return np.stack([starts, starts + run], axis=1)
