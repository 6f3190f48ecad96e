"""Layouts as resharding records them."""

import json
from typing import Any

import pytest
from any_layout import layouts, wholes
from hypothesis import given
from hypothesis import strategies as st

from slimckpt.errors import DamagedFileError
from slimckpt.layouts.layout import Box, Layout, Piece, Shard, TensorLayout
from slimckpt.layouts.stored import pack, unpack


@given(st.data())
def test_any_layout_of_ranks_is_read_as_it_was(data: Any) -> None:
    layout = data.draw(layouts(data.draw(wholes())))
    names = data.draw(st.lists(st.sampled_from(sorted(layout.tensors)), unique=True))
    found = unpack(pack(layout, names), "file")
    assert found.tensors == {name: layout.tensors[name] for name in names}
    assert found.ranks == layout.ranks and layout.origin in found.origin


def test_weights_are_kept_and_files_that_hold_something_are_not() -> None:
    box = Box((0,), (4,))
    shards = (Shard(3, (4,), (Piece(box, (0,)),), "local"), Shard("a.pt", (4,), (Piece(box, 0),)))
    tensors = {"w": TensorLayout("BF16", (4,), shards)}
    layout = Layout(tensors, (0, 3), "x", {"model.w": ("w", "F32"), "model.v": ("v", "F32")})
    found = unpack(pack(layout, ["w"]), "file")
    assert found.tensors["w"].shards == shards[:1]
    assert found.weights == {"model.w": ("w", "F32")}


GOOD = {
    "schema": "slimckpt.layout/1",
    "origin": "x",
    "ranks": [0],
    "tensors": {"w": ["F32", [4], 0]},
    "shards": [[[0, [4], None, [[[[0], [4]], [0], None]]]]],
    "weights": {},
}
BAD: dict[str, Any] = {
    "another schema": {"schema": "slimckpt.layout/2"},
    "a shard that is not there": {"tensors": {"w": ["F32", [4], 1]}},
    "a negative number": {"ranks": [-1]},
    "a truth value": {"ranks": [True]},
    "a shape that is none": {"tensors": {"w": ["F32", "4", 0]}},
    "a dtype that is none": {"tensors": {"w": [4, [4], 0]}},
    "a piece too short": {"shards": [[[0, [4], None, [[[[0], [4]], [0]]]]]]},
    "a list of tensors": {"tensors": []},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_layout_is_an_error_that_names_the_file(name: str) -> None:
    assert unpack(json.dumps(GOOD).encode(), "file").ranks == (0,)
    with pytest.raises(DamagedFileError, match=r"^file: expected a layout"):
        unpack(json.dumps({**GOOD, **BAD[name]}).encode(), "file")


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"null", b"\xff"])
def test_what_is_no_json_is_an_error_too(data: bytes) -> None:
    with pytest.raises(DamagedFileError, match=r"^file: expected a layout"):
        unpack(data, "file")
