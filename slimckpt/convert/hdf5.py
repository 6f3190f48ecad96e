"""HDF5: a dataset for each tensor, in the group that its name says: ``a/b`` is ``b`` in ``a``.

libhdf5 writes the structure, in the earliest format, so that any reader takes it; the elements go
to the places that it gave. Texts are scalar UTF-8 strings of fixed length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from slimckpt.convert.blueprint import Blueprint, Body, Literals
from slimckpt.convert.entries import Contents
from slimckpt.dtypes import BY_NAME
from slimckpt.errors import UsageError
from slimckpt.store.container import MAX_RANK, SMALL_ALIGNMENT, StructureFile, without_signals
from slimckpt.store.hdf5_types import hdf5_type

DTYPES = frozenset(name for name, row in BY_NAME.items() if row.hdf5)


def plan(contents: Contents) -> dict[str, Blueprint]:
    """The file by name.

    Raises
    ------
    UsageError
        HDF5 cannot have a dataset of that name, or of so many dimensions.
    """
    shapes = {entry.name: entry.shape for entry in contents.entries}
    _check(shapes | dict.fromkeys(contents.texts, ()))
    raw, bodies, literals = without_signals(lambda: _structure(contents))
    taken = sorted(
        [(body.at, body.at + body.stop) for body in bodies]
        + [(at, at + len(data)) for at, data in literals]
    )
    literals += _outside(raw.written(), taken)
    nbytes = max([raw.size, *(stop for _, stop in taken)])
    literals = [(at, data[: nbytes - at]) for at, data in literals if at < nbytes]
    return {"model.h5": Blueprint(nbytes, sorted(literals), bodies)}


def _structure(contents: Contents) -> tuple[StructureFile, list[Body], Literals]:
    from h5py import h5f, h5p

    raw = StructureFile()
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_file_space_strategy(h5f.FSPACE_STRATEGY_NONE, False, 1)
    creation.set_obj_track_times(False)
    literals: Literals = []
    bodies: list[Body] = []
    file = h5f.create(b"model", h5f.ACC_TRUNC, creation, _access(raw))
    try:
        for entry in contents.entries:
            at = _dataset(file, entry.name, hdf5_type(entry.dtype, False), entry.shape)
            if entry.nbytes:
                bodies.append(Body(at, entry, 0, entry.nbytes, 0))
        for name, text in contents.texts.items():
            value = text.encode() or b"\0"
            literals.append((_dataset(file, name, _text(len(value)), ()), value))
    finally:
        file.close()
    return raw, bodies, literals


def _check(shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        parts = name.split("/")
        if "" in parts or "." in parts or "\0" in name:
            raise UsageError(
                f"HDF5 cannot have a dataset named {name!a}: it reads / as a step into a group, and"
                " no step may be empty or a dot; another --format can, or leave it out (--skip)"
            )
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        if clash := next((group for group in above if group in shapes), None):
            raise UsageError(
                f"HDF5 cannot have both {clash!a} and {name!a}: the one would be a dataset and a"
                " group; another --format can, or leave one out (--skip)"
            )
        if len(shape) > MAX_RANK:
            raise UsageError(
                f"tensor {name!a} has {len(shape)} dimensions, and HDF5 allows {MAX_RANK}; another"
                " --format can, or leave it out (--skip)"
            )


def _access(raw: StructureFile) -> Any:
    from h5py import h5f, h5fd, h5p

    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_EARLIEST, h5f.LIBVER_LATEST)
    access.set_alignment(1, SMALL_ALIGNMENT)
    access.set_fileobj_driver(h5fd.fileobj_driver, raw)
    return access


def _dataset(file: Any, name: str, kind: Any, shape: tuple[int, ...]) -> int:
    """A new dataset, and where its elements belong; of one without any, 0."""
    from h5py import h5d, h5o, h5p, h5s

    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    linking = h5p.create(h5p.LINK_CREATE)
    linking.set_create_intermediate_group(True)
    linking.set_char_encoding(1)  # UTF-8
    space = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
    made = h5d.create(file, None, kind, space, creation)
    h5o.link(made, file, name.encode(), lcpl=linking)
    return int(made.get_offset() or 0)


def _text(nbytes: int) -> Any:
    from h5py import h5t

    kind = h5t.C_S1.copy()
    kind.set_size(nbytes)
    kind.set_cset(h5t.CSET_UTF8)
    kind.set_strpad(h5t.STR_NULLPAD)
    return kind


def _outside(runs: Iterable[tuple[int, bytes]], taken: list[tuple[int, int]]) -> Iterator[Any]:
    """What of some runs of bytes lies outside of ``taken``, which is sorted."""
    number = 0
    for start, data in runs:
        stop = start + len(data)
        at = start
        while number < len(taken) and taken[number][1] <= at:
            number += 1
        following = number
        while following < len(taken) and taken[following][0] < stop:
            low, high = taken[following]
            if at < low:
                yield at, data[at - start : low - start]
            at = max(at, high)
            following += 1
        if at < stop:
            yield at, data[at - start :]
