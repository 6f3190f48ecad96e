"""Deciding sameness: which bodies have the same bytes, and which files are worth rewriting.

A *body* is what can be stored once: a payload, or a file's skeleton. Bodies are numbered:
payload rows of the catalog first, then one skeleton a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slimckpt.analysis.sampling import ROWS, FlatUnit, sample_flat_unit
from slimckpt.model import FLOOR, Catalog, Ints, Span, gaps
from slimckpt.sources.digest import DIGEST, Digests, Unit, run_units, sample_unit, units_of

Mask = npt.NDArray[np.bool_]

_AT_ONCE = 1 << 16


class Bodies:
    """The bodies of a catalog.

    Attributes
    ----------
    nbytes, file : int64
        Length and file of each body.
    apart : bool
        Payloads that a rewriter takes out of the skeleton; ``False`` for skeletons.
    candidate : bool
        Bodies that may be stored once: those apart, and skeletons of at least
        :data:`~slimckpt.model.FLOOR` bytes. Nothing in a nested slim checkpoint is.
    """

    def __init__(self, catalog: Catalog, root: bytes) -> None:
        self.catalog = catalog
        self.root = root
        table, files = catalog.table, catalog.files
        self.n_payloads = table.n_payloads
        self.n_files = len(files)
        counts = np.diff(catalog.payload_start)
        of_payload = np.repeat(np.arange(self.n_files), counts)
        self.file: Ints = np.concatenate([of_payload, np.arange(self.n_files)])
        out = np.where(table.stored_apart, table.payload_nbytes, 0)
        taken = np.zeros(self.n_files, np.int64)
        np.add.at(taken, of_payload, out)
        self.sizes: Ints = np.array([file.size for file in files], np.int64)
        self.nbytes: Ints = np.concatenate([table.payload_nbytes, self.sizes - taken])
        self.apart: Mask = np.concatenate([table.stored_apart, np.zeros(self.n_files, np.bool_)])
        usable = np.array([file.condition != "store" for file in files], np.bool_)
        skeletons = (self.nbytes[self.n_payloads :] >= FLOOR) & usable
        self.candidate: Mask = np.concatenate([table.stored_apart, skeletons])

    def __len__(self) -> int:
        return len(self.nbytes)

    def skeleton(self, file: int) -> int:
        """The body number of a file's skeleton."""
        return self.n_payloads + file

    def spans(self, body: int) -> tuple[Span, ...]:
        """Where a body lies in its source file."""
        if body < self.n_payloads:
            return self.catalog.table.spans(body)
        file = body - self.n_payloads
        rows = self.catalog.payloads(file)
        table = self.catalog.table
        first = int(table.columns["span_end"][rows.start - 1]) if rows.start else 0
        counts = np.diff(table.columns["span_end"][rows], prepend=first)
        last = first + int(counts.sum())
        spans = np.stack(
            [table.columns[name][first:last] for name in ("span_offset", "span_nbytes")], axis=1
        )
        keep = np.repeat(self.apart[rows], counts)
        return tuple(gaps(spans[keep], int(self.sizes[file])))

    def path(self, file: int) -> bytes:
        return os.path.join(self.root, self.catalog.files[file].path)

    def units(self, files: Iterable[int]) -> Iterator[Unit]:
        """Work units over all bodies of the given files."""
        for file in files:
            rows = self.catalog.payloads(file)
            pairs = list(enumerate(self.catalog.table.all_spans(rows), rows.start))
            skeleton = self.skeleton(file)
            pairs.append((skeleton, self.spans(skeleton)))
            yield from units_of(self.path(file), self.catalog.files[file].label, pairs)

    def flat_units(self) -> Iterator[FlatUnit]:
        """Units over all payloads that lie in one piece."""
        columns = self.catalog.table.columns
        flat = np.diff(columns["span_end"], prepend=0) == 1
        for file in range(self.n_files):
            rows = self.catalog.payloads(file)
            for first in range(rows.start, rows.stop, ROWS):
                last = min(first + ROWS, rows.stop)
                some = first + np.flatnonzero(flat[first:last])
                offsets = columns["span_offset"][columns["span_end"][some] - 1]
                yield FlatUnit(
                    self.path(file),
                    self.catalog.files[file].label,
                    some,
                    offsets,
                    self.nbytes[some],
                )

    def other_units(self) -> Iterator[Unit]:
        """Units over all bodies in several pieces and all skeletons, none cut."""
        counts = np.diff(self.catalog.table.columns["span_end"], prepend=0)
        for file in range(self.n_files):
            rows = self.catalog.payloads(file)
            several = rows.start + np.flatnonzero(counts[rows] != 1)
            pairs = [(body, self.spans(body)) for body in (*several.tolist(), self.skeleton(file))]
            yield from units_of(self.path(file), self.catalog.files[file].label, pairs, unit=0)


def sample(bodies: Bodies, executor: Executor) -> Digests:
    """Digests of samples: two bodies of different samples differ; of equal ones, maybe not."""
    digests = Digests(np.minimum(bodies.nbytes, 1))  # a sample is one block, whatever its body
    for unit, joined in run_units(executor, sample_flat_unit, bodies.flat_units()):
        digests.digests[unit.rows] = np.frombuffer(joined, np.uint8).reshape(-1, DIGEST)
        digests.known[unit.rows] = True
    digests.fill(executor, bodies.other_units(), work=sample_unit)
    return digests


