"""Reading ranks and files: the same through both backends, of a directory and of a store."""

import builtins
import os
import pickle
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from mindspore_bytes import map_record, record
from safetensors_bytes import from_entries, safetensors_file
from sample_files import SAMPLES, expected

from slimckpt import views
from slimckpt.errors import (
    AmbiguousTensorError,
    ClosedError,
    DamagedFileError,
    NotUnderstoodError,
    OpaqueTensorError,
    RefusedFileError,
    SlimckptError,
    StoreDamagedError,
    UnknownFileError,
    UnknownRankError,
    UnknownStepError,
    UnknownTensorError,
    UsageError,
)
from slimckpt.model import Table
from slimckpt.rewrite.slim import slim
from slimckpt.sources.backends import BackendName, MmapBackend
from slimckpt.views import Checkpoint

Open = Callable[[Path], Checkpoint]
Tree = dict[str | bytes, bytes]

MINDSPORE = {
    "Bool": ("BOOL", np.bool_),
    "Int4": ("I4X2", np.uint8),
    "Int8": ("I8", np.int8),
    "UInt8": ("U8", np.uint8),
    "Int16": ("I16", np.int16),
    "UInt16": ("U16", np.uint16),
    "Int32": ("I32", np.int32),
    "UInt32": ("U32", np.uint32),
    "Int64": ("I64", np.int64),
    "UInt64": ("U64", np.uint64),
    "Float16": ("F16", np.float16),
    "BFloat16": ("BF16", ml_dtypes.bfloat16),
    "Float32": ("F32", np.float32),
    "Float64": ("F64", np.float64),
}
SAMPLED = (
    "ms_chunked",
    "ms_crc",
    "ms_dp4_real_ckpt",
    "ms_dp4_real_dedup_ckpt",
    "ms_dp8_ckpt",
    "ms_dtypes",
    "ms_edge",
    "ms_opshard8_ckpt",
    "ms_reshard_8to4",
    "ms_uneven4_ckpt",
)
RNG = np.random.default_rng(11)
BIG = RNG.random(600, np.float32)
"""2,400 bytes: stored apart from its file's skeleton."""
SMALL = np.arange(6, dtype=np.float32)
ENCRYPTED = (SAMPLES / "ms_encrypted" / "net_AES-GCM.ckpt").read_bytes()


def tensors(**arrays: np.ndarray) -> bytes:
    """A safetensors file of float32 and int64 arrays."""
    spelling = {"float32": "F32", "int64": "I64"}
    return safetensors_file(
        [(name, spelling[a.dtype.name], a.shape, a.tobytes()) for name, a in arrays.items()]
    )


def damaged(data: bytes) -> bytes:
    return data[:-1]


