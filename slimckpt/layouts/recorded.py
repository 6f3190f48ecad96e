"""Which layout a step records, by whichever framework wrote it; and layouts that are given."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slimckpt.errors import UsageError
from slimckpt.formats.mindspore_parallel import is_strategy
from slimckpt.formats.mindspore_strategy import Strategy, read_strategy
from slimckpt.layouts.dcp import dcp_layout
from slimckpt.layouts.deepspeed import deepspeed_layout
from slimckpt.layouts.dtensor import dtensor_layout
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Layout
from slimckpt.layouts.megatron import megatron_layout
from slimckpt.layouts.mindspore import StrategyRules, ranks_of
from slimckpt.layouts.paddle import paddle_layout
from slimckpt.layouts.placement import Rules
from slimckpt.layouts.stored import stored_layout
from slimckpt.layouts.toml_rules import read_toml
from slimckpt.model import encode_path, show_path

LayoutLike = Layout | Rules | str | bytes | os.PathLike[str]
"""A layout, rules for one, or the path of a file (or a directory of strategy files) with rules."""

READERS: tuple[Callable[[Sequence[File]], Layout | None], ...] = (
    stored_layout,
    dcp_layout,
    deepspeed_layout,
    paddle_layout,
    megatron_layout,
    dtensor_layout,
)
"""Each is given the files of a step, and gives the layout that they record or ``None``. The first
that gives one counts."""

_NAMED = b"strategy"
_LARGEST = 256 * 2**20


def recorded(
    files: Sequence[File], around: Iterable[Sequence[File]], beside: bytes, n_ranks: int
) -> Layout | Rules | None:
    """What is recorded of a step; ``None`` where nothing is.

    Parameters
    ----------
    files
        Of the step.
    around
        Files where its strategy files may be, the nearest first; the first that have any count.
    beside
        The directory the tree lies in: where the tree has no strategy files, they may be there.
    n_ranks
        Of the step: of strategy files that differ, those for another number do not count.

    Raises
    ------
    UsageError
        There are strategy files that contradict each other.
    """
    for reader in READERS:
        found = reader(files)
        if found is not None:
            return found
    for near_first in around:
        texts: dict[str, bytes] = {}
        for file in near_first:
            if _NAMED in file.path.lower():
                with file.holding.source() as source:
                    if _may_be_strategy(source.read(0, min(source.size, 4096)), source.size):
                        texts[encode_path(file.path)] = source.read(0, source.size)
        if texts:
            return _together(texts, n_ranks)
    return _together(_strategies_in(beside, _NAMED), n_ranks)


def given(layout: LayoutLike) -> Layout | Rules:
    """A layout or rules as they are, or those in a file: TOML, a strategy file, or a directory
    with the strategy files of all stages.

    Raises
    ------
    UsageError
        The file is neither, or is not to be read.
    DamagedFileError
        It is a damaged strategy file.
    """
    if isinstance(layout, Layout | Rules):
        return layout
    path = os.fsencode(layout)
    label = show_path(path)
    if os.path.isdir(path):
        found = _together(_strategies_in(path, b""), None)
        if found is None:
            raise UsageError(f"{label} has no strategy files of MindSpore")
        return found
    data = _read(path, label)
    if _may_be_strategy(data, len(data)):
        return StrategyRules([read_strategy(data, label)], label)
    return read_toml(data, label)


def _may_be_strategy(head: bytes, size: int) -> bool:
    return head.lstrip().startswith(b"{") or is_strategy(head, size)


def _read(path: bytes, label: str, most: int = -1) -> bytes:
    try:
        with Path(os.fsdecode(path)).open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise UsageError(f"{label}: {error.strerror}; expected a file with a layout") from None


def _strategies_in(directory: bytes, named: bytes) -> dict[str, bytes]:
    """Strategy files in a directory, and in directories of it, whose names have ``named``."""
    found = {}
    for path in _entries(directory, named):
        for inner in _entries(path, b"") if os.path.isdir(path) else [path]:
            size = os.path.getsize(inner) if os.path.isfile(inner) else 0
            if 0 < size < _LARGEST and _may_be_strategy(_read(inner, show_path(inner), 4096), size):
                found[show_path(inner)] = _read(inner, show_path(inner))
    return found


def _entries(directory: bytes, named: bytes) -> list[bytes]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return [os.path.join(directory, name) for name in names if named in name.lower()]


def _together(texts: dict[str, bytes], n_ranks: int | None) -> StrategyRules | None:
    """The rules that strategy files make up: one, copies of it, or one for each pipeline stage."""
    files: dict[bytes, str] = {}
    for label, data in texts.items():
        files.setdefault(data, label)
    distinct: list[tuple[str, Strategy]] = []
    for data, label in files.items():
        strategy = read_strategy(data, label)
        if all(strategy.parameters != other.parameters for _, other in distinct):
            distinct.append((label, strategy))
    alone = []
    if n_ranks is not None and len(distinct) > 1:
        alone = [found for found in distinct if ranks_of(found[1]) == n_ranks]
    chosen = alone if len(alone) == 1 else distinct
    if not chosen:
        return None
    return StrategyRules([found for _, found in chosen], ", ".join(name for name, _ in chosen))
