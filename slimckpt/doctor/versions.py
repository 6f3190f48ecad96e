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


LIBHDF5_ISSUES = (
    # Release notes of HDF5 1.14.4, which list CVE-2023-1006-001 to CVE-2023-1023-001 as of
    # "HDF5 library versions <=1.14.3".
    KnownIssue(
        (0,),
        (1, 14, 4),
        "damaged or hostile files can overflow its buffers",
        "slimckpt opens no input with it, but h5py and HDF5 tools do",
    ),
    # h5py #2930, HDFGroup/hdf5 #6409 and #6534; seen with 2.0.0 and 2.1.1 (PureHDF #167);
    # allowed again by HDFGroup/hdf5 #6432, merged after 2.1.1.
    KnownIssue(
        (2, 0),
        (2, 2),
        "it refuses chunked datasets of other writers (PureHDF, JLD2) that conform to the format",
        "slimckpt keeps and restores such files, but h5py does not open them",
    ),
    # "Known problems" in the change logs of HDF5 2.0.0 to 2.2.0-rc1.
    KnownIssue(
        (2, 0),
        (3,),
        "it may convert values of non-IEEE floats (float8, float6, float4) wrongly",
        "slimckpt reads bytes and is not affected, but other HDF5 tools may show wrong values",
    ),
)
"""What users of slim checkpoints and of HDF5 inputs may meet. libhdf5 lays out the structure of
containers, in memory; no input is opened with it, and no bytes of tensors go through it."""


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
