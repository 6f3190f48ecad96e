"""Plain pickles: Paddle's files, metadata, and whatever else holds numpy arrays."""

import pickle
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import BytesSource, Example, FormatTests, Truth, elements_of, truth_found
from sample_files import SAMPLES, expected
from torch_bytes import Made, Storage, Symbol, paddle_tensor, pickled, rebuilt
from torch_truth import PADDLE_FOLDERS, Known, paddle_files

from slimckpt.formats import Found, examine
from slimckpt.formats.dcp_metadata import read_metadata
from slimckpt.formats.plain_pickles import PlainPickle

ROWS = np.arange(12, dtype="<f4").reshape(3, 4)
BF16 = np.arange(4, dtype="<u2")
NAMES = "StructuredToParameterName@@"
SPELLING = {"<f4": "F32", "<f8": "F64", "<u2": "U16", "|b1": "BOOL", ">i4": "I32", "<i8": "I64"}


def found_in(data: bytes) -> Found:
    found = examine(BytesSource(data))
    assert (found.format, found.condition) == ("pickle", "understood"), found.problem
    return found


def truth(name: str, array: Any, path: str | None = None, dtype: str | None = None) -> Truth:
    array = np.asanyarray(array)
    spelled = dtype or SPELLING[array.dtype.str]
    return Truth.of(name, spelled, array.shape, array.tobytes(), path or f"['{name}']")


def as_numpy_1(data: bytes) -> bytes:
    """Module names of numpy before 2, which have other lengths under protocol 4."""
    return data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


STATE = {"w": ROWS, "half": BF16, NAMES: {"w": "linear_0.w_0", "half": "linear_0.b_0"}}
STATE_TRUTH = [truth("w", ROWS), truth("half", BF16, dtype="BF16")]


class TestPlainPickle(FormatTests):
    format = PlainPickle()

    def examples(self) -> dict[str, Example]:
        nested = {"o": [paddle_tensor("w_0", ROWS)], "n": np.float64(1)}
        one = pickle.dumps({"w": ROWS}, 4)
        return {
            **{
                f"a state dict, protocol {protocol}": Example(
                    pickle.dumps(STATE, protocol), STATE_TRUTH
                )
                for protocol in (3, 4)
            },
            "of numpy 1": Example(as_numpy_1(pickle.dumps(STATE, 2)), STATE_TRUTH),
            "any other object": Example(pickled(nested, 4)[0], [truth("o.0", ROWS, "['o'][0]")]),
            "two, one after the other": Example(
                one + one,
                [truth(f"{n}.w", ROWS, f"[{n}]['w']") for n in (0, 1)],
                frozenset([len(one)]),
            ),
            "no arrays": Example(pickle.dumps({"step": 3}, 4), []),
        }

    def samples(self) -> dict[str, Example]:
        return {
            f"{folder} {path.name}": Example(
                path.read_bytes(),
                [Truth(k.name, k.dtype, k.shape, _nbytes(k), str(k.sha256), k.path) for k in known],
            )
            for folder in ("paddle_distcp_4", "paddle26_distcp_4")
            for path, known in paddle_files(folder).items()
        }

    def large(self, nbytes: int) -> tuple[bytes, int]:
        return pickle.dumps({"w": np.zeros(nbytes, np.uint8)}, 4), 1

    def claims(self, sample: Path) -> bool:
        head = sample.read_bytes()[:15]
        legacy = sample.name in ("legacy_nonzip.pt", "legacy_views.pt")
        return head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5") and not legacy

    def magics(self) -> list[bytes]:
        return [b"\x80\2", b"\x80\4", b"\x80\4\x95", pickle.dumps(STATE, 4)[:150]]

    def test_it_claims_no_ordinary_file(self) -> None:
        """A pickle is no ordinary file to this format; nothing else begins like one."""
        for data in (b"", b"\x80", b"\x80\2", b"\x80\1N.", b"\x80\6N.", b"\x80\2\0", b"\x7fELF"):
            assert not self.format.matches(data, len(data))
        assert self.format.matches(b"\x80\x02}q\x00.", 6)


def _nbytes(known: Known) -> int:
    widths = {"BOOL": 1, "BF16": 2, "C64": 8}
    width = widths.get(known.dtype) or int(known.dtype.strip("FIU")) // 8
    return int(np.prod(known.shape, dtype=int)) * width


