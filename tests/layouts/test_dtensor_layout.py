"""DTensors that ranks saved one by one, made by hand as torch 2.13 and those before 2.5 pickle
them: which rows each rank has is written out here, as torch places them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_bytes import Made, Storage, Symbol, saved_members, torch_zip

import slimckpt
from slimckpt.errors import CheckFailedError, NotUnderstoodError, SlimckptError
from slimckpt.layouts.ranks import at_ranks
from slimckpt.rewrite.slim import slim

NEW, OLD = "torch.distributed.tensor", "torch.distributed._tensor"
Placements = Sequence[tuple[str, dict[str, Any]]]
ROWS: Placements = [("Shard", {"dim": 0})]
FSDP_ON_TP: Placements = [("_StridedShard", {"dim": 0, "split_factor": 2}), *ROWS]
TWICE: Placements = [*ROWS, *ROWS]


def whole(rows: int, columns: int = 3) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def tensor(array: np.ndarray, key: str, padding: int = 0) -> Made:
    """A tensor, in a storage of so many elements more."""
    body = array.tobytes() + b"\xee" * array.itemsize * padding
    cls = {"f": "FloatStorage", "i": "IntStorage"}[array.dtype.kind]
    strides = tuple(
        stride // array.itemsize for stride in np.empty(array.shape, array.dtype).strides
    )
    made = Storage(key, cls, body, array.itemsize)
    return Made(
        Symbol("torch._utils", "_rebuild_tensor_v2"), (made, 0, array.shape, strides, False, {})
    )


def mesh_2_13(
    shape: tuple[int, ...], rank: int, ranks: Sequence[int], strides: Sequence[int] = ()
) -> Made:
    """A mesh of a root whose ranks are listed."""
    strides = strides or tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    axes = tuple(
        Made(
            Symbol("torch.distributed._mesh_layout", "_FlatLayout"),
            new=True,
            state={"shape": (size,), "stride": (stride,)},
        )
        for size, stride in zip(shape, strides, strict=True)
    )
    layout = Made(
        Symbol("torch.distributed._mesh_layout", "_MeshLayout"), new=True, state={"axes": axes}
    )
    state = {
        "_device_type": "cpu", "_layout": layout, "_mesh_dim_names": None, "_rank": rank,
        "_rank_map": tensor(np.array(ranks, np.int32), "mesh"), "_flatten_rank_map": tuple(ranks),
    }  # fmt: skip
    return Made(Symbol("torch.distributed.device_mesh", "DeviceMesh"), new=True, state=state)


def mesh_before(shape: tuple[int, ...], rank: int, ranks: Sequence[int]) -> Made:
    """A mesh as a tensor, and the coordinates of the rank in it."""
    grid = np.array(ranks, np.int32).reshape(shape)
    at = [int(part[0]) for part in np.nonzero(grid == rank)]
    state = {
        "device_type": "cpu", "mesh": tensor(grid, "mesh"), "_flatten_mesh_list": tuple(ranks),
        "_coordinate_on_dim": at,
    }  # fmt: skip
    return Made(Symbol("torch.distributed.device_mesh", "DeviceMesh"), new=True, state=state)


def dtensor(
    local: np.ndarray,
    shape: tuple[int, ...],
    mesh: Made,
    placements: Placements,
    *,
    order: Any = None,
    package: str = NEW,
    key: str = "0",
) -> Made:
    spec = {
        "mesh": mesh,
        "placements": tuple(
            Made(Symbol(f"{package}.placement_types", kind), new=True, state=dict(state))
            for kind, state in placements
        ),
        "tensor_meta": Made(
            Symbol(f"{package}._dtensor_spec", "TensorMeta"),
            (Made(Symbol("torch", "Size"), (shape,)), (1,), Symbol("torch", "float32")),
            new=True,
        ),
    }
    if order is not None:
        entry = Symbol(f"{package}._dtensor_spec", "ShardOrderEntry")
        spec["shard_order"] = tuple(Made(entry, each, new=True) for each in order)
    state = {
        "_local_tensor": tensor(local, key, padding=7),
        "_spec": Made(Symbol(f"{package}._dtensor_spec", "DTensorSpec"), new=True, state=spec),
    }
    cls = Symbol(package if package == NEW else f"{package}.api", "DTensor")
    wrapper = Symbol("torch._utils", "_rebuild_wrapper_subclass")
    return Made(
        Symbol("torch._tensor", "_rebuild_from_type_v2"),
        (wrapper, cls, (cls, Symbol("torch", "float32"), shape, (1,), 0), (None, state)),
    )


def save(root: Path, rank: int, state: Mapping[str, Any], name: str = "rank_{}.pt") -> None:
    root.mkdir(exist_ok=True)
    same = tensor(np.arange(5000, dtype=np.float32), "same")
    state = {"lr": tensor(np.float32([rank]), "lr"), "same": same, **state}
    (root / name.format(rank)).write_bytes(torch_zip(saved_members({"model": state})))


def save_rows(
    root: Path, rows: int, parts: Sequence[Sequence[int]], mesh: tuple[int, ...],
    placements: Placements, **options: Any,
) -> np.ndarray:  # fmt: skip
    """Save ``model.w``, of which each rank has the rows listed."""
    truth, everyone = whole(rows), range(len(parts))
    for rank, part in enumerate(parts):
        local = truth[list(part)] if len(part) else truth[:0]
        made = mesh_2_13(mesh, rank, everyone)
        save(root, rank, {"w": dtensor(local, truth.shape, made, placements, **options)})
    return truth


def show(root: Path, name: str = "model.w") -> np.ndarray:
    with slimckpt.open(root) as ckpt:
        return np.array(ckpt.tensor(name))


R = range
BY_HAND: dict[str, tuple[int, list[Sequence[int]], tuple[int, ...], Placements, dict[str, Any]]] = {
    "13 rows over 4": (13, [R(4), R(4, 8), R(8, 12), R(12, 13)], (4,), ROWS, {}),
    "5 rows over 4": (5, [R(2), R(2, 4), R(4, 5), R(0)], (4,), ROWS, {}),
    "13 rows over 2 of 2": (13, [R(4), R(4, 7), R(7, 10), R(10, 13)], (2, 2), TWICE, {}),
    "5 rows over 2 of 2": (5, [R(2), R(2, 3), R(3, 4), R(4, 5)], (2, 2), TWICE, {}),
    "13 rows, FSDP 2 on TP 2": (13, [R(4), R(7, 10), R(4, 7), R(10, 13)], (2, 2), FSDP_ON_TP, {}),
    "5 rows, FSDP 2 on TP 2": (5, [R(2), R(3, 4), R(2, 3), R(4, 5)], (2, 2), FSDP_ON_TP, {}),
    "7 rows, FSDP 3 on TP 2, as fully_shard splits": (
        7, [R(2), R(4, 5), R(2, 4), R(5, 6), R(0), R(6, 7)], (3, 2), FSDP_ON_TP, {},
    ),
    "7 rows, FSDP 3 on TP 2, as distribute_tensor splits": (
        7, [R(2), R(4, 5), R(2, 4), R(5, 6), R(6, 7), R(0)], (3, 2), FSDP_ON_TP, {},
    ),
    "the strided split to the right": (
        8, [[0, 2], [1, 3], [4, 6], [5, 7]], (2, 2), [*ROWS, FSDP_ON_TP[0]], {},
    ),
    "an order that is recorded": (
        8, [R(2), R(4, 6), R(2, 4), R(6, 8)], (2, 2), TWICE, {"order": [(0, (1, 0))]},
    ),
    "rows by data, all by tensor": (
        5, [R(3), R(3), R(3, 5), R(3, 5)], (2, 2), [*ROWS, ("Replicate", {})], {},
    ),
    "module names before 2.5": (5, [R(3), R(3, 5)], (2,), ROWS, {"package": OLD}),
}  # fmt: skip


@pytest.mark.parametrize("stored", [False, True], ids=["files", "store"])
@pytest.mark.parametrize("case", BY_HAND)
def test_the_whole_is_put_together_of_what_ranks_hold(
    case: str, stored: bool, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    truth = save_rows(root, *BY_HAND[case][:4], **BY_HAND[case][4])
    if stored:
        slim(root, tmp_path / "store", min_saving=0)
        root = tmp_path / "store"
    assert np.array_equal(show(root), truth)


def test_columns_of_rows_are_put_together(tmp_path: Path) -> None:
    truth, placements = whole(13, 5), [*ROWS, ("Shard", {"dim": 1})]
    rows, columns = [slice(7), slice(7, 13)], [slice(3), slice(3, 5)]
    for rank in range(4):
        local = np.ascontiguousarray(truth[rows[rank // 2], columns[rank % 2]])
        mesh = mesh_2_13((2, 2), rank, range(4))
        save(tmp_path / "run", rank, {"w": dtensor(local, (13, 5), mesh, placements)})
    assert np.array_equal(show(tmp_path / "run"), truth)


def test_a_mesh_written_as_a_tensor_tells_ranks_that_paths_do_not(tmp_path: Path) -> None:
    truth, ranks = whole(5), (1, 0)  # rank 1 has the first place
    for rank, part, name in ((1, truth[:3], "some.pt"), (0, truth[3:], "other.pt")):
        made = dtensor(part, (5, 3), mesh_before((2,), rank, ranks), ROWS, package=OLD)
        save(tmp_path / "run", rank, {"w": made}, name)
    assert np.array_equal(show(tmp_path / "run"), truth)


def test_each_rank_has_the_sub_mesh_that_it_is_in(tmp_path: Path) -> None:
    truth = whole(5)
    for rank in range(4):  # tensor parallel over 0, 1 and over 2, 3, the data in both
        made = mesh_2_13((2,), rank, range(4), strides=(1,))
        save(
            tmp_path / "tp",
            rank,
            {"w": dtensor([truth[:3], truth[3:]][rank % 2], (5, 3), made, ROWS)},
        )
        made = mesh_2_13((2,), rank, range(4), strides=(2,))
        save(
            tmp_path / "dp",
            rank,
            {"w": dtensor([truth[:3], truth[3:]][rank // 2], (5, 3), made, ROWS)},
        )
    assert np.array_equal(show(tmp_path / "tp"), truth)
    assert np.array_equal(show(tmp_path / "dp"), truth)


def test_what_is_no_dtensor_stays_outside(tmp_path: Path) -> None:
    save_rows(tmp_path / "run", *BY_HAND["5 rows over 4"][:4])
    with slimckpt.open(tmp_path / "run") as ckpt:
        assert list(ckpt.layout().tensors) == ["model.w"]
        assert ckpt.layout().ranks == (0, 1, 2, 3)
        assert ckpt.rank(3)["model.w"].shape == (0, 3)


def test_it_goes_onto_other_ranks_by_rules(tmp_path: Path) -> None:
    truth = save_rows(tmp_path / "run", *BY_HAND["13 rows, FSDP 2 on TP 2"][:4])
    rules = tmp_path / "two.toml"
    rules.write_text(
        '[mesh]\nfsdp = 2\n[[rule]]\nmatch = "model.w"\ndim = 0\naxis = "fsdp"\nsplit = "ceil"\n'
    )
    with slimckpt.open(tmp_path / "run") as ckpt:
        for target in (rules, at_ranks((), ckpt.layout(), 2)):
            resharded = ckpt.reshard(target)
            assert np.array_equal(resharded[0]["model.w"], truth[:7])
            assert np.array_equal(resharded[1]["model.w"], truth[7:])


PARTIAL: Placements = [("Partial", {"reduce_op": "sum"})]
UNKNOWN: Placements = [("_Diagonal", {"dim": 0})]
BEYOND: Placements = [("Shard", {"dim": 2})]
REFUSED: dict[str, tuple[dict[str, Any], type[SlimckptError], str]] = {
    "partial": ({"placements": PARTIAL}, NotUnderstoodError, r"Partial.*redistribute"),
    "unknown": ({"placements": UNKNOWN}, NotUnderstoodError, r"expected Shard.*_Diagonal"),
    "no such axis": ({"placements": BEYOND}, NotUnderstoodError, r"axis of \[5, 3\].*axis 2"),
    "more axes than the mesh": ({"placements": TWICE}, NotUnderstoodError, r"each axis.*found 2"),
    "no such rank": ({"ranks": (0, 7)}, CheckFailedError, r"expected rank 1 in.*\[0, 7\]"),
    "twice the same rank": ({"ranks": (1, 1)}, NotUnderstoodError, r"different ranks.*\(1, 1\)"),
    "another rank's": ({"rank": 0}, CheckFailedError, r"rank 1, as the path says.*rank 0"),
    "one row too many": ({"part": slice(2, 5)}, CheckFailedError, r"\[2, 3\] of.*found \[3, 3\]"),
    "another shape": ({"shape": (6, 3)}, CheckFailedError, r"expected the spec.*\[6, 3\]"),
    "an order of other axes": ({"order": [(0, (1,))]}, CheckFailedError, r"expected the spec"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_spec_that_is_not_so_is_refused_by_file_and_tensor(what: str, tmp_path: Path) -> None:
    changed, error, text = REFUSED[what]
    truth = whole(5)
    good = dtensor(truth[:3], (5, 3), mesh_2_13((2,), 0, (0, 1)), ROWS)
    mesh = mesh_2_13((2,), changed.get("rank", 1), changed.get("ranks", (0, 1)))
    bad = dtensor(
        truth[changed.get("part", slice(3, 5))],
        changed.get("shape", (5, 3)),
        mesh,
        changed.get("placements", ROWS),
        order=changed.get("order"),
    )
    right = dtensor(truth[3:], (5, 3), mesh_2_13((2,), 1, (0, 1)), ROWS, key="1")
    save(tmp_path / "run", 0, {"w": good, "right": good})
    save(tmp_path / "run", 1, {"w": bad, "right": right})
    with pytest.raises(error, match=rf"rank_1\.pt: tensor 'model\.w'.*{text}"):
        show(tmp_path / "run")
    assert np.array_equal(show(tmp_path / "run", "model.right"), truth)


def test_a_rank_without_a_spec_or_file_is_missed(tmp_path: Path) -> None:
    truth = save_rows(tmp_path / "run", *BY_HAND["13 rows over 4"][:4])
    other = dtensor(truth[8:12], (13, 3), mesh_2_13((4,), 2, range(4)), ROWS, key="1")
    save(tmp_path / "run", 2, {"w": tensor(truth[8:12], "0"), "other": other})
    with pytest.raises(CheckFailedError, match=r"rank_2\.pt: tensor 'model\.w'.*without a spec"):
        show(tmp_path / "run")
    (tmp_path / "run" / "rank_2.pt").unlink()
    with pytest.raises(CheckFailedError, match=r"nobody holds \[8:12, 0:3\]"):
        show(tmp_path / "run")


def test_replicas_that_differ_are_not_believed(tmp_path: Path) -> None:
    save_rows(tmp_path / "run", *BY_HAND["rows by data, all by tensor"][:4])
    changed, mesh = whole(5)[:3] + 1, mesh_2_13((2, 2), 1, range(4))
    made = dtensor(changed, (5, 3), mesh, [*ROWS, ("Replicate", {})])
    save(tmp_path / "run", 1, {"w": made})
    with pytest.raises(CheckFailedError, match=r"differs between file rank_0\.pt"):
        show(tmp_path / "run")
