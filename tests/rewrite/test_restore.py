"""``restore`` of a selection, and of a store that is damaged."""

import os
from pathlib import Path

import pytest
from mindspore_bytes import record
from trees import body, contents, small_run, snapshot

from slimckpt.errors import DestinationError, NotAStoreError, StoreDamagedError, UsageError
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim

ALL = {
    "args.json",
    "checkpoint-10/args.json",
    "checkpoint-10/model.safetensors",
    "checkpoint-20/model.safetensors",
    "rank_0/net-1_1.ckpt",
    "rank_1/net-1_1.ckpt",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("restore")
    source = small_run(root / "source", 2048)
    for rank in (0, 1):
        (source / "iter_5" / f"rank_{rank}").mkdir(parents=True)
        data = record("w", "Float32", [512], body(rank, 2048))
        (source / "iter_5" / f"rank_{rank}" / "w.ckpt").write_bytes(data)
    (source / "iter_5" / "common.bin").write_bytes(b"of no rank")
    slim(source, root / "store", min_saving=0)
    return root


ITER_5 = {"iter_5/common.bin", "iter_5/rank_0/w.ckpt", "iter_5/rank_1/w.ckpt"}
STEP_1 = {"rank_0/net-1_1.ckpt", "rank_1/net-1_1.ckpt"}
CASES: dict[str, tuple[dict[str, object], set[str]]] = {
    "everything": ({}, ALL | ITER_5),
    "a step, with what has no step": ({"steps": [20]}, {
        "args.json", "checkpoint-20/model.safetensors"}),
    "two steps": ({"steps": [10, 20]}, ALL - STEP_1),
    "a step as text": ({"steps": ["5"]}, ITER_5 | {"args.json"}),
    "a rank, with what has no rank": ({"ranks": [1]}, {
        *(ALL | ITER_5) - {"rank_0/net-1_1.ckpt", "iter_5/rank_0/w.ckpt"}}),
    "a rank of a step": ({"steps": [5], "ranks": [0]}, {
        "args.json", "iter_5/common.bin", "iter_5/rank_0/w.ckpt"}),
    "the step of one name of a hard link": ({"steps": [10], "files": ["*args.json"]}, {
        "args.json", "checkpoint-10/args.json"}),
    "a glob across directories": ({"files": ["*.ckpt"]}, {
        *STEP_1, "iter_5/rank_0/w.ckpt", "iter_5/rank_1/w.ckpt"}),
    "two globs": ({"files": ["rank_0/*", "*model*"]}, {
        "rank_0/net-1_1.ckpt", "checkpoint-10/model.safetensors",
        "checkpoint-20/model.safetensors"}),
    "a glob and a rank": ({"files": ["*.ckpt"], "ranks": [1]}, {
        "rank_1/net-1_1.ckpt", "iter_5/rank_1/w.ckpt"}),
    "the later name of a hard link": ({"files": ["checkpoint-10/args.json"]}, {
        "checkpoint-10/args.json"}),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_a_selection_gives_its_files_as_they_were_and_no_others(
    place: Path, tmp_path: Path, what: str
) -> None:
    options, wanted = CASES[what]
    result = restore(place / "store", tmp_path / "back", **options)
    found = snapshot(tmp_path / "back")
    original = snapshot(place / "source")
    files = {os.fsdecode(path) for path, entry in found.items() if entry[0] == "file"}
    assert files == wanted
    for path, entry in found.items():
        if entry[0] != "file":
            assert entry == original[path]
            continue
        # The group of hard links is named by the first path that is there.
        assert (*entry[:3], *entry[4:]) == (*original[path][:3], *original[path][4:])
        assert {p for p, e in found.items() if e[0] == "file" and e[3] == entry[3]} == {
            p
            for p, e in original.items()
            if p in found and e[0] == "file" and e[3] == original[path][3]
        }
    bodies = {entry[3]: entry[1] for entry in found.values() if entry[0] == "file"}
    assert (result.files, result.nbytes) == (len(bodies), sum(bodies.values()))


def test_only_the_directories_that_lead_to_a_selection_are_made(
    place: Path, tmp_path: Path
) -> None:
    restore(place / "store", tmp_path / "back", files=["iter_5/rank_1/*"])
    assert set(snapshot(tmp_path / "back")) == {
        b"",
        b"iter_5",
        b"iter_5/rank_1",
        b"iter_5/rank_1/w.ckpt",
    }


def test_a_link_is_restored_by_its_name(place: Path, tmp_path: Path) -> None:
    restore(place / "store", tmp_path / "back", files=["latest"])
    assert snapshot(tmp_path / "back")[b"latest"] == snapshot(place / "source")[b"latest"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": [99]}, r"no step 99; there are .*10.*20"),
        ({"ranks": [7]}, r"no rank 7 in what is selected; there are 0-1"),
        ({"files": ["*.pt"]}, r"no file matches '\*\.pt'; paths are like args\.json"),
        ({"files": ["*.ckpt", "*.pt"]}, r"no file matches '\*\.pt'"),
        ({"run": "other"}, r"no run 'other'"),
        ({"files": ["iter_5/*"], "steps": [20]}, r"the selection matches no file"),
    ],
)
def test_a_selection_of_nothing_is_an_error_that_says_what_there_is(
    place: Path, tmp_path: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        restore(place / "store", tmp_path / "back", **options)
    assert list(tmp_path.iterdir()) == []


def test_one_run_of_two_is_restored_with_what_belongs_to_none(tmp_path: Path) -> None:
    for run in ("a", "b"):
        directory = tmp_path / "source" / run / "checkpoint-10" / "rank_0"
        directory.mkdir(parents=True)
        (directory / "x.ckpt").write_bytes(record("w", "Float32", [512], body(1, 2048)))
    (tmp_path / "source" / "notes.txt").write_bytes(b"of no run")
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    restore(tmp_path / "store", tmp_path / "back", run="b")
    assert set(contents(tmp_path / "back")) == {b"b/checkpoint-10/rank_0/x.ckpt", b"notes.txt"}


def test_a_restored_file_that_is_damaged_names_file_and_tensor_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    source = small_run(tmp_path / "source", 2048)
    slim(source, tmp_path / "store", min_saving=0)
    path = tmp_path / "store" / "own" / "rank_1" / "net-1_1.ckpt.h5"
    data, needle = bytearray(path.read_bytes()), body(11, 2048)
    assert data.count(needle) == 1
    data[data.index(needle) + 1000] ^= 4
    path.write_bytes(data)
    with pytest.raises(StoreDamagedError, match=r"rank_1/net-1_1\.ckpt: tensor moment is damaged"):
        restore(tmp_path / "store", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "store"]
    restore(tmp_path / "store", tmp_path / "rest", files=["rank_0/*", "checkpoint-*", "args.json"])
    original = contents(source)
    assert contents(tmp_path / "rest") == {
        path: data for path, data in original.items() if path != b"rank_1/net-1_1.ckpt"
    }


@pytest.mark.parametrize("damage", ["gone", "cut", "skeleton", "whole file"])
def test_other_damage_is_an_error_that_names_the_file(tmp_path: Path, damage: str) -> None:
    source = small_run(tmp_path / "source", 2048)
    slim(source, tmp_path / "store", min_saving=0)
    path = tmp_path / "store" / "own" / "rank_1" / "net-1_1.ckpt.h5"
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    elif damage == "skeleton":
        data = path.read_bytes()
        assert data.count(body(21, 16)) == 1
        path.write_bytes(data.replace(body(21, 16), bytes(16)))
    else:
        path = tmp_path / "store" / "whole" / "args.json"
        stat = path.stat()
        path.write_bytes(path.read_bytes()[::-1])
        os.utime(path, ns=(0, stat.st_mtime_ns))
    says = "args.json: its content" if damage == "whole file" else "net-1_1.ckpt"
    with pytest.raises(StoreDamagedError, match=says):
        restore(tmp_path / "store", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "store"]


def test_a_missing_first_manifest_is_replaced_by_its_copy(tmp_path: Path) -> None:
    source = small_run(tmp_path / "source")
    slim(source, tmp_path / "store", min_saving=0)
    (tmp_path / "store" / "slimckpt.json").unlink()
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_a_place_to_restore_to_must_be_new_and_outside_the_store(
    place: Path, tmp_path: Path
) -> None:
    for target in (place / "store", tmp_path, place / "source"):
        with pytest.raises(DestinationError, match="exists"):
            restore(place / "store", target)
    with pytest.raises(DestinationError, match="lies inside"):
        restore(place / "store", place / "store" / "back")
    with pytest.raises(UsageError, match="does not exist"):
        restore(place / "store", tmp_path / "no" / "back")
    with pytest.raises(NotAStoreError, match="is not a slim checkpoint"):
        restore(place / "source", tmp_path / "back")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_more_than_one_name_outside_the_source_is_reported_and_restored(
    tmp_path: Path,
) -> None:
    source = small_run(tmp_path / "source")
    os.link(source / "rank_0" / "net-1_1.ckpt", tmp_path / "outside")
    result = slim(source, tmp_path / "store", min_saving=0)
    assert any("hard links outside" in w and "rank_0/net-1_1.ckpt" in w for w in result.warnings)
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_where_paths_state_coordinates_a_rank_is_refused_with_the_way_on(tmp_path: Path) -> None:
    for tp in (0, 1):
        path = tmp_path / "run" / f"mp_rank_{tp:02}" / "w.ckpt"
        path.parent.mkdir(parents=True)
        path.write_bytes(record("w", "Float32", [512], body(1, 2048)))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    with pytest.raises(UsageError, match=r"coordinates \(tp, pp, dp\), so select by --file"):
        restore(tmp_path / "store", tmp_path / "back", ranks=[1])
    result = restore(tmp_path / "store", tmp_path / "back", files=["*mp_rank_01*"])
    assert result.files == 1
