"""numpy's ``.npz``: a zip archive of ``.npy`` members, each array aligned (NEP 1).

Dtypes that numpy does not have are written as ``V1`` and ``V2``, as numpy itself writes arrays of
``ml_dtypes``: ``found.view(ml_dtypes.bfloat16)`` makes them what they were.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slimckpt.convert.blueprint import Blueprint
from slimckpt.convert.entries import Contents
from slimckpt.convert.zips import ALIGNMENT, Archive
from slimckpt.dtypes import BY_NAME, numpy_dtype

DTYPES = frozenset(BY_NAME)
_MAGIC = b"\x93NUMPY"


def plan(contents: Contents) -> dict[str, Blueprint]:
    """The file by name."""
    blueprint = Blueprint()
    archive = Archive(blueprint)
    for entry in contents.entries:
        dtype = numpy_dtype(entry.dtype)
        descr = f"|V{dtype.itemsize}" if _is_void(dtype) else dtype.str
        archive.put(f"{entry.name}.npy", entry, _header(descr, entry.stored))
    for name, text in contents.texts.items():
        array = np.array(text, "<U")
        archive.put(f"{name}.npy", _header(array.dtype.str, ()) + array.tobytes())
    archive.close()
    return {"model.npz": blueprint}


def _is_void(dtype: np.dtype[Any]) -> bool:
    """Whether it is none of numpy's own."""
    return dtype.type.__module__ != "numpy"


def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    wide = len(text) > 65_000
    head = len(_MAGIC) + (6 if wide else 4)
    text += " " * (-(head + len(text) + 1) % ALIGNMENT) + "\n"
    version = b"\2\0" if wide else b"\1\0"
    return _MAGIC + version + len(text).to_bytes(4 if wide else 2, "little") + text.encode()
