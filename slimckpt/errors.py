"""One tree of errors. Each class knows the exit code of the command that ends with it."""

from __future__ import annotations

from typing import ClassVar


class SlimckptError(Exception):
    """The root of everything slimckpt raises on purpose. Exit code 2."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return str(self.args[0]) if self.args else type(self).__name__


class UsageError(SlimckptError, ValueError):
    """The call cannot mean anything: contradictory or impossible arguments."""


class DestinationError(SlimckptError, FileExistsError):
    """The destination exists, lies inside the source, or is in use by another run."""


class NoSpaceError(SlimckptError, OSError):
    """The destination's file system cannot hold what would be written. Nothing was written.

    Exit code 4, as for a disk that fills up meanwhile.
    """

    exit_code = 4


class MountError(SlimckptError, OSError):
    """A slim checkpoint cannot be mounted: the mount point does not fit, or FUSE is missing."""


class NotAStoreError(SlimckptError, FileNotFoundError):
    """The path holds no slim checkpoint."""


class UnsupportedStoreError(SlimckptError, ValueError):
    """The slim checkpoint needs a newer slimckpt: an unknown version or requirement."""


class CheckFailedError(SlimckptError):
    """A check found damage, drift, a gap or a difference. Exit code 1."""

    exit_code = 1


class StoreDamagedError(CheckFailedError, ValueError):
    """Bytes of a slim checkpoint are not what its manifest says."""


class DamagedFileError(CheckFailedError, ValueError):
    """A source file is of a known format but breaks its rules, or ends too early."""


class NotUnderstoodError(SlimckptError, ValueError):
    """A source file is of no known format, or of one that holds no readable tensors here."""


class NothingToGainError(SlimckptError):
    """Slimming would not make the source smaller, so nothing was written. Exit code 3."""

    exit_code = 3


class StoppedError(SlimckptError):
    """Stopped by a signal, a full disk or a quota. Running it again is safe. Exit code 4."""

    exit_code = 4


class UnfaithfulSourceError(SlimckptError, OSError):
    """The source cannot be copied faithfully: unreadable, special, or changed. Exit code 5."""

    exit_code = 5


class RefusedFileError(SlimckptError, ValueError):
    """A source file is of a known format, but its tensors cannot be reached (encrypted, say)."""


class UnknownTensorError(SlimckptError, KeyError):
    """No tensor of that name."""


class DroppedTensorError(SlimckptError, KeyError):
    """The tensor was left out by ``--drop``: it, or a file with it, cannot be given back.

    Exit code 1.
    """

    exit_code = 1


class UnknownRankError(SlimckptError, KeyError):
    """No such rank, or the selection does not name exactly one."""


class NotARankView(SlimckptError, LookupError):
    """What a rank's file holds is what a save plan happened to put there (DCP, torch_dist)."""


class UnknownStepError(SlimckptError, KeyError):
    """No such step, or the selection does not name exactly one."""


class NoOriginalError(SlimckptError, FileNotFoundError):
    """The entry was made by resharding: there is no original file of it."""


class UnknownFileError(SlimckptError, KeyError):
    """No file of that path."""


class AmbiguousTensorError(SlimckptError, LookupError):
    """Two different tensors have this name."""


class OpaqueTensorError(SlimckptError, TypeError):
    """The entry is stored and restored, but is not an array (a string, an unknown type)."""


class ClosedError(SlimckptError, ValueError):
    """The checkpoint was closed."""


class UnknownGlobalError(NotUnderstoodError):
    """A pickle needs a class or function that is not among those that slimckpt runs."""


class FrameworkMissingError(SlimckptError, ImportError):
    """A framework is not installed, or too old."""
