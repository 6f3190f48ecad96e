"""Extracting ranks of a slim checkpoint: a store for one node, which needs nothing of the other."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from in_process import invoke
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES
from trees import body, contents, snapshot

import slimckpt
from slimckpt import effects
from slimckpt.convert.extract import extract
from slimckpt.convert.reshard import reshard
from slimckpt.errors import (
    DestinationError,
    NoOriginalError,
    NoSpaceError,
    NotAStoreError,
    StoppedError,
    StoreDamagedError,
    UsageError,
)
from slimckpt.model import compact_ranks
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify
from slimckpt.store.reader import Store

BLOCK = 4 * 2**20


def restored(store: Path, target: Path, **wanted: object) -> dict[bytes, object]:
    restore(store, target, **wanted)  # type: ignore[arg-type]
    return snapshot(target)


CASES = {
    "ms_dp8_ckpt": (2, 3),
    "ms_opshard8_ckpt": (7,),
    "torch_ddp4": (1, 3),
    "paddle_dp4": (2,),
    "ms_dp4_real_dedup_ckpt": (0, 3),
    "ms_uneven4_ckpt": (1, 2),
}


@pytest.mark.parametrize("sample", CASES)
def test_what_is_extracted_restores_to_the_originals(sample: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    slim(SAMPLES / sample, store, min_saving=0)
    ranks = CASES[sample]
    result = extract(store, tmp_path / "node", ranks)
    moved = tmp_path / "elsewhere"
    store.rename(moved)
    assert result.ranks == ranks and verify(tmp_path / "node").problems == []
    assert verify(tmp_path / "node").notes == []
    found = restored(tmp_path / "node", tmp_path / "back")
    assert found == restored(moved, tmp_path / "wanted", ranks=ranks)
    for path, data in contents(tmp_path / "back").items():
        assert data == (SAMPLES / sample / os.fsdecode(path)).read_bytes()
    assert result.files == len(contents(tmp_path / "back"))
    assert result.nbytes == sum(map(len, contents(tmp_path / "back").values()))
    with slimckpt.open(tmp_path / "node") as node, slimckpt.open(moved) as all_:
        assert node.ranks == ranks
        understood = [path for path in node.files if node.files[path].condition == "understood"]
        assert len(understood) >= len(ranks)
        for path in understood:
            here, there = node.files[path], all_.files[path]
            assert list(here) == list(there)
            for name in here:
                if not here.info(name).dtype.startswith("opaque"):
                    assert here[name].tobytes() == there[name].tobytes(), (path, name)


def run_of(root: Path, *, steps: int = 2, ranks: int = 4, nbytes: int = 300_000) -> Path:
    """Ranks that share, by pairs too, in several steps; with files of no rank and of no step."""
    for step in range(10, 10 * steps + 1, 10):
        for rank in range(ranks):
            path = root / f"step_{step}" / f"rank_{rank}" / "model.safetensors"
            path.parent.mkdir(parents=True)
            tensors = [
                ("frozen", "U8", [nbytes], body(1, nbytes)),
                ("pair", "U8", [nbytes], body(100 * step + rank // 2, nbytes)),
                ("own", "U8", [nbytes], body(1000 * step + rank, nbytes)),
                ("small", "U8", [40], body(rank, 40)),
            ]
            path.write_bytes(safetensors_file(tensors))
        (root / f"step_{step}" / "trainer.json").write_bytes(b'{"step": %d}' % step)
    (root / "latest").write_bytes(b"step_%d" % (10 * steps))
    return root


@pytest.fixture
def store(tmp_path: Path) -> Path:
    slim(run_of(tmp_path / "run"), tmp_path / "store", min_saving=0)
    return tmp_path / "store"


def test_it_takes_what_its_ranks_need_and_that_once(store: Path, tmp_path: Path) -> None:
    result = extract(store, tmp_path / "node", [2, 3])
    # frozen once; for each step pair once, and own of both ranks
    unique = 300_000 * (1 + 2 * (1 + 2))
    total = sum(map(len, contents(tmp_path / "node").values()))
    assert unique <= result.stored_nbytes <= unique + 5_000
    assert result.stored_nbytes < total < result.stored_nbytes + 100_000 + 2 * 50_453
    assert (result.files, result.steps, result.ranks) == (7, (10, 20), (2, 3))
    for data in contents(tmp_path / "node").values():
        assert body(10_000, 300_000) not in data  # rank 0's own


def test_nothing_points_out_of_it(store: Path, tmp_path: Path) -> None:
    extract(store, tmp_path / "node", [1])
    node = Store(bytes(tmp_path / "node"))
    there = set(contents(tmp_path / "node"))
    used = set()
    for part in node.parts():
        assert {container.name for container in part.containers} <= there
        for entry in part.files:
            runs = node.runs(part, entry, node.index(part, entry))
            used |= {run.name for run in runs if run.name is not None}
    assert used <= there
    assert {name for name in there if name.startswith((b"own/", b"shared/", b"whole/"))} == used


def test_one_step_of_one_rank(store: Path, tmp_path: Path) -> None:
    result = extract(store, tmp_path / "node", [3], steps=["20"])
    assert result.steps == (20,) and result.files == 3
    found = restored(tmp_path / "node", tmp_path / "back")
    assert {path for path, about in found.items() if about[0] == "file"} == {
        b"latest",
        b"step_20/rank_3/model.safetensors",
        b"step_20/trainer.json",
    }
    again = extract(store, tmp_path / "again", [3], steps=[20])
    assert again == result
    assert contents(tmp_path / "node") == contents(tmp_path / "again")


def test_an_excerpt_of_an_excerpt(store: Path, tmp_path: Path) -> None:
    extract(store, tmp_path / "some", [1, 2])
    extract(tmp_path / "some", tmp_path / "less", [2])
    extract(store, tmp_path / "same", [2])
    assert contents(tmp_path / "less") == contents(tmp_path / "same")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"ranks": [4]}, "no rank 4.*there are 0-3"),
        ({"ranks": []}, "no ranks were named"),
        ({"ranks": [1], "steps": [30]}, "no step 30; there are 10, 20"),
        ({"ranks": [1], "run": "other"}, "no run 'other'"),
        ({"ranks": [1], "jobs": 0}, "at least 1"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(
    wanted: dict[str, object], says: str, store: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        extract(store, tmp_path / "node", **wanted)  # type: ignore[arg-type]
    assert not (tmp_path / "node").exists()


def test_only_a_slim_checkpoint_is_extracted_from(store: Path, tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError, match="not a slim checkpoint"):
        extract(tmp_path / "run", tmp_path / "node", [0])
    with pytest.raises(DestinationError, match="lies inside"):
        extract(store, store / "node", [0])
    with pytest.raises(DestinationError, match="exists"):
        extract(store, tmp_path / "run", [0])


def test_threads_change_no_byte_and_large_tensors_are_copied_right(tmp_path: Path) -> None:
    sizes = {"exact": BLOCK, "more": BLOCK + 1, "many": 3 * BLOCK + 77, "unit": 64 * 2**20 + 5}
    for rank in (0, 1):
        path = tmp_path / "run" / f"rank_{rank}" / "m.safetensors"
        path.parent.mkdir(parents=True)
        noise = np.random.default_rng(3).bytes(max(sizes.values()))
        tensors = [(name, "U8", [n], noise[:n]) for name, n in sizes.items()]
        path.write_bytes(safetensors_file(tensors))
    slim(tmp_path / "run", tmp_path / "store")
    extract(tmp_path / "store", tmp_path / "one", [1], jobs=1)
    extract(tmp_path / "store", tmp_path / "four", [1], jobs=4)
    assert contents(tmp_path / "one") == contents(tmp_path / "four")
    assert verify(tmp_path / "one").problems == []
    restore(tmp_path / "one", tmp_path / "back")
    original = (tmp_path / "run/rank_1/m.safetensors").read_bytes()
    assert (tmp_path / "back/rank_1/m.safetensors").read_bytes() == original


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_hard_links_across_ranks_and_steps(wanted: tuple[int, ...], tmp_path: Path) -> None:
    root = run_of(tmp_path / "run", ranks=2)
    first = root / "step_10/rank_0/model.safetensors"
    for path in ("step_10/rank_1/linked.safetensors", "step_20/rank_1/linked.safetensors"):
        os.link(first, root / path)
    slim(root, tmp_path / "store", min_saving=0)
    extract(tmp_path / "store", tmp_path / "node", wanted)
    assert verify(tmp_path / "node").problems == []
    found = restored(tmp_path / "node", tmp_path / "back")
    assert found == restored(tmp_path / "store", tmp_path / "there", ranks=wanted)
    linked = b"step_20/rank_1/linked.safetensors"
    assert (linked in found) == (1 in wanted)
    with slimckpt.open(tmp_path / "node") as ckpt:
        if 1 in wanted:
            data = ckpt.files[os.fsdecode(linked)]["own"].tobytes()
            assert data == body(10_000, 300_000)


def test_files_that_lost_tensors_stay_as_they_are(tmp_path: Path) -> None:
    slim(SAMPLES / "ms_dp8_ckpt", tmp_path / "store", min_saving=0, drop=["optimizer"])
    extract(tmp_path / "store", tmp_path / "node", [5])
    result = verify(tmp_path / "node")
    assert result.sound and result.dropped > 10
    with slimckpt.open(tmp_path / "node") as node, slimckpt.open(tmp_path / "store") as store:
        name = "backbone.embedding.weight"
        assert node.rank(5)[name].tobytes() == store.rank(5)[name].tobytes()
        with pytest.raises(slimckpt.SlimckptError, match="left out"):
            node.rank(5)[f"adam_m.{name}"]


def test_of_resharded_ranks(tmp_path: Path) -> None:
    reshard(
        SAMPLES / "ms_dp8_ckpt",
        tmp_path / "store",
        SAMPLES / "ms_reshard_8to4" / "strategy.ckpt",
    )
    result = extract(tmp_path / "store", tmp_path / "node", [1, 3])
    assert result.ranks == (1, 3) and verify(tmp_path / "node").sound
    with slimckpt.open(tmp_path / "node") as node, slimckpt.open(tmp_path / "store") as store:
        assert node.ranks == (1, 3)
        for rank in node.ranks:
            here, there = node.rank(rank), store.rank(rank)
            assert list(here) == list(there) and len(here) >= 58
            for name in here:
                if name != "note":
                    assert here[name].tobytes() == there[name].tobytes()
    with pytest.raises(NoOriginalError, match="rank_1/tensors"):
        restore(tmp_path / "node", tmp_path / "back")


def test_damage_is_found_while_copying_and_named(store: Path, tmp_path: Path) -> None:
    opened = Store(bytes(store))
    (part,) = [part for part in opened.parts() if part.step == 20]
    (entry,) = [e for e in part.files if e.file.role.rank == 2]
    index = opened.index(part, entry)
    assert index is not None
    rows = {index.table.name(row): row for row in range(index.table.n_tensors)}
    payload = int(index.table.columns["home_row"][rows["own"]])
    ((name, offset, _),) = opened.pieces(part, entry, index, payload)
    path = store / os.fsdecode(name or b"")
    data = bytearray(path.read_bytes())
    data[offset + 1234] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        StoreDamagedError, match=r"step_20/rank_2/model.*tensor own is damaged.*rank_2.*extracted"
    ):
        extract(store, tmp_path / "node", [2, 3])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "store"]
    # It is not in the way of ranks that do not need it.
    extract(store, tmp_path / "node", [1])
    assert verify(tmp_path / "node").sound


@pytest.mark.parametrize("what", ["cut", "gone", "whole"])
def test_a_store_that_lost_bytes_is_refused(what: str, store: Path, tmp_path: Path) -> None:
    if what == "whole":
        path = next((store / "whole").rglob("trainer.json"))
        path.write_bytes(path.read_bytes()[::-1])
    else:
        path = next(path for path in (store / "own").rglob("*rank_2*/*.h5"))
        os.truncate(path, path.stat().st_size - 5) if what == "cut" else path.unlink()
    with pytest.raises(StoreDamagedError, match=path.name.replace(".", r"\.")):
        extract(store, tmp_path / "node", [2])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "store"]


def test_a_copy_of_a_store_without_times_can_be_extracted_from(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "copy", copy_function=shutil.copyfile)
    extract(tmp_path / "copy", tmp_path / "node", [0])
    extract(store, tmp_path / "other", [0])
    assert snapshot(tmp_path / "node").keys() == snapshot(tmp_path / "other").keys()
    assert verify(tmp_path / "node").notes == []


class Crash(BaseException):
    """The process is gone."""


def failing(at: int, failure: Callable[[], BaseException], once: bool) -> Callable[..., None]:
    seen = [0]

    def observer(effect: str, path: bytes) -> None:
        seen[0] += 1
        if seen[0] - 1 == at or (seen[0] - 1 > at and not once):
            raise failure()

    return observer


def test_a_run_that_dies_leaves_no_destination_or_a_sound_one(store: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    before = contents(store)
    with effects.observe(lambda effect, path: seen.append(effect)):
        extract(store, tmp_path / "first", [1, 2], jobs=1)
    total, published = len(seen), 0
    moments = sorted({*range(0, total, total // 12), *range(total - 4, total)})
    for moment in moments:
        target = tmp_path / "node"
        with pytest.raises(Crash), effects.observe(failing(moment, Crash, once=False)):
            extract(store, target, [1, 2], jobs=1)
        if target.exists():
            published += 1
        else:
            extract(store, target, [1, 2], jobs=1)
        assert contents(target) == contents(tmp_path / "first")
        shutil.rmtree(target)
        assert not list(tmp_path.glob("*.slimckpt-part"))
    assert 1 <= published < len(moments)
    assert contents(store) == before


def test_a_full_disk_leaves_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    with effects.observe(lambda effect, path: seen.append(effect)):
        extract(store, tmp_path / "whole", [1], jobs=1)
    kinds = ("mkdir", "create", "write", "allocate", "fsync")
    fits = [number for number, effect in enumerate(seen[:-1]) if effect in kinds]
    for moment in fits[:: len(fits) // 10]:
        full = failing(moment, lambda: OSError(errno.ENOSPC, "No space left"), once=True)
        with (
            pytest.raises(StoppedError, match=r"node.*nothing was kept.*run it again"),
            effects.observe(full),
        ):
            extract(store, tmp_path / "node", [1], jobs=1)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "store", "whole"]
    real = os.statvfs

    def no_room(path: bytes) -> os.statvfs_result:
        found = list(real(path))
        found[4] = 1  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", no_room)
    with pytest.raises(NoSpaceError, match="nothing was written"):
        extract(store, tmp_path / "node", [1])


def test_containers_are_no_more_readable_than_their_sources(tmp_path: Path) -> None:
    root = run_of(tmp_path / "run", steps=1)
    (root / "step_10/rank_2/model.safetensors").chmod(0o600)
    (root / "step_10/rank_3/model.safetensors").chmod(0o644)
    slim(root, tmp_path / "store", min_saving=0)
    extract(tmp_path / "store", tmp_path / "node", [2, 3])
    modes = {str(p): p.stat().st_mode & 0o777 for p in (tmp_path / "node").rglob("*.h5")}
    assert {m for name, m in modes.items() if "/shared" in name or "rank_2" in name} == {0o600}
    assert {m for name, m in modes.items() if "own/" in name and "rank_3" in name} == {0o644}


def test_by_command(store: Path, tmp_path: Path) -> None:
    node = str(tmp_path / "node")
    command = ["extract", str(store), node, "--rank", "1,2-3", "--step", "10"]
    dry = invoke([*command, "--dry-run"])
    assert dry.exit_code == 0 and "ranks 1-3, 5 files" in dry.stdout
    assert "nothing was written" in dry.stdout and not (tmp_path / "node").exists()
    result = invoke([*command, "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["schema"] == "slimckpt.extract/1"
    assert compact_ranks(found["ranks"]) == "1-3" and found["steps"] == [10]
    assert found["files"] == 5 and found["dry_run"] is False
    assert verify(node).sound
    missing = invoke(["extract", str(store), node + "2"])
    assert missing.exit_code == 2 and "--rank 8-15" in missing.stderr
    unknown = invoke(["extract", str(store), node + "2", "--rank", "2-9"])
    assert unknown.exit_code == 2 and "no rank 4" in unknown.stderr and "0-3" in unknown.stderr
