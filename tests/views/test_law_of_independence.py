"""Law 8: sharing on disk is never sharing in the program."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors_bytes import safetensors_file

import slimckpt

sizes = st.sampled_from([16, 1020, 1024, 5000, 1 << 20])
shapes = st.lists(st.tuples(sizes, st.integers(0, 2)), min_size=2, max_size=6)


@settings(max_examples=40)
@given(shapes, st.data())
def test_updating_one_of_equal_tensors_changes_neither_another_nor_a_file(
    drawn: list[tuple[int, int]], data: st.DataObject
) -> None:
    bodies = {
        f"t{n}": np.random.default_rng([size, seed]).bytes(size)
        for n, (size, seed) in enumerate(drawn)
    }
    chosen = data.draw(st.sampled_from(sorted(bodies)))
    with TemporaryDirectory() as place:
        root = Path(place)
        for rank in range(2):
            folder = root / "run" / f"rank_{rank}"
            folder.mkdir(parents=True)
            tensors = [(name, "U8", [len(body)], body) for name, body in bodies.items()]
            (folder / "m").write_bytes(safetensors_file(tensors))
        slimckpt.slim(root / "run", root / "store", min_saving=0)
        before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for source in ("run", "store"):
            with slimckpt.open(root / source) as checkpoint:
                own, other = (checkpoint.rank(r, writable=True) for r in range(2))
                own[chosen][:] = ~own[chosen]
                changed = bytes(byte ^ 0xFF for byte in bodies[chosen])
                for name, body in bodies.items():
                    assert own[name].tobytes() == (changed if name == chosen else body)
                    assert other[name].tobytes() == body
                    assert checkpoint.rank(0)[name].tobytes() == body
        assert {p: p.read_bytes() for p in root.rglob("*") if p.is_file()} == before
