"""Numbering equal runs of a blob: the names and shapes of a table, which ranks and steps repeat."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slimckpt.model import Ints

_AT_ONCE = 1 << 16
"""Rows whose ends are Python integers at a time."""


def distinct_runs(blob: npt.NDArray[np.generic], ends: Ints) -> tuple[list[bytes], Ints]:
    """The different runs of ``blob``, in order of first appearance, and which each row is.

    Parameters
    ----------
    blob, ends
        A column of a table and where each row's run in it ends, as ``names`` and ``name_end``.

    Returns
    -------
    runs, codes
        Row ``r`` is ``runs[codes[r]]``.
    """
    known: dict[bytes, int] = {}
    codes = np.empty(len(ends), np.int64)
    start = 0
    for first in range(0, len(ends), _AT_ONCE):
        some = ends[first : first + _AT_ONCE]
        base, width = start, blob.itemsize
        text = blob[base : int(some[-1])].tobytes()
        found = []
        for end in some.tolist():
            run = text[(start - base) * width : (end - base) * width]
            found.append(known.setdefault(run, len(known)))
            start = end
        codes[first : first + len(found)] = found
    return list(known), codes
