"""What torch would load, from a slim checkpoint or from the original files.

Tensors lie in copy-on-write mappings of the stored files: processes of a node share what none of
them changes, and writing to a tensor changes no file, and no other tensor that was not tied to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slimckpt.errors import FrameworkMissingError, NotUnderstoodError
from slimckpt.formats.torch_files import archives_of
from slimckpt.frameworks.installed import installed
from slimckpt.frameworks.origin import Payloads, opened, require_complete, view_of, which
from slimckpt.frameworks.torch_objects import Objects
from slimckpt.frameworks.torch_tensors import Tensors
from slimckpt.model import StepLabel, encode_path
from slimckpt.sources.backends import BackendName
from slimckpt.views.checkpoint import Checkpoint, Path

_FORMATS = ("torch", "torch-legacy", "safetensors")


def load(
    path: Path,
    *,
    file: Path | None = None,
    rank: int | None = None,
    step: StepLabel | None = None,
    run: str | None = None,
    allow: Iterable[Any] = (),
    backend: BackendName | None = None,
    check: bool = False,
) -> Any:
    """The object that ``torch.load(original, weights_only=False, map_location="cpu")`` gives.

    Only constructors that are known to be harmless run: those of torch, numpy, Python's own
    containers, and what DeepSpeed, Megatron, transformers and accelerate put into checkpoints.

    Parameters
    ----------
    path
        A slim checkpoint or an original directory; or either with the original path of a file
        behind it: ``load("run.slim/rank_3/model.pt")``.
    file
        The original path of the file.
    rank, step, run
        Say which file, where ``file`` does not: the only one of the rank that torch wrote.
    allow
        Further classes and functions that the file may name.
    backend, check
        As of :func:`slimckpt.open`.

    Returns
    -------
    object
        Its tensors can be written to; no file changes. Tensors that share a storage in the file
        share it here, others never do.

    Raises
    ------
    UnknownGlobalError
        The file names a class or function that is not allowed; the message says which.
    DroppedTensorError
        Tensors of the file were left out when it was slimmed.
    FrameworkMissingError
        torch is not installed, or too old.
    UsageError, NotUnderstoodError, DamagedFileError, StoreDamagedError, KeyError
        The file is none of torch, or cannot be read, or the arguments do not name one.
    """
    torch = imported()
    with (
        opened(path, file, rank, step, run, _FORMATS, "torch.save", backend, check) as origin,
        origin.holding.source() as source,
    ):
        if origin.holding.file.format == "safetensors":
            view = origin.checkpoint.files[encode_path(origin.member.path)]
            return Tensors(torch, origin.checkpoint).named(view)
        require_complete(origin.holding)
        objects = Objects(torch, Payloads(origin, source.read), allow)
        if origin.holding.file.format == "torch-legacy":
            return objects.of_legacy(source)
        archives = archives_of(source)
        if len(archives) > 1:
            raise NotUnderstoodError(
                f"{source.label}: it holds {len(archives)} items of torch.distributed.checkpoint,"
                " not one object; StorageReader loads them, and"
                " slimckpt.open(…).tensor(name) gives whole tensors"
            )
        return objects.of_archive(archives[0])


def state_dict(
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
    """The tensors of a rank, or of one file, by name, of files of any format.

    Parameters
    ----------
    path, step, file, run, backend, check
        As of :func:`load`.
    rank, coords
        As of :meth:`slimckpt.Step.rank`.

    Returns
    -------
    dict of str to torch.Tensor
        Names are those of :meth:`slimckpt.Step.rank`. Dtypes that torch does not have (packed
        ones of 4 and 6 bits) are ``uint8``, as stored.
    """
    torch = imported()
    root, named = which(path, file, rank, step, run)
    with Checkpoint(root, backend, check) as checkpoint:
        view = view_of(checkpoint, named, rank, step, run, coords)
        return Tensors(torch, checkpoint).named(view)


def StorageReader(
    path: Path,
    *,
    step: StepLabel | None = None,
    run: str | None = None,
    directory: Path | None = None,
    allow: Iterable[Any] = (),
    backend: BackendName | None = None,
    check: bool = False,
) -> Any:
    """What reads a slim checkpoint for ``torch.distributed.checkpoint.load``.

    >>> dcp.load(state, storage_reader=slimckpt.frameworks.torch.StorageReader("run.slim"))

    Parameters
    ----------
    path, step, run, allow, backend, check
        As of :func:`load`; ``path`` may go on with the path of a directory in the checkpoint.
    directory
        Where in the tree the ``.metadata`` lies, if there are several.

    Returns
    -------
    torch.distributed.checkpoint.StorageReader
        Objects among the tensors are made as by :func:`load`, never unpickled as they are.

    Raises
    ------
    FrameworkMissingError
        torch is not installed, or too old, or was built without ``torch.distributed``.
    UsageError, DamagedFileError, StoreDamagedError, KeyError
        There is no such checkpoint of torch.distributed.checkpoint, or several, or it cannot be
        read.
    """
    torch = imported()
    try:
        from slimckpt.frameworks.torch_dcp import SlimReader
    except ImportError as error:
        raise FrameworkMissingError(
            f"torch {torch.__version__} here has no torch.distributed.checkpoint that StorageReader"
            f" could serve ({error}); install one that was built with torch.distributed:"
            " pip install 'slimckpt[torch]'"
        ) from None

    return SlimReader(path, step, run, directory, tuple(allow), backend, check)


def imported() -> Any:
    """The module torch.

    Raises
    ------
    FrameworkMissingError
        It is not installed, or too old.
    """
    return installed("torch", "torch", (2, 4))


__all__ = ["StorageReader", "load", "state_dict"]
