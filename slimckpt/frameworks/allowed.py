"""What a pickle may name: an allow-list of classes and functions, and what stands for some of them.

An entry is imported only when a pickle names it. What is not on the list is an
:class:`~slimckpt.errors.UnknownGlobalError`; there is no way around it but to list it.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from slimckpt.errors import UnknownGlobalError, UsageError

_RENAMED = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    "pathlib._local": "pathlib",
}
"""Modules by the names that other versions of Python and numpy give them."""
_PLAIN = {
    "argparse": ("Namespace",),
    "builtins": (
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list",
        "object", "range", "set", "slice", "str", "tuple",
    ),
    "collections": ("Counter", "OrderedDict", "defaultdict", "deque"),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "pathlib": ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath"),
    "types": ("SimpleNamespace",),
    "uuid": ("UUID",),
}  # fmt: skip


class Found(NamedTuple):
    """What a name stands for, and whether it may be called, or only be named.

    Of a class that is not ``initialized``, whose ``__init__`` may do anything, objects are only
    made and given their state, as pickle itself does with what was saved.
    """

    what: Any
    called: bool
    initialized: bool = True


Rule = Callable[[str, str], Found | None]
"""Says what a module's name stands for, if it knows."""


class UnfinishedArray:
    """An array before it has its elements; its memo entries are from ``born`` on."""

    born = 0


class _FromBuffer:
    """Stands for numpy's ``_frombuffer``, which the reader does itself."""


FROM_BUFFER = _FromBuffer()


def _begin_array(*arguments: Any) -> UnfinishedArray:
    return UnfinishedArray()


def _dtype(code: Any, align: Any = False, copy: Any = True) -> np.dtype[Any]:
    """A dtype of its own, since giving it a state changes it."""
    if not (type(code) is str or (isinstance(code, type) and issubclass(code, np.generic))):
        raise TypeError(f"no code of a dtype: {type(code).__name__}")
    return np.dtype(code, align=bool(align), copy=True)


def _scalar(dtype: np.dtype[Any], data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) is not bytes:
        raise TypeError("no dtype and bytes")
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {dtype}")
    return np.frombuffer(data, dtype)[0]


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise TypeError("no text in latin1")
    return text.encode("latin1")


def _member(cls: Any, name: Any) -> Any:
    """``getattr``, of an enumeration only."""
    if not isinstance(cls, enum.EnumMeta):
        raise TypeError(f"getattr of a {type(cls).__name__}")
    return cls[name]


def _type(thing: Any) -> Any:
    """How the types of Python's three constants are written, which have no names."""
    if thing is not None and thing is not ... and thing is not NotImplemented:
        raise TypeError(f"type of a {type(thing).__name__}")
    return type(thing)


def _reconstruct(cls: Any, base: Any, state: Any) -> Any:
    """``copyreg._reconstructor``, of plain objects only."""
    if not isinstance(cls, type) or base is not object or state is not None:
        raise TypeError("not a plain object")
    return object.__new__(cls)


_STAND_INS: dict[tuple[str, str], Found] = {
    ("_codecs", "encode"): Found(_encode, True),
    ("builtins", "Ellipsis"): Found(..., False),
    ("builtins", "NotImplemented"): Found(NotImplemented, False),
    ("builtins", "getattr"): Found(_member, True),
    ("builtins", "type"): Found(_type, True),
    ("copyreg", "_reconstructor"): Found(_reconstruct, True),
    ("numpy", "dtype"): Found(_dtype, True),
    ("numpy", "ndarray"): Found(np.ndarray, False),
    ("numpy._core.multiarray", "_reconstruct"): Found(_begin_array, True),
    ("numpy._core.multiarray", "scalar"): Found(_scalar, True),
    ("numpy._core.numeric", "_frombuffer"): Found(FROM_BUFFER, False),
}


def _numpy_types(module: str, name: str) -> Found | None:
    """Scalar types of numpy and ml_dtypes, by name only."""
    if module not in ("numpy", "ml_dtypes"):
        return None
    found = getattr(import_module(module), name, None)
    is_one = isinstance(found, type) and issubclass(found, np.generic)
    return Found(found, False) if is_one else None


class Allowed:
    """An allow-list.

    Parameters
    ----------
    names
        By module, names that are imported and may be called.
    classes
        By module, names of classes that are imported and whose ``__init__`` is not to run.
    stand_ins
        What stands for a module's name instead of what it has.
    rules
        Asked in turn about other names.
    allow
        Further classes and functions, as they are.
    """

    def __init__(
        self,
        names: Mapping[str, Iterable[str]] | None = None,
        classes: Mapping[str, Iterable[str]] | None = None,
        stand_ins: Mapping[tuple[str, str], Found] | None = None,
        rules: Iterable[Rule] = (),
        allow: Iterable[Any] = (),
    ) -> None:
        self._names = {
            (module, name): table is not classes
            for table in (_PLAIN, names or {}, classes or {})
            for module, those in table.items()
            for name in those
        }
        self._found = {**_STAND_INS, **(stand_ins or {})}
        self._rules = (_numpy_types, *rules)
        for thing in allow:
            if not callable(thing) or not hasattr(thing, "__qualname__"):
                raise UsageError(f"allow takes classes and functions, found {thing!r:.100}")
            self._found[thing.__module__, thing.__qualname__] = Found(thing, True)
        # By identity: what is found need not be hashable.
        self._called: dict[int, Found] = {}

    def find(self, module: str, name: str, label: str) -> Any:
        """What ``module.name`` stands for in the file ``label``.

        Raises
        ------
        UnknownGlobalError
            It is not on the list, or not installed.
        """
        module = _RENAMED.get(module, module)
        found = self._found.get((module, name)) or self._found_out(module, name, label)
        self._found[module, name] = found
        if found.called:
            self._called[id(found.what)] = found
        return found.what

    def may_call(self, what: Any, new: bool = False) -> bool:
        """Whether it may be called; with ``new``, whether objects of it may be made."""
        found = self._called.get(id(what))
        return found is not None and (new or found.initialized)

    def may_build(self, cls: type) -> bool:
        """Whether objects of a class may be given a state: not what the whole process shares."""
        return (
            self.may_call(cls, new=True)
            and cls.__module__ != "builtins"
            and not issubclass(cls, enum.Enum)
        )

    def _found_out(self, module: str, name: str, label: str) -> Found:
        if (module, name) in self._names:
            try:
                found: Any = import_module(module)
                for part in name.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError) as error:
                raise UnknownGlobalError(
                    f"{label}: it needs {module}.{name}, which is not to be had here ({error})"
                ) from None
            return Found(found, True, self._names[module, name])
        for rule in self._rules:
            known = rule(module, name)
            if known is not None:
                return known
        raise UnknownGlobalError(
            f"{label}: it needs {module}.{name}, which is not among what slimckpt runs. If you"
            f" trust it, pass allow=[{name.rpartition('.')[2]}]; the tensors alone can be had"
            " without it (state_dict, or slimckpt.open)"
        )


def enumerations_of(*packages: str) -> Rule:
    """A rule for enumerations of packages, in modules that are imported already."""

    def rule(module: str, name: str) -> Found | None:
        if module.partition(".")[0] not in packages:
            return None
        found = getattr(sys.modules.get(module), name, None)
        return Found(found, True) if isinstance(found, enum.EnumMeta) else None

    return rule
