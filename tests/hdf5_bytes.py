"""HDF5 files made by h5py in memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t

LIBVERS = ("earliest", "v108", "v110", "v112", "latest")


def hdf5_file(write: Callable[[h5py.File], Any], libver: str = "earliest", **options: Any) -> bytes:
    """What ``write`` puts into a new file of h5py; ``options`` are those of ``h5py.File``."""
    memory = io.BytesIO()
    with h5py.File(memory, "w", libver=(libver, "latest"), **options) as file:
        write(file)
    return memory.getvalue()


def make(file: Any, name: str, array: Any, *, compact: bool = False, early: bool = False) -> None:
    """A dataset with properties that h5py's high level does not offer."""
    array = np.asarray(array)
    creation = h5p.create(h5p.DATASET_CREATE)
    if compact:
        creation.set_layout(h5d.COMPACT)
    if early:
        creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    kind = h5t.py_create(array.dtype, logical=True)
    made = h5d.create(file.id, name.encode(), kind, h5s.create_simple(array.shape), creation)
    if not early:
        made.write(h5s.ALL, h5s.ALL, array)


def contents(data: bytes) -> dict[str, np.ndarray]:
    """Every dataset of numbers by its path, read by h5py; links are not followed twice."""
    found: dict[str, np.ndarray] = {}
    with h5py.File(io.BytesIO(data), "r") as file:
        file.visititems(
            lambda name, item: (
                found.update({name: item[()]})
                if isinstance(item, h5py.Dataset) and item.shape is not None
                else None
            )
        )
    return found
