"""What is installed, against the lowest that is supported, and what libhdf5 is known for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Library:
    """A program or library: its version, the lowest supported, and what is wrong with it."""

    name: str
    version: str | None
    lowest: str | None = None
    problem: str = ""


class KnownIssue(NamedTuple):
    """Versions from ``since`` to before ``before`` do ``what``; ``effect`` is on slimckpt."""

    since: tuple[int, ...]
    before: tuple[int, ...]
    what: str
    effect: str


_NO_CHUNK_ITER = (
    "h5py offers no chunk_iter with it",
    "locating the chunks of large HDF5 inputs takes time quadratic in their number, where it is"
    " done at all",
)
LIBHDF5_ISSUES = (
    # h5py's h5d.pyx: chunk_iter where HDF5 >= 1.12.3, or >= 1.10.10 in the series before.
    # Each get_chunk_info walks the index again: h5py #2117, HDFGroup/hdf5 #6.
    KnownIssue((0,), (1, 10, 10), *_NO_CHUNK_ITER),
    KnownIssue((1, 11), (1, 12, 3), *_NO_CHUNK_ITER),
    # Release notes of HDF5 1.14.4; HDFGroup/hdf5 #3003. Seen with 1.14.2, not with 2.0.0.
    KnownIssue(
        (0,),
        (1, 14, 4),
        "it gives addresses of chunks without the length of the user block",
        "chunked HDF5 inputs with a user block need that added",
    ),
    # Release notes of HDF5 1.14.4, which list CVE-2023-1006-001 to CVE-2023-1023-001 as of
    # "HDF5 library versions <=1.14.3".
    KnownIssue(
        (0,),
        (1, 14, 4),
        "damaged or hostile files can overflow its buffers",
        "an HDF5 input that is damaged can end the process; slim checkpoints are read without it",
    ),
    # h5py #2930, HDFGroup/hdf5 #6409 and #6534; seen with 2.0.0 and 2.1.1 (PureHDF #167);
    # allowed again by HDFGroup/hdf5 #6432, merged after 2.1.1.
    KnownIssue(
        (2, 0),
        (2, 2),
        "it refuses chunked datasets of other writers (PureHDF, JLD2) that conform to the format",
        "such HDF5 inputs are not understood, and kept whole",
    ),
    # "Known problems" in the change logs of HDF5 2.0.0 to 2.2.0-rc1.
    KnownIssue(
        (2, 0),
        (3,),
        "it may convert values of non-IEEE floats (float8, float6, float4) wrongly",
        "slimckpt reads bytes, and is not affected; other HDF5 tools may show wrong values",
    ),
)
"""Only what matters for what slimckpt reads and writes."""


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, for comparing."""
    found = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    return found + (0,) * (3 - len(found))


def libhdf5_issues(version: str) -> list[KnownIssue]:
    """What is known of a version of libhdf5."""
    return [i for i in LIBHDF5_ISSUES if i.since <= numbers(version) < i.before]


def libraries() -> list[Library]:
    """slimckpt, Python and what slimckpt requires by its own metadata, in that order; libhdf5."""
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        about = metadata.metadata("slimckpt")
    except metadata.PackageNotFoundError:
        missing = "is not installed, so what it requires is unknown; run `pip install .`"
        return [Library("slimckpt", None, problem=missing), Library("Python", python)]
    lowest_python = about["Requires-Python"].removeprefix(">=")
    found = [Library("slimckpt", about["Version"]), judge("Python", python, lowest_python)]
    for name, lowest in required(metadata.requires("slimckpt") or ()):
        # What stands on a library that is broken would only repeat its error.
        found.append(_installed(name, lowest, not any(library.problem for library in found)))
    if not any(library.problem for library in found):
        from h5py import version

        found.append(Library("libhdf5", version.hdf5_version))
    return found


def required(requirements: Iterable[str]) -> list[tuple[str, str]]:
    """Name and lowest version of each requirement that is not an extra's."""
    found = [re.match(r"([\w.-]+)\s*>=\s*([\d.]+)\s*\Z", text) for text in requirements]
    return [(match[1], match[2]) for match in found if match]


def judge(name: str, version: str, lowest: str) -> Library:
    """A library that is there: too old or not."""
    old = numbers(version) < numbers(lowest)
    return Library(name, version, lowest, "is too old" if old else "")


def _installed(name: str, lowest: str, importable: bool) -> Library:
    try:
        version = metadata.version(name)
        if importable:
            import_module(name)
    except metadata.PackageNotFoundError:
        return Library(name, None, lowest, "is not installed")
    except (ImportError, OSError, AttributeError, ValueError) as error:
        return Library(name, version, lowest, f"cannot be imported: {error}".splitlines()[0])
    return judge(name, version, lowest)
