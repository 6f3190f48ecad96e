"""torch.save: archives, archives one after another, and the format before 1.6."""

import math
import pickle
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import BytesSource, Example, FormatTests, Truth, elements_of, truth_found
from sample_files import SAMPLES
from torch_bytes import (
    ORDERED,
    Made,
    Storage,
    Symbol,
    pickled,
    rebuilt,
    saved,
    saved_before_1_6,
    saved_members,
    torch_utils,
    torch_zip,
)
from torch_truth import FOLDERS, Known, torch_files
from trees import snapshot
from zip_bytes import zip_file

import slimckpt
from slimckpt.formats import Found, examine
from slimckpt.formats.torch_files import TorchLegacy, TorchZip
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim

CORNERS = SAMPLES / "torch_corners"
ROWS = np.arange(12, dtype="<f4")
IDS = np.arange(5, dtype="<i8")
FROM_TYPE = Symbol("torch._tensor", "_rebuild_from_type_v2")


def floats(key: str = "0", values: Any = ROWS) -> Storage:
    return Storage(key, "FloatStorage", np.asarray(values, "<f4").tobytes(), 4)


def longs(key: str = "1", values: Any = IDS) -> Storage:
    return Storage(key, "LongStorage", np.asarray(values, "<i8").tobytes(), 8)


def untyped(key: str, body: bytes) -> Storage:
    return Storage(key, "UntypedStorage", body, 1)


def f32(name: str, values: Any, path: str | None = None) -> Truth:
    array = np.asarray(values, "<f4")
    return Truth.of(name, "F32", array.shape, array.tobytes(), path or f"['{name}']")


def i64(name: str, values: Any, path: str | None = None) -> Truth:
    array = np.asarray(values, "<i8")
    return Truth.of(name, "I64", array.shape, array.tobytes(), path or f"['{name}']")


