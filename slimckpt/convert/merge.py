"""``merge STORE OUT``: whole tensors as safetensors, as transformers opens them."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimckpt.convert import safetensors
from slimckpt.convert.entries import Contents, LeftOut, WholeEntry
from slimckpt.convert.renaming import NONE, Renaming, read_renaming
from slimckpt.convert.rounding import DTYPES, RoundedEntry, in_dtype
from slimckpt.convert.wholes import chosen_of, outside_of
from slimckpt.convert.writing import Planned, require_room, write_all
from slimckpt.errors import UsageError
from slimckpt.layouts.recorded import LayoutLike
from slimckpt.model import StepLabel
from slimckpt.progress import SILENT, Progress
from slimckpt.rewrite.access import Guard
from slimckpt.rewrite.workplace import check_destination
from slimckpt.views.checkpoint import Checkpoint, Step
from slimckpt.views.whole import Wholes

MAX_SHARD = "5GB"
ONLY = ("weights",)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(slots=True)
class MergeResult:
    """What was written, or with ``dry_run`` would be.

    Attributes
    ----------
    files : dict of str to int
        Names, and sizes in bytes.
    tensors, tensor_nbytes : int
        What is in them; tied tensors count once.
    tied : dict of str to str
        Names that are not in the files, and for each the one that has its elements.
    left_out : list of LeftOut
        What the step has besides, and why it is not in the files.
    overflowed : list of str
        Tensors with finite values that are infinite in the dtype they were written in.
    unused : list of str
        Rules for names that matched none.
    """

    files: dict[str, int]
    tensors: int
    tensor_nbytes: int
    dry_run: bool
    tied: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    overflowed: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)


def merge(
    source: str | bytes | os.PathLike[str],
    destination: str | bytes | os.PathLike[str],
    *,
    step: StepLabel | None = None,
    run: str | None = None,
    layout: LayoutLike | None = None,
    max_shard_size: int | str = MAX_SHARD,
    dtype: str | None = None,
    only: str | None = None,
    skip: Sequence[str] = (),
    rename: str | os.PathLike[str] | Renaming | None = None,
    allow_drift: bool = False,
    jobs: int | None = None,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> MergeResult:
    """Write the whole tensors of a step as safetensors: ``model.safetensors``, or shards and their
    index, with the names and the header that transformers looks for.

    Parameters
    ----------
    source, destination
        A slim checkpoint or an original directory, and a path that does not exist yet.
    step, run
        Which step, where there are several.
    layout
        Where the step records none. Without any, all ranks have to hold the same.
    max_shard_size
        Bytes of tensors in one file, or a text such as ``"5GB"``.
    dtype
        ``"bf16"``, ``"f16"`` or ``"f32"``: what floating tensors are rounded to, to nearest even.
        Without it every bit stays.
    only
        ``"weights"``: no optimizer state. Where the record says which tensors are weights they get
        the names of the model's parameters (of DeepSpeed what ``zero_to_fp32`` gives).
    skip
        Globs of names of whole tensors that are left out.
    rename
        Rules for names, or the path of a file with them: see :mod:`slimckpt.convert.renaming`.
    allow_drift
        Where ranks that should hold the same differ, take the lowest.

    Raises
    ------
    UsageError
        Options mean nothing, two tensors would get one name, or there is no layout and none is
        given.
    CheckFailedError
        Ranks do not hold what the layout says, or differ.
    DestinationError, NoSpaceError, StoppedError
        As their names say; there is no destination then.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"there is no dtype {dtype!r} to merge to; there are {', '.join(DTYPES)}")
    if only is not None and only not in ONLY:
        raise UsageError(f"there is no way to merge only {only!r}; there is 'weights'")
    most = shard_size(max_shard_size)
    if not isinstance(rename, Renaming):
        rename = NONE if rename is None else read_renaming(Path(os.fspath(rename)))
    with Checkpoint(source) as checkpoint:
        target = check_destination(os.fsencode(destination), checkpoint.path)
        chosen = checkpoint.only_step(run, "whole_tensors", step)
        wholes = chosen.whole_tensors(layout, allow_drift)
        wanted = None if dtype is None else DTYPES[dtype]
        contents, tied, unused = _merged(chosen, wholes, only, skip, rename, wanted)
        if not contents.entries:
            raise UsageError("there is no tensor to be written; `slimckpt ls` shows what there is")
        _require_dtypes(contents)
        contents.texts |= tied
        files = safetensors.plan(contents, most)
        sizes = {name: blueprint.nbytes for name, blueprint in files.items()}
        require_room(sum(sizes.values()), target)
        if not dry_run:
            stats = [(member.path, member.holding.file.stat) for member in chosen.members]
            access = Guard([]).strictest(stats)
            planned = [Planned(n.encode(), blueprint, access) for n, blueprint in files.items()]
            write_all(planned, target, checkpoint.path, jobs, progress, checkpoint.unload)
    entries = contents.entries
    return MergeResult(
        sizes,
        len(entries),
        sum(entry.nbytes for entry in entries),
        dry_run,
        tied,
        contents.left_out + contents.failed,
        [e.name for e in entries if isinstance(e, RoundedEntry) and e.overflowed],
        unused,
    )


def _require_dtypes(contents: Contents) -> None:
    for entry in contents.entries:
        if entry.dtype not in safetensors.DTYPES:
            raise UsageError(
                f"tensor {entry.name!a} is {entry.dtype}, which safetensors has not; leave it out"
                " (skip=[…], --skip)"
            )


def shard_size(text: int | str) -> int:
    """Bytes, from such a text as ``5GB`` or ``500MiB``.

    Raises
    ------
    UsageError
        It is none, or is 0.
    """
    match = _SIZE.fullmatch(str(text).strip())
    found = 0
    if match:
        number, prefix, binary = match.groups()
        found = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])
    if found < 1:
        raise UsageError(f"{text!r} is no size of a file; say 5GB or 500MB")
    return found


def _merged(
    step: Step,
    wholes: Wholes,
    only: str | None,
    skip: Sequence[str],
    rename: Renaming,
    dtype: str | None,
) -> tuple[Contents, dict[str, str], list[str]]:
    """What is written; names that are tied to others; rules that match nothing.

    Of tied tensors the first is written, as transformers has it.
    """
    contents = Contents()
    tied: dict[str, str] = {}
    chosen = chosen_of(wholes, only, contents.left_out, skip)
    names, unused = rename.names(chosen)
    first: dict[Hashable, str] = {}
    for old, (whole_name, wanted) in chosen.items():
        whole, name = wholes[whole_name], names[old]
        whole.require()
        entry = in_dtype(WholeEntry(name, whole), dtype or wanted)
        kept = first.setdefault((whole.stored(), entry.dtype, entry.shape), name)
        if kept == name:
            contents.entries.append(entry)
        else:
            tied[name] = kept
    contents.left_out += outside_of(step, wholes)
    return contents, tied, unused
