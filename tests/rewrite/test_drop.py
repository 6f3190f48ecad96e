"""``slim --drop``: what is left out, what never is, and how a store says what it lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from in_process import invoke
from mindspore_bytes import record
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES
from trees import body, contents, snapshot

import slimckpt
from slimckpt.errors import DroppedTensorError, NothingToGainError, UsageError
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import sentence, verify

N = 65536
STEPS = (1000, 1500, 2000, 2500)
MOMENTS = {"exp_avg.w", "exp_avg_sq.w"}


def values(seed: int) -> np.ndarray:
    """What a parameter is in float32."""
    return np.random.default_rng(seed).standard_normal(N // 4, np.float32)


def rounded(seed: int) -> bytes:
    """The same in bfloat16."""
    return values(seed).astype(ml_dtypes.bfloat16).tobytes()


def rank_file(
    step: int, rank: int, names: str = "w exp_avg.w exp_avg_sq.w master_weights.w"
) -> bytes:
    """A weight and its master, which ranks share, moments that nothing else has, a counter."""
    found = []
    for number, name in enumerate(names.split()):
        if name == "w":
            found.append((name, "BF16", [N // 4], rounded(step)))
        elif name == "master_weights.w":
            found.append((name, "F32", [N // 4], values(step).tobytes()))
        else:
            found.append((name, "F32", [N // 4], body(step * 100 + number * 10 + rank, N)))
    return safetensors_file([*found, ("exp_avg.bias", "F32", [8], body(step + rank, 32))])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    for step in STEPS:
        (source / f"checkpoint-{step}").mkdir(parents=True)
        for rank in (0, 1):
            path = source / f"checkpoint-{step}" / f"rank_{rank}.safetensors"
            path.write_bytes(rank_file(step, rank))
    (source / "args.json").write_bytes(b"{}\n")
    return source


def arrays(view: slimckpt.RankView) -> dict[str, bytes]:
    return {name: view[name].tobytes() for name in view}


def test_moments_are_left_out_and_everything_else_reads_as_before(
    run: Path, tmp_path: Path
) -> None:
    result = slim(run, tmp_path / "store", drop=["optimizer"])
    assert {(t.name, t.category, t.nbytes) for t in result.dropped} == {
        (name, "moment", N) for name in MOMENTS
    }
    assert len(result.dropped) == len(MOMENTS) * len(STEPS) * 2
    with slimckpt.open(tmp_path / "store") as store, slimckpt.open(run) as source:
        for step in STEPS:
            for rank in (0, 1):
                kept, full = store.step(step).rank(rank), source.step(step).rank(rank)
                assert set(kept.dropped) == MOMENTS
                assert full.dropped == ()
                wanted = arrays(full)
                assert arrays(kept) == {n: d for n, d in wanted.items() if n not in MOMENTS}
                assert list(kept) == [name for name in full if name not in MOMENTS]


def test_a_dropped_tensor_is_no_key_but_says_what_it_was(run: Path, tmp_path: Path) -> None:
    slim(run, tmp_path / "store", drop=["optimizer"])
    with slimckpt.open(tmp_path / "store") as store:
        for view in (store.step(1000).rank(0), store.files["checkpoint-1000/rank_0.safetensors"]):
            assert "exp_avg.w" not in view
            assert view.get("exp_avg.w") is None
            assert view.info("exp_avg.w").shape == (N // 4,)
            for read in (view.__getitem__, view.raw, view.by_path.__getitem__):
                with pytest.raises(DroppedTensorError, match=r"rank_0.*'exp_avg\.w'.*--drop"):
                    read("exp_avg.w")
            assert set(view.by_path.dropped) == MOMENTS


def test_the_store_is_smaller_by_what_was_dropped(run: Path, tmp_path: Path) -> None:
    slim(run, tmp_path / "store", drop=["optimizer"], min_saving=0)
    stored = contents(tmp_path / "store")
    for step in STEPS:
        for rank in (0, 1):
            for number in (1, 2):
                gone = body(step * 100 + number * 10 + rank, N)
                assert not any(gone in data for data in stored.values())
        master = values(step).tobytes()
        assert sum(data.count(master) for data in stored.values()) == 1


def test_what_is_dropped_stands_in_the_manifest_and_in_every_listing(
    run: Path, tmp_path: Path
) -> None:
    wanted = {
        (f"checkpoint-{step}/rank_{rank}.safetensors", name)
        for step in STEPS
        for rank in (0, 1)
        for name in MOMENTS
    }
    command = ["slim", str(run), str(tmp_path / "store"), "--drop", "optimizer", "--quiet"]
    dry = invoke([*command, "--dry-run", "--json"])
    assert dry.exit_code == 0
    assert {(t["file"], t["name"]) for t in json.loads(dry.stdout)["dropped"]} == wanted
    said = invoke([*command, "--dry-run"]).stdout
    assert not (tmp_path / "store").exists()
    assert "dropped: 16 tensors, 1.05 MB (moment); 8 files cannot be restored any more" in said
    rows = [
        line.split()
        for line in said.splitlines()
        if line.split()[:1] and line.split()[0] in MOMENTS
    ]
    assert [(row[0], row[-3:]) for row in rows] == [
        (name, ["and", "7", "more"]) for name in ("exp_avg.w", "exp_avg_sq.w")
    ]
    assert invoke(command).exit_code == 0
    parts = [json.loads(p.read_bytes()) for p in sorted((tmp_path / "store/parts").iterdir())]
    entries = [entry for part in parts for entry in part["entries"] if "dropped" in entry]
    assert {(e["path"], name) for e in entries for name in e["dropped"]["tensors"]} == wanted
    assert {e["dropped"]["nbytes"] for e in entries} == {2 * N}
    root = json.loads((tmp_path / "store/slimckpt.json").read_bytes())
    assert root["totals"]["dropped_tensors"] == 16
    listed = invoke(["ls", str(tmp_path / "store")]).stdout
    assert listed.count("slim, 2 dropped") == 8
    listed = invoke(
        ["ls", str(tmp_path / "store"), "--step", "1000", "--rank", "0", "--json"]
    ).stdout
    tensors = [t for file in json.loads(listed)["files"] for t in file["tensors"] or []]
    assert {t["name"] for t in tensors if t["dropped"]} == MOMENTS


def test_restore_gives_the_other_files_back_and_names_those_it_cannot(
    run: Path, tmp_path: Path
) -> None:
    before = snapshot(run)
    slim(run, tmp_path / "store", drop=["optimizer"], keep_full="last:1")
    lost = {f"checkpoint-{step}/rank_{r}.safetensors" for step in STEPS[:-1] for r in (0, 1)}
    result = restore(tmp_path / "store", tmp_path / "back")
    assert result.not_restored == [(path, 2, 2 * N) for path in sorted(lost)]
    wanted = {path: entry for path, entry in before.items() if os.fsdecode(path) not in lost}
    assert snapshot(tmp_path / "back") == wanted
    store = str(tmp_path / "store")
    said = invoke(["restore", store, str(tmp_path / "two"), "--quiet"])
    assert said.exit_code == 1
    assert said.stderr.count("not restored: checkpoint-") == len(lost)
    script = [sys.executable, "-I", "-S", tmp_path / "store" / "restore.py", tmp_path / "three"]
    done = subprocess.run([*script, "--check"], capture_output=True, text=True)
    assert done.returncode == 1
    assert all(f"not restored: {path} lost 2 tensors" in done.stderr for path in lost)
    assert snapshot(tmp_path / "three") == snapshot(tmp_path / "two") == wanted


def test_a_selection_of_lost_files_alone_restores_nothing(run: Path, tmp_path: Path) -> None:
    slim(run, tmp_path / "store", drop=["optimizer"])
    with pytest.raises(DroppedTensorError, match="all 1 files selected"):
        restore(tmp_path / "store", tmp_path / "back", files=["checkpoint-1000/rank_0*"])
    script = [sys.executable, "-I", "-S", tmp_path / "store" / "restore.py", tmp_path / "back"]
    done = subprocess.run([*script, "--file", "*rank_0*"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Nothing was restored" in done.stderr
    assert not (tmp_path / "back").exists()


def test_verify_says_that_the_source_may_go_but_for_what_was_dropped(
    run: Path, tmp_path: Path
) -> None:
    slim(run, tmp_path / "store", drop=["optimizer"])
    result = verify(tmp_path / "store", against=run)
    assert (result.problems, result.safe, result.dropped) == ([], True, 16)
    assert "if its 16 dropped tensors may go" in sentence(result, "source")
    assert any("16 tensors were left out" in note for note in result.notes)
    assert verify(tmp_path / "store", quick=True).sound


@pytest.mark.parametrize("name", ["w", "exp_avg.w", "exp_avg.bias"])
def test_verify_finds_a_source_that_differs_in_what_was_kept_or_dropped(
    run: Path, tmp_path: Path, name: str
) -> None:
    slim(run, tmp_path / "store", drop=["optimizer"])
    path = run / "checkpoint-1500" / "rank_1.safetensors"
    data, stat = bytearray(path.read_bytes()), path.stat()
    with slimckpt.open(run) as source:
        piece = source.step(1500).rank(1)[name].tobytes()
    data[data.index(piece) + len(piece) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    result = verify(tmp_path / "store", against=run)
    assert not result.safe
    assert "checkpoint-1500/rank_1.safetensors" in result.problems[0]


@pytest.mark.parametrize(
    ("rules", "spared"),
    [
        ("last:1", {2500}),
        ("last:2", {2000, 2500}),
        ("last:9", set(STEPS)),
        ("every:1000", {1000, 2000}),
        ("last:1,every:1000", {1000, 2000, 2500}),
        ("every:2500,last:1", {2500}),
        ("every:7", set()),
    ],
)
def test_steps_that_are_spared_lose_nothing(
    run: Path, tmp_path: Path, rules: str, spared: set[int]
) -> None:
    result = slim(run, tmp_path / "store", drop=["optimizer"], keep_full=rules, min_saving=0)
    losing = {int(t.file.split("/")[0].removeprefix("checkpoint-")) for t in result.dropped}
    assert losing == set(STEPS) - spared


def test_every_is_an_error_where_a_step_is_not_a_number(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / "source" / f"rank_{rank}").mkdir(parents=True)
        path = tmp_path / "source" / f"rank_{rank}" / "net-1_5.ckpt"
        moment = body(rank, N)
        path.write_bytes(
            record("w", "Float32", [N // 4], body(9, N))
            + record("adam_m.w", "Float32", [N // 4], moment)
        )
    source, store = tmp_path / "source", tmp_path / "store"
    with pytest.raises(UsageError, match=r"every:10 needs steps that are numbers.*'1_5'"):
        slim(source, store, drop=["optimizer"], keep_full="every:10", min_saving=0)
    result = slim(source, store, drop=["optimizer"], keep_full="last:1", min_saving=0)
    assert result.dropped == []


@pytest.mark.parametrize(
    ("drop", "keep", "why"),
    [
        (["moments"], None, "cannot drop 'moments'"),
        ([], "last:1", "nothing is dropped"),
        (["optimizer"], "", "'' is no rule"),
        (["optimizer"], "last", "'last' is no rule"),
        (["optimizer"], "last:0", "'last:0' is no rule"),
        (["optimizer"], "last:-1", "'last:-1' is no rule"),
        (["optimizer"], "first:1", "'first:1' is no rule"),
        (["optimizer"], "last:1,last:2", "last twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    run: Path, tmp_path: Path, drop: list[str], keep: str | None, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        slim(run, tmp_path / "store", drop=drop, keep_full=keep)


def test_files_of_no_step_are_spared_where_steps_are(run: Path, tmp_path: Path) -> None:
    (run / "loose.safetensors").write_bytes(rank_file(7, 0))
    spared = slim(run, tmp_path / "a", drop=["optimizer"], keep_full="last:1")
    assert "loose.safetensors" not in {t.file for t in spared.dropped}
    everything = slim(run, tmp_path / "b", drop=["optimizer"])
    assert "loose.safetensors" in {t.file for t in everything.dropped}


def test_a_hard_link_in_a_spared_step_spares_the_file(run: Path, tmp_path: Path) -> None:
    os.link(run / "checkpoint-1000/rank_0.safetensors", run / "checkpoint-2500/rank_2.safetensors")
    result = slim(run, tmp_path / "store", drop=["optimizer"], keep_full="last:1")
    assert "checkpoint-1000/rank_0.safetensors" not in {t.file for t in result.dropped}
    assert "checkpoint-1000/rank_1.safetensors" in {t.file for t in result.dropped}


def test_a_hard_link_of_a_file_that_lost_tensors_says_so_too(run: Path, tmp_path: Path) -> None:
    os.link(run / "checkpoint-1000/rank_0.safetensors", run / "checkpoint-1500/rank_2.safetensors")
    slim(run, tmp_path / "store", drop=["optimizer"])
    with slimckpt.open(tmp_path / "store") as store:
        assert set(store.step(1500).rank(2).dropped) == MOMENTS
    root = json.loads((tmp_path / "store/slimckpt.json").read_bytes())
    assert root["totals"]["dropped_tensors"] == 16


def test_bytes_that_are_stored_for_something_else_are_not_dropped(tmp_path: Path) -> None:
    weight, zeros = body(1, N), bytes(N)
    for rank in (0, 1):
        path = tmp_path / "source" / f"rank_{rank}.safetensors"
        path.parent.mkdir(exist_ok=True)
        tensors = [("w", weight), ("exp_avg.w", weight), ("exp_avg_sq.w", zeros)]
        path.write_bytes(safetensors_file([(n, "F32", [N // 4], d) for n, d in tensors]))
    result = slim(tmp_path / "source", tmp_path / "store", drop=["optimizer"])
    assert {t.name for t in result.dropped} == {"exp_avg_sq.w"}
    with slimckpt.open(tmp_path / "store") as store:
        assert store.rank(1)["exp_avg.w"].tobytes() == weight


def test_masters_go_when_a_weight_of_the_same_rank_and_step_stays(
    run: Path, tmp_path: Path
) -> None:
    result = slim(run, tmp_path / "store", drop=["master"])
    assert {(t.name, t.category) for t in result.dropped} == {("master_weights.w", "master weight")}
    assert len(result.dropped) == 8
    both = slim(run, tmp_path / "both", drop=["master", "optimizer"])
    assert {t.name for t in both.dropped} == MOMENTS | {"master_weights.w"}


OTHER = {
    "is of another step": [],
    "has fewer elements": [("w", "BF16", [4], rounded(1500)[:8])],
    "has more elements": [("w", "BF16", [N // 2], rounded(1500) * 2)],
    "has other values": [("w", "BF16", [N // 4], rounded(7))],
    "is zero": [("w", "BF16", [N // 4], bytes(N // 2))],
    "is of integers": [("w", "I8", [N // 4], body(1, N // 4))],
    "has another name": [("net.v", "BF16", [N // 4], rounded(1500))],
}


@pytest.mark.parametrize("why", OTHER)
def test_the_last_copy_of_a_parameter_is_never_dropped(run: Path, tmp_path: Path, why: str) -> None:
    master = ("master_weights.w", "F32", [N // 4], values(1500).tobytes())
    path = run / "checkpoint-1500" / "rank_1.safetensors"
    path.write_bytes(safetensors_file([*OTHER[why], master]))
    (run / "checkpoint-1500" / "rank_0.safetensors").unlink()
    message = r"refused: of 1 master weights no other copy.*master_weights\.w in checkpoint-1500/r"
    with pytest.raises(UsageError, match=message):
        slim(run, tmp_path / "store", drop=["master"])
    assert not (tmp_path / "store").exists()
    slim(run, tmp_path / "store", drop=["optimizer"])


def test_a_shard_of_another_rank_is_no_copy(run: Path, tmp_path: Path) -> None:
    """As where each rank has a part of the parameter, under one name."""
    master = ("master_weights.w", "F32", [N // 4], values(99).tobytes())
    path = run / "checkpoint-1500" / "rank_1.safetensors"
    path.write_bytes(safetensors_file([master]))
    with pytest.raises(UsageError, match=r"of 1 master weights.*checkpoint-1500/rank_1"):
        slim(run, tmp_path / "store", drop=["master"])


def test_a_network_of_the_same_names_is_no_copy(tmp_path: Path) -> None:
    for name, seed in (("actor", 1), ("critic", 2)):
        (tmp_path / "run" / name).mkdir(parents=True)
        weight = [("layer.w", "BF16", [N // 4], rounded(seed))]
        master = [("master_weights.layer.w", "F32", [N // 4], values(seed).tobytes())]
        (tmp_path / "run" / name / "m.safetensors").write_bytes(safetensors_file(weight))
        (tmp_path / "run" / name / "o.safetensors").write_bytes(safetensors_file(master))
    both = slim(tmp_path / "run", tmp_path / "a", drop=["master"], min_saving=0, dry_run=True)
    assert len(both.dropped) == 2
    (tmp_path / "run" / "critic" / "m.safetensors").unlink()
    with pytest.raises(UsageError, match=r"of 1 master weights.*critic/o\.safetensors"):
        slim(tmp_path / "run", tmp_path / "b", drop=["master"], min_saving=0)


def test_a_weight_of_all_ranks_is_a_copy_for_each(run: Path, tmp_path: Path) -> None:
    for step in STEPS:
        weight = [("model.w", "BF16", [N // 4], rounded(step))]
        directory = run / f"checkpoint-{step}"
        (directory / "model.safetensors").write_bytes(safetensors_file(weight))
        for rank in (0, 1):
            data = rank_file(step, rank, "exp_avg.w master_weights.w")
            (directory / f"rank_{rank}.safetensors").write_bytes(data)
    result = slim(run, tmp_path / "store", drop=["master"])
    assert len(result.dropped) == 8


def test_masters_of_megatron_go_since_its_weights_are_they_rounded(tmp_path: Path) -> None:
    """They are numbered, not named: a weight of the same file is found by its values."""
    result = slim(
        SAMPLES / "megatron_tp2_pp2", tmp_path / "s", drop=["master"], min_saving=0, dry_run=True
    )
    assert {t.category for t in result.dropped} == {"master weight"}
    assert all(t.path.startswith("['optimizer']['fp32_from_fp16_params']") for t in result.dropped)
    assert len(result.dropped) == 38


@pytest.mark.parametrize("folder", ["deepspeed_zero1_dp4", "deepspeed_zero3_dp4"])
def test_masters_that_ranks_share_out_flat_stay(folder: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="refused: of 4 master weights no other copy"):
        slim(SAMPLES / folder, tmp_path / "store", drop=["master"], min_saving=0)


@pytest.mark.parametrize("newest", ["was cut short", "has weights only"])
def test_a_newest_step_from_which_nothing_resumes_is_not_the_one_spared(
    run: Path, tmp_path: Path, newest: str
) -> None:
    directory = run / "checkpoint-3000"
    directory.mkdir()
    if newest == "was cut short":
        (directory / "rank_0.safetensors").write_bytes(rank_file(3000, 0)[:-N])
        (directory / "tokenizer.safetensors").write_bytes(
            safetensors_file([("table", "F32", [N // 4], body(1, N))])
        )
    else:
        (directory / "rank_0.safetensors").write_bytes(rank_file(3000, 0, "w"))
    result = slim(run, tmp_path / "store", drop=["optimizer"], keep_full="last:1")
    assert {t.file.split("/")[0] for t in result.dropped} == {
        f"checkpoint-{step}" for step in STEPS[:-1]
    }


def test_a_rank_that_stopped_before_the_others_keeps_its_own_newest_step(
    run: Path, tmp_path: Path
) -> None:
    (run / "checkpoint-2500" / "rank_1.safetensors").unlink()
    result = slim(run, tmp_path / "store", drop=["optimizer"], keep_full="last:1")
    assert {t.file.split("/")[0] for t in result.dropped} == {"checkpoint-1000", "checkpoint-1500"}


def test_steps_that_no_path_states_cannot_be_spared(tmp_path: Path) -> None:
    for name in ("best", "final"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "m.safetensors").write_bytes(rank_file(1, 0))
    with pytest.raises(UsageError, match=r"of 2 files to spare: no path states a step .*best"):
        slim(tmp_path / "run", tmp_path / "store", drop=["optimizer"], keep_full="last:1")


def test_files_of_nothing_but_moments_keep_their_names_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for rank in (0, 1):
        weights = [("w", "F32", [N // 4], body(1, N))]
        moments = [("exp_avg.w", "F32", [N // 4], body(2 + rank, N))]
        (source / f"model_rank_{rank}.safetensors").write_bytes(safetensors_file(weights))
        (source / f"optim_rank_{rank}.safetensors").write_bytes(safetensors_file(moments))
    slim(source, tmp_path / "store", drop=["optimizer"])
    with slimckpt.open(tmp_path / "store") as store:
        assert list(store.rank(0)) == ["w"]
        assert store.rank(0).dropped == ("exp_avg.w",)


def test_a_category_given_by_hand_decides(run: Path, tmp_path: Path) -> None:
    result = slim(run, tmp_path / "a", drop=["optimizer"], categories=[("weight", "exp_avg_sq*")])
    assert {t.name for t in result.dropped} == {"exp_avg.w"}
    command = ["slim", str(run), str(tmp_path / "b"), "--drop", "optimizer", "--dry-run"]
    command += ["--min-saving", "0"]
    said = invoke([*command, "--category", "weight=exp_avg*"])
    assert said.exit_code == 0
    assert "dropped" not in said.stdout


def test_a_parameter_that_sounds_like_a_moment_is_kept(tmp_path: Path) -> None:
    names = (
        "momentum_encoder.layer.weight moments.weight velocity.weight optimizer_embedding.weight"
    )
    for rank in (0, 1):
        path = tmp_path / "source" / f"rank_{rank}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(rank_file(1, rank, names))
    with pytest.raises(NothingToGainError):
        slim(tmp_path / "source", tmp_path / "store", drop=["optimizer"])


@pytest.mark.parametrize("folder", sorted(p.name for p in SAMPLES.iterdir() if p.is_dir()))
def test_a_sample_without_its_optimizer_opens_and_says_what_is_missing(
    folder: str, tmp_path: Path
) -> None:
    source, store = SAMPLES / folder, tmp_path / "store"
    result = slim(source, store, drop=["optimizer"], min_saving=0)
    gone = {(t.file, t.path) for t in result.dropped}
    checked = verify(store, against=source)
    assert checked.safe
    assert checked.dropped == len(gone)
    with slimckpt.open(store) as opened, slimckpt.open(source) as original:
        for path, file in opened.files.items():
            if file.condition != "understood":
                continue
            assert set(file.by_path.dropped) == {name for where, name in gone if where == path}
            for name in file.by_path:
                kept, was = file.by_path[name], original.files[path].by_path[name]
                assert (kept.dtype, kept.shape) == (was.dtype, was.shape)
                assert kept.tobytes() == was.tobytes()


def test_a_glob_that_matches_nothing_is_told(run: Path, tmp_path: Path) -> None:
    result = slim(run, tmp_path / "store", drop=["optimizer"], categories=[("weight", "expavg*")])
    assert any("'expavg*'" in warning for warning in result.warnings)


def test_names_are_listed_as_category_and_views_know_them(tmp_path: Path) -> None:
    """Members of an archive have exact paths that are not their names."""
    for rank in (0, 1):
        path = tmp_path / "run" / f"rank_{rank}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, **{"w": values(1), "exp_avg.w": values(2 + rank)})
    result = slim(tmp_path / "run", tmp_path / "a", drop=["optimizer"], min_saving=0)
    assert {t.name for t in result.dropped} == {"exp_avg.w"}
    with slimckpt.open(tmp_path / "a") as store:
        assert store.rank(0).dropped == ("exp_avg.w",)
    rules = [("weight", name) for name in {t.name for t in result.dropped}]
    kept = slim(
        tmp_path / "run", tmp_path / "b", drop=["optimizer"], categories=rules, min_saving=0
    )
    assert kept.dropped == [] and kept.warnings == []