def dense(key: str = "0", values: Any = ROWS, shape: tuple[int, ...] | None = None) -> Made:
    array = np.asarray(values, "<f4").reshape(shape if shape is not None else np.shape(values))
    strides = [step // 4 for step in array.strides]
    return rebuilt(floats(key, array), array.shape, strides)


def found_in(data: bytes) -> Found:
    found = examine(BytesSource(data))
    assert found.condition == "understood", found.problem
    return found


def problem_of(data: bytes) -> str:
    found = examine(BytesSource(data))
    assert (found.condition, found.table.n_tensors) == ("damaged", 0)
    return str(found.problem)


SMALL = {"w": dense(shape=(3, 4)), "n": {"i": rebuilt(longs(), (5,), (1,))}}
SMALL_TRUTH = [f32("w", ROWS.reshape(3, 4)), i64("n.i", IDS, "['n']['i']")]


class TestTorchZip(FormatTests):
    format = TorchZip()

    def examples(self) -> dict[str, Example]:
        members = saved_members(SMALL, "a")
        lean = {name: members[name] for name in ("a/data.pkl", "a/data/0", "a/data/1", "a/version")}
        item = saved_members(dense(values=[1, 2]), "x")
        item = torch_zip({name: item[name] for name in ("x/data.pkl", "x/data/0")}, alignment=1)
        swapped = {"a/data.pkl": members["a/data.pkl"], "a/byteorder": b"big"}
        swapped |= {"a/data/0": ROWS.astype(">f4").tobytes(), "a/data/1": IDS.tobytes()}
        return {
            "torch's way": Example(torch_zip(members, alignment=8), SMALL_TRUTH),
            "Python's way, deflated": Example(zip_file(lean, lean), SMALL_TRUTH),
            "two, one after the other": Example(
                item + item,
                [f32(str(n), [1, 2], f"[{n}]") for n in (0, 1)],
                frozenset([len(item)]),
            ),
            "big-endian": Example(
                zip_file(swapped),
                [
                    Truth.of("w", "F32", (3, 4), ROWS.astype(">f4").tobytes(), "['w']"),
                    Truth.of("n.i", "I64", (5,), IDS.tobytes(), "['n']['i']"),
                ],
            ),
        }

    def samples(self) -> dict[str, Example]:
        """Those whose truth is of stored bytes and has every tensor."""
        return {
            name: Example(
                (CORNERS / name).read_bytes(),
                [
                    Truth(k.name, k.dtype, k.shape, _nbytes(k), str(k.sha256), k.path)
                    for k in torch_files("torch_corners")[name]
                ],
            )
            for name in (
                *("aliased_views.pt", "align4096.pt", "crc_flipped.pt", "crc_off.pt", "cycle.pt"),
                *("deflated.pt", "dtensor.pt", "dtypes.pt", "from_buffer.pt", "no_byteorder.pt"),
                *("missing_module_global.pt", "nan_payloads.pt", "parameter.pt", "proto3.pt"),
                *("proto4.pt", "proto5.pt", "python_zip_unaligned.pt", "skip_data.pt"),
                *("sparse.pt", "strides.pt", "tensor_subclass_missing_module.pt"),
                *("view_of_large.pt", "zip64_headers.pt", "conj_neg_bits.pt"),
            )
        }

    def large(self, nbytes: int) -> tuple[bytes, int]:
        return saved({"w": rebuilt(untyped("0", bytes(nbytes)), (nbytes,), (1,))}), 1

    def claims(self, sample: Path) -> bool:
        if sample.parts[-3:-2] == ("ckpt",) or sample.name in ("empty_file.pt", "not_a_zip.pt"):
            return False
        legacy = sample.name in ("legacy_nonzip.pt", "legacy_views.pt")
        return (
            not legacy
            and sample.read_bytes()[:4] == b"PK\3\4"
            and sample.suffix not in (*(".npz", ".keras"),)
        )

    def magics(self) -> list[bytes]:
        data = torch_zip(saved_members(SMALL, "a"), alignment=4)
        return [data[: 30 + 10], data[:200], data[:-100], data]


class TestTorchLegacy(FormatTests):
    format = TorchLegacy()

    def examples(self) -> dict[str, Example]:
        views = {"a": rebuilt(floats(), (2, 3), (3, 1), 6), "b": rebuilt(floats(), (4,), (3,))}
        part = Storage("0", "FloatStorage", ROWS.tobytes(), 4, view=(("7", 4, 6),))
        return {
            "small": Example(saved_before_1_6(SMALL), SMALL_TRUTH),
            "views": Example(
                saved_before_1_6(views), [f32("a", ROWS[6:].reshape(2, 3)), f32("b", ROWS[::3])]
            ),
            "a view of a storage": Example(
                saved_before_1_6({"v": rebuilt(part, (2,), (1,), 1)}), [f32("v", ROWS[5:7])]
            ),
            "empty": Example(
                saved_before_1_6({"e": rebuilt(floats(values=[]), (0, 3), (3, 1))}),
                [f32("e", np.zeros((0, 3)))],
            ),
        }

    def samples(self) -> dict[str, Example]:
        return {
            name: Example(
                (CORNERS / name).read_bytes(),
                [
                    Truth(k.name, k.dtype, k.shape, _nbytes(k), str(k.sha256), k.path)
                    for k in torch_files("torch_corners")[name]
                ],
            )
            for name in ("legacy_nonzip.pt", "legacy_views.pt")
        }

    def large(self, nbytes: int) -> tuple[bytes, int]:
        return saved_before_1_6({"w": rebuilt(untyped("0", bytes(nbytes)), (nbytes,), (1,))}), 1

    def claims(self, sample: Path) -> bool:
        return sample.name in ("legacy_nonzip.pt", "legacy_views.pt")

    def magics(self) -> list[bytes]:
        data = saved_before_1_6(SMALL)
        return [data[:15], data[:30], data[:-70]]


WIDTH = {
    "opaque:complex32": 4,
    "opaque:float4_e2m1fn_x2": 1,
    "BOOL": 1,
    "BF16": 2,
    "opaque:meta": 0,
}


def _nbytes(known: Known) -> int:
    bits = known.dtype.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ").partition("_")[0]
    itemsize = WIDTH[known.dtype] if known.dtype in WIDTH else int(bits) // 8
    return math.prod(known.shape) * itemsize


COO = Made(Symbol("torch.serialization", "_get_layout"), ("torch.sparse_coo",))
CSR = Made(Symbol("torch.serialization", "_get_layout"), ("torch.sparse_csr",))
CSC = Made(Symbol("torch.serialization", "_get_layout"), ("torch.sparse_csc",))
ARRAY = Made(
    Symbol("numpy._core.multiarray", "_reconstruct"),
    (Symbol("numpy", "ndarray"), (0,), "b"),
    state=(
        1,
        (2, 3),
        Made(
            Symbol("numpy", "dtype"),
            ("f4", False, True),
            state=(3, "<", None, None, None, -1, -1, 0),
        ),
        False,
        ROWS[:6].tobytes(),
    ),
)
HOOKS = Made(ORDERED)
LEGACY_STORAGE = Made(
    Symbol("torch.storage", "_load_from_bytes"), (saved_before_1_6(floats("77")),)
)


def from_type(function: Symbol, args: Any, state: Any) -> Made:
    return Made(FROM_TYPE, (function, Symbol("my.tensors", "Sub"), args, state))


WRAPPER = Symbol("torch._utils", "_rebuild_wrapper_subclass")
CORNER_CASES: dict[str, tuple[Any, list[Truth]]] = {
    "of version 1": (
        torch_utils("_rebuild_tensor", floats(), 2, (2, 2), (4, 1)),
        [f32("x", [[2, 3], [6, 7]])],
    ),
    "a size that is torch.Size": (
        Made(
            Symbol("torch._utils", "_rebuild_tensor_v2"),
            (floats(), 0, Made(Symbol("torch", "Size"), ((12,),)), (1,), False, HOOKS),
        ),
        [f32("x", ROWS)],
    ),
    "of version 3": (
        torch_utils(
            "_rebuild_tensor_v3", untyped("0", bytes(range(8))), 1, (3,), (1,), False, HOOKS,
            Symbol("torch", "uint16"),
        ),
        [Truth.of("x", "U16", (3,), bytes(range(2, 8)), "['x']")],
    ),
    "a dtype that is not known": (
        torch_utils(
            "_rebuild_tensor_v3", untyped("0", bytes(range(8))), 0, (4,), (1,), False, HOOKS,
            Symbol("torch", "float2_e1"),
        ),
        [Truth.of("x.0", "U8", (8,), bytes(range(8)), "['x'](0)")],
    ),
    "a parameter": (
        torch_utils("_rebuild_parameter", dense(), True, HOOKS),
        [f32("x", ROWS)],
    ),
    "a parameter with attributes": (
        torch_utils(
            "_rebuild_parameter_with_state", dense(), True, HOOKS,
            ({"grad_copy": dense("1", [1]), "dim": 0}, {"slot": dense("2", [2])}),
        ),
        [
            f32("x", ROWS),
            f32("x.grad_copy", [1], "['x'].grad_copy"),
            f32("x.slot", [2], "['x'].slot"),
        ],
    ),
    "quantized by tensor": (
        torch_utils(
            "_rebuild_qtensor", Storage("0", "QUInt8Storage", bytes(range(6)), 1), 0, (2, 3),
            (3, 1), (Symbol("torch", "per_tensor_affine"), 0.5, 3), False, HOOKS,
        ),
        [Truth.of("x", "U8", (2, 3), bytes(range(6)), "['x']")],
    ),
    "quantized by channel": (
        torch_utils(
            "_rebuild_qtensor", Storage("0", "QInt8Storage", bytes(range(6)), 1), 0, (2, 3),
            (3, 1), (Symbol("torch", "per_channel_affine"), dense("1", [.5, 1]),
            rebuilt(longs("2", [3, 4]), (2,), (1,)), 0), False, HOOKS,
        ),
        [
            Truth.of("x", "I8", (2, 3), bytes(range(6)), "['x']"),
            f32("x.scales", [0.5, 1], "['x'].scales"),
            i64("x.zero_points", [3, 4], "['x'].zero_points"),
        ],
    ),
    "sparse by coordinates": (
        torch_utils(
            "_rebuild_sparse_tensor", COO,
            (rebuilt(longs("0", [0, 1]), (2, 1), (1, 1)), dense("1", [7]), (3, 4), True),
        ),
        [
            i64("x.indices", [[0], [1]], "['x'].indices"),
            f32("x.values", [7], "['x'].values"),
        ],
    ),
    "sparse by rows": (
        torch_utils(
            "_rebuild_sparse_tensor", CSR,
            (rebuilt(longs("0", [0, 1]), (2,), (1,)), rebuilt(longs("1", [3]), (1,), (1,)),
            dense("2", [7]), (1, 4)),
        ),
        [
            i64("x.crow_indices", [0, 1], "['x'].crow_indices"),
            i64("x.col_indices", [3], "['x'].col_indices"),
            f32("x.values", [7], "['x'].values"),
        ],
    ),
    "sparse by columns": (
        torch_utils(
            "_rebuild_sparse_tensor", CSC,
            (rebuilt(longs("0", [0, 1]), (2,), (1,)), rebuilt(longs("1", [3]), (1,), (1,)),
            dense("2", [7]), (1, 4)),
        ),
        [
            i64("x.ccol_indices", [0, 1], "['x'].ccol_indices"),
            i64("x.row_indices", [3], "['x'].row_indices"),
            f32("x.values", [7], "['x'].values"),
        ],
    ),
    "nested": (
        torch_utils(
            "_rebuild_nested_tensor", dense(), rebuilt(longs("1", [2, 3]), (1, 2), (2, 1)),
            rebuilt(longs("2", [3, 1]), (1, 2), (2, 1)), rebuilt(longs("3", [0]), (1,), (1,)),
        ),
        [
            f32("x.buffer", ROWS, "['x'].buffer"),
            i64("x.sizes", [[2, 3]], "['x'].sizes"),
            i64("x.strides", [[3, 1]], "['x'].strides"),
            i64("x.offsets", [0], "['x'].offsets"),
        ],
    ),
    "nested and jagged": (
        Made(
            Symbol("torch.nested._internal.nested_tensor", "_rebuild_njt"),
            ({"values": dense(), "offsets": rebuilt(longs(), (5,), (1,)), "_ragged_idx": 1},),
        ),
        [f32("x.values", ROWS, "['x'].values"), i64("x.offsets", IDS, "['x'].offsets")],
    ),
    "without storage": (
        torch_utils(
            "_rebuild_meta_tensor_no_storage", Symbol("torch", "float32"), (3, 4), (4, 1), False
        ),
        [Truth.of("x", "opaque:meta", (3, 4), b"", "['x']")],
    ),
    "of another device, from numpy": (
        torch_utils(
            "_rebuild_device_tensor_from_numpy", ARRAY, Symbol("torch", "float32"), "xla:0", False
        ),
        [f32("x", ROWS[:6].reshape(2, 3))],
    ),
    "of another device, from a tensor": (
        torch_utils(
            "_rebuild_device_tensor_from_cpu_tensor", dense(), Symbol("torch", "float32"), "hpu",
            False,
        ),
        [f32("x", ROWS)],
    ),
    "with attributes": (
        from_type(
            Symbol("torch._utils", "_rebuild_tensor_v2"), dense().args,
            {"partition_dim": 0, "master": dense("1", [1, 2])},
        ),
        [f32("x", ROWS), f32("x.master", [1, 2], "['x'].master")],
    ),
    "distributed": (
        from_type(WRAPPER, (), {"_local_tensor": dense(), "_spec": Made(Symbol("a", "b"))}),
        [f32("x", ROWS)],
    ),
    "of two wrapped tensors": (
        from_type(WRAPPER, (), {"data": dense(), "scale": dense("1", [3])}),
        [f32("x.data", ROWS, "['x'].data"), f32("x.scale", [3], "['x'].scale")],
    ),
    "a parameter that is distributed": (
        torch_utils("_rebuild_parameter", from_type(WRAPPER, (), {"_local_tensor": dense()}), 1, 2),
        [f32("x", ROWS)],
    ),
    "from an older module": (
        Made(
            Symbol("torch._tensor", "_rebuild_from_type"),
            (Symbol("torch._utils", "_rebuild_tensor_v2"), 0, dense().args, {}),
        ),
        [f32("x", ROWS)],
    ),
    "stride 0": (rebuilt(floats(), (3, 2), (0, 1), 4), [f32("x", [[4, 5]] * 3)]),
    "overlapping": (
        rebuilt(floats(), (3, 4), (1, 1)),
        [f32("x", [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]])],
    ),
    "a transposed one": (rebuilt(floats(), (4, 3), (1, 4)), [f32("x", ROWS.reshape(3, 4).T)]),
    "a scalar": (rebuilt(floats(), (), (), 7), [f32("x", 7)]),
    "one row with an odd stride": (rebuilt(floats(), (1, 4), (99, 1)), [f32("x", [ROWS[:4]])]),
    "an empty slice beyond its storage": (rebuilt(floats(), (0,), (1,), 99), [f32("x", [])]),
    "a bare storage": (floats(), [Truth.of("x", "U8", (48,), ROWS.tobytes(), "['x']")]),
    "of a GPU of long ago": (
        rebuilt(Storage("0", "FloatStorage", ROWS.tobytes(), 4, "cuda:3"), (12,), (1,)),
        [f32("x", ROWS)],
    ),
    "negated": (
        rebuilt(floats(), (3,), (1,), 1, {"neg": True}),
        [f32("x", [-1, -2, -3])],
    ),
    "conjugated": (
        rebuilt(
            Storage("0", "ComplexFloatStorage", ROWS[:4].tobytes(), 8), (2,), (1,), 0,
            {"conj": True},
        ),
        [Truth.of("x", "C64", (2,), np.array([0, -1, 2, -3], "<f4").tobytes(), "['x']")],
    ),
    "conjugated and negated": (
        rebuilt(
            Storage("0", "ComplexFloatStorage", ROWS[:4].tobytes(), 8), (2,), (1,), 0,
            {"conj": True, "neg": True},
        ),
        [Truth.of("x", "opaque:C64-conj-neg", (2,), ROWS[:4].tobytes(), "['x']")],
    ),
    "negated integers": (
        rebuilt(longs("0"), (5,), (1,), 0, {"neg": True}),
        [Truth.of("x", "opaque:I64-neg", (5,), IDS.tobytes(), "['x']")],
    ),
    "in a set, by NEWOBJ and among arguments": (
        Made(
            Symbol("my", "Thing"), (dense(),), new=True, items=[dense("1", [1])],
            pairs={"k": dense("2", [2])}, state=({"a": dense("3", [3])}, {"b": dense("4", [4])}),
        ),
        [
            f32("x.0", ROWS, "['x'](0)"),
            f32("x.0", [1], "['x'][0]"),
            f32("x.k", [2], "['x']['k']"),
            f32("x.a", [3], "['x'].a"),
            f32("x.b", [4], "['x'].b"),
        ],
    ),
    "in what a named tuple and its like are made of": (
        Made(Symbol("my", "Pair"), (dense(), 1), new=True, kwargs={"k": dense("1", [1])}),
        [f32("x.0", ROWS, "['x'][0]"), f32("x.k", [1], "['x'](k)")],
    ),
    "in the arguments of what is not known": (
        Made(Symbol("my", "make"), ([dense()],), state=[dense("1", [1])]),
        [f32("x.0.0", ROWS, "['x'](0)[0]"), f32("x.state.0", [1], "['x'].__setstate__[0]")],
    ),
    "under odd keys": (
        {(1, "t"): dense(), "": dense("1", [1]), 2.5: dense("2", [2]), None: dense("3", [3])},
        [
            f32("x.(1, 't')", ROWS, "['x'][(1, 't')]"),
            f32("x.", [1], "['x']['']"),
            f32("x.2.5", [2], "['x'][2.5]"),
            f32("x.None", [3], "['x'][None]"),
        ],
    ),
    "under a key that no UTF-8 is": (
        {"\udcff": dense()},
        [f32("x.\\udcff", ROWS, "['x']['\\udcff']")],
    ),
}  # fmt: skip
PROTOCOLS = range(2, 6)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", CORNER_CASES)
def test_every_way_to_write_a_tensor_is_read(case: str, protocol: int) -> None:
    tensor, truth = CORNER_CASES[case]
    data = saved({"x": tensor}, protocol=protocol)
    assert truth_found(data, found_in(data)) == truth


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_tensor_in_a_plain_pickle_has_its_storage_in_an_archive_inside(protocol: int) -> None:
    tensors = {"a": rebuilt(LEGACY_STORAGE, (2, 2), (4, 1), 1), "b": LEGACY_STORAGE}
    data, _ = pickled(tensors, protocol)
    found = found_in(data)
    truth = [
        f32("a", [[1, 2], [5, 6]]),
        Truth.of("b", "U8", (48,), ROWS.tobytes(), "['b']"),
    ]
    assert truth_found(data, found) == truth
    assert found.table.n_payloads == 1


