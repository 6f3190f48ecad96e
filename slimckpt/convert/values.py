"""What the pickle of a file holds besides tensors: numbers, texts and the like, by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slimckpt.formats.collector import uncollected
from slimckpt.formats.numpy_arrays import array_of
from slimckpt.formats.objects import Part, Trail, Walk
from slimckpt.formats.pickles import Call, Dict, PickleReader, pairs_of
from slimckpt.formats.torch_files import archives_of, read_archive, read_legacy
from slimckpt.formats.torch_tensors import archive_of, rebuilt, storage_of
from slimckpt.views.mapping import TensorView
from slimckpt.views.providers import Holding

_TEXT = "opaque:str"
_LEAVES = (bool, int, float, complex, str, bytes, type(None))


def values_in(holding: Holding) -> list[str]:
    """Names of what is no tensor in the pickles of a file; none where it has no pickle.

    A sequence of nothing but such values counts as one.

    Raises
    ------
    SlimckptError
        The pickle cannot be read.
    """
    kind = holding.file.format
    if kind not in ("torch", "torch-legacy", "pickle"):
        return []
    found: dict[str, None] = {}
    with holding.source() as source, uncollected():
        roots = []
        if kind == "torch-legacy":
            roots.append(read_legacy(source).root)
        elif kind == "torch":
            for archive in archives_of(source):
                roots.append(PickleReader(*read_archive(archive).opened()).read())
        else:
            reader = PickleReader(source, 0, source.size)
            while reader.at < source.size:
                roots.append(reader.read())
        for root in roots:
            walk = Walk(source.label, source.size)
            walk(root, _Visit(walk, found))
    return list(found)


def text_of(view: TensorView, name: str) -> str | None:
    """A text in a file of MindSpore (UTF-32, little endian); ``None`` where it is something
    else."""
    if view.info(name).dtype != _TEXT:
        return None
    try:
        return view.raw(name).decode("utf-32-le").removesuffix("\0")
    except UnicodeDecodeError:
        return None


class _Visit:
    """Notes values on the way, and stops where a tensor begins."""

    def __init__(self, walk: Walk, found: dict[str, None]) -> None:
        self.walk, self.found = walk, found

    def __call__(self, trail: Trail, node: Any) -> Iterable[Part] | None:
        if rebuilt(node)[0] is not None or array_of(node) is not None:
            return ()
        if storage_of(node) is not None or archive_of(node) is not None:
            return ()
        if type(node) in (list, tuple):
            if node and all(type(item) in _LEAVES for item in node):
                self._note(self.walk.texts(trail)[0])
            return None
        pairs = [*pairs_of(node)]
        if type(node) is Call and type(node.state) is Dict:
            pairs += node.state.pairs
        for key, value in pairs:
            if type(value) in _LEAVES:
                before = self.walk.texts(trail)[0]
                self._note(f"{before}.{key}" if before else str(key))
        return None

    def _note(self, name: str) -> None:
        self.found[name] = None
