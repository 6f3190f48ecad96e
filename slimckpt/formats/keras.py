"""Keras 3's ``.keras``: a zip archive of JSON and HDF5 (``keras/src/saving/saving_lib.py``, 3.12).

Its weights, with those of the optimizer, are an HDF5 file that is stored without compression. It
is read where it lies.
"""

from __future__ import annotations

from typing import Any

from slimckpt.errors import NotUnderstoodError
from slimckpt.formats.base import Format
from slimckpt.formats.hdf5 import locate_hdf5
from slimckpt.formats.npz import add_opaque
from slimckpt.formats.zips import STORED, check_members, first_name, names_inside, read_members
from slimckpt.model import TableBuilder
from slimckpt.sources.positioned import ByteSource

_JSON = ("metadata.json", "config.json")


class Keras(Format):
    """A model saved whole; its configuration stays in the skeleton, code in it never runs."""

    name = "keras"

    def matches(self, head: bytes, size: int) -> bool:
        return first_name(head) in [name.encode() for name in _JSON]

    def found_inside(self, source: ByteSource) -> bool:
        return set(_JSON) <= set(names_inside(source))

    def locate(self, source: ByteSource, table: TableBuilder) -> dict[str, Any]:
        members = read_members(source)
        names = [member.name for member in members]
        if not set(_JSON) <= set(names):
            raise NotUnderstoodError(
                f"{source.label}: is a zip archive without {' and '.join(_JSON)}, so not Keras'"
            )
        weights = [member for member in members if member.name.endswith(".h5")]
        facts: dict[str, Any] = {}
        for member in weights:
            if member.method == STORED:
                prefix = f"{member.name}/" if len(weights) > 1 else ""
                stop = member.offset + member.nbytes
                facts[member.name] = locate_hdf5(source, table, member.offset, stop, prefix)
            else:
                add_opaque(table, member, "hdf5")
                facts[member.name] = "compressed, so its tensors are not read"
        return facts

    def check(self, source: ByteSource) -> str | None:
        return check_members(source, read_members(source))
