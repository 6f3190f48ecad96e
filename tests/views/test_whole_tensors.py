"""Whole tensors of torch.distributed.checkpoint: what torch itself makes of all chunks."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES, expected

import slimckpt
from slimckpt.errors import CheckFailedError, NotARankView, UnknownTensorError
from slimckpt.layouts.layout import Box, Layout, Piece, Shard, TensorLayout
from slimckpt.rewrite.slim import slim
from slimckpt.views.whole import Wholes, WholeTensor

SAMPLE = "fsdp_dcp_4"
TRUTH = expected(SAMPLE)


# What torch's own conversion to one file gives, by the flat names of the metadata.
WHOLE = {
    ".".join(re.findall(r"\['?(.*?)'?\]", path)): tensor
    for path, tensor in TRUTH["full_tensors_after_dcp_to_torch_save"]["tensors"].items()
}


@pytest.fixture(params=["directory-mmap", "directory-pread", "store-mmap", "store-pread"])
def ckpt(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[slimckpt.Checkpoint]:
    where, backend = request.param.split("-")
    path = SAMPLES / SAMPLE
    if where == "store":
        slim(path, tmp_path / "store", min_saving=0)
        path = tmp_path / "store"
    with slimckpt.open(path, backend=backend) as checkpoint:
        yield checkpoint


def test_every_whole_tensor_is_what_torch_makes_of_it(ckpt: slimckpt.Checkpoint) -> None:
    (step,) = ckpt._steps(None)
    named = {
        name: item
        for name, item in TRUTH["items"].items()
        if item["kind"] == "TensorStorageMetadata"
    }
    assert set(step.wholes) == set(named)
    for name, item in named.items():
        whole = ckpt.tensor(name)
        assert list(whole.shape) == item["size"], name
        found = np.asarray(whole)
        assert list(found.shape) == item["size"], name
        assert hashlib.sha256(found.tobytes()).hexdigest() == WHOLE[name]["sha256"], name


def test_a_rank_is_refused_and_the_way_on_is_named(ckpt: slimckpt.Checkpoint) -> None:
    with pytest.raises(NotARankView, match=r"tensor\(name\).*files\[path\]"):
        ckpt.rank(0)
    with pytest.raises(NotARankView):
        ckpt.rank()
    assert ckpt.ranks == (0, 1, 2, 3)


def test_items_have_the_names_of_the_metadata(ckpt: slimckpt.Checkpoint) -> None:
    for file, names in TRUTH["file_item_order"].items():
        objects = {
            name for name, item in TRUTH["items"].items() if item["kind"] != "TensorStorageMetadata"
        }
        view = ckpt.files[file]
        assert list(view.by_path) == [
            f"[{number}]" for number, name in enumerate(names) if name not in objects
        ]
        assert set(view) == set(names) - objects


@pytest.mark.parametrize("name", ["model.wte.weight", "shard_dim1"])
def test_any_slice_is_that_of_the_whole_array(name: str) -> None:
    with slimckpt.open(SAMPLES / SAMPLE) as ckpt:
        whole = ckpt.tensor(name)
        array = np.asarray(whole)
        part = st.one_of(
            st.integers(-array.shape[0], array.shape[0] - 1),
            st.slices(array.shape[0]),
            st.just(Ellipsis),
        )

        @given(part, st.slices(array.shape[1]))
        def search(first: Any, second: slice) -> None:
            for key in (first, (first, second), (Ellipsis, second)):
                if isinstance(key, tuple) and key.count(Ellipsis) > 1:
                    continue
                wanted, found = array[key], whole[key]
                assert found.shape == wanted.shape
                assert found.dtype == wanted.dtype
                assert found.tobytes() == wanted.tobytes()

        search()
        for wrong in (array.shape[0], -array.shape[0] - 1, (0, 0, 0), "x", (..., ...)):
            with pytest.raises(IndexError):
                whole[wrong]


def test_a_slice_of_one_chunk_is_no_copy() -> None:
    with slimckpt.open(SAMPLES / SAMPLE) as ckpt:
        whole = ckpt.tensor("model.wte.weight")
        rows = whole[4:6]
        assert not rows.flags.writeable
        assert whole[3:5].flags.writeable, "of two chunks, in memory of its own"
        assert len(whole) == 13 and whole.ndim == 2


def test_an_unknown_name_lists_some(ckpt: slimckpt.Checkpoint) -> None:
    with pytest.raises(UnknownTensorError, match="such as model"):
        ckpt.tensor("model.nope")


def test_a_checkpoint_without_metadata_whose_ranks_are_equal_has_whole_tensors() -> None:
    with slimckpt.open(SAMPLES / "torch_ddp4") as ckpt:
        name = "model.wte.weight"
        assert (np.asarray(ckpt.tensor(name)) == ckpt.rank(3)[name]).all()
        assert ckpt.layout().origin == "the equality of ranks 0-3"
        with pytest.raises(UnknownTensorError, match=r"rank\(r\)\[name\]"):
            ckpt.tensor("x")


def test_a_checkpoint_without_metadata_whose_ranks_differ_says_so(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / f"rank_{rank}"
        folder.mkdir()
        np.save(folder / "w.npy", np.full(4, rank, np.float32))
    with (
        slimckpt.open(tmp_path) as ckpt,
        pytest.raises(UnknownTensorError, match=r"differ in tensor 'w'.*rank\(r\)\[name\]"),
    ):
        ckpt.tensor("w")


@pytest.mark.parametrize(
    "how", ["a file is gone", "files are swapped", "a file is of another save"]
)
def test_files_that_are_not_what_the_metadata_says_are_an_error(how: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(SAMPLES / SAMPLE, place)
    one, other = place / "__0_0.distcp", place / "__2_0.distcp"
    if how == "a file is gone":
        other.unlink()
    elif how == "files are swapped":
        one.rename(place / "x")
        other.rename(one)
        (place / "x").rename(other)
    else:
        shutil.copy(one, other)
    with slimckpt.open(place) as ckpt, pytest.raises(CheckFailedError, match=r"model\.wte\.weight"):
        ckpt.tensor("model.wte.weight")


def test_a_cut_metadata_leaves_files_readable_by_number(tmp_path: Path) -> None:
    place = tmp_path / "run"
    shutil.copytree(SAMPLES / SAMPLE, place)
    metadata = place / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-100])
    with slimckpt.open(place) as ckpt:
        view = ckpt.files["__0_0.distcp"]
        assert list(view)[:2] == ["0", "1"]
        assert ckpt.files[".metadata"].condition == "damaged"


def sharded_run(place: Path, missing: int | None = None) -> np.ndarray:
    """A tensor of five rows in three safetensors files, as torch's Hugging Face writer says it."""
    place.mkdir(exist_ok=True)
    whole = np.arange(20, dtype=np.float32).reshape(5, 4)
    for number, (low, high) in enumerate(((0, 2), (2, 4), (4, 5))):
        if number == missing:
            continue
        info = {"w": {"saved_offsets": [low, 0]}, "same": {"saved_offsets": [0]}}
        tensors = [
            ("w", "F32", [high - low, 4], whole[low:high].tobytes()),
            ("same", "I8", [3], b"abc"),
        ]
        data = safetensors_file(tensors, {"DCP_SHARDING_INFO": json.dumps(info)})
        (place / f"shard-{number:05}-model-00001-of-00001.safetensors").write_bytes(data)
    return whole


