"""What Paddle would load, from a slim checkpoint or from the original files.

Tensors lie in copy-on-write mappings of the stored files, as far as Paddle shares memory:
processes of a node share what none of them changes, and writing to a tensor changes no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slimckpt.errors import UsageError
from slimckpt.frameworks.installed import installed
from slimckpt.frameworks.origin import Payloads, opened, require_complete, view_of, which
from slimckpt.frameworks.paddle_objects import Objects
from slimckpt.frameworks.paddle_tensors import DTYPES, Tensors
from slimckpt.model import StepLabel, encode_path
from slimckpt.sources.backends import BackendName
from slimckpt.views.checkpoint import Checkpoint, Path

_FORMATS = ("pickle", "safetensors")


def load(
    path: Path,
    *,
    file: Path | None = None,
    rank: int | None = None,
    step: StepLabel | None = None,
    run: str | None = None,
    return_numpy: bool = False,
    keep_name_table: bool = False,
    allow: Iterable[Any] = (),
    backend: BackendName | None = None,
    check: bool = False,
) -> Any:
    """The object that ``paddle.load(original)`` gives; of safetensors files what
    ``paddle.load(original, safetensors=True)`` gives.

    Only constructors that are known to be harmless run: those of numpy, of Python's own
    containers, and of what Paddle itself puts into checkpoints.

    Parameters
    ----------
    path
        A slim checkpoint or an original directory; or either with the original path of a file
        behind it: ``load("run.slim/rank_3/model.pdparams")``.
    file
        The original path of the file.
    rank, step, run
        Say which file, where ``file`` does not: the only one of the rank that Paddle wrote.
    return_numpy, keep_name_table
        As of ``paddle.load``.
    allow
        Further classes and functions that the file may name.
    backend, check
        As of :func:`slimckpt.open`.

    Returns
    -------
    object
        Its tensors can be written to; no file changes. As with ``paddle.load`` each is
        independent of all others, also one that the file holds twice; arrays, with
        ``return_numpy``, are not. Names, dtypes and places are as there: ``float8`` that Paddle
        wrote comes back as ``int8``.

    Raises
    ------
    UnknownGlobalError
        The file names a class or function that is not allowed; the message says which.
    DroppedTensorError
        Tensors of the file were left out when it was slimmed.
    FrameworkMissingError
        Paddle is not installed, or too old.
    UsageError, NotUnderstoodError, DamagedFileError, StoreDamagedError, KeyError
        The file is none of Paddle, or cannot be read, or the arguments do not name one. Files of
        ``use_binary_format=True`` and programs are not read: they have to be restored.

    Notes
    -----
    With Paddle 3.0 or newer, on the CPU, tensors share the mapped memory of a slim checkpoint,
    but those in Fortran order and those that are smaller than 1 KiB. What lies unaligned, as most
    tensors in the original files do, is copied once.
    """
    paddle = imported()
    with (
        opened(path, file, rank, step, run, _FORMATS, "paddle.save", backend, check) as origin,
        origin.holding.source() as source,
    ):
        require_complete(origin.holding)
        if origin.holding.file.format == "safetensors":
            view = origin.checkpoint.files[encode_path(origin.member.path)]
            # Paddle takes unsigned integers of 16 bits for bfloat16.
            found = Tensors(paddle, origin.checkpoint, {**DTYPES, "U16": "bfloat16"})
            return found.arrays(view) if return_numpy else found.named(view)
        payloads = Payloads(origin, source.read)
        return Objects(paddle, payloads, allow, return_numpy, keep_name_table).of_file(source)


def tensors(
    path: Path,
    rank: int | None = None,
    *,
    step: StepLabel | None = None,
    file: Path | None = None,
    run: str | None = None,
    backend: BackendName | None = None,
    check: bool = False,
    coords: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The tensors of a rank, or of one file, by name, of files of any format, on the CPU.

    Parameters
    ----------
    path, step, file, run, backend, check
        As of :func:`load`.
    rank, coords
        As of :meth:`slimckpt.Step.rank`.

    Returns
    -------
    dict of str to paddle.Tensor
        Names are those of :meth:`slimckpt.Step.rank`. Tensors can be written to; no file changes,
        and no other tensor but those that are views of the same memory in the file. Dtypes that
        Paddle does not have are ``uint8``: packed ones as stored, ``U16`` with one more axis, of
        the bytes of an element.

    Notes
    -----
    What shares the mapped memory and what is copied is as with :func:`load`; Paddle 2.6 copies
    everything. Of 512 MiB in 32 tensors, Paddle 3.3.1, warm: ``paddle.load`` takes 0.97 s and
    512 MiB of private memory, :func:`load` 14 ms, this 5 ms, both no private memory; 8 processes
    that then touch every page 4,098, 514 and 515 MiB in all. A ``Parameter`` is a copy of what
    ``set_state_dict`` gives it.
    """
    paddle = imported()
    if not paddle.in_dynamic_mode():
        raise UsageError(
            "in static mode Paddle has no tensors outside of a program; call"
            " paddle.disable_static(), or take arrays (slimckpt.open)"
        )
    root, named = which(path, file, rank, step, run)
    with Checkpoint(root, backend, check) as checkpoint:
        view = view_of(checkpoint, named, rank, step, run, coords)
        return Tensors(paddle, checkpoint, DTYPES).named(view)


def imported() -> Any:
    """The module paddle.

    Raises
    ------
    FrameworkMissingError
        It is not installed, or too old.
    """
    return installed("paddle", "Paddle", (2, 6))


__all__ = ["load", "tensors"]
