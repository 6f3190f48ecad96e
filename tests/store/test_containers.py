"""Containers, as any HDF5 tool sees them."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import h5py
import ml_dtypes
import numpy as np
import pytest
from blake3 import blake3
from mindspore_bytes import record
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES, expected
from trees import body, small_run

from slimckpt.rewrite.slim import slim
from slimckpt.store.reader import Store

BLOCK = 4 * 1024 * 1024
NUMPY: dict[str, Any] = {
    "Float32": "<f4", "Float16": "<f2", "Float64": "<f8", "BFloat16": ml_dtypes.bfloat16,
    "Int8": "i1", "UInt8": "u1", "Int16": "<i2", "UInt16": "<u2", "Int32": "<i4",
    "UInt32": "<u4", "Int64": "<i8", "UInt64": "<u8", "Bool": "?", "Complex64": "<c8",
    "Complex128": "<c16", "Float8E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def containers(store: Path) -> list[Path]:
    return sorted(store.rglob("*.h5"))


def datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    for group in file.values():
        if group.name != "/tensors":
            for name, item in group.items():
                yield f"{group.name}/{name}", item


def raw(path: Path, dataset: h5py.Dataset) -> bytes:
    offset = dataset.id.get_offset()
    return path.read_bytes()[offset : offset + dataset.id.get_storage_size()]


def digest(data: bytes) -> str:
    """The digest of FORMAT.md, written down a second time."""
    if len(data) <= BLOCK:
        return blake3(data).hexdigest()
    blocks = b"".join(blake3(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK))
    whole = len(data).to_bytes(8, "little") + blocks
    return blake3(whole, derive_key_context="slimckpt block tree").hexdigest()


@pytest.mark.parametrize("folder", ["ms_dp8_ckpt", "ms_dtypes", "lora_steps", "ms_chunked"])
def test_every_dataset_is_named_by_the_digest_of_its_bytes(folder: str, tmp_path: Path) -> None:
    slim(SAMPLES / folder, tmp_path / "store", min_saving=0)
    seen: list[str] = []
    for path in containers(tmp_path / "store"):
        with h5py.File(path, "r") as file:
            assert set(file) == {"payloads", "index", "tensors"} or set(file) == {
                "index",
                "tensors",
            }
            for name, dataset in file.get("payloads", {}).items():
                assert digest(raw(path, dataset)) == name
                assert dataset.chunks is None and dataset.external is None
                seen.append(name)
    assert seen and len(set(seen)) == len(seen)


def test_a_dataset_of_more_than_a_block_is_named_by_its_block_tree(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    data = body(1, BLOCK + 4)
    for name in ("a", "b"):
        (tmp_path / "source" / name).write_bytes(record("w", "UInt8", [len(data)], data))
    slim(tmp_path / "source", tmp_path / "store")
    (path,) = [p for p in containers(tmp_path / "store") if "shared" in p.parts]
    with h5py.File(path, "r") as file:
        (name,) = file["payloads"]
        assert name == digest(data) != blake3(data).hexdigest()
        assert file["payloads"][name][()].tobytes() == data


def test_the_block_digests_of_a_tensor_are_not_taken_for_the_tensor(tmp_path: Path) -> None:
    data = body(1, 40 * BLOCK)
    blocks = b"".join(blake3(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK))
    disguised = len(data).to_bytes(8, "little") + blocks
    assert len(disguised) > 1024
    (tmp_path / "source").mkdir()
    for name, payload in (("a", data), ("b", disguised), ("c", data[: len(disguised)])):
        content = record("w", "UInt8", [len(payload)], payload)
        (tmp_path / "source" / name).write_bytes(content)
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    names: list[str] = []
    for path in containers(tmp_path / "store"):
        with h5py.File(path, "r") as file:
            names += [n for n, d in file["payloads"].items() if d.id.get_storage_size() > 1024]
    assert len(set(names)) == len(names) == 3


def test_links_show_every_tensor_of_a_real_checkpoint_with_its_values(tmp_path: Path) -> None:
    """Values against the hashes and types that MindSpore itself gave."""
    slim(SAMPLES / "ms_dp8_ckpt", tmp_path / "store", min_saving=0)
    shown = 0
    for name, truth in expected("ms_dp8_ckpt")["files"].items():
        with h5py.File(tmp_path / "store" / "own" / f"{name}.h5", "r") as file:
            large = {n for n, t in truth["params"].items() if t.get("nbytes", 0) >= 1024}
            assert set(file["tensors"]) == large
            for tensor in large:
                about = truth["params"][tensor]
                dataset = file["tensors"][tensor]
                assert list(dataset.shape) == about["shape"]
                data = raw(Path(dataset.file.filename), dataset)
                assert hashlib.sha256(data).hexdigest() == about["sha256"]
                values = np.frombuffer(data, NUMPY[about["dtype"]]).reshape(about["shape"])
                if about["dtype"] == "BFloat16":
                    np.testing.assert_array_equal(
                        dataset.astype("f4")[()], values.astype(np.float32)
                    )
                else:
                    assert dataset.dtype == NUMPY[about["dtype"]]
                    np.testing.assert_array_equal(dataset[()], values)
                shown += 1
    assert shown > 100


def of_dtype(dtype: str, shape: list[int], data: bytes, tmp_path: Path) -> h5py.Dataset:
    (tmp_path / "source").mkdir()
    content = safetensors_file([("t", dtype, shape, data)])
    (tmp_path / "source" / "x.safetensors").write_bytes(content)
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    return h5py.File(tmp_path / "store" / "own" / "x.safetensors.h5", "r")["tensors/t"]


NARROW = {
    "BF16": (ml_dtypes.bfloat16, np.arange(65536, dtype=np.uint16).tobytes(), 65536),
    "F8_E5M2": (ml_dtypes.float8_e5m2, bytes(range(256)) * 8, 2048),
    "F16": (np.float16, np.arange(65536, dtype=np.uint16).tobytes(), 65536),
}


@pytest.mark.parametrize("dtype", NARROW)
def test_every_pattern_of_a_narrow_float_means_the_same_to_hdf5(dtype: str, tmp_path: Path) -> None:
    kind, data, count = NARROW[dtype]
    dataset = of_dtype(dtype, [count], data, tmp_path)
    with dataset.file:
        with np.errstate(invalid="ignore"):
            right = np.frombuffer(data, kind).astype(np.float32)
        found = dataset.astype("f4")[()]
        numbers = ~np.isnan(right)
        np.testing.assert_array_equal(found[numbers], right[numbers])
        assert np.isnan(found[~numbers]).all()
        np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(right[numbers]))


@pytest.mark.parametrize(
    ("dtype", "numpy", "nbytes"),
    [
        ("F32", "<f4", 4), ("F64", "<f8", 8), ("I8", "i1", 1), ("U8", "u1", 1), ("I16", "<i2", 2),
        ("U16", "<u2", 2), ("I32", "<i4", 4), ("U32", "<u4", 4), ("I64", "<i8", 8),
        ("U64", "<u8", 8), ("C64", "<c8", 8),
    ],
)  # fmt: skip
def test_a_common_dtype_is_native_in_hdf5(
    dtype: str, numpy: str, nbytes: int, tmp_path: Path
) -> None:
    data = body(1, 1200 * nbytes)
    dataset = of_dtype(dtype, [3, 400], data, tmp_path)
    with dataset.file:
        assert (dataset.dtype, dataset.shape) == (np.dtype(numpy), (3, 400))
        assert dataset[()].tobytes() == data


def test_booleans_are_booleans(tmp_path: Path) -> None:
    data = bytes(i % 3 == 0 for i in range(2000))
    dataset = of_dtype("BOOL", [2000], data, tmp_path)
    with dataset.file:
        assert dataset.dtype == np.bool_ and dataset[()].tobytes() == data


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E8M0"])
def test_a_dtype_that_hdf5_cannot_say_is_shown_as_bytes(dtype: str, tmp_path: Path) -> None:
    data = body(1, 2000)
    dataset = of_dtype(dtype, [2, 1000], data, tmp_path)
    with dataset.file:
        assert (dataset.dtype, dataset.shape) == (np.uint8, (2000,))
        assert dataset[()].tobytes() == data


def test_more_dimensions_than_hdf5_has_are_shown_as_bytes(tmp_path: Path) -> None:
    data = body(1, 2048)
    dataset = of_dtype("U8", [1] * 40 + [2048], data, tmp_path)
    with dataset.file:
        assert dataset.shape == (2048,)


def test_odd_names_are_escaped_in_links_and_kept_in_the_index(tmp_path: Path) -> None:
    names = ["a/b", "..", ".", "%41", "A", "模型 é🙂", "line\nbreak", "x" * 3000, "\x7f", "a//b"]
    rows = [(n, "U8", [1024], body(i, 1024)) for i, n in enumerate(names)]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "x.safetensors").write_bytes(safetensors_file(rows))
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    with h5py.File(tmp_path / "store" / "own" / "x.safetensors.h5", "r") as file:
        shown = {unquote(link): file["tensors"][link][()].tobytes() for link in file["tensors"]}
        assert all(re.fullmatch("[!-~]+", link) and "/" not in link for link in file["tensors"])
    assert shown == {name: data for name, _, _, data in rows if len(name) < 1000}
    store = Store(bytes(tmp_path / "store"))
    (part,) = store.parts()
    index = store.index(part, part.files[0])
    assert index is not None and sorted(index.table.names()) == sorted(names)


def test_links_lead_out_of_a_container_to_the_shared_one_wherever_the_store_is(
    tmp_path: Path,
) -> None:
    source = small_run(tmp_path / "source", 2048)
    deep = source / "runs" / "a" / "rank_0"
    deep.mkdir(parents=True)
    shutil.copy(source / "rank_0" / "net-1_1.ckpt", deep)
    slim(source, tmp_path / "made", min_saving=0)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "made").rename(tmp_path / "elsewhere" / "store")
    own = tmp_path / "elsewhere" / "store" / "own"
    for path in (own / "rank_0" / "net-1_1.ckpt.h5", own / "runs/a/rank_0/net-1_1.ckpt.h5"):
        with h5py.File(path, "r") as file:
            link = file["tensors"].get("embedding", getlink=True)
            assert isinstance(link, h5py.ExternalLink)
            assert not link.filename.startswith("/")
            assert file["tensors/embedding"][()].tobytes() == body(1, 2048)


def test_large_datasets_start_at_pages_and_small_ones_at_64_bytes(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    sizes = [1024, 1025, 65535, 65536, 70001, 200000]
    rows = [(str(i), "U8", [n], body(i, n)) for i, n in enumerate(sizes)]
    (tmp_path / "source" / "x.safetensors").write_bytes(safetensors_file(rows))
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    with h5py.File(tmp_path / "store" / "own" / "x.safetensors.h5", "r") as file:
        taken = []
        for _, dataset in datasets(file):
            offset, nbytes = dataset.id.get_offset(), dataset.id.get_storage_size()
            assert offset % (4096 if nbytes >= 65536 else 64) == 0
            taken.append((offset, offset + nbytes))
        taken.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(taken))


def test_what_only_optimizer_state_uses_lies_in_containers_of_its_own(tmp_path: Path) -> None:
    slim(SAMPLES / "ms_dp8_ckpt", tmp_path / "store", min_saving=0)
    moments: set[str] = set()
    others: set[str] = set()
    for path in (tmp_path / "store" / "own").rglob("*.h5"):
        with h5py.File(path, "r") as file:
            for name in file["tensors"]:
                link = file["tensors"].get(name, getlink=True)
                if isinstance(link, h5py.ExternalLink):
                    target = Path(link.filename).name
                    (moments if name.startswith("adam_") else others).add(target)
    assert moments and others
    assert all(".optimizer" in name for name in moments)
    assert not any(".optimizer" in name for name in others)


def test_containers_are_named_by_the_ranks_that_share_them(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / "source" / f"rank_{rank}").mkdir(parents=True)
        (tmp_path / "source" / f"rank_{rank}" / "w.ckpt").write_bytes(
            record("all", "UInt8", [17 * 2**20], bytes([1]) * (17 * 2**20))
            + record("pair", "UInt8", [16 * 2**20], bytes([2 + rank % 2]) * (16 * 2**20))
        )
    slim(tmp_path / "source", tmp_path / "store")
    names = {path.name for path in (tmp_path / "store" / "shared").iterdir()}
    assert names == {"ranks-0-3.h5", "ranks-0,2.h5", "ranks-1,3.h5"}


needs_tools = pytest.mark.skipif(
    shutil.which("h5ls") is None or shutil.which("h5dump") is None,
    reason="h5ls and h5dump are not installed (hdf5-tools)",
)


@needs_tools
def test_h5ls_follows_the_links_and_h5dump_shows_the_values(tmp_path: Path) -> None:
    values = np.arange(600, dtype=np.float32) / 8
    wide = values.astype("<f4").tobytes()
    narrow = values.astype(ml_dtypes.bfloat16)
    (tmp_path / "source").mkdir()
    for name in ("a", "b"):
        own = np.full(600, ord(name), "<i2").tobytes()
        (tmp_path / "source" / f"{name}.safetensors").write_bytes(
            safetensors_file(
                [
                    ("wide", "F32", [20, 30], wide),
                    ("narrow", "BF16", [600], narrow.tobytes()),
                    ("own", "I16", [600], own),
                ]
            )
        )
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    path = tmp_path / "store" / "own" / "a.safetensors.h5"
    listed = subprocess.run(
        ["h5ls", "-r", "-E", "-S", path], capture_output=True, text=True, check=True
    )
    assert re.search(r"^/tensors/wide\s+External Link \{.*shared/.*\}", listed.stdout, re.M)
    assert re.search(r"Dataset \{20, 30\}", listed.stdout)
    assert re.search(r"^/tensors/own\s+Dataset, same as /payloads/\w{64}$", listed.stdout, re.M)
    assert "not found" not in listed.stdout.lower() and listed.stderr == ""
    for name, right in (("wide", values), ("narrow", narrow.astype(np.float32)), ("own", None)):
        dumped = subprocess.run(
            ["h5dump", "-y", "-w", "0", "-d", f"/tensors/{name}", path],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        block = dumped.stdout[dumped.stdout.index("DATA {") :]
        found = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", block)]
        np.testing.assert_allclose(
            found, np.full(600, ord("a")) if right is None else right.reshape(-1), rtol=1e-5
        )


@needs_tools
@pytest.mark.parametrize("folder", ["ms_dtypes", "lora_steps", "ms_edge"])
def test_h5dump_opens_every_container_of_a_store(folder: str, tmp_path: Path) -> None:
    slim(SAMPLES / folder, tmp_path / "store", min_saving=0)
    for path in containers(tmp_path / "store"):
        subprocess.run(["h5dump", "-H", path], capture_output=True, check=True)
        subprocess.run(["h5ls", "-r", "-E", "-S", path], capture_output=True, check=True)


def test_manifests_are_what_format_md_says(tmp_path: Path) -> None:
    slim(small_run(tmp_path / "source"), tmp_path / "store", min_saving=0)
    data = (tmp_path / "store" / "slimckpt.json").read_bytes()
    root = json.loads(data)
    assert list(root)[-1] == "digest"
    assert (root["format"], root["version"], root["requires"]) == ("slimckpt", 0, [])
    zeroed = data.replace(root["digest"].encode(), b"0" * 64)
    assert blake3(zeroed).hexdigest() == root["digest"]
    assert (tmp_path / "store" / "slimckpt.json.2").read_bytes() == data
    for part in root["parts"]:
        text = (tmp_path / "store" / part["name"]).read_bytes()
        assert (len(text), digest(text)) == (part["nbytes"], part["digest"])
        assert json.loads(text)["format"] == "slimckpt-part"
    for name, extra in root["extras"].items():
        text = (tmp_path / "store" / name).read_bytes()
        assert (len(text), digest(text)) == (extra["nbytes"], extra["digest"])


INTERRUPTED = """
import random, signal, tempfile
from h5py import h5d, h5f, h5fd, h5g, h5p, h5s, h5t
from slimckpt.store.container import Dataset, lay_out

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, stop)
chance, stopped = random.Random(2), 0
datasets = [Dataset("payloads", f"{n:064x}", 8) for n in range(500)]
for _ in range(60):
    with tempfile.TemporaryFile() as file:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001 + chance.random() * 0.02)
            lay_out(file.fileno(), b"x", datasets, [])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            stopped += 1
print(stopped)
"""


def test_an_interrupt_does_not_reach_libhdf5_in_the_middle_of_its_work() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert int(ran.stdout) > 5
