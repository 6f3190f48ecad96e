"""Several roots as one tree."""

import os
from pathlib import Path

import pytest
from safetensors_bytes import safetensors_file

import slimckpt
from slimckpt.errors import UsageError

SHARED = os.urandom(100_000)


def write(path: Path, *bodies: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [(f"w{n}", "U8", [len(body)], body) for n, body in enumerate(bodies)]
    path.write_bytes(safetensors_file(rows))


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two runs in the working directory, with one payload in common."""
    monkeypatch.chdir(tmp_path)
    write(Path("a/rank_0/net-1_5.safetensors"), SHARED, os.urandom(5000))
    write(Path("b/rank_0/net-1_5.safetensors"), SHARED, os.urandom(7000))
    Path("b/README").write_text("hello")
    return "a", "b"


def test_equal_bytes_across_roots_are_found(roots: tuple[str, str]) -> None:
    apart = [slimckpt.analyze(root) for root in roots]
    assert [report.total.before - report.total.after for report in apart] == [0, 0]
    both = slimckpt.analyze(roots)
    assert both.total.before - both.total.after == len(SHARED)
    assert both.sources == ["a", "b"]
    assert both.total.before == sum(report.total.before for report in apart)


def test_each_root_has_its_row_and_each_run_its_name(roots: tuple[str, str]) -> None:
    both = slimckpt.analyze(roots)
    sizes = [slimckpt.analyze(root).total.before for root in roots]
    assert [(root, amount.before) for root, amount in both.by_root] == list(
        zip(roots, sizes, strict=True)
    )
    assert both.runs == ["a", "b"]
    assert [(run, step) for run, step, _ in both.by_step] == [
        ("a", "1_5"),
        ("b", None),
        ("b", "1_5"),
    ]
    assert slimckpt.analyze("a").by_root == []


def test_listings_start_with_the_root_as_typed(roots: tuple[str, str]) -> None:
    assert {path for path, _, _ in slimckpt.analyze([*roots[:1], "./b/"]).not_slimmed} == {
        "./b/README"
    }


def test_the_name_of_a_root_may_be_a_step(tmp_path: Path) -> None:
    for step in (10, 20):
        write(tmp_path / "step_7" / f"checkpoint-{step}" / "model.safetensors", SHARED)
    found = slimckpt.analyze([tmp_path / "step_7" / f"checkpoint-{step}" for step in (10, 20)])
    assert found.steps == [10, 20], "and what is above a root is not"
    assert found.repeated_steps == [(str(tmp_path / "step_7"), 20, 10)]


def test_runs_of_one_name_stay_apart(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / str(number) / "run" / "step_5" / "a.safetensors", SHARED)
    found = slimckpt.analyze([tmp_path / "1" / "run", tmp_path / "2" / "run"])
    assert found.runs == [str(tmp_path / "1" / "run"), str(tmp_path / "2" / "run")]
    assert found.repeated_steps == []


def test_hard_links_across_roots_are_one_file(roots: tuple[str, str]) -> None:
    os.link("a/rank_0/net-1_5.safetensors", "b/linked.safetensors")
    found = slimckpt.analyze(roots)
    assert found.files == 3
    assert not any("hard links outside" in note for note in found.notes)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "a"], "the same directory"),
        (["a", "./a/"], "the same directory"),
        (["a", "a/rank_0"], "a/rank_0 is inside a"),
        (["a/rank_0", "b", "a"], "a/rank_0 is inside a"),
        (["link", "a"], "the same directory"),
        ([], "no directory"),
    ],
)
def test_nested_and_equal_roots_are_refused(
    roots: tuple[str, str], names: list[str], message: str
) -> None:
    Path("link").symlink_to("a")
    with pytest.raises(UsageError, match=message):
        slimckpt.analyze(names)


def test_names_that_only_begin_alike_are_not_nested(roots: tuple[str, str]) -> None:
    write(Path("a2/x.safetensors"), SHARED)
    assert slimckpt.analyze(["a", "a2"]).files == 2


def test_a_slim_checkpoint_among_the_roots_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / "run" / f"rank_{rank}.safetensors", SHARED)
    slimckpt.slim(tmp_path / "run", tmp_path / "run.slim")
    with pytest.raises(UsageError, match="slimckpt ls"):
        slimckpt.analyze([tmp_path / "run", tmp_path / "run.slim"])
