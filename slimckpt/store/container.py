"""One HDF5 container: laying out its structure, leaving the bytes of its datasets to others.

The recipe is chosen to be fast and to give the same bytes every time: the earliest file format,
no object times, no free-space bookkeeping, early allocation without filling, small datasets
packed at 64 bytes first, large ones at pages after. libhdf5 writes the structure into a
:class:`StructureFile`; payload bytes never go through it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slimckpt import effects
from slimckpt.store.hdf5_types import hdf5_type

T = TypeVar("T")

LARGE = 64 * 1024
PAGE = 4096
SMALL_ALIGNMENT = 64
MAX_RANK = 32
"""Dimensions a dataset of HDF5 can have."""
_RUN_PAGES = 1024


@dataclass(slots=True)
class Dataset:
    """A dataset to be: ``group`` and ``name``, bytes, and the dtype and shape it shows.

    Where ``dtype`` is ``None`` or HDF5 cannot say it, the dataset is flat ``uint8``.
    """

    group: str
    name: str
    nbytes: int
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    big_endian: bool = False


@dataclass(slots=True)
class Link:
    """``/tensors/<name>``: hard to a dataset of this container, or external to another's.

    ``container`` is the other container's path relative to this one's directory.
    """

    name: str
    target: str
    container: bytes | None = None


@dataclass(slots=True)
class Layout:
    """Where each dataset's bytes lie, in the order they were given, and the file's length."""

    offsets: list[int] = field(default_factory=list)
    nbytes: int = 0


def lay_out(fd: int, path: bytes, datasets: Sequence[Dataset], links: Iterable[Link]) -> Layout:
    """Write the structure of a new container into an empty file.

    Returns
    -------
    Layout
        The offset of every dataset. The bytes there are for the caller to write.
    """
    raw, offsets = without_signals(lambda: _structure(datasets, links))
    ends = [at + d.nbytes for at, d in zip(offsets, datasets, strict=True)]
    layout = Layout(offsets, max([raw.size, *ends]))
    for offset, data in raw.written():
        effects.write_at(fd, data[: layout.nbytes - offset], offset, path)
    return layout


def without_signals(work: Callable[[], T]) -> T:
    """What ``work`` returns, done in a thread: signals, and so exceptions of their handlers, come
    in the main thread alone. libhdf5 does not survive one in a callback into Python."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def _structure(
    datasets: Sequence[Dataset], links: Iterable[Link]
) -> tuple[StructureFile, list[int]]:
    from h5py import h5f, h5p

    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_file_space_strategy(h5f.FSPACE_STRATEGY_NONE, False, 1)
    creation.set_obj_track_times(False)
    offsets = [0] * len(datasets)
    small = [i for i, d in enumerate(datasets) if d.nbytes < LARGE]
    large = [i for i, d in enumerate(datasets) if d.nbytes >= LARGE]
    raw = StructureFile()
    file = h5f.create(b"container", h5f.ACC_TRUNC, creation, _access(raw, 1, SMALL_ALIGNMENT))
    try:
        groups = _groups(file, sorted({d.group for d in datasets} | {"tensors"}))
        _create(groups, datasets, small, offsets)
        if not large:
            _link(groups["tensors"], links)
    finally:
        file.close()
    if large:
        file = h5f.open(b"container", h5f.ACC_RDWR, _access(raw, LARGE, PAGE))
        try:
            groups = _groups(file, sorted({d.group for d in datasets} | {"tensors"}))
            _create(groups, datasets, large, offsets)
            _link(groups["tensors"], links)
        finally:
            file.close()
    return raw, offsets


class StructureFile(io.RawIOBase):
    """What libhdf5 writes of a container, kept in memory until it has closed the file.

    Only pages that were written are kept: structure, not the space of datasets. An error of the
    disk can so never reach libhdf5 in the middle of its work, which old ones do not survive.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._at = 0
        self.size = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}
        self._at = base[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self.size - self._at))
        for number, start, at, take in _by_page(self._at, wanted):
            page = self._pages.get(number)
            view[at : at + take] = page[start : start + take] if page else bytes(take)
        self._at += wanted
        return wanted

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for number, start, at, take in _by_page(self._at, len(view)):
            page = self._pages.setdefault(number, bytearray(PAGE))
            page[start : start + take] = view[at : at + take]
        self._at += len(view)
        self.size = max(self.size, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size

    def written(self) -> Iterator[tuple[int, bytes]]:
        """Runs of pages that were written, with their offset."""
        numbers = sorted(self._pages)
        start = 0
        for place, number in enumerate(numbers):
            last = place + 1 == len(numbers) or numbers[place + 1] != number + 1
            if last or place + 1 - start >= _RUN_PAGES:
                run = numbers[start : place + 1]
                yield run[0] * PAGE, b"".join(self._pages[n] for n in run)
                start = place + 1


def _by_page(offset: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Page number, start in the page, start in the run, and length of each piece of a run."""
    done = 0
    while done < nbytes:
        number, start = divmod(offset + done, PAGE)
        take = min(PAGE - start, nbytes - done)
        yield number, start, done, take
        done += take


def _access(raw: StructureFile, threshold: int, interval: int) -> Any:
    from h5py import h5f, h5fd, h5p

    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_EARLIEST, h5f.LIBVER_LATEST)
    access.set_alignment(threshold, interval)
    access.set_fileobj_driver(h5fd.fileobj_driver, raw)
    return access


def _groups(file: Any, names: Iterable[str]) -> dict[str, Any]:
    from h5py import h5g

    found = {}
    root = h5g.open(file, b"/")
    for name in names:
        key = name.encode()
        found[name] = h5g.open(file, key) if key in root else h5g.create(file, key)
    return found


def _create(
    groups: dict[str, Any], datasets: Sequence[Dataset], rows: Iterable[int], offsets: list[int]
) -> None:
    from h5py import h5d, h5p, h5s, h5t

    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)
    for row in rows:
        dataset = datasets[row]
        kind = None
        if dataset.dtype is not None and len(dataset.shape) <= MAX_RANK:
            kind = hdf5_type(dataset.dtype, dataset.big_endian)
        if kind is None:
            kind, space = h5t.STD_U8LE, h5s.create_simple((dataset.nbytes,))
        elif dataset.shape:
            space = h5s.create_simple(dataset.shape)
        else:
            space = h5s.create(h5s.SCALAR)
        made = h5d.create(groups[dataset.group], dataset.name.encode(), kind, space, creation)
        offsets[row] = made.get_offset()


def _link(group: Any, links: Iterable[Link]) -> None:
    from h5py import h5p

    creation = h5p.create(h5p.LINK_CREATE)
    creation.set_char_encoding(1)  # UTF-8
    for link in links:
        name, target = link.name.encode(), link.target.encode()
        if link.container is None:
            group.links.create_hard(name, group, b"/" + target, lcpl=creation)
        else:
            group.links.create_external(name, link.container, b"/" + target, lcpl=creation)