def hash_files(
    bodies: Bodies,
    files: Iterable[int],
    executor: Executor,
    digests: Digests,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Digest every body of the given files, over all bytes."""
    digests.fill(executor, bodies.units(files), progress)


def hash_whole(
    bodies: Bodies, files: Iterable[int], executor: Executor, progress: Callable[[int], None] | None
) -> Digests:
    """Digest whole files; rows are file numbers."""
    digests = Digests(bodies.sizes)
    units = (
        unit
        for file in files
        for unit in units_of(
            bodies.path(file),
            bodies.catalog.files[file].label,
            [(file, (Span(0, int(bodies.sizes[file])),))],
        )
    )
    digests.fill(executor, units, progress)
    return digests


@dataclass(slots=True)
class Sharing:
    """Which bodies are the same, and which files gain by being rewritten.

    ``class_of`` numbers each body's bytes: equal numbers, equal bytes. ``users`` counts the
    candidate bodies of each class in files that are ``rewritten``. A class with two or more users
    is *shared*. ``dropped`` are the bodies that are left out, for good.
    """

    class_of: Ints
    users: Ints
    rewritten: Mask
    dropped: Mask

    def shared(self, bodies: Bodies) -> Mask:
        """For each body, whether it is stored once for several users."""
        here = bodies.candidate & self.rewritten[bodies.file]
        return here & (self.users[self.class_of] >= 2)

    def stored(self, bodies: Bodies) -> Mask:
        """For each body, whether it is a candidate whose bytes will be in the store."""
        return bodies.candidate & self.rewritten[bodies.file] & ~self.dropped


def classes(bodies: Bodies, digests: Digests) -> Ints:
    """Number the bodies by (length, digest)."""
    unknown = np.flatnonzero(~digests.known)
    class_of = _by_prefix(bodies.nbytes, digests.digests)
    if class_of is None:
        keys = np.zeros(len(bodies), np.dtype([("nbytes", "<i8"), ("digest", "V32")]))
        keys["nbytes"] = bodies.nbytes
        keys["digest"] = np.ascontiguousarray(digests.digests).view("V32")[:, 0]
        _, inverse = np.unique(np.ascontiguousarray(keys).view("V40"), return_inverse=True)
        class_of = inverse.reshape(-1).astype(np.int64)
    # A body that was not hashed equals nothing.
    class_of[unknown] = class_of.max(initial=-1) + 1 + np.arange(len(unknown))
    return class_of


def _by_prefix(nbytes: Ints, digests: npt.NDArray[np.uint8]) -> Ints | None:
    """Number (length, digest) by sorting the first eight bytes of the digests only.

    Returns ``None`` if those are equal for different digests, which someone must have worked for.
    Of two million it needs a third of the memory of sorting all forty bytes.
    """
    prefixes = digests[:, :8].copy().view("<u8")[:, 0]
    order = np.argsort(prefixes, kind="stable")
    new = np.ones(len(order), np.bool_)
    for first in range(1, len(order), _AT_ONCE):
        here = order[first : first + _AT_ONCE]
        before = order[first - 1 : first - 1 + len(here)]
        same = (nbytes[here] == nbytes[before]) & (digests[here] == digests[before]).all(axis=1)
        if (~same & (prefixes[here] == prefixes[before])).any():
            return None
        new[first : first + len(here)] = ~same
    class_of = np.empty(len(order), np.int64)
    class_of[order] = np.cumsum(new) - 1
    return class_of


def decide(
    bodies: Bodies,
    digests: Digests,
    min_saving: float,
    droppable: Mask | None = None,
    class_of: Ints | None = None,
) -> Sharing:
    """Find what is the same, and leave out the files that gain too little.

    Parameters
    ----------
    min_saving : float
        Percent of a file's bytes that must be shared for it to be rewritten. All files below it
        leave together, and the count is repeated until none leaves, so that the answer does not
        depend on order. At 0 every file that is understood stays.
    droppable : bool array
        Bodies that may be left out. One whose bytes are stored for another body all the same is
        not. What is left out counts as shared.
    class_of : int64 array
        What :func:`classes` said, where it was asked before.

    Notes
    -----
    With samples instead of digests the answer is an upper bound: what samples tell apart differs.
    """
    if class_of is None:
        class_of = classes(bodies, digests)
    n_classes = int(class_of.max(initial=-1)) + 1
    if droppable is None:
        droppable = np.zeros(len(bodies), np.bool_)
    understood = np.array([file.understood for file in bodies.catalog.files], np.bool_)
    rewritten = np.array([file.condition != "store" for file in bodies.catalog.files], np.bool_)
    while True:
        here = bodies.candidate & rewritten[bodies.file]
        needed = np.bincount(class_of[here & ~droppable], minlength=n_classes) > 0
        dropped = here & droppable & ~needed[class_of]
        users = np.bincount(class_of[here & ~dropped], minlength=n_classes)
        shared = dropped | (here & (users[class_of] >= 2))
        gained = np.zeros(bodies.n_files, np.int64)
        np.add.at(gained, bodies.file[shared], bodies.nbytes[shared])
        enough = np.where(understood, gained * 100 >= min_saving * bodies.sizes, gained > 0)
        leaving = rewritten & ~enough
        if not leaving.any():
            return Sharing(class_of, users, rewritten, dropped)
        rewritten &= enough


def first_users(bodies: Bodies, sharing: Sharing) -> Mask:
    """For each body, whether it is the first of its class among users: the one that is stored."""
    here = np.flatnonzero(sharing.stored(bodies))
    first = np.zeros(len(bodies), np.bool_)
    _, at = np.unique(sharing.class_of[here], return_index=True)
    first[here[at]] = True
    return first
