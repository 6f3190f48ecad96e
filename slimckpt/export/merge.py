"""``merge STORE OUT``: whole tensors as safetensors, as transformers opens them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimckpt.analysis.categories import CATEGORIES, WEIGHTS, categorize
from slimckpt.dtypes import BY_NAME
from slimckpt.errors import UsageError
from slimckpt.export import safetensors
from slimckpt.export.entries import Contents, Entry, LeftOut, WholeEntry
from slimckpt.export.renaming import NONE, Renaming, read_renaming
from slimckpt.export.replicated import replicated
from slimckpt.export.rounding import DTYPES, RoundedEntry, in_dtype
from slimckpt.formats.collector import TableBuilder
from slimckpt.layouts.layout import TensorLayout
from slimckpt.layouts.recorded import LayoutLike
from slimckpt.model import StepLabel, encode_path
from slimckpt.progress import SILENT, Progress
from slimckpt.views.bound import NoLayoutError
from slimckpt.views.checkpoint import Checkpoint, Step
from slimckpt.views.whole import Wholes, WholeTensor

MAX_SHARD = "5GB"
ONLY = ("weights",)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_BESIDE = ("scalar", "other")
"""What may belong to a module beside its weights: counters of batches, masks, positions."""


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
    rename
        Rules for names, or the path of a file with them: see :mod:`slimckpt.export.renaming`.
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
        chosen = (
            checkpoint.step(step, run) if step is not None else checkpoint.only_step(run, "merge")
        )
        wholes = _wholes(chosen, layout, allow_drift)
        merged = _Merged(wholes, only, rename, dtype and DTYPES[dtype])
        contents = Contents(merged.entries, left_out=[*merged.left_out, *_outside(chosen, wholes)])
        contents.texts |= merged.tied
        files = safetensors.plan(contents, most)
        write_files(files, destination, checkpoint.path, jobs, dry_run, progress)
    return MergeResult(
        {name: blueprint.nbytes for name, blueprint in files.items()},
        len(merged.entries),
        sum(entry.nbytes for entry in merged.entries),
        dry_run,
        merged.tied,
        contents.left_out,
        [e.name for e in merged.entries if isinstance(e, RoundedEntry) and e.overflowed],
        merged.unused,
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


def _wholes(step: Step, layout: LayoutLike | None, allow_drift: bool) -> Wholes:
    try:
        return step.whole_tensors(layout, allow_drift)
    except NoLayoutError:
        return step.whole_tensors(replicated(step), allow_drift)


class _Merged:
    """What is written of whole tensors, and what is not.

    Of tied tensors the first is, as transformers keeps it; ``tied`` names the others.
    """

    def __init__(
        self, wholes: Wholes, only: str | None, rename: Renaming, dtype: str | None
    ) -> None:
        self.left_out: list[LeftOut] = []
        self.tied: dict[str, str] = {}
        self.entries: list[Entry] = []
        chosen = self._chosen(wholes, only)
        names, self.unused = rename.names(chosen)
        first: dict[Hashable, str] = {}
        for old, (whole_name, wanted) in chosen.items():
            whole, name = wholes[whole_name], names[old]
            whole.require()
            entry = in_dtype(in_dtype(WholeEntry(name, whole), wanted), dtype)
            kept = first.setdefault((whole.elements, entry.dtype), name)
            if kept == name:
                self.entries.append(entry)
            else:
                self.tied[name] = kept

    def _chosen(self, wholes: Wholes, only: str | None) -> dict[str, tuple[str, str]]:
        """Whole tensors by the names that they have before they are renamed, and their dtypes."""
        layout = wholes.layout
        if only and layout.weights:
            taken = {whole for whole, _ in layout.weights.values()}
            self._leave([name for name in layout.tensors if name not in taken])
            return dict(layout.weights)
        named = {name: (name, layout.tensors[name].dtype) for name in layout.tensors}
        if only:
            weights = _weights(layout.tensors)
            self._leave([name for name in named if name not in weights])
            named = {name: chosen for name, chosen in named.items() if name in weights}
        return named

    def _leave(self, names: Sequence[str]) -> None:
        self.left_out += [LeftOut(name, "is no weight") for name in names]


def _weights(tensors: Mapping[str, TensorLayout]) -> set[str]:
    """Names of weights, and of buffers of the modules that have them."""
    builder = TableBuilder()
    for name, tensor in tensors.items():
        nbytes = math.prod(tensor.shape) * BY_NAME[tensor.dtype].bits // 8
        builder.tensor(name, tensor.dtype, tensor.shape, nbytes, fill=b"")
    found = {
        name: CATEGORIES[code]
        for name, code in zip(tensors, categorize(builder.build()).tolist(), strict=True)
    }
    weights = {name for name, category in found.items() if category in WEIGHTS}
    modules = {module for name in weights for module in _modules(name)}
    return weights | {
        name
        for name, category in found.items()
        if category in _BESIDE and next(_modules(name), None) in modules
    }


def _modules(name: str) -> Iterator[str]:
    """The modules that a tensor is in, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