@pytest.mark.parametrize("protocol", range(2, 6))
def test_arrays_of_every_kind_are_found_under_every_protocol(protocol: int) -> None:
    arrays = {
        "rows": ROWS,
        "fortran": np.asfortranarray(ROWS),
        "cube": np.asfortranarray(np.arange(24, dtype="<f8").reshape(2, 3, 4)),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 3), "<f4"),
        "yes": np.array([True]),
        "yes again": np.array([True]),
        "wide": np.arange(200, 300, dtype="<i8"),
        "big": np.arange(3, dtype=">i4"),
    }
    data = pickle.dumps(arrays, protocol)
    found = found_in(data)
    assert truth_found(data, found) == [truth(name, array) for name, array in arrays.items()]
    rows = {found.table.name(row): found.table.tensor(row) for row in range(len(arrays))}
    assert rows["big"].big_endian and not rows["rows"].big_endian
    assert rows["fortran"].strides == (1, 3) and rows["rows"].strides is None
    assert rows["empty"].payload is None
    # Python has one object for all strings of one equal byte; protocol 5 copies buffers.
    assert (rows["yes"].payload == rows["yes again"].payload) == (protocol < 5)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_what_is_no_array_of_numbers_is_opaque_or_left_alone(protocol: int) -> None:
    inner = np.arange(3)
    objects = np.array([{"a": inner}, None, "x"], dtype=object)
    values = {
        "text": np.array(["a", "größe"]),
        "bytes": np.array([b"abc"]),
        "time": np.array(["2020-01-01"], "<M8[s]"),
        "fields": np.zeros(2, [("x", "<i4"), ("y", "<f8")]),
        "long": np.zeros(2, np.longdouble),
        "objects": objects,
        "number": np.float32(3),
        "kind": np.dtype("f4"),
    }
    data = pickle.dumps(values, protocol)
    dtypes = {
        "text": "opaque:<U5",
        "bytes": "opaque:|S3",
        "time": "opaque:<M8",
        "fields": "opaque:structured",
        "long": f"opaque:<f{np.dtype(np.longdouble).itemsize}",
    }
    wanted = [truth(name, values[name], dtype=dtype) for name, dtype in dtypes.items()]
    wanted.append(truth("objects.state.0.a", inner, "['objects'].__setstate__[0]['a']"))
    assert truth_found(data, found_in(data)) == wanted


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_both_ways_in_which_paddle_writes_are_read(protocol: int) -> None:
    tied = paddle_tensor("w_0", ROWS)
    static = Made(Symbol("builtins", "eval"), ("data", {"data": ROWS}))
    nested = {"t": [tied, tied], "half": paddle_tensor("h", BF16), "static": static, "np": BF16}
    data, _ = pickled(nested, protocol)
    found = found_in(data)
    assert found.facts == {"writer": "paddle"}
    assert truth_found(data, found) == [
        truth("t.0", ROWS, "['t'][0]"),
        truth("t.1", ROWS, "['t'][1]"),
        truth("half", BF16, dtype="BF16"),
        truth("static", ROWS),
        truth("np", BF16),
    ]
    assert found.table.n_payloads == 2
    data = pickle.dumps(STATE, protocol)
    assert truth_found(data, found_in(data)) == STATE_TRUTH


@pytest.mark.parametrize("protocol", [2, 3])
def test_pieces_that_paddle_cut_are_there_with_the_whole(protocol: int) -> None:
    whole = np.arange(100, 110, dtype="<f4")
    state = {
        "w@@.0": whole[:4],
        "w@@.1": whole[4:],
        "UnpackBigParamInfor@@": {"w": {"OriginShape": (2, 5), "slices": ["w@@.0", "w@@.1"]}},
    }
    data = pickle.dumps(state, protocol)
    found = found_in(data)
    assert truth_found(data, found) == [
        truth("w@@.0", whole[:4]),
        truth("w@@.1", whole[4:]),
        truth("w", whole.reshape(2, 5)),
    ]
    assert found.table.n_payloads == 1


@pytest.mark.parametrize(
    ("slices", "condition"),
    [
        (["w@@.0", "w@@.0"], "damaged"),
        (["w@@.0", 7], "damaged"),
        (["w@@.0", "nowhere"], "understood"),
        ([], "understood"),
        (["w@@.0"], "understood"),
        ("w@@.0", "understood"),
    ],
)
def test_pieces_that_do_not_make_the_whole_are_refused_or_left_as_they_are(
    slices: Any, condition: str
) -> None:
    entry = {"OriginShape": (2, 5), "slices": slices}
    data = pickle.dumps({"w@@.0": np.zeros(4), "UnpackBigParamInfor@@": {"w": entry}}, 3)
    found = examine(BytesSource(data))
    assert found.condition == condition
    assert found.table.n_tensors == (condition == "understood")


def test_a_storage_of_torch_is_not_in_a_plain_pickle() -> None:
    tensor = rebuilt(Storage("0", "FloatStorage", bytes(16), 4), (4,), (1,))
    found = examine(BytesSource(pickled({"x": tensor}, 4)[0]))
    assert found.condition == "damaged"
    assert "refers to storage '0' of torch, which a plain pickle does not hold" in str(
        found.problem
    )