def write(root: Path, tree: Tree) -> Path:
    for name, data in tree.items():
        path = os.path.join(os.fsencode(root), os.fsencode(name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with builtins.open(path, "wb") as file:  # noqa: PTH123 - paths are bytes
            file.write(data)
    return root


def state_of(root: Path) -> dict[str, str]:
    return {
        str(path): sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


class ReadingTests:
    """Inherited for each pair of backend and kind of checkpoint."""

    backend: ClassVar[BackendName]
    of_store: ClassVar[bool]

    @pytest.fixture
    def open(self, tmp_path: Path) -> Iterator[Open]:
        opened: list[Checkpoint] = []

        def opener(source: Path) -> Checkpoint:
            if self.of_store:
                target = tmp_path / f"slim-{len(opened)}"
                slim(source, target, min_saving=0)
                source = target
            opened.append(views.open(source, self.backend))
            return opened[-1]

        yield opener
        for checkpoint in opened:
            checkpoint.close()

    @pytest.fixture
    def open_tree(self, tmp_path: Path, open: Open) -> Callable[[Tree], Checkpoint]:
        def opener(tree: Tree) -> Checkpoint:
            return open(write(tmp_path / f"tree-{len(list(tmp_path.iterdir()))}", tree))

        return opener

    def test_files_are_found_through_links_that_stay_in_the_tree(
        self, open: Open, tmp_path: Path
    ) -> None:
        ones = tensors(w=np.ones(400, np.float32))
        root = write(tmp_path / "linked", {"step_5/m.safetensors": ones})
        outside = write(tmp_path / "outside", {"m.safetensors": ones})
        for name, target in (
            ("last.safetensors", "step_5/../newest.safetensors"),
            ("newest.safetensors", "step_5/m.safetensors"),
            ("latest", "./step_5"),
            ("around", "around"),
            ("out", "../outside"),
            ("far", str(outside)),
            ("gone", "step_6"),
        ):
            (root / name).symlink_to(target)
        ckpt = open(root)
        for name in ("last.safetensors", "latest/m.safetensors", b"latest/m.safetensors"):
            assert ckpt.files[name]["w"].sum() == 400 and name in ckpt.files
            assert ckpt.files[name].path == "step_5/m.safetensors"
        for name in ("around", "out/m.safetensors", "far/m.safetensors", "gone/m.safetensors"):
            assert name not in ckpt.files
            with pytest.raises(UnknownFileError, match=name):
                ckpt.files[name]
        assert list(ckpt.files) == ["step_5/m.safetensors"]

    # What the frameworks read is what is read here.

    @pytest.mark.parametrize("folder", SAMPLED)
    def test_every_tensor_of_mindspore_is_found_with_its_dtype_shape_and_bytes(
        self, open: Open, folder: str
    ) -> None:
        ckpt = open(SAMPLES / folder)
        for path, file in expected(folder)["files"].items():
            view = ckpt.files[path]
            assert (view.path, view.size, view.condition) == (path, file["size"], "understood")
            params = file["params"]
            strings = [name for name in file["order"] if params[name]["dtype"] == "str"]
            order = [name for name in file["order"] if name not in strings]
            if path.endswith(".ckpt"):  # safetensors orders by dtype and name
                assert list(view) == order
            assert set(view) == set(order) and len(view) == len(order)
            assert view.opaque == tuple(strings)
            for name, truth in params.items():
                if truth["dtype"] == "str":
                    assert view.raw(name).decode("utf-32-le") == truth["value"]
                    continue
                spelling, dtype = MINDSPORE[truth["dtype"]]
                array, info = view[name], view.info(name)
                assert (info.dtype, list(info.shape)) == (spelling, truth["shape"]), name
                assert (array.dtype, list(array.shape)) == (dtype, truth["shape"]), name
                assert sha256(array.tobytes()).hexdigest() == truth["sha256"], name
                assert sha256(view.raw(name)).hexdigest() == truth["sha256"], name
                assert not array.flags.writeable

    def test_every_tensor_of_a_trainer_is_found_with_its_dtype_shape_and_bytes(
        self, open: Open
    ) -> None:
        ckpt = open(SAMPLES / "lora_steps")
        assert ckpt.steps == (10, 20, 30)
        for step in ckpt.steps:
            view = ckpt.step(step).rank(0)
            truth = expected("lora_steps")["files"][f"checkpoint-{step}/model.safetensors"]
            assert {f"['{name}']" for name in view} >= truth["tensors"].keys()
            for path, tensor in truth["tensors"].items():
                array = view[path[2:-2]]
                assert (f"torch.{array.dtype}", list(array.shape)) == (
                    tensor["dtype"],
                    tensor["shape"],
                )
                assert sha256(array.tobytes()).hexdigest() == tensor["sha256"]
            unread = {path for path, _ in view.not_read}
            assert f"checkpoint-{step}/trainer_state.json" in unread
            assert f"checkpoint-{step}/model.safetensors" not in unread
            assert view.problems == ()

    def test_a_rank_of_eight_is_its_file(self, open: Open) -> None:
        ckpt = open(SAMPLES / "ms_dp8_ckpt")
        assert (ckpt.steps, ckpt.ranks, ckpt.runs) == (("1_1",), tuple(range(8)), ("",))
        for rank in ckpt.ranks:
            file = expected("ms_dp8_ckpt")["files"][f"rank_{rank}/net-1_1.ckpt"]
            view = ckpt.rank(rank)
            order = [n for n in file["order"] if file["params"][n]["dtype"] != "str"]
            assert list(view) == order
            for name in order:
                digest = sha256(view[name].tobytes()).hexdigest()
                assert digest == file["params"][name]["sha256"]

    # Steps and runs.

    def test_steps_come_in_the_order_of_their_numbers(self, open_tree: Any) -> None:
        ckpt = open_tree({f"step_{n}/m": tensors(w=BIG + n) for n in (9, 10000, 2000)})
        assert ckpt.steps == (9, 2000, 10000)
        for n in ckpt.steps:
            step = ckpt.step(n)
            assert (step.label, step.run, step.ranks) == (n, "", (0,))
            assert np.array_equal(step.rank()["w"], BIG + n)

    def test_an_epoch_and_a_step_of_it_are_one_label(self, open_tree: Any) -> None:
        tree = {
            f"rank_{rank}/net-{label}.ckpt": record("w", "Float32", [600], (BIG + n).tobytes())
            for rank in (0, 1)
            for n, label in enumerate(("1_5", "2_5", "10_5"))
        }
        ckpt = open_tree(tree)
        assert ckpt.steps == ("1_5", "2_5", "10_5")
        assert np.array_equal(ckpt.step("10_5").rank(1)["w"], BIG + 2)

    def test_an_unknown_step_is_a_key_error_that_lists_those_there_are(
        self, open_tree: Any
    ) -> None:
        ckpt = open_tree({f"step_{n}/m": tensors(w=BIG + n) for n in (1, 2)})
        with pytest.raises(UnknownStepError, match="no step 3; there are step 1, step 2") as caught:
            ckpt.step(3)
        assert isinstance(caught.value, KeyError)
        with pytest.raises(UnknownStepError, match="no step '1'"):
            ckpt.step("1")

    def test_a_rank_without_a_step_is_an_error_where_there_are_several(
        self, open_tree: Any
    ) -> None:
        ckpt = open_tree({f"step_{n}/rank_{n}/m": tensors(w=BIG + n) for n in (1, 2)})
        with pytest.raises(UnknownStepError, match=r"2 steps.*step 1, step 2"):
            ckpt.rank(1)
        assert ckpt.ranks == (1, 2)

    def test_a_tree_without_steps_has_none_and_its_rank_is_all_of_it(self, open_tree: Any) -> None:
        ckpt = open_tree({"a/m": tensors(w=BIG), "b": tensors(v=SMALL)})
        assert (ckpt.steps, ckpt.ranks, ckpt.runs) == ((), (0,), ("",))
        view = ckpt.rank(0)
        assert list(view) == ["w", "v"]
        assert list(ckpt.rank()) == ["w", "v"]
        assert view.step is None
        with pytest.raises(UnknownStepError, match="has no steps"):
            ckpt.step(0)
        with pytest.raises(UnknownRankError, match="no rank 1; there are rank 0"):
            ckpt.rank(1)

    def test_a_file_without_a_step_is_in_no_step(self, open_tree: Any) -> None:
        ckpt = open_tree({"step_1/m": tensors(w=BIG), "base": tensors(base=BIG)})
        assert ckpt.steps == (1,)
        assert list(ckpt.rank(0)) == ["w"]
        assert list(ckpt.step(1).rank(0)) == ["w"]
        assert list(ckpt.step(1).files) == ["step_1/m"]
        assert "base" not in ckpt.step(1).files
        assert list(ckpt.files) == ["base", "step_1/m"]
        assert np.array_equal(ckpt.files["base"]["base"], BIG)

    def test_two_runs_stay_apart(self, open_tree: Any) -> None:
        tree: Tree = {
            f"{run}/step_{n}/m": tensors(w=BIG + n, run=np.array([len(run)]))
            for run in ("a", "bb")
            for n in (1, 2)
        }
        tree["a/step_3/m"] = tensors(w=BIG)
        ckpt = open_tree(tree)
        assert (ckpt.runs, ckpt.steps) == (("a", "bb"), (1, 2, 3))
        with pytest.raises(UnknownStepError, match=r"step 1 is in 2 runs.*'a', 'bb'"):
            ckpt.step(1)
        assert ckpt.step(1, run="bb").rank()["run"].tolist() == [2]
        assert ckpt.step(3).run == "a"
        with pytest.raises(UnknownStepError, match="no step 3 in run 'bb'"):
            ckpt.step(3, run="bb")
        with pytest.raises(UnknownStepError, match=r"step 1 of run 'a'.*step 2 of run 'bb'"):
            ckpt.rank()
        with pytest.raises(UnknownStepError, match="no run 'c'; there are 'a', 'bb'"):
            ckpt.step(1, run="c")

    def test_a_rank_is_found_by_run_where_each_run_has_one_step(self, open_tree: Any) -> None:
        ckpt = open_tree({f"{run}/step_1/m": tensors(w=BIG + len(run)) for run in ("a", "bb")})
        assert np.array_equal(ckpt.rank(0, run="bb")["w"], BIG + 2)
        with pytest.raises(UnknownStepError, match=r"'a'.*'bb'"):
            ckpt.rank(0)

    def test_runs_of_nothing_that_is_understood_do_not_count(self, open_tree: Any) -> None:
        ckpt = open_tree(
            {
                "README": b"hello\n" * 300,
                "logs/step_7.txt": b"loss\n" * 300,
                "a/step_1/m": tensors(w=BIG),
            }
        )
        assert (ckpt.runs, ckpt.steps) == (("a",), (1,))
        assert list(ckpt.rank()) == ["w"]
        assert len(ckpt.files) == 3

    def test_where_nothing_is_understood_all_runs_count(self, open_tree: Any) -> None:
        ckpt = open_tree({"a/step_1/x": b"text", "b/step_2/x": b"text"})
        assert (ckpt.runs, ckpt.steps) == (("a", "b"), (1, 2))
        with pytest.raises(NotUnderstoodError, match="a/step_1/x"):
            ckpt.step(1).rank()

    def test_a_run_without_steps_is_one_beside_others(self, open_tree: Any) -> None:
        ckpt = open_tree(
            {
                "a/rank_0/m": tensors(w=BIG),
                "b/rank_0/m": tensors(w=BIG + 1),
                "c/step_1/rank_0/m": tensors(w=BIG + 2),
            }
        )
        assert (ckpt.runs, ckpt.steps) == (("a", "b", "c"), (1,))
        assert np.array_equal(ckpt.rank(0)["w"], BIG + 2)
        assert np.array_equal(ckpt.rank(0, run="b")["w"], BIG + 1)
        with pytest.raises(UnknownStepError, match="no step 1 in run 'a'; there are run 'a'"):
            ckpt.step(1, run="a")

    # Ranks.

    def test_a_rank_is_its_files_and_those_of_no_rank_in_file_order(self, open_tree: Any) -> None:
        ckpt = open_tree(
            {
                "rank_0/m": tensors(w=BIG),
                "rank_1/m": tensors(w=BIG + 1, own=SMALL),
                "zz_common": tensors(y=SMALL, x=SMALL),
                "aa_common": tensors(z=SMALL),
                "notes.txt": b"text",
            }
        )
        assert ckpt.ranks == (0, 1)
        view = ckpt.rank(1)
        assert list(view) == ["z", "w", "own", "y", "x"]
        assert np.array_equal(view["w"], BIG + 1)
        assert len(view) == 5
        assert "own" in view and "own" not in ckpt.rank(0) and 5 not in view
        assert [path for path, _ in view.not_read] == ["notes.txt"]
        assert "not a format" in view.not_read[0][1]

    def test_an_unknown_rank_is_a_key_error_that_lists_those_there_are(
        self, open_tree: Any
    ) -> None:
        ckpt = open_tree({f"rank_{n}/m": tensors(w=BIG + n) for n in (0, 1, 2, 7)})
        with pytest.raises(UnknownRankError, match="no rank 3; there are ranks 0-2,7") as caught:
            ckpt.rank(3)
        assert isinstance(caught.value, KeyError)
        with pytest.raises(UnknownRankError, match="has 4 ranks; say which: ranks 0-2,7"):
            ckpt.rank()

    def test_coordinates_select(self, open_tree: Any) -> None:
        ckpt = open_tree(
            {
                f"iter_0000005/mp_rank_{tp:02}_{pp:03}/m": tensors(w=BIG + 10 * tp + pp)
                for tp in (0, 1)
                for pp in (0, 1)
            }
        )
        assert ckpt.steps == (5,)
        assert ckpt.ranks == ()
        assert {"tp": 1, "pp": 0} in ckpt.step(5).coords
        assert np.array_equal(ckpt.rank(tp=1, pp=0)["w"], BIG + 10)
        assert np.array_equal(ckpt.rank(1, tp=0)["w"], BIG + 1)
        with pytest.raises(UnknownRankError, match="pp=0 tp=0; pp=0 tp=1; pp=1 tp=0; pp=1 tp=1"):
            ckpt.rank(1)
        with pytest.raises(UnknownRankError, match="has 2 ranks of tp=1"):
            ckpt.rank(tp=1)
        with pytest.raises(UnknownRankError, match="no tp=2"):
            ckpt.rank(tp=2)

    def test_a_number_selects_where_one_coordinate_alone_varies(self, open_tree: Any) -> None:
        ckpt = open_tree({f"mp_rank_{tp:02}/m": tensors(w=BIG + tp) for tp in (0, 1)})
        assert ckpt.ranks == (0, 1)
        assert np.array_equal(ckpt.rank(1)["w"], BIG + 1)
        assert np.array_equal(ckpt.rank(tp=1)["w"], BIG + 1)

    def test_a_damaged_file_makes_the_rank_an_error_unless_it_is_skipped(
        self, open_tree: Any
    ) -> None:
        ckpt = open_tree(
            {
                "rank_0/m": tensors(w=BIG),
                "rank_1/m": tensors(w=BIG),
                "rank_1/n": damaged(tensors(v=BIG)),
            }
        )
        assert list(ckpt.rank(0)) == ["w"]
        with pytest.raises(DamagedFileError, match=r"rank_1/n.*skip_damaged=True"):
            ckpt.rank(1)
        view = ckpt.rank(1, skip_damaged=True)
        assert list(view) == ["w"]
        assert [path for path, _ in view.problems] == ["rank_1/n"]
        assert "rank_1/n" in view.problems[0][1]
        assert view.not_read == ()

    def test_a_refused_file_makes_the_rank_an_error_unless_it_is_skipped(
        self, open_tree: Any
    ) -> None:
        ckpt = open_tree({"rank_0/m": tensors(w=BIG), "rank_0/n": ENCRYPTED})
        with pytest.raises(RefusedFileError, match=r"rank_0/n.*encrypted.*skip_damaged=True"):
            ckpt.rank(0)
        assert [path for path, _ in ckpt.rank(0, skip_damaged=True).problems] == ["rank_0/n"]

    def test_a_rank_of_nothing_that_is_understood_is_an_error_that_names_its_files(
        self, open_tree: Any
    ) -> None:
        ckpt = open_tree({"rank_0/m": tensors(w=BIG), "rank_1/x": b"text", "rank_1/y": ENCRYPTED})
        with pytest.raises(NotUnderstoodError, match=r"none of its 2 files.*rank_1/y.*rank_1/x"):
            ckpt.rank(1, skip_damaged=True)

    # Names.

    def test_an_unknown_name_is_a_key_error(self, open_tree: Any) -> None:
        view = open_tree({"m": tensors(w=BIG)}).rank()
        for ask in (view.__getitem__, view.info, view.raw, view.unpack):
            with pytest.raises(UnknownTensorError, match="no tensor 'x'") as caught:
                ask("x")
            assert isinstance(caught.value, KeyError)
        assert view.get("x") is None

    @pytest.mark.parametrize("array", [BIG, SMALL], ids=["apart", "in the skeleton"])
    def test_a_name_in_two_files_that_agree_is_one(self, open_tree: Any, array: Any) -> None:
        view = open_tree({"a": tensors(w=array, x=SMALL), "b": tensors(w=array, y=SMALL)}).rank()
        assert list(view) == ["w", "x", "y"]
        assert np.array_equal(view["w"], array)
        assert view.raw("w") == array.tobytes()
        assert view.info("w").shape == array.shape

    @pytest.mark.parametrize(
        "other",
        [BIG + 1, BIG.reshape(20, 30), BIG.view(np.int64), np.append(BIG[:-1], np.float32(9))],
        ids=["bytes", "shape", "dtype", "last"],
    )
    def test_a_name_in_two_files_that_differ_is_ambiguous(
        self, open_tree: Any, other: np.ndarray
    ) -> None:
        ckpt = open_tree({"a": tensors(w=BIG), "b": tensors(w=other, v=SMALL)})
        view = ckpt.rank()
        assert list(view) == ["w", "v"]
        for ask in (view.__getitem__, view.raw):
            with pytest.raises(AmbiguousTensorError, match=r"'w' differ: in a and in b.*files"):
                ask("w")
        assert np.array_equal(ckpt.files["a"]["w"], BIG)
        assert ckpt.files["b"]["w"].tobytes() == other.tobytes()

    def test_a_name_twice_in_a_file_is_ambiguous_unless_the_two_agree(self, open_tree: Any) -> None:
        ones, twos = (np.full(600, n, np.float32).tobytes() for n in (1, 2))
        ckpt = open_tree(
            {
                "differ": record("w", "Float32", [600], ones) + record("w", "Float32", [600], twos),
                "agree": record("v", "Float32", [600], ones) + record("v", "Float32", [600], ones),
            }
        )
        assert list(ckpt.rank()) == ["v", "w"]
        assert ckpt.files["agree"]["v"].tobytes() == ones
        with pytest.raises(AmbiguousTensorError, match="in differ, entries 0 and 1"):
            ckpt.files["differ"]["w"]

    def test_entries_that_are_not_arrays_are_listed_apart_and_given_raw(
        self, open_tree: Any
    ) -> None:
        text = "naïve 😀".encode("utf-32-le")
        keys, values = bytes(range(8)), bytes(range(100, 108))
        ckpt = open_tree(
            {
                "m.ckpt": record("s", "str", [0], text)
                + record("w", "Float32", [600], BIG.tobytes())
                + record("h", "HiFloat8", [2000], bytes(2000))
                + map_record("m", [("int32", [2], keys), ("float32", [2], values)])
            }
        )
        view = ckpt.rank()
        assert list(view) == ["w"] and len(view) == 1 and "s" not in view
        assert view.opaque == ("s", "h", "m")
        with pytest.raises(OpaqueTensorError, match=r"'s' is of type opaque:str.*raw\(name\)"):
            view["s"]
        assert view.raw("s") == text
        assert view.raw("h") == bytes(2000)
        assert view.info("h").shape == (2000,)
        with pytest.raises(AmbiguousTensorError, match=r"at 'm#3.0' and at 'm#3.1'"):
            view.raw("m")
        paths = view.by_path
        assert list(paths) == ["w"]
        assert paths.opaque == ("s", "h", "m#3.0", "m#3.1")
        assert (paths.raw("m#3.0"), paths.raw("m#3.1")) == (keys, values)
        assert ckpt.files["m.ckpt"].by_path.raw("m#3.1") == values
        assert np.array_equal(paths["w"], BIG)

    # Arrays.

    def test_packed_dtypes_come_as_bytes_and_unpack(self, open_tree: Any) -> None:
        ckpt = open_tree(
            {
                "q.ckpt": record("q", "Int4", [2], b"\x21\xf8"),
                "f.safetensors": safetensors_file(
                    [
                        ("even", "F4", [2, 4], b"\x10\x32\x54\x76"),
                        ("odd", "F4", [2, 3], b"\x10\x32\x54"),
                        ("six", "F6_E2M3", [4], b"\x01\x00\x00"),
                    ]
                ),
            }
        )
        view = ckpt.rank()
        assert (view["q"].dtype, view["q"].tolist()) == (np.uint8, [0x21, 0xF8])
        assert view.unpack("q").tolist() == [1, 2, -8, -1]
        assert view["even"].tolist() == [[0x10, 0x32], [0x54, 0x76]]
        assert view.unpack("even").astype(float).tolist() == [[0, 0.5, 1, 1.5], [2, 3, 4, 6]]
        assert view["odd"].tolist() == [0x10, 0x32, 0x54]
        assert view.unpack("odd").astype(float).tolist() == [[0, 0.5, 1], [1.5, 2, 3]]
        assert view.unpack("six").astype(float).tolist() == [0.125, 0, 0, 0]
        assert view.info("even").shape == (2, 4)

    def test_empty_and_scalar_tensors_are_arrays(self, open_tree: Any) -> None:
        view = open_tree(
            {
                "m": safetensors_file(
                    [
                        ("none", "F32", [0], b""),
                        ("plane", "BF16", [3, 0, 4], b""),
                        ("scalar", "F64", [], np.float64(2.5).tobytes()),
                        ("w", "F32", [600], BIG.tobytes()),
                    ]
                )
            }
        ).rank()
        assert (view["none"].shape, view["none"].dtype) == ((0,), np.float32)
        assert (view["plane"].shape, view["plane"].dtype) == ((3, 0, 4), ml_dtypes.bfloat16)
        assert (view["scalar"].shape, float(view["scalar"])) == ((), 2.5)
        assert isinstance(view["scalar"], np.ndarray)
        assert (view.raw("none"), len(view.raw("scalar"))) == (b"", 8)
        assert not any(array.flags.writeable for array in view.values())

    def test_a_shape_that_numpy_cannot_hold_is_a_clear_error_for_that_tensor_alone(
        self, open_tree: Any
    ) -> None:
        huge = 2**63 - 1
        view = open_tree(
            {
                "m": record("plane", "Float64", [huge, 0, huge], b"")
                + record("deep", "Float64", [1] * 100, bytes(8))
                + record("w", "Float32", [600], BIG.tobytes())
            }
        ).rank()
        assert list(view) == ["plane", "deep", "w"]
        for name in ("plane", "deep"):
            with pytest.raises(NotUnderstoodError, match=f"m: tensor '{name}'.*numpy cannot"):
                view[name]
        assert view.info("plane").shape == (huge, 0, huge)
        assert (view.raw("plane"), view.raw("deep")) == (b"", bytes(8))
        assert np.array_equal(view["w"], BIG)

    def test_a_small_tensor_is_aligned_wherever_it_lies(self, open_tree: Any) -> None:
        for pad in range(1, 8):
            body = safetensors_file(
                [
                    ("pad", "U8", [pad], bytes(pad)),
                    ("small", "F64", [5], np.arange(5.0).tobytes()),
                    ("large", "F32", [600], BIG.tobytes()),
                ]
            )
            view = open_tree({"m": body}).rank()
            assert view["small"].flags.aligned
            assert view["small"].tolist() == [0, 1, 2, 3, 4]
            assert not view["small"].flags.writeable
            assert np.array_equal(view["large"], BIG)

    # Writable views.

    def test_writable_arrays_are_independent_and_no_file_changes(
        self, open_tree: Any, tmp_path: Path
    ) -> None:
        large = RNG.random(2**19, np.float32)  # 2 MiB: copy-on-write pages
        tree = {
            f"rank_{n}/m": tensors(a=large, b=large, c=BIG, d=BIG, e=SMALL, f=SMALL) for n in (0, 1)
        }
        ckpt = open_tree(tree)
        before = state_of(tmp_path)
        view = ckpt.rank(0, writable=True)
        for one, other, truth in (("a", "b", large), ("c", "d", BIG), ("e", "f", SMALL)):
            assert view[one].flags.writeable
            view[one][...] += 1
            assert np.array_equal(view[one], truth + 1)
            assert np.array_equal(view[other], truth)
            for fresh in (ckpt.rank(0), ckpt.rank(1), ckpt.rank(0, writable=True)):
                assert np.array_equal(fresh[one], truth)
            assert view.raw(one) == truth.tobytes()
        assert not ckpt.rank(0)["a"].flags.writeable
        assert state_of(tmp_path) == before

    def test_a_writable_array_is_found_as_it_was_left(self, open_tree: Any) -> None:
        view = open_tree({"m": tensors(w=BIG, s=SMALL)}).rank(writable=True)
        view["w"][7] = 42
        view["s"][1] = 43
        assert (view["w"][7], view["s"][1]) == (42, 43)
        assert view.by_path["w"][7] == 42

    def test_writable_empty_and_ambiguous_tensors_are_as_before(self, open_tree: Any) -> None:
        none = np.zeros((0, 3), np.float32)
        ckpt = open_tree({"a": tensors(w=BIG, v=BIG, n=none), "b": tensors(w=BIG, v=BIG + 1)})
        view = ckpt.rank(writable=True)
        view["w"][0] = 1
        assert view["w"][0] == 1
        assert view["n"].shape == (0, 3)
        with pytest.raises(AmbiguousTensorError):
            view["v"]

    # Files.

    def test_files_are_found_by_text_bytes_and_path_and_come_in_byte_order(
        self, open_tree: Any
    ) -> None:
        tree: Tree = {
            "rank_1/net-1_1.ckpt": record("w", "Float32", [600], BIG.tobytes()),
            "rank_0/net-1_1.ckpt": record("w", "Float32", [600], BIG.tobytes()),
            "名字/é": tensors(w=SMALL),
            b"\xff\xfe": b"not a path in UTF-8",
            "empty": b"",
        }
        ckpt = open_tree(tree)
        order = sorted(os.fsencode(path) for path in tree)
        assert [path.encode("utf-8", "surrogateescape") for path in ckpt.files] == order
        assert len(ckpt.files) == 5
        for path in ("名字/é", "名字/é".encode(), Path("名字") / "é"):
            assert path in ckpt.files
            assert np.array_equal(ckpt.files[path]["w"], SMALL)
        odd = ckpt.files[b"\xff\xfe"]
        assert (odd.size, odd.path, odd.format) == (19, "\udcff\udcfe", "unknown")
        assert ckpt.files["empty"].size == 0
        for missing in ("rank_0", "nothing", b"\xff", "", "/empty", "\ud800"):
            assert missing not in ckpt.files
            with pytest.raises(UnknownFileError, match="has no file"):
                ckpt.files[missing]
        assert 5 not in ckpt.files

    def test_files_that_are_not_understood_are_errors_only_when_asked_for_tensors(
        self, open_tree: Any
    ) -> None:
        ckpt = open_tree(
            {"m": tensors(w=BIG), "d": damaged(tensors(w=BIG)), "r": ENCRYPTED, "o": b"text"}
        )
        for path, condition, error in (
            ("d", "damaged", DamagedFileError),
            ("r", "refused", RefusedFileError),
            ("o", "opaque", NotUnderstoodError),
        ):
            view = ckpt.files[path]
            assert (view.condition, bool(view.problem)) == (condition, True)
            asks: tuple[Callable[[], Any], ...] = (
                lambda view=view: view["w"],  # type: ignore[misc]
                lambda view=view: list(view),  # type: ignore[misc]
                lambda view=view: len(view),  # type: ignore[misc]
                lambda view=view: view.by_path["w"],  # type: ignore[misc]
                lambda view=view: view.raw("w"),  # type: ignore[misc]
            )
            for ask in asks:
                with pytest.raises(error, match=f"^{path}: "):
                    ask()
        fine = ckpt.files["m"]
        assert (fine.condition, fine.problem, fine.format) == ("understood", None, "safetensors")
        assert dict(fine.by_path).keys() == {"w"}

    def test_a_hard_link_is_a_file_of_its_own_rank(self, tmp_path: Path, open: Open) -> None:
        root = write(tmp_path / "linked", {"rank_0/m": tensors(w=BIG), "rank_1/n": tensors(v=BIG)})
        os.link(root / "rank_0" / "m", root / "rank_1" / "m")
        os.link(root / "rank_1" / "n", root / "zz")
        ckpt = open(root)
        assert list(ckpt.files) == ["rank_0/m", "rank_1/m", "rank_1/n", "zz"]
        assert list(ckpt.rank(0)) == ["w", "v"]
        assert list(ckpt.rank(1)) == ["w", "v"]
        assert np.array_equal(ckpt.files["rank_1/m"]["w"], BIG)

    def test_files_of_a_store_inside_the_tree_are_not_read(
        self, tmp_path: Path, open: Open
    ) -> None:
        root = write(tmp_path / "outer", {"m": tensors(w=BIG)})
        slim(write(tmp_path / "inner", {"n": tensors(v=BIG)}), root / "kept", min_saving=0)
        ckpt = open(root)
        assert ckpt.files["kept/slimckpt.json"].condition == "store"
        assert "slim checkpoint" in str(ckpt.files["kept/slimckpt.json"].problem)
        assert list(ckpt.rank()) == ["w"]

    # Lifetime.

    def test_after_closing_nothing_is_read_and_arrays_stay_valid(self, open_tree: Any) -> None:
        tree = {"step_1/m": tensors(w=BIG, s=SMALL), "step_1/n": b"text"}
        ckpt = open_tree(tree)
        view, writable = ckpt.rank(), ckpt.rank(writable=True)
        file, files, step = ckpt.files["step_1/m"], ckpt.files, ckpt.step(1)
        arrays = [view["w"], writable["w"]]
        with ckpt as same:
            assert same is ckpt
        asks: list[Callable[[], Any]] = [
            lambda: view["w"],
            lambda: list(view),
            lambda: len(view),
            lambda: view.info("w"),
            lambda: view.raw("w"),
            lambda: view.by_path["w"],
            lambda: view.opaque,
            lambda: writable["s"],
            lambda: file["w"],
            lambda: file.condition,
            lambda: files["step_1/m"],
            lambda: list(files),
            lambda: step.rank(0),
            lambda: step.ranks,
            lambda: step.files,
            lambda: ckpt.steps,
            lambda: ckpt.ranks,
            lambda: ckpt.runs,
            lambda: ckpt.files,
            lambda: ckpt.step(1),
            lambda: ckpt.rank(),
        ]
        for ask in asks:
            with pytest.raises(ClosedError):
                ask()
        ckpt.close()
        for array in arrays:
            assert np.array_equal(array, BIG)

    def test_everything_can_be_pickled_and_opens_again(self, open_tree: Any) -> None:
        ckpt = open_tree({f"step_1/rank_{n}/m": tensors(w=BIG + n, s=SMALL) for n in (0, 1)})
        view = ckpt.rank(1, writable=True)
        parts = (
            ckpt,
            ckpt.step(1),
            view,
            view.by_path,
            ckpt.files,
            ckpt.step(1).files,
            ckpt.files["step_1/rank_1/m"],
        )
        found = pickle.loads(pickle.dumps(parts))
        ckpt.close()
        again, step, rank, by_path, files, of_step, file = found
        assert again.steps == (1,)
        assert step.ranks == (0, 1)
        assert rank["w"].flags.writeable
        assert list(of_step) == list(files) == ["step_1/rank_0/m", "step_1/rank_1/m"]
        for each in (rank, by_path, files["step_1/rank_1/m"], of_step["step_1/rank_1/m"], file):
            assert np.array_equal(each["w"], BIG + 1)
        assert again._backend_name == self.backend
        assert type(again._backend) is type(ckpt._backend)
        again.close()
        with pytest.raises(ClosedError):
            rank["w"]

    def test_a_coordinate_view_can_be_pickled(self, open_tree: Any) -> None:
        ckpt = open_tree({f"mp_rank_{tp:02}/m": tensors(w=BIG + tp) for tp in (0, 1)})
        found = pickle.loads(pickle.dumps(ckpt.rank(tp=1, skip_damaged=True)))
        assert np.array_equal(found["w"], BIG + 1)

    def test_views_are_equal_only_to_themselves(self, open_tree: Any) -> None:
        ckpt = open_tree({"m": tensors(w=BIG)})
        view = ckpt.rank()
        assert view == view and view != ckpt.rank() and len({view, ckpt.rank()}) == 2
        assert ckpt.files != ckpt.files
        for shown in (ckpt, ckpt.step(None), view, ckpt.files, ckpt.files["m"]):
            assert type(shown).__name__ in repr(shown)

    # Laziness.

    def test_names_are_known_without_making_objects_or_touching_tensors(
        self, open_tree: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        view = open_tree({"m": tensors(**{f"w{n}": BIG for n in range(50)})}).rank()

        def refuse(*args: Any, **kept: Any) -> Any:
            raise AssertionError("touched")

        monkeypatch.setattr(Table, "tensor", refuse)
        for way in ("view", "private"):
            monkeypatch.setattr(type(view._arrays.backend), way, refuse)
        assert len(view) == 50 and "w7" in view and list(view)[7] == "w7"
        monkeypatch.undo()
        for way in ("view", "private"):
            monkeypatch.setattr(type(view._arrays.backend), way, refuse)
        assert view.info("w7").nbytes == BIG.nbytes

    def test_a_tensor_reads_its_own_bytes_only(
        self, open_tree: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[int] = []
        view = open_tree({"m": tensors(**{f"w{n}": BIG for n in range(50)})}).rank()
        kind = type(view._arrays.backend)
        real = kind.view

        def spy(self: Any, path: bytes, offset: int, nbytes: int, size: int) -> Any:
            asked.append(nbytes)
            return real(self, path, offset, nbytes, size)

        monkeypatch.setattr(kind, "view", spy)
        assert np.array_equal(view["w7"], BIG)
        # A mapped tensor asks for nothing: its pages come when they are touched.
        assert asked == ([] if kind is MmapBackend else [BIG.nbytes])


class DirectoryTests(ReadingTests):
    """What only a directory of original files does."""

    of_store = False

    def test_what_is_no_file_at_all_does_not_stand_in_the_way(
        self, open: Open, tmp_path: Path
    ) -> None:
        root = write(tmp_path / "run", {"m.safetensors": tensors(w=np.ones(4, np.float32))})
        os.mkfifo(root / "pipe")
        assert open(root).rank(0)["w"].sum() == 4

    def test_only_files_that_are_asked_for_are_examined_and_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree = {f"step_{s}/rank_{r}/m": tensors(w=BIG) for s in (1, 2, 3) for r in range(4)}
        tree["step_2/common"] = tensors(c=BIG)
        write(tmp_path, tree)
        examined: list[bytes] = []
        real = views.providers.scan_unit

        def spy(unit: Any) -> Any:
            examined.extend(path for path, _ in unit.files)
            return real(unit)

        monkeypatch.setattr(views.providers, "scan_unit", spy)
        with views.open(tmp_path, self.backend) as ckpt:
            assert (ckpt.steps, ckpt.ranks) == ((1, 2, 3), (0, 1, 2, 3))
            assert len(ckpt.files) == 13
            file = ckpt.files["step_1/rank_0/m"]
            assert (examined, file.size) == ([], len(tree["step_1/rank_0/m"]))
            for _ in range(2):
                ckpt.step(2).rank(3)["w"]
            names = [os.path.relpath(path, os.fsencode(tmp_path)) for path in examined]
            assert names == [b"step_2/common", b"step_2/rank_3/m"]

    def test_a_file_cut_after_it_was_examined_is_an_error_before_it_is_mapped(
        self, tmp_path: Path
    ) -> None:
        write(tmp_path, {"rank_0/m": tensors(w=BIG)})
        with views.open(tmp_path, self.backend) as ckpt:
            view, writable = ckpt.rank(), ckpt.rank(writable=True)
            os.truncate(tmp_path / "rank_0" / "m", 1000)
            for each in (view, writable):
                with pytest.raises(DamagedFileError, match=r"looks truncated: expected .* 1000"):
                    each["w"]

    def test_what_is_not_a_directory_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(tensors(w=BIG))
        for name in ("file", "missing"):
            with pytest.raises(UsageError, match=name):
                views.open(tmp_path / name, self.backend)

    def test_an_empty_directory_has_nothing_to_read(self, tmp_path: Path) -> None:
        with views.open(tmp_path, self.backend) as ckpt:
            assert (ckpt.steps, ckpt.runs, list(ckpt.files)) == ((), (), [])
            with pytest.raises(NotUnderstoodError, match="no files"):
                ckpt.rank()

    def test_large_unaligned_arrays_are_views(self, tmp_path: Path) -> None:
        data = from_entries({"w": {"dtype": "F32", "shape": [600], "data_offsets": [0, 2400]}})
        header = data.ljust((len(data) + 3) // 4 * 4 + 1)
        header = (len(header) - 8).to_bytes(8, "little") + header[8:]
        (tmp_path / "m").write_bytes(header + BIG.tobytes())
        with views.open(tmp_path, self.backend) as ckpt:
            found = ckpt.rank()["w"]
            assert np.array_equal(found, BIG)
            if self.backend == "mmap":
                assert not found.flags.aligned


class StoreTests(ReadingTests):
    """What only a slim checkpoint does."""

    of_store = True

    def test_opening_reads_the_root_manifest_and_a_rank_its_part_and_its_index(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree: Tree = {
            f"step_{s}/rank_{r}/m": tensors(w=BIG, s=SMALL) for s in range(5) for r in "01"
        }
        slim(write(tmp_path / "tree", tree), tmp_path / "slim", min_saving=0)
        opened: list[str] = []
        real_open, real_os_open = builtins.open, os.open

        def note(path: Any) -> None:
            name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
            if name.startswith(str(tmp_path)):
                opened.append(os.path.relpath(name, tmp_path / "slim"))

        def spy(path: Any, *args: Any, **kept: Any) -> Any:
            note(path)
            return real_open(path, *args, **kept)

        def os_spy(path: Any, *args: Any, **kept: Any) -> Any:
            note(path)
            return real_os_open(path, *args, **kept)

        monkeypatch.setattr(builtins, "open", spy)
        monkeypatch.setattr(os, "open", os_spy)
        with views.open(tmp_path / "slim", self.backend) as ckpt:
            assert ckpt.steps == (0, 1, 2, 3, 4)
            assert set(opened) == {"slimckpt.json"}
            opened.clear()
            step = ckpt.step(3)
            view = step.rank(1)
            assert len(view) == 2
            assert len(opened) == 2
            assert [name for name in opened if name.startswith("parts/")] == opened[:1]
            assert opened[1] == "own/step_3/rank_1/m.h5"
            opened.clear()
            assert ckpt.files["step_3/rank_0/m"].size == len(tree["step_3/rank_0/m"])
            assert opened == []
            view["w"]
            assert len(opened) == 1 and opened[0].startswith("shared/")

    def test_equal_tensors_of_two_ranks_are_the_same_pages_on_disk(self, tmp_path: Path) -> None:
        slim(
            write(tmp_path / "tree", {f"rank_{n}/m": tensors(w=BIG) for n in (0, 1)}),
            tmp_path / "slim",
            min_saving=0,
        )
        with views.open(tmp_path / "slim", self.backend) as ckpt:
            shared = np.shares_memory(ckpt.rank(0)["w"], ckpt.rank(1)["w"])
            assert shared == (self.backend == "mmap")

    def test_a_container_that_was_cut_is_an_error_before_it_is_mapped(self, tmp_path: Path) -> None:
        source = write(tmp_path / "tree", {f"rank_{n}/m": tensors(w=BIG) for n in (0, 1)})
        slim(source, tmp_path / "slim", min_saving=0)
        (shared,) = (tmp_path / "slim" / "shared").iterdir()
        shared.chmod(0o600)
        os.truncate(shared, shared.stat().st_size - 1)
        with views.open(tmp_path / "slim", self.backend) as ckpt:
            for writable in (False, True):
                view = ckpt.rank(0, writable=writable)
                with pytest.raises(StoreDamagedError, match="looks truncated: expected"):
                    view["w"]

    def test_a_file_kept_whole_opens_like_any_other_until_it_is_changed(
        self, tmp_path: Path
    ) -> None:
        large = RNG.random(2**17, np.float32)
        tree: Tree = {f"rank_{n}/m": tensors(w=large) for n in (0, 1)}
        tree["rank_2/m"] = tensors(own=RNG.random(600, np.float32), s=SMALL)
        slim(write(tmp_path / "tree", tree), tmp_path / "slim")
        whole = tmp_path / "slim" / "whole" / "rank_2" / "m"
        assert whole.exists()
        with views.open(tmp_path / "slim", self.backend) as ckpt:
            assert np.array_equal(ckpt.rank(2)["s"], SMALL)
            assert ckpt.rank(2)["own"].tobytes() in tree["rank_2/m"]
        whole.chmod(0o600)
        whole.write_bytes(tree["rank_2/m"])
        with views.open(tmp_path / "slim", self.backend) as ckpt:
            with pytest.raises(StoreDamagedError, match=r"rank_2/m.*was changed after"):
                ckpt.rank(2)
            with pytest.raises(StoreDamagedError, match="was changed after"):
                len(ckpt.files["rank_2/m"])
            assert list(ckpt.rank(0)) == ["w"]
            with pytest.raises(NotUnderstoodError, match="was changed after"):
                ckpt.rank(2, skip_damaged=True)

    def test_a_damaged_part_fails_its_step_alone(self, tmp_path: Path) -> None:
        tree: Tree = {f"step_{n}/m": tensors(w=BIG) for n in (1, 2)}
        slim(write(tmp_path / "tree", tree), tmp_path / "slim", min_saving=0)
        with views.open(tmp_path / "slim", self.backend) as ckpt:
            name = next(p.name for p in ckpt._provider._store.root.parts if p.step == 1)
            path = tmp_path / "slim" / name
            path.chmod(0o600)
            path.write_bytes(path.read_bytes().replace(b"step_1", b"step_9"))
            with pytest.raises(StoreDamagedError, match="part is damaged"):
                ckpt.step(1).rank(0)
            assert np.array_equal(ckpt.step(2).rank(0)["w"], BIG)

    def test_a_damaged_root_manifest_is_an_error_on_opening(self, tmp_path: Path) -> None:
        slim(write(tmp_path / "tree", {"m": tensors(w=BIG)}), tmp_path / "slim", min_saving=0)
        for name in ("slimckpt.json", "slimckpt.json.2"):
            path = tmp_path / "slim" / name
            path.chmod(0o600)
            path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(SlimckptError, match=r"slimckpt\.json"):
            views.open(tmp_path / "slim", self.backend)


class TestMappedDirectory(DirectoryTests):
    backend = "mmap"


class TestReadDirectory(DirectoryTests):
    backend = "pread"


class TestMappedStore(StoreTests):
    backend = "mmap"


class TestReadStore(StoreTests):
    backend = "pread"
