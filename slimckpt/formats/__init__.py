"""Container formats: detection by content, never by suffix. A new format is one module.

:data:`FORMATS` is asked in order; the first that matches locates. Where none does, they are asked
again to look further inside.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

from slimckpt.errors import (
    DamagedFileError,
    NotUnderstoodError,
    RefusedFileError,
    UnfaithfulSourceError,
)
from slimckpt.formats.base import Format
from slimckpt.formats.hdf5 import Hdf5
from slimckpt.formats.keras import Keras
from slimckpt.formats.mindspore import MindSpore
from slimckpt.formats.npy import Npy
from slimckpt.formats.npz import Npz
from slimckpt.formats.plain_pickles import PlainPickle
from slimckpt.formats.safetensors import Safetensors
from slimckpt.formats.torch_files import TorchLegacy, TorchZip
from slimckpt.model import Condition, Table, TableBuilder
from slimckpt.sources.positioned import ByteSource

FORMATS: tuple[Format, ...] = (
    Safetensors(),
    TorchZip(),
    PlainPickle(),
    TorchLegacy(),
    Hdf5(),
    Npy(),
    Npz(),
    Keras(),
    MindSpore(),
)
UNKNOWN = "unknown"
HEAD = 4096


class Found(NamedTuple):
    """What a file turned out to be. ``table`` is empty unless it is ``understood``."""

    format: str
    condition: Condition
    problem: str | None
    facts: dict[str, Any]
    table: Table


def examine(source: ByteSource) -> Found:
    """Detect the format of a file and locate its tensors.

    Never raises for what the file contains: a file that breaks its format's rules is ``damaged``
    with the reason as its ``problem``, and so on (law 7).
    """
    head = source.read(0, min(HEAD, source.size))
    matching = (candidate for candidate in FORMATS if candidate.matches(head, source.size))
    inside = (candidate for candidate in FORMATS if candidate.found_inside(source))
    for candidate in chain(matching, inside):
        builder = TableBuilder()
        try:
            facts = candidate.locate(source, builder)
            table = builder.build()
            _refuse_overlap(source, table)
        except UnfaithfulSourceError:
            raise
        except DamagedFileError as error:
            return _without_tensors(candidate.name, "damaged", str(error))
        except RefusedFileError as error:
            return _without_tensors(candidate.name, "refused", str(error))
        except NotUnderstoodError as error:
            return _without_tensors(candidate.name, "opaque", str(error))
        return Found(candidate.name, "understood", None, facts, table)
    return _without_tensors(UNKNOWN, "opaque", None)


def check(name: str, source: ByteSource) -> str | None:
    """Run the own checksums of format ``name`` over a file; what is wrong, or ``None``."""
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate.check(source)
    return None


def _without_tensors(name: str, condition: Condition, problem: str | None) -> Found:
    if problem is None:
        problem = "not a format slimckpt reads"
    return Found(name, condition, problem, {}, TableBuilder().build())


def _refuse_overlap(source: ByteSource, table: Table) -> None:
    """Payloads are disjoint and inside the file, whatever the format module believed."""
    import numpy as np

    offsets, lengths = table.columns["span_offset"], table.columns["span_nbytes"]
    if not len(offsets):
        return
    order = np.argsort(offsets, kind="stable")
    starts, ends = offsets[order], offsets[order] + lengths[order]
    if starts[0] < 0 or ends.max() > source.size or lengths.min() < 0:
        raise DamagedFileError(
            f"{source.label}: a tensor lies outside the file's {source.size} bytes; it looks"
            " truncated"
        )
    if (starts[1:] < ends[:-1]).any():
        at = int(starts[1:][starts[1:] < ends[:-1]][0])
        raise DamagedFileError(
            f"{source.label}: two tensors claim the bytes at offset {at}; expected disjoint ones"
        )


__all__ = ["FORMATS", "UNKNOWN", "Format", "Found", "check", "examine"]
