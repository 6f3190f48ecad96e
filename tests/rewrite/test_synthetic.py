"""Stores of tensors that lie in no file: what resharding writes, and what commands make of it."""

import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import invoke
from sample_files import SAMPLES, expected
from trees import contents, snapshot

import slimckpt
from slimckpt import effects
from slimckpt.convert.reshard import ReshardResult, reshard
from slimckpt.errors import (
    CheckFailedError,
    DestinationError,
    NoOriginalError,
    NoSpaceError,
    NothingToGainError,
    StoppedError,
    UnfaithfulSourceError,
    UnsupportedStoreError,
    UsageError,
)
from slimckpt.frameworks import mindspore as slim_mindspore
from slimckpt.frameworks.origin import opened
from slimckpt.rewrite.access import Access
from slimckpt.rewrite.listing import list_path
from slimckpt.rewrite.synthetic import SyntheticFile, SyntheticTensor, write_synthetic
from slimckpt.rewrite.verify import verify
from slimckpt.store.manifest import Part, Root
from slimckpt.store.reader import Store

DP8, STRATEGY = SAMPLES / "ms_dp8_ckpt", SAMPLES / "ms_reshard_8to4" / "strategy.ckpt"
TRUTH: dict[str, Any] = expected("ms_reshard_8to4")["files"]
EMBEDDING = "backbone.embedding.weight"


