"""Checkpoints opened in every way there is."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slimckpt import views
from slimckpt.rewrite.slim import slim
from slimckpt.views import Checkpoint

WAYS = [
    pytest.param((backend, of_store, staged), id=f"{backend}-{kind}{'-staged' * staged}")
    for backend in ("mmap", "pread")
    for of_store, kind in ((False, "directory"), (True, "store"))
    for staged in (False, True)
]


@pytest.fixture(params=WAYS)
def open_any(request: Any, tmp_path: Path) -> Iterator[Callable[[Path], Checkpoint]]:
    """Opens a directory, or the store of it, with either backend, staged or not."""
    backend, of_store, staged = request.param
    opened: list[Checkpoint] = []

    def opener(source: Path) -> Checkpoint:
        if of_store:
            target = tmp_path / f"any-{len(opened)}"
            slim(source, target, min_saving=0)
            source = target
        stage = tmp_path / "any stage" if staged else None
        opened.append(views.open(source, backend, stage=stage))
        return opened[-1]

    yield opener
    for checkpoint in opened:
        checkpoint.close()
