"""Which file loaders take for what they are asked for."""

from pathlib import Path

import pytest
from mindspore_bytes import record

import slimckpt
from slimckpt.frameworks.origin import opened, which
from slimckpt.model import encode_path

ONE = record("one", "Float32", [2], bytes(8))
FORMATS = ("mindspore", "safetensors")


def tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def taken(root: Path, rank: int | None = None) -> str:
    with opened(root, None, rank, None, None, FORMATS, "MindSpore") as origin:
        return encode_path(origin.member.path)


def test_a_path_may_go_on_into_a_slim_checkpoint(tmp_path: Path) -> None:
    run = tree(tmp_path / "run", {"rank_0/net-1_1.ckpt": ONE, "rank_1/net-1_1.ckpt": ONE})
    slim = tmp_path / "slim"
    slimckpt.slim(run, slim, min_saving=0)
    inner = "rank_1/net-1_1.ckpt"
    assert which(slim / inner, None, None, None, None) == (bytes(slim), inner)
    assert which(slim, inner, None, None, None) == (bytes(slim), inner)
    assert which(slim, None, 1, "1_1", "") == (bytes(slim), None)
    assert which(run / inner, None, None, None, None) == (bytes(run / "rank_1"), "net-1_1.ckpt")
    (tmp_path / "last.ckpt").symlink_to(f"run/{inner}")
    pointed = bytes(run / "rank_1"), "net-1_1.ckpt"
    assert which(tmp_path / "last.ckpt", None, None, None, None) == pointed
    assert which(slim, f"./rank_0/../{inner}", None, None, None) == (bytes(slim), inner)


def test_arguments_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    run = tree(tmp_path, {"rank_0/net-1_1.ckpt": ONE})
    inner = "rank_0/net-1_1.ckpt"
    with pytest.raises(ValueError, match="leave out file="):
        which(run / inner, "net-1_1.ckpt", None, None, None)
    for rank, step, name in [(0, None, None), (None, "1_1", None), (None, None, "")]:
        with pytest.raises(ValueError, match="leave out rank, step and run"):
            which(run, inner, rank, step, name)


def test_of_several_steps_one_is_to_be_named_and_may_be_as_text(tmp_path: Path) -> None:
    run = tree(tmp_path, {f"step_{step}/rank_0.ckpt": ONE for step in (5, 10)})
    with pytest.raises(KeyError, match="2 steps; say step=…: step 5, step 10"):
        taken(run, 0)
    for step in (5, "5"):
        with opened(run, None, 0, step, None, FORMATS, "MindSpore") as origin:
            assert encode_path(origin.member.path) == "step_5/rank_0.ckpt"


def test_a_file_that_is_not_there_is_named_as_text(tmp_path: Path) -> None:
    run = tree(tmp_path, {"net.ckpt": ONE})
    for file in ("nét.ckpt", "nét.ckpt".encode()):
        with (
            pytest.raises(KeyError, match=r"has no file 'n\\xe9t\.ckpt'"),
            opened(run, file, None, None, None, FORMATS, "MindSpore"),
        ):
            pass


def test_a_file_of_the_rank_goes_before_files_of_all_ranks(tmp_path: Path) -> None:
    run = tree(tmp_path, {"rank_0/net.ckpt": ONE, "rank_1/net.ckpt": ONE, "common.ckpt": ONE})
    assert taken(run, 1) == "rank_1/net.ckpt"


@pytest.mark.parametrize("damaged", [ONE[:-1], (0x7F3A5ED8).to_bytes(4, "little") + bytes(60)])
def test_no_file_is_taken_beside_one_that_cannot_be_read(tmp_path: Path, damaged: bytes) -> None:
    run = tree(
        tmp_path,
        {"rank_0/a.ckpt": ONE, "rank_0/net.ckpt": damaged, "rank_1/net.ckpt": ONE, "x.ckpt": ONE},
    )
    with pytest.raises(slimckpt.SlimckptError, match=r"rank_0/net\.ckpt.*(truncated|encrypted)"):
        taken(run, 0)
    assert taken(run, 1) == "rank_1/net.ckpt"


def test_what_is_no_checkpoint_does_not_stand_in_the_way(tmp_path: Path) -> None:
    strategy = Path(__file__).parents[1] / "samples" / "ms_dp8_ckpt" / "strategy.ckpt"
    files = {"rank_0/net.ckpt": ONE, "rank_0/strategy.ckpt": strategy.read_bytes()}
    assert taken(tree(tmp_path, {**files, "rank_0/notes.txt": b"no"})) == "rank_0/net.ckpt"