def onto_four(target: Path, **options: Any) -> ReshardResult:
    return reshard(DP8, target, STRATEGY, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight ranks as the four that MindSpore makes of them, in a store."""
    target = tmp_path_factory.mktemp("synthetic") / "store"
    onto_four(target)
    return target


def params_of(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = TRUTH[f"rank_{rank}/net{rank}.ckpt"]["params"]
    return found


def test_ranks_of_the_store_hold_what_mindspore_makes(made: Path) -> None:
    with slimckpt.open(made) as ckpt:
        assert ckpt.ranks == (0, 1, 2, 3) and ckpt.steps == ("1_1",)
        for rank in ckpt.ranks:
            view, truth = ckpt.rank(rank), params_of(rank)
            assert set(view) - {"note"} == set(truth) and len(truth) == 58
            for name, param in truth.items():
                array = view[name]
                found = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
                assert found == param["sha256"] and list(array.shape) == param["shape"], name
        file = ckpt.files["step_1_1/rank_2/tensors"]
        assert np.array_equal(file[EMBEDDING], ckpt.rank(2)[EMBEDDING])
    with slimckpt.open(made, check=True) as ckpt:
        assert len(dict(ckpt.rank(3).items())) >= 58


def test_nothing_but_the_store_is_needed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    slimckpt.slim(DP8, source)
    reshard(source, tmp_path / "store", STRATEGY)
    moved = (tmp_path / "elsewhere").resolve()
    (tmp_path / "store").rename(moved)
    for path in [*source.rglob("*")][::-1]:
        path.rmdir() if path.is_dir() else path.unlink()
    assert verify(moved).sound
    for data in contents(moved).values():
        assert os.fsencode(source) not in data


def test_verify_counts_its_entries_and_says_that_there_are_no_originals(made: Path) -> None:
    result = verify(made)
    assert result.sound and result.files == result.synthetic == 5 and result.containers == 6
    assert result.nbytes_read > 300_000
    assert ["made by resharding" in note for note in result.notes] == [True]


def test_what_is_equal_is_stored_once(made: Path) -> None:
    store, where = Store(bytes(made)), set()
    (part,) = store.parts()
    for entry in part.files:
        assert entry.synthetic
        if entry.file.role.rank is None:
            continue  # the layout
        assert entry.file.size > 160_000
        index = store.index(part, entry)
        assert index is not None
        rows = {index.table.name(row): row for row in range(index.table.n_tensors)}
        payload = int(index.table.columns["home_row"][rows[EMBEDDING]])
        ((name, offset, nbytes),) = store.pieces(part, entry, index, payload)
        where.add((name, offset))
        assert nbytes == 64 * 32 * 4
    assert len({params_of(rank)[EMBEDDING]["sha256"] for rank in range(4)}) == len(where) == 1
    bodies = [c for container in part.containers for c in [store.contents(container)]]
    digests = [row.tobytes() for found in bodies for row in found.digest[found.nbytes >= 1024]]
    payloads = [d for d in digests if digests.count(d) > 1]
    assert not payloads


def test_any_byte_that_changed_is_found_and_named(made: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(made.rglob("*.h5"))):
        for at in np.random.default_rng(number).integers(0, path.stat().st_size, 6).tolist():
            before = path.read_bytes()
            changed = bytearray(before)
            changed[at] ^= 0x10
            path.write_bytes(changed)
            try:
                problems = verify(made).problems
            finally:
                path.write_bytes(before)
            assert problems and all(path.name in text or "tensors" in text for text in problems), (
                path,
                at,
            )
    assert verify(made).sound


def test_a_changed_tensor_is_named_where_it_is_read(made: Path, tmp_path: Path) -> None:
    store = Store(bytes(made))
    (part,) = store.parts()
    index = store.index(part, part.files[0])
    assert index is not None
    (place, *_) = store.pieces(part, part.files[0], index, 0)
    path = made / os.fsdecode(place[0] or b"")
    before = path.read_bytes()
    path.write_bytes(before[: place[1] + 7] + b"?" + before[place[1] + 8 :])
    try:
        with (
            slimckpt.open(made, check=True) as ckpt,
            pytest.raises(CheckFailedError, match=r"tensors.*digest is wrong"),
        ):
            ckpt.rank(0)[EMBEDDING]
    finally:
        path.write_bytes(before)


REFUSED: dict[str, list[str]] = {
    "restore": ["restore", "STORE", "OUT"],
    "restore of a rank": ["restore", "STORE", "OUT", "--rank", "1"],
    "restore of a file": ["restore", "STORE", "OUT", "--file", "*rank_1*"],
    "mount": ["mount", "STORE", "EMPTY"],
    "verify --against": ["verify", "STORE", "--against", str(DP8)],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_originals_refuses_its_entries_by_name(
    what: str, made: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    known = {"STORE": str(made), "OUT": str(tmp_path / "out"), "EMPTY": str(tmp_path / "empty")}
    arguments = [known.get(word, word) for word in REFUSED[what]]
    result = invoke(arguments)
    assert result.exit_code == 2 and result.stdout == ""
    for word in ("step_1_1/rank_1/tensors", "no original file", "slimckpt export"):
        assert word in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_the_library_refuses_too(made: Path, tmp_path: Path) -> None:
    with pytest.raises(NoOriginalError, match=r"cannot restore.* step_1_1/rank_0/tensors.*2 more"):
        slimckpt.restore(made, tmp_path / "out")
    with pytest.raises(UsageError, match=r"no rank 4.*there are 0-3"):
        slimckpt.restore(made, tmp_path / "out", ranks=[4])
    assert not (tmp_path / "out").exists()


def test_the_way_out_refuses_too(made: Path, tmp_path: Path) -> None:
    for options in ([], ["--rank", "2"], ["--file", "*rank_2*"], ["--step", "1_1", "--check"]):
        result = subprocess.run(
            [sys.executable, str(made / "restore.py"), str(tmp_path / "out"), *options],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 2 and result.stdout == ""
        assert "step_1_1/rank_2/tensors" in result.stderr
        assert "no original file" in result.stderr and "slimckpt export" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_listing_says_that_they_are_synthetic(made: Path) -> None:
    files = list_path(made).files
    assert {(file.stored, file.format) for file in files} == {("synthetic", "synthetic")}
    assert [file.rank for file in files] == [None, 0, 1, 2, 3]
    (_, file) = list_path(made, rank=2).files
    assert {t.name for t in file.tensors} == set(params_of(2)) | {"note"}


def test_a_store_is_no_source_to_slim(made: Path, tmp_path: Path) -> None:
    with pytest.raises(NothingToGainError, match="is a slim checkpoint already"):
        slimckpt.slim(made, tmp_path / "again")
    with pytest.raises(DestinationError, match="exists"):
        slimckpt.slim(DP8, made)
    with pytest.raises(DestinationError, match="exists"):
        onto_four(made)
    assert list(tmp_path.iterdir()) == []


def test_inside_a_tree_it_is_kept_whole(made: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "more").mkdir(parents=True)
    onto_four(tree / "resharded")
    before = snapshot(tree)
    slimckpt.slim(tree, tmp_path / "store", min_saving=0)
    slimckpt.restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == before
    assert verify(tmp_path / "back" / "resharded").sound


def test_a_loader_of_files_says_what_there_is_instead(made: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"file": "step_1_1/rank_1/tensors", "rank": None},
        {"file": None, "rank": 1},
    ]
    for where in asked:
        with (
            pytest.raises(
                NoOriginalError, match=r"rank_1/tensors.*no file of torch\.save.*state_dict"
            ),
            opened(made, step=None, run=None, formats=("torch",), writer="torch.save", **where),
        ):
            pass
    assert callable(slim_mindspore.tensors)


def test_what_was_resharded_can_be_resharded_back(made: Path, tmp_path: Path) -> None:
    result = reshard(
        made, tmp_path / "eight", DP8 / "strategy.ckpt", layout=STRATEGY, only_ranks=[0, 5]
    )
    assert result.ranks == (0, 5)
    with slimckpt.open(DP8) as before, slimckpt.open(tmp_path / "eight") as after:
        whole = set(before.layout().tensors)
        assert after.ranks == (0, 5) and len(whole) == 45
        for rank in after.ranks:
            there, here = before.rank(rank), after.rank(rank)
            for name in whole:
                assert there[name].tobytes() == here[name].tobytes(), (rank, name)


def test_threads_change_no_byte(tmp_path: Path) -> None:
    onto_four(tmp_path / "one", jobs=1)
    onto_four(tmp_path / "four", jobs=4)
    assert contents(tmp_path / "one") == contents(tmp_path / "four")
    assert len(contents(tmp_path / "one")) == 11


def test_a_dry_run_says_the_same_and_writes_nothing(tmp_path: Path) -> None:
    dry = onto_four(tmp_path / "store", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    wet = onto_four(tmp_path / "store")
    assert dry.dry_run and not wet.dry_run
    assert (dry.tensors, dry.tensor_nbytes, dry.store_nbytes, dry.carried) == (
        (wet.tensors, wet.tensor_nbytes, wet.store_nbytes, wet.carried)
    )


class Crash(BaseException):
    """The process is gone."""


def failing(at: int, failure: Callable[[], BaseException], once: bool) -> Callable[..., None]:
    seen = [0]

    def observer(effect: str, path: bytes) -> None:
        seen[0] += 1
        if seen[0] - 1 == at or (seen[0] - 1 > at and not once):
            raise failure()

    return observer


def effects_of(work: Callable[[], object]) -> list[str]:
    seen: list[str] = []
    with effects.observe(lambda effect, path: seen.append(effect)):
        work()
    return seen


def test_a_run_that_dies_leaves_no_destination_or_a_sound_one(tmp_path: Path) -> None:
    seen = effects_of(lambda: onto_four(tmp_path / "first", jobs=1))
    total, published = len(seen), 0
    moments = sorted({*range(0, total, total // 12), *range(total - 4, total)})
    for moment in moments:
        target = tmp_path / "store"
        with pytest.raises(Crash), effects.observe(failing(moment, Crash, once=False)):
            onto_four(target, jobs=1)
        if target.exists():
            published += 1
            assert verify(target).sound
            target.rename(tmp_path / f"published-{moment}")
        else:
            # What is left behind is in the way of nobody: the next run takes it away.
            onto_four(target, jobs=1)
            target.rename(tmp_path / f"store-{moment}")
    assert 1 <= published < len(moments)
    assert not list(tmp_path.glob("*.slimckpt-part"))
    assert contents(tmp_path / "store-0") == contents(tmp_path / "first")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    seen = effects_of(lambda: onto_four(tmp_path / "whole", jobs=1))
    kinds = ("mkdir", "create", "write", "allocate", "fsync")
    fits = [number for number, effect in enumerate(seen[:-1]) if effect in kinds]
    for moment in fits[:: len(fits) // 10]:
        full = failing(moment, lambda: OSError(errno.ENOSPC, "No space left"), once=True)
        with (
            pytest.raises(StoppedError, match=r"store.*nothing was kept.*run it again"),
            effects.observe(full),
        ):
            onto_four(tmp_path / "store", jobs=1)
        assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_what_cannot_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def full(path: bytes) -> os.statvfs_result:
        found = list(real(path))
        found[4] = 1  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(NoSpaceError, match="nothing was written"):
        onto_four(tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def tensor(name: str, data: bytes, chunks: Callable[[], list[bytes]]) -> SyntheticTensor:
    return SyntheticTensor(name, "U8", (len(data),), len(data), name, chunks)


@pytest.mark.parametrize(
    "second",
    [b"x" * 5000, b"x" * 4999, b"x" * 5001, b"y" * 5000],
    ids=["", "less", "more", "other"],
)
def test_bytes_that_change_while_they_are_read_are_noticed(second: bytes, tmp_path: Path) -> None:
    reads: list[int] = []

    def chunks() -> list[bytes]:
        reads.append(1)
        return [b"x" * 5000 if len(reads) == 1 else second]

    file = SyntheticFile(
        b"rank_0/t", slimckpt.model.Role(rank=0), [tensor("t", bytes(5000), chunks)]
    )
    (tmp_path / "source").mkdir()

    def work() -> object:
        access = Access(0o600, None, None)
        return write_synthetic(
            [file], tmp_path / "store", bytes(tmp_path / "source"), access, mtime=0
        )

    if second == b"x" * 5000:
        work()
        assert verify(tmp_path / "store").sound
        return
    with pytest.raises(UnfaithfulSourceError):
        work()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_origin_of_a_later_version_is_refused_by_name(made: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    onto_four(store)
    opened_store = Store(bytes(store))
    part = opened_store.part(0)
    part.files[1].origin = "dreamt"
    rewrite_part(store, part, opened_store.root)
    with pytest.raises(UnsupportedStoreError, match=r"rank_1/tensors.*origin \('dreamt'\)"):
        slimckpt.restore(store, tmp_path / "out")


def rewrite_part(store: Path, part: Part, root: Root) -> None:
    from slimckpt.sources.digest import digest_of

    data = part.pack()
    (store / root.parts[0].name).write_bytes(data)
    root.parts[0].nbytes, root.parts[0].digest = len(data), digest_of(data).hex()
    for name in ("slimckpt.json", "slimckpt.json.2"):
        (store / name).write_bytes(root.pack())
