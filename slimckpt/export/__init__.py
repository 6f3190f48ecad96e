"""A checkpoint in another form: on other ranks, whole, or in files of another format.

``slimckpt.export(…)`` calls the room: it has the name of its best known function,
:func:`slimckpt.export.export.export`, which once the room is imported could not be had otherwise.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module(f"{__name__}.export").export(*arguments, **options)


sys.modules[__name__].__class__ = _Room