def test_a_tied_tensor_is_two_tensors_on_one_payload() -> None:
    tied = dense()
    data = saved({"a": tied, "b": tied, "c": rebuilt(tied.args[0], (2,), (1,))})
    found = found_in(data)
    assert [t.name for t in truth_found(data, found)] == ["a", "b", "c"]
    assert found.table.n_payloads == 1


def test_storages_that_nobody_refers_to_are_payloads_all_the_same() -> None:
    members = saved_members({"x": dense()})
    members["archive/data/9"] = b"nobody's"
    found = found_in(torch_zip(members))
    assert (found.table.n_tensors, found.table.n_payloads) == (1, 2)


def test_payloads_lie_where_their_bytes_are_whatever_the_alignment() -> None:
    for alignment in (1, 64, 4096):
        data = torch_zip(saved_members(SMALL), alignment=alignment)
        assert truth_found(data, found_in(data)) == SMALL_TRUTH


def test_archives_one_after_another_are_items_of_their_number() -> None:
    data = saved({"w": dense()}) + saved(3.5) + saved(dense("0", [1]))
    found = found_in(data)
    assert found.facts["items"] == 3
    assert truth_found(data, found) == [f32("0.w", ROWS, "[0]['w']"), f32("2", [1], "[2]")]


def test_an_array_in_a_deflated_pickle_is_found_in_what_it_decodes_to() -> None:
    members = saved_members({"x": ARRAY}, protocol=4)
    data = torch_zip(members, ["archive/data.pkl"])
    assert truth_found(data, found_in(data)) == [f32("x", ROWS[:6].reshape(2, 3))]