@pytest.mark.parametrize("stored", [False, True])
def test_shards_in_safetensors_are_joined_as_their_headers_say(
    stored: bool, tmp_path: Path
) -> None:
    whole = sharded_run(tmp_path / "run")
    where = tmp_path / "run"
    if stored:
        slim(where, tmp_path / "store", min_saving=0)
        where = tmp_path / "store"
    with slimckpt.open(where) as ckpt:
        assert np.array_equal(np.asarray(ckpt.tensor("w")), whole)
        assert np.array_equal(ckpt.tensor("w")[1:5, ::2], whole[1:5, ::2])
        assert np.asarray(ckpt.tensor("same")).tobytes() == b"abc"
        with pytest.raises(NotARankView):
            ckpt.rank(0)


def test_a_missing_shard_in_safetensors_is_an_error(tmp_path: Path) -> None:
    sharded_run(tmp_path / "run", missing=1)
    with slimckpt.open(tmp_path / "run") as ckpt, pytest.raises(CheckFailedError, match="'w'"):
        ckpt.tensor("w")


def whole_of(shape: tuple[int, ...], boxes: list[Any]) -> WholeTensor:
    """A tensor of which files hold boxes, none of which is there."""
    shards = tuple(
        Shard(str(n), sizes, (Piece(Box(offsets, sizes), (0,) * len(sizes)),))
        for n, (offsets, sizes) in enumerate(boxes)
    )
    layout = Layout({"w": TensorLayout("BF16", shape, shards)}, (), "its metadata")
    return Wholes(layout, None)["w"]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_an_empty_tensor_is_whole(shape: tuple[int, ...]) -> None:
    for boxes in ([], [((0,) * len(shape), shape)]):
        found = np.asarray(whole_of(shape, boxes))
        assert (found.shape, found.dtype) == (shape, ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    "boxes", [[], [((0,), (3,))], [((0,), (4,)), ((3,), (2,))], [((0, 0), (2, 2))]]
)
def test_chunks_that_leave_gaps_or_go_outside_are_an_error(boxes: list[Any]) -> None:
    with pytest.raises(CheckFailedError, match="'w'"):
        whole_of((4,), boxes)
