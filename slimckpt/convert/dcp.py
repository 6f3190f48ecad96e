"""A directory of torch.distributed.checkpoint: ``.metadata`` and ``__R_0.distcp`` of each rank.

As torch 2.13 writes it (``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``): a
``.distcp`` file is items end to end, each a file of ``torch.save``, and the metadata says which
tensors there are, of which chunks, and where each lies. A chunk is a box that ranks hold by the
layout of the step; what several have is written once, to the file of the lowest.

The object is a flat dict: what :class:`torch.distributed.checkpoint.DefaultLoadPlanner` makes of
nested ones, too, with names joined by dots.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from slimckpt.convert.blueprint import Blueprint
from slimckpt.convert.entries import Contents, Entry, LeftOut, LocalEntry, WholeEntry, elements_of
from slimckpt.convert.pickling import pickled
from slimckpt.convert.rounding import in_dtype
from slimckpt.convert.torch import DTYPES, SPELLED, put_archive, storages_of
from slimckpt.convert.values import text_of
from slimckpt.convert.wholes import SKIPPED, chosen_of, outside_of
from slimckpt.convert.writing import Planned, require_room, write_all
from slimckpt.dtypes import numpy_dtype
from slimckpt.errors import UsageError
from slimckpt.formats.base import DCP
from slimckpt.formats.dcp_metadata import METADATA
from slimckpt.formats.pickles import Call, Global
from slimckpt.layouts.covering import holder_key
from slimckpt.layouts.dcp import metadata_among, sharded
from slimckpt.layouts.layout import Box, Holder, Shape, whole_box
from slimckpt.layouts.recorded import LayoutLike
from slimckpt.model import Bytes, StepLabel
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.access import Guard
from slimckpt.rewrite.workplace import check_destination
from slimckpt.views.checkpoint import Checkpoint, Step
from slimckpt.views.whole import Wholes, WholeTensor

_INDEX, _PLACE = "metadata.MetadataIndex", "filesystem._StorageInfo"
_VERSION = "1.0.0"
"""Of the metadata: ``CURRENT_DCP_VERSION``."""


class Chunk(NamedTuple):
    """A box of a tensor, and its elements."""

    box: Box
    entry: Entry


class BoxEntry(Entry):
    """A box of a whole tensor."""

    def __init__(self, name: str, whole: WholeTensor, box: Box) -> None:
        itemsize = numpy_dtype(whole.dtype).itemsize
        super().__init__(name, whole.dtype, box.lengths, box.lengths, itemsize)
        self._whole, self._box = whole, box

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        """As :func:`elements_of` asks for its elements: by slices, and an ellipsis behind them."""
        spans = zip(key, self._box.offsets, strict=False)
        inside = (slice(span.start + low, span.stop + low) for span, low in spans)
        whole_key = (*inside, ...)
        return self._whole[whole_key]

    def read(self, start: int, stop: int) -> Iterator[Bytes]:
        return elements_of(self, self, start, stop)


Held = tuple[Holder | None, Chunk]
"""A chunk, and who has it."""


def chunks_of(name: str, whole: WholeTensor) -> list[Held]:
    """A whole tensor as ranks (or files) hold it: each box, and the lowest of those that have it.

    Boxes that overlap cannot be chunks: the tensor is then one.
    """
    if whole.is_encoded or not whole.held:
        return [(None, Chunk(whole_box(whole.shape), WholeEntry(name, whole)))]
    return [(holder, Chunk(box, BoxEntry(name, whole, box))) for box, holder in whole.held]


class Item(NamedTuple):
    """Something in a file: a chunk of a tensor, or a text."""

    name: str
    content: Chunk | str


@dataclass(slots=True)
class DcpResult:
    """What was written, or with ``dry_run`` would be.

    Attributes
    ----------
    files : dict of str to int
        Names, and sizes in bytes.
    tensors : dict of str to int
        Names, and in how many chunks each is.
    carried : list of str
        Of these, tensors outside the layout, which are those of the first rank.
    counts : dict of str to int
        How many tensors each file has a part of.
    left_out : list of LeftOut
    """

    files: dict[str, int]
    tensors: dict[str, int]
    dry_run: bool
    carried: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def export_dcp(
    source: str | bytes | os.PathLike[str],
    destination: str | bytes | os.PathLike[str],
    *,
    step: StepLabel | None = None,
    run: str | None = None,
    layout: LayoutLike | None = None,
    only: str | None = None,
    categories: Sequence[tuple[str, str]] = (),
    skip: Sequence[str] = (),
    allow_drift: bool = False,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> DcpResult:
    """Write a step as torch.distributed.checkpoint would save it.

    Parameters
    ----------
    source, destination
        A slim checkpoint or an original directory, and a path that does not exist yet.
    step, run
        Which step, where there are several.
    layout
        Where the step records none. Without any, all ranks have to hold the same.
    only
        ``"weights"``: only what belongs to the model.
    categories, skip
        As of :func:`slimckpt.export`.
    allow_drift
        Where ranks that should hold the same differ, take the lowest.

    Raises
    ------
    UsageError
        There is no layout, or torch has no dtype for a tensor.
    CheckFailedError
        Ranks do not hold what the layout says, or differ.
    DestinationError, NoSpaceError, StoppedError
        As their names say; there is no destination then.
    """
    with Checkpoint(source) as checkpoint:
        target = check_destination(os.fsencode(destination), checkpoint.path)
        chosen = checkpoint.only_step(run, "whole_tensors", step)
        wholes = chosen.whole_tensors(layout, allow_drift)
        contents = Contents()
        held = _held(wholes, only, categories, skip, contents.left_out)
        _carry(chosen, outside_of(chosen, wholes), only, skip, contents)
        _require_dtypes([*(c.entry for cs in held.values() for _, c in cs), *contents.entries])
        items = _items(held, contents.entries, contents.texts)
        files = dcp_files(items)
        sizes = {name: blueprint.nbytes for name, blueprint in files.items()}
        require_room(sum(sizes.values()), target)
        if not dry_run:
            stats = [(member.path, member.holding.file.stat) for member in chosen.members]
            access = Guard([]).strictest(stats)
            planned = [Planned(n.encode(), blueprint, access) for n, blueprint in files.items()]
            write_all(planned, target, checkpoint.path, jobs, progress, checkpoint.unload)
    carried = [entry.name for entry in contents.entries]
    tensors = {name: len(chunks) for name, chunks in held.items()} | dict.fromkeys(carried, 1)
    counts = {
        _file(number): len({item.name for item in there if isinstance(item.content, Chunk)})
        for number, there in items.items()
    }
    return DcpResult(sizes, tensors, dry_run, carried, counts, contents.left_out)


def _held(
    wholes: Wholes,
    only: str | None,
    categories: Sequence[tuple[str, str]],
    skip: Sequence[str],
    left_out: list[LeftOut],
) -> dict[str, list[Held]]:
    """The chunks of whole tensors."""
    found = {}
    for name, (whole_name, dtype) in chosen_of(wholes, only, left_out, skip, categories).items():
        whole = wholes[whole_name]
        whole.require()
        found[name] = [
            (holder, chunk._replace(entry=in_dtype(chunk.entry, dtype)))
            for holder, chunk in chunks_of(name, whole)
        ]
    if not found:
        raise UsageError("there is no tensor to be written; `slimckpt ls` shows what there is")
    return found


def _carry(
    step: Step,
    outside: Iterable[LeftOut],
    only: str | None,
    skip: Sequence[str],
    contents: Contents,
) -> None:
    """Take over what is outside the layout, where ranks do not differ in it: a name has one
    place."""
    sharded_files = metadata_among(step.members) is not None or sharded(step.members)
    views = [] if sharded_files or only else [step.rank(rank) for rank in step.ranks]
    for one in outside:
        having = [v for v in views if one.name in v or one.name in v.opaque]
        if any(fnmatchcase(one.name, glob) for glob in skip):
            contents.left_out.append(LeftOut(one.name, SKIPPED))
        elif not having:
            contents.left_out.append(one)
        else:
            first, *others = having
            here = first.located(one.name)
            if not all(first.arrays.same(here, other.located(one.name)) for other in others):
                contents.left_out.append(
                    LeftOut(one.name, "ranks differ in it, and a name has one place")
                )
            elif one.name in first:
                contents.entries.append(LocalEntry(one.name, first.arrays, *here))
            elif (text := text_of(first, one.name)) is not None:
                contents.texts[one.name] = text
            else:
                contents.left_out.append(one)


def _require_dtypes(entries: Iterable[Entry]) -> None:
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise UsageError(f"tensor {entry.name!a} is {entry.dtype}, which torch has not")


def _items(
    held: Mapping[str, Sequence[Held]], carried: Sequence[Entry], texts: Mapping[str, str]
) -> dict[int, list[Item]]:
    """What each file has, by the number of the rank.

    Parameters
    ----------
    held
        For each tensor its chunks, and whose file each is for (``None``: the first).
    carried
        Tensors that the first file has whole.
    texts
        What the first file has besides.
    """
    holders = {holder for chunks in held.values() for holder, _ in chunks if holder is not None}
    numbers: dict[Holder | None, int] = {
        holder: holder if isinstance(holder, int) else number
        for number, holder in enumerate(sorted(holders, key=holder_key))
    }
    first = numbers[None] = min(numbers.values(), default=0)
    files: dict[int, list[Item]] = {number: [] for number in sorted(set(numbers.values()))}
    files[first] += [Item(name, text) for name, text in texts.items()]
    for name, chunks in held.items():
        for holder, chunk in chunks:
            files[numbers[holder]].append(Item(name, chunk))
    files[first] += [Item(e.name, Chunk(whole_box(e.shape), e)) for e in carried]
    return files


def dcp_files(files: Mapping[int, Sequence[Item]]) -> dict[str, Blueprint]:
    """The files of a checkpoint by name, from what the file of each rank is to have."""
    found: dict[str, Blueprint] = {}
    texts: dict[str, Call] = {}
    chunks: dict[str, list[Chunk]] = {}
    storage: dict[Call, Call] = {}
    for number, items in files.items():
        path = _file(number)
        blueprint = found[path] = Blueprint()
        for name, content in items:
            at = blueprint.nbytes
            if isinstance(content, str):
                put_archive(blueprint, "archive", content)
                texts[name] = _object("metadata.BytesStorageMetadata")
                index = _object(_INDEX, fqn=name, offset=None, index=None)
            else:
                storages, (view,) = storages_of([content.entry])
                put_archive(blueprint, "archive", view.node(storages), storages)
                known = chunks.setdefault(name, [])
                offset = _size(content.box.offsets)
                index = _object(_INDEX, fqn=name, offset=offset, index=len(known))
                known.append(content)
            length = blueprint.nbytes - at
            storage[index] = _object(_PLACE, relative_path=path, offset=at, length=length)
    state = texts | {name: _tensor(held) for name, held in chunks.items()}
    metadata = _object(
        "metadata.Metadata",
        state_dict_metadata=state,
        planner_data={name: (name,) for name in state},
        storage_data=storage,
        storage_meta=None,
        version=_VERSION,
    )
    found[METADATA] = Blueprint()
    found[METADATA].put(pickled(metadata))
    return found


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _tensor(chunks: Sequence[Chunk]) -> Call:
    """``TensorStorageMetadata`` of a tensor in chunks."""
    ends = zip(*(map(sum, zip(*chunk.box, strict=True)) for chunk in chunks), strict=True)
    properties = _object("metadata.TensorProperties")
    properties.state = (
        Global("torch", SPELLED[chunks[0].entry.dtype]),
        Call(Global("torch.serialization", "_get_layout"), ("torch.strided",)),
        False,
        Call(Global(f"{DCP}.metadata", "_MEM_FORMAT_ENCODING"), (0,)),
        False,
    )
    return _object(
        "metadata.TensorStorageMetadata",
        properties=properties,
        size=_size(tuple(map(max, ends))),
        chunks=[
            _object(
                "metadata.ChunkStorageMetadata",
                offsets=_size(chunk.box.offsets),
                sizes=_size(chunk.box.lengths),
            )
            for chunk in chunks
        ],
    )


def _object(name: str, **fields: Any) -> Call:
    """An object of a class of torch.distributed.checkpoint, as pickle makes it."""
    module, _, cls = name.rpartition(".")
    found = Call(Global(f"{DCP}.{module}", cls), (), new=True)
    found.state = fields or None
    return found


def _size(shape: Shape) -> Call:
    return Call(Global("torch", "Size"), (shape,))
