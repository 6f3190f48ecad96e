"""What MindSpore would load, from a slim checkpoint or from the original files.

Tensors lie in copy-on-write mappings of the stored files: processes of a node share what none of
them changes, and writing to a tensor changes no file, and no other tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slimckpt.errors import DamagedFileError, UsageError
from slimckpt.formats import check as check_file
from slimckpt.frameworks.installed import installed
from slimckpt.frameworks.mindspore_tensors import entries, tensor_of_array
from slimckpt.frameworks.origin import opened, view_of, which
from slimckpt.model import StepLabel
from slimckpt.sources.backends import BackendName
from slimckpt.views.arrays import Arrays, tensor_of
from slimckpt.views.checkpoint import Checkpoint, Path
from slimckpt.views.mapping import TensorView

_FORMATS = ("mindspore", "safetensors")

Prefix = str | Sequence[str] | None


def load_checkpoint(
    path: Path,
    rank: int | None = None,
    step: StepLabel | None = None,
    *,
    file: Path | None = None,
    run: str | None = None,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: Prefix = None,
    specify_prefix: Prefix = None,
    choice_func: Callable[[str], bool] | None = None,
    crc_check: bool = False,
    remove_redundancy: bool = False,
    backend: BackendName | None = None,
    check: bool = False,
) -> dict[str, Any]:
    """What ``mindspore.load_checkpoint(original)`` gives, of a ``.ckpt`` or safetensors file.

    Parameters
    ----------
    path
        A slim checkpoint or an original directory; or either with the original path of a file
        behind it: ``load_checkpoint("run.slim/rank_3/net-1_100.ckpt")``.
    rank, step, run
        Say which file, where ``file`` does not: the only one of the rank that MindSpore reads.
    file
        The original path of the file.
    net, strict_load, remove_redundancy
        As of ``mindspore.load_checkpoint``: the parameters are loaded into ``net`` by
        ``mindspore.load_param_into_net``, and given back too.
    filter_prefix, specify_prefix, choice_func
        As of ``mindspore.load_checkpoint``, which lets prefixes go before ``choice_func``, and
        ignores them for safetensors.
    crc_check
        Also read all of the file and compare it with the CRC32 it states, if it states one.
    backend, check
        As of :func:`slimckpt.open`.

    Returns
    -------
    dict of str to mindspore.Parameter
        In MindSpore's order; strings of ``append_dict`` are ``str``. Parameters made of a slim
        checkpoint share its memory until they are written to; of an original file only those do
        that lie where their dtype wants them.

    Raises
    ------
    DroppedTensorError
        Chosen parameters were left out when it was slimmed.
    RefusedFileError
        The file is encrypted.
    DamagedFileError
        ``crc_check`` found damage.
    NotUnderstoodError
        MindSpore's own loader would not take an entry either, or it is a ``MapParameter``.
    FrameworkMissingError
        MindSpore is not installed, or too old.
    UsageError, StoreDamagedError, KeyError
        Nothing is left after choosing; the file cannot be read; the arguments do not name one.
    """
    mindspore = imported()
    specify, without = _prefixes(specify_prefix), _prefixes(filter_prefix)
    with opened(path, file, rank, step, run, _FORMATS, "MindSpore", backend, check) as origin:
        found = origin.holding.file
        if found.format == "safetensors" or not (specify or without):
            chosen = choice_func
        else:

            def chosen(name: str) -> bool:
                return name.startswith(specify or "") and not (without and name.startswith(without))

        if crc_check:
            with origin.holding.source() as source:
                problem = check_file(found.format, source)
            if problem is not None:
                raise DamagedFileError(problem)
        parameters = entries(mindspore, origin, chosen)
    if not parameters:
        raise UsageError(
            f"{found.label}: no parameter is left; do filter_prefix, specify_prefix and choice_func"
            " say what they should?"
        )
    if net is not None:
        stated = found.facts.get("metadata", {}).get("remove_redundancy")
        if found.format == "safetensors" and stated in ("True", "False"):
            remove_redundancy = stated == "True"
        mindspore.load_param_into_net(net, parameters, strict_load, remove_redundancy)
    return parameters


def tensors(
    path: Path,
    rank: int | None = None,
    step: StepLabel | None = None,
    *,
    file: Path | None = None,
    run: str | None = None,
    backend: BackendName | None = None,
    check: bool = False,
    coords: Mapping[str, int] | None = None,
) -> Mapping[str, Any]:
    """The tensors of a rank, or of one file, by name, of files of any format.

    Parameters
    ----------
    path, step, file, run, backend, check
        As of :func:`load_checkpoint`.
    rank, coords
        As of :meth:`slimckpt.Step.rank`.

    Returns
    -------
    Mapping of str to mindspore.Tensor
        Names are those of :meth:`slimckpt.Step.rank`; a tensor is made when it is asked for. It
        is a copy where MindSpore has to have one: of ``qint4x2``, and of tensors that do not lie
        where their dtype wants them, or not in C order. Dtypes that MindSpore cannot take (float8,
        other packed ones) are ``uint8``, as stored.

    Notes
    -----
    MindSpore writes to memory that numpy says is read-only; these tensors are writable, and the
    caller's alone. A ``Parameter`` made of one is a copy, unless nothing else refers to the tensor:
    ``Parameter(found[name], name)`` copies, :func:`load_checkpoint` does not.
    """
    mindspore = imported()
    root, wanted = which(path, file, rank, step, run)
    view = view_of(Checkpoint(root, backend, check), wanted, rank, step, run, coords)
    return _Tensors(mindspore, view)


class _Tensors(Mapping[str, Any]):
    """Tensors made when they are asked for, each once; pickled, they are made anew."""

    def __init__(self, mindspore: Any, view: TensorView) -> None:
        self._mindspore, self._view = mindspore, view
        self._arrays = Arrays(view.arrays.backend, True)
        self._made: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _tensors_of, (self._view,)

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            member, row = self._view._find(name)
            array = self._arrays.array(member.holding, row)
            dtype = tensor_of(member.holding, row).dtype
            self._made.setdefault(name, tensor_of_array(self._mindspore, array, dtype))
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._view

    def __iter__(self) -> Iterator[str]:
        return iter(self._view)

    def __len__(self) -> int:
        return len(self._view)

    def __repr__(self) -> str:
        return f"<tensors of {self._view!r}>"


def _tensors_of(view: TensorView) -> _Tensors:
    return _Tensors(imported(), view)


def imported() -> Any:
    """The module mindspore.

    Raises
    ------
    FrameworkMissingError
        It is not installed, or too old.
    """
    return installed("mindspore", "MindSpore", (2, 7))


def _prefixes(given: Prefix) -> tuple[str, ...]:
    """Prefixes as a tuple; none where the argument was left out."""
    if given is None:
        return ()
    found = (given,) if isinstance(given, str) else tuple(given)
    if not found or not all(isinstance(prefix, str) and prefix for prefix in found):
        raise UsageError(
            f"a prefix must be a text, or several, none of them empty; found {given!r}"
        )
    return found


__all__ = ["load_checkpoint", "tensors"]
