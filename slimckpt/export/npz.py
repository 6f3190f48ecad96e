"""numpy's ``.npz``: a zip archive of ``.npy`` members, each array aligned (NEP 1).

Dtypes that numpy does not have are written as ``V1`` and ``V2``, as numpy itself writes arrays of
``ml_dtypes``: ``found.view(ml_dtypes.bfloat16)`` makes them what they were.
"""

from __future__ import annotations

import numpy as np

from slimckpt.dtypes import BY_NAME, numpy_dtype
from slimckpt.export.blueprint import Blueprint
from slimckpt.export.entries import Contents
from slimckpt.export.zips import ALIGNMENT, Archive

DTYPES = frozenset(BY_NAME)
_MAGIC = b"\x93NUMPY"


def plan(contents: Contents) -> dict[str, Blueprint]:
    """The file by name."""
    blueprint = Blueprint()
    archive = Archive(blueprint)
    for entry in contents.entries:
        dtype = numpy_dtype(entry.dtype)
        is_own = dtype.isbuiltin == 1
        descr = dtype.str if is_own else f"|V{dtype.itemsize}"
        archive.put(f"{entry.name}.npy", entry, _header(descr, entry.stored))
    for name, text in contents.texts.items():
        array = np.array(text, "<U")
        archive.put(f"{name}.npy", _header(array.dtype.str, ()) + array.tobytes())
    archive.close()
    return {"model.npz": blueprint}


def is_void(dtype: str) -> bool:
    """Whether numpy has no dtype of its own for it."""
    return numpy_dtype(dtype).isbuiltin != 1


def _header(descr: str, shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    wide = len(text) > 65_000
    head = len(_MAGIC) + (6 if wide else 4)
    text += " " * (-(head + len(text) + 1) % ALIGNMENT) + "\n"
    version = b"\2\0" if wide else b"\1\0"
    return _MAGIC + version + len(text).to_bytes(4 if wide else 2, "little") + text.encode()