def test_text_in_a_deflated_pickle_is_left_alone() -> None:
    latin = Made(Symbol("_codecs", "encode"), ("é" * 8, "latin1"))
    wide = Made(
        Symbol("numpy._core.multiarray", "_reconstruct"),
        state=(
            1,
            (2,),
            ARRAY.state[2],
            False,
            latin,
        ),
    )
    data = torch_zip(saved_members({"x": wide}), ["archive/data.pkl"])
    found = examine(BytesSource(data))
    assert found.condition == "opaque" and "itself encoded" in str(found.problem)


def _lie(tensor: Any, **changed: bytes | None) -> bytes:
    members = saved_members({"x": tensor})
    for name, body in changed.items():
        if body is None:
            del members["archive/" + name.replace("_", "/")]
        else:
            members["archive/" + name.replace("_", "/")] = body
    return torch_zip(members)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (_lie(dense(), data_0=None), "storage '0' is not in the file"),
        (_lie(dense(), data_0=b"1234"), "storage '0' has 4 bytes, expected 48"),
        (_lie(dense(), data_0=b""), "storage '0' has 0 bytes, expected 48"),
        (_lie(dense(), byteorder=b"pdp"), "byteorder is b'pdp', expected 'little' or 'big'"),
        (
            saved({"x": rebuilt(floats(), (4, 4), (4, 1))}),
            "tensor 'x' takes bytes 0 to 64 of a storage of 48",
        ),
        (
            saved({"x": rebuilt(floats(), (3,), (1,), 10)}),
            "tensor 'x' takes bytes 40 to 52 of a storage of 48",
        ),
        (saved({"x": rebuilt(floats(), (3,), (-1,), 1)}), "tensor 'x' takes bytes -4 to 8 of"),
        (torch_zip({"a/data.pkl": b"\x80\x02N.N"}), "1 bytes follow the pickle in data.pkl"),
        (torch_zip({"a/version": b"3\n"}), "expected one data.pkl in torch's archive, found 0"),
        (saved_before_1_6(SMALL)[:-1], "39 bytes are left where storage '1' has 40"),
        (saved_before_1_6(SMALL) + b"x", "expected"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_damaged_and_says_how(data: bytes, words: str) -> None:
    problem = problem_of(data)
    assert words in problem and problem.startswith("it: ")


def test_a_tensor_deeper_than_any_name_is_not_understood() -> None:
    members = saved_members(dense())
    body = members["archive/data.pkl"][2:-1]
    members["archive/data.pkl"] = b"\x80\2" + b"]" * 600 + body + b"a" * 600 + b"."
    found = examine(BytesSource(torch_zip(members)))
    assert (found.condition, found.table.n_tensors) == ("opaque", 0)
    assert "has objects too deep; it is kept as a whole" in str(found.problem)


def test_a_number_that_no_file_has_is_no_tensor() -> None:
    for offset, shape, stride in ((2**70, 2, 1), (0, 2**70, 1), (0, 2, 2**70), (-1, 2, 1)):
        data = saved({"x": rebuilt(floats(), (shape,), (stride,), offset)})
        found = found_in(data)
        assert [t.path for t in truth_found(data, found)] == ["['x'](0)"]


def test_storages_of_the_format_before_1_6_are_little_endian_whatever_the_machine() -> None:
    data = saved_before_1_6(SMALL).replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89")
    assert b"\x89" in data
    found = found_in(data)
    assert not any(found.table.tensor(row).big_endian for row in range(found.table.n_tensors))


def values_of(data: bytes, found: Found, row: int) -> bytes:
    """The elements of a tensor, little-endian."""
    tensor, body = found.table.tensor(row), elements_of(data, found, row)
    if not tensor.big_endian:
        return body
    width = tensor.nbytes // math.prod(tensor.shape) // (2 if tensor.dtype[0] == "C" else 1)
    return np.frombuffer(body, f">u{width}").astype(f"<u{width}").tobytes()


def _files() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for file in torch_files(folder):
            yield folder, file


@pytest.mark.parametrize(("folder", "file"), list(_files()))
def test_every_tensor_that_torch_reads_of_a_sample_is_found_right(folder: str, file: str) -> None:
    data = (SAMPLES / folder / file).read_bytes()
    found = found_in(data)
    table = found.table
    rows = {table.path(row) or table.name(row): row for row in range(table.n_tensors)}
    assert len(rows) == table.n_tensors
    for known in torch_files(folder)[file]:
        tensor = table.tensor(rows.pop(known.path))
        assert (tensor.name, tensor.dtype, tensor.shape) == (known.name, known.dtype, known.shape)
        if known.strides is not None and math.prod(known.shape):
            assert _same_steps(known, tensor.strides)
        if known.sha256 is not None:
            body = values_of(data, found, table.n_tensors and _row(table, known.path))
            assert sha256(body).hexdigest() == known.sha256, known.path
    assert set(rows) <= MORE.get(file, set())


MORE = {
    # Given by torch as numbers or storages, and not as tensors.
    "untyped_typed_storage.pt": {"['ut']", "['ty']"},
    "quantized.pt": {"['per_channel'].scales", "['per_channel'].zero_points"},
}


def _row(table: Any, path: str) -> int:
    return next(
        row for row in range(table.n_tensors) if (table.path(row) or table.name(row)) == path
    )


def _same_steps(known: Known, strides: Any) -> bool:
    wanted = [s for s, dim in zip(known.strides or (), known.shape, strict=True) if dim > 1]
    if strides is None:
        strides = [math.prod(known.shape[axis + 1 :]) for axis in range(len(known.shape))]
    return wanted == [s for s, dim in zip(strides, known.shape, strict=True) if dim > 1]


ENDS = {
    "empty_file.pt": ("unknown", "opaque", "not a format slimckpt reads"),
    "not_a_zip.pt": ("unknown", "opaque", "not a format slimckpt reads"),
    "truncated.pt": ("torch", "damaged", "expected the end of a zip archive, found none"),
    "truncated_half.pt": ("torch", "damaged", "expected the end of a zip archive, found none"),
}


def _member(path: Path, member: str = "/data/0") -> bytes:
    with zipfile.ZipFile(path) as archive:
        return next(archive.read(m) for m in archive.namelist() if m.endswith(member))


WITHOUT_TRUTH = {
    "malicious_eval.pt": [
        Truth.of("w", "F32", (3,), _member(CORNERS / "malicious_eval.pt", "/data/0"), "['w']")
    ],
    "malicious_os_system.pt": [
        Truth.of("w", "F32", (3,), _member(CORNERS / "malicious_os_system.pt", "/data/0"), "['w']")
    ],
    "plain_pickle.pkl": [],
    "untyped_typed_storage.pt": [
        Truth.of(
            "ut", "U8", (16,), _member(CORNERS / "untyped_typed_storage.pt", "/data/0"), "['ut']"
        ),
        Truth.of(
            "ty", "U8", (16,), _member(CORNERS / "untyped_typed_storage.pt", "/data/1"), "['ty']"
        ),
    ],
}
"""torch read none, or was not let."""


def test_each_corner_of_torch_is_read_right_or_says_why_not() -> None:
    read = {name for name, tensors in torch_files("torch_corners").items() if tensors}
    every = {path.name for path in CORNERS.iterdir() if path.name != "expected.json"}
    assert len(every) == 40
    assert every == read | set(ENDS) | set(WITHOUT_TRUTH) | {"small.safetensors"}
    for name, (format_name, condition, words) in ENDS.items():
        found = examine(BytesSource((CORNERS / name).read_bytes()))
        assert (found.format, found.condition) == (format_name, condition), name
        assert words in str(found.problem), name
    for name, truth in WITHOUT_TRUTH.items():
        data = (CORNERS / name).read_bytes()
        assert truth_found(data, found_in(data)) == truth, name


@pytest.mark.parametrize("name", ["malicious_os_system.pt", "malicious_eval.pt"])
def test_a_hostile_file_is_slimmed_and_restored_like_any_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpickled, the one would write ``slimckpt_pwned_file`` into the current directory, and the
    other evaluate ``__import__('os').getpid()``."""
    source, here = tmp_path / "source", tmp_path / "here"
    source.mkdir()
    here.mkdir()
    for number in range(2):
        (source / f"{number}.pt").write_bytes((CORNERS / name).read_bytes())
    monkeypatch.chdir(here)

    def run(*_: object) -> None:
        raise AssertionError("something in the file was run")

    monkeypatch.setattr("posix.system", run)
    slim(source, tmp_path / "store", min_saving=0)
    with slimckpt.open(tmp_path / "store") as checkpoint:
        assert checkpoint.files["0.pt"]["w"].tobytes() == _member(source / "0.pt")
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)
    assert not list(here.iterdir())


def test_the_samples_that_are_made_here_are_what_torch_would_unpickle() -> None:
    """The assembler of these tests writes pickles that Python itself accepts."""
    data, _ = pickled({"x": [1, (2, "a")], "y": Made(Symbol("collections", "OrderedDict"))}, 4)
    assert pickle.loads(data) == {"x": [1, (2, "a")], "y": {}}


@pytest.mark.parametrize("start", [b"\x80\x03", b"\x80\x04\x95\x0d" + bytes(7)])
def test_the_magic_number_of_the_old_format_may_be_of_another_protocol(start: bytes) -> None:
    data = (SAMPLES / "torch_corners" / "legacy_nonzip.pt").read_bytes()
    found = examine(BytesSource(data))
    other = examine(BytesSource(start + data[2:]))
    assert (other.format, other.condition) == ("torch-legacy", "understood")
    assert other.table.names() == found.table.names()


def test_an_archive_packed_again_with_its_directories_is_recognised(tmp_path: Path) -> None:
    source = SAMPLES / "torch_corners" / "aliased_views.pt"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(tmp_path / "again", "w") as new:
        new.writestr("archive/", b"")
        for info in old.infolist():
            new.writestr(f"archive/{info.filename.split('/', 1)[1]}", old.read(info))
    found = examine(BytesSource((tmp_path / "again").read_bytes()))
    assert (found.format, found.condition) == ("torch", "understood")
    assert found.table.names() == examine(BytesSource(source.read_bytes())).table.names()