def test_metadata_with_nonsense_in_it_is_an_error_of_ours() -> None:
    """Found by fuzzing: a size that is called with what has no length."""
    whole = Made(
        Symbol("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        new=True,
        state={"size": Made(Symbol("torch", "Size"), Made(Symbol("a", "b"))), "chunks": []},
    )
    metadata = Made(
        Symbol("torch.distributed.checkpoint.metadata", "Metadata"),
        new=True,
        state={"state_dict_metadata": {"w": whole}, "storage_data": {}},
    )
    data, _ = pickled(metadata, 4)
    assert read_metadata(BytesSource(data)).tensors == {}


def _paddle_files() -> list[tuple[Path, list[Known]]]:
    return [pair for folder in PADDLE_FOLDERS for pair in paddle_files(folder).items()]


@pytest.mark.parametrize(
    ("path", "known"), _paddle_files(), ids=lambda value: getattr(value, "name", "")
)
def test_every_tensor_that_paddle_reads_of_a_sample_is_found_right(
    path: Path, known: list[Known]
) -> None:
    data = path.read_bytes()
    found = examine(BytesSource(data))
    table = found.table
    rows = {table.path(row): row for row in range(table.n_tensors)}
    if path.name == "binary_format.pdtensor":
        assert (found.format, found.condition) == ("unknown", "opaque")
        return
    for one in known:
        row = rows.pop(one.path)
        tensor = table.tensor(row)
        assert (tensor.name, tensor.dtype, tensor.shape) == (one.name, one.dtype, one.shape)
        assert sha256(elements_of(data, found, row)).hexdigest() == one.sha256, one.path
    # Whole tensors of those that were cut are there beside their pieces.
    assert set(rows) <= ({"['w']"} if "bigparam" in path.name else set())


def _payloads(paths: list[Path]) -> dict[str, list[int]]:
    """Lengths of the payloads of all tensors by digest; each payload of a file once.

    Those that are text are left out: the truth is of what it decodes to.
    """
    found: dict[str, list[int]] = defaultdict(list)
    for path in paths:
        data = path.read_bytes()
        table = examine(BytesSource(data)).table
        seen = set()
        for row in range(table.n_tensors):
            tensor = table.tensor(row)
            payload = tensor.payload if tensor.encoding == "raw" else None
            if payload is not None and payload not in seen:
                seen.add(payload)
                body = b"".join(data[at : at + nbytes] for at, nbytes in table.spans(payload))
                found[sha256(body).hexdigest()].append(len(body))
    return found


def _duplicate(payloads: dict[str, list[int]], floor: int = 0) -> int:
    return sum(sum(lengths[1:]) for lengths in payloads.values() if lengths[0] >= floor)


FLOORS = (0, 1024)


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize(
    "folder", ["torch_ddp4", "megatron_tp2_pp2", "deepspeed_zero3_dp4", "lora_steps"]
)
def test_duplicate_bytes_of_torch_are_those_of_the_truth(folder: str, floor: int) -> None:
    truth: dict[str, dict[Any, int]] = defaultdict(dict)
    for file, about in expected(folder)["files"].items():
        for path, entry in about.get("tensors", {}).items():
            # Here every tensor that is not empty has all of a storage, or one of its own.
            assert entry.get("storage_nbytes", entry["nbytes"]) == entry["nbytes"], path
            if entry["nbytes"] and entry["class"] != "numpy.ndarray":
                truth[entry["sha256"]][file, entry.get("storage_id", path)] = entry["nbytes"]
    paths = [SAMPLES / folder / file for file in expected(folder)["files"]]
    lengths = {digest: list(places.values()) for digest, places in truth.items()}
    assert _duplicate(_payloads(paths), floor) == _duplicate(lengths, floor)


def test_duplicate_bytes_are_what_the_samples_state() -> None:
    """Where neither dtypes and shapes nor views tell equal payloads apart."""
    for folder in ("torch_ddp4", "deepspeed_zero1_dp4", "deepspeed_zero3_dp4"):
        stated = expected(folder)["summary"]["duplicate_bytes_not_counting_aliases"]
        paths = [SAMPLES / folder / file for file in expected(folder)["files"]]
        assert _duplicate(_payloads(paths)) == stated, folder
    for folder in PADDLE_FOLDERS:
        totals = expected(folder)["totals"]
        paths = [SAMPLES / folder / "ckpt" / file for file in expected(folder)["files"]]
        if folder != "paddle_proto_variants":
            stated = totals["tensor_bytes"] - totals["unique_tensor_bytes"]
            assert _duplicate(_payloads(paths)) == stated, folder


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("folder", PADDLE_FOLDERS)
def test_duplicate_bytes_of_paddle_are_those_of_the_truth(folder: str, floor: int) -> None:
    """Of files whose bytes are as such in the pickle (protocol 2 has text)."""
    truth: dict[str, dict[Any, int]] = defaultdict(dict)
    paths = []
    for file, entries in expected(folder)["tensors"].items():
        if "p2" in file:
            continue
        paths.append(SAMPLES / folder / "ckpt" / file)
        for entry in entries:
            digest = entry.get("sha256_stored_bytes", entry["sha256"])
            if entry["nbytes"] and "@@" not in str(entry["path"]):
                truth[digest][file, entry["payload"]["offset"]] = entry["nbytes"]
    lengths = {digest: list(places.values()) for digest, places in truth.items()}
    assert _duplicate(_payloads(paths), floor) == _duplicate(lengths, floor)
