"""Where torch keeps the location of a load: torch/serialization.py of 2.5 on, torch/_utils.py of
2.4, in which nothing is set but during a load. Stand-ins; a whole run on torch 2.4.0 is by hand."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from slimckpt.frameworks.torch_objects import _on_cpu


def test_torch_2_5_on_is_told_that_a_load_is_to_the_cpu() -> None:
    local = SimpleNamespace(map_location="meta")
    torch = SimpleNamespace(serialization=SimpleNamespace(_serialization_tls=local))
    with _on_cpu(torch):
        assert local.map_location == "cpu"
    assert local.map_location == "meta"


def test_torch_2_4_is_told_too() -> None:
    local = threading.local()
    torch = SimpleNamespace(
        serialization=SimpleNamespace(), _utils=SimpleNamespace(_thread_local_state=local)
    )
    with _on_cpu(torch):
        assert local.map_location == "cpu"
    assert local.map_location is None
