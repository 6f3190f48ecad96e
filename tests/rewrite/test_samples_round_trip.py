"""Real checkpoints, slimmed and restored: identical, and smaller by what they repeat."""

import hashlib
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sample_files import SAMPLES, expected
from trees import dressed, snapshot

from slimckpt.analysis.scan import scan
from slimckpt.analysis.sharing import Bodies, classes, hash_files
from slimckpt.analysis.tree import walk
from slimckpt.errors import NothingToGainError
from slimckpt.formats import examine
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify
from slimckpt.sources.digest import Digests
from slimckpt.sources.positioned import FileSource
from slimckpt.store.index import IN_SKELETON, STORED
from slimckpt.store.reader import Store

FOLDERS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"
MUST_PUBLISH = ("lora_steps", "ms_dp8_ckpt")
MUST_NOT_PUBLISH = ("fsdp_dcp_4", "deepspeed_zero3_dp4")
FLOOR = 1024


def make(out: Path, *options: object) -> Path:
    subprocess.run([sys.executable, SCRIPT, out, *map(str, options)], check=True)
    return out


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_sample_comes_back_identical_in_every_respect(folder: str, tmp_path: Path) -> None:
    source = dressed(SAMPLES / folder, tmp_path / "source")
    before = snapshot(source)
    slim(source, tmp_path / "store", min_saving=0)
    checked = verify(tmp_path / "store", against=source)
    # One of torch's corners was damaged on purpose before it was slimmed.
    inherited = 1 if folder == "torch_corners" else 0
    assert (len(checked.problems), checked.inherited) == (inherited, inherited)
    assert all("crc_flipped.pt" in problem for problem in checked.problems)
    assert (checked.notes, checked.safe) == ([], True)
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == before
    assert snapshot(source) == before
    way_out = [sys.executable, "-I", "-S", tmp_path / "store" / "restore.py"]
    subprocess.run([*way_out, tmp_path / "without"], check=True, capture_output=True)
    assert snapshot(tmp_path / "without") == before


@pytest.mark.parametrize("folder", FOLDERS)
def test_by_default_a_sample_is_slimmed_to_its_gain_or_left_with_a_reason(
    folder: str, tmp_path: Path
) -> None:
    source = dressed(SAMPLES / folder, tmp_path / "source")
    before = snapshot(source)
    try:
        result = slim(source, tmp_path / "store")
    except NothingToGainError as error:
        assert folder not in MUST_PUBLISH
        assert "nothing to gain" in str(error) and "nothing was written" in str(error)
        assert [path.name for path in tmp_path.iterdir()] == ["source"]
        return
    assert folder not in MUST_NOT_PUBLISH
    assert result.store_nbytes < result.source_nbytes
    assert result.store_nbytes == sum(
        path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file()
    )
    assert verify(tmp_path / "store", against=source).safe
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == before


@pytest.mark.parametrize("container", ["mindspore", "safetensors"])
def test_a_run_of_data_parallel_replicas_shrinks_to_one_copy(
    container: str, tmp_path: Path
) -> None:
    source = make(tmp_path / "source", "--size", "50M", "--dp", 2, "--mp", 4, "--format", container)
    result = slim(source, tmp_path / "store")
    tensors, distinct = _bytes_of_tensors(source)
    structure = result.store_nbytes - (result.source_nbytes - tensors + distinct)
    assert 0 <= structure < 2_000_000
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


@pytest.mark.parametrize("container", ["mindspore", "safetensors"])
def test_a_run_of_unique_shards_is_left_alone(container: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "--size", "8M", "--unique", "--format", container)
    with pytest.raises(NothingToGainError, match="none has 5 % of its bytes"):
        slim(source, tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def _bytes_of_tensors(source: Path) -> tuple[int, int]:
    """Bytes of all tensors of at least 1 KiB, and of the distinct ones, by hashes of our own."""
    total, seen = 0, {}
    for path in source.rglob("*"):
        if not path.is_file():
            continue
        with FileSource(str(path).encode()) as file:
            table = examine(file).table
            for row in range(table.n_payloads):
                payload = table.payload(row)
                if payload.nbytes >= FLOOR:
                    data = b"".join(file.read(*span) for span in payload.spans)
                    total += len(data)
                    seen[hashlib.sha256(data).digest()] = len(data)
    return total, sum(seen.values())


def _replicas_found(source: Path) -> dict[str, list[list[str]]]:
    """Which files hold the same bytes under a name, from the analysis of all payloads."""
    tree = walk(str(source).encode())
    with ThreadPoolExecutor(2) as executor:
        catalog = scan(tree, executor)
        bodies = Bodies(catalog, tree.root)
        digests = Digests(bodies.nbytes)
        hash_files(bodies, range(len(catalog.files)), executor, digests)
    class_of = classes(bodies, digests)
    groups: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for number, file in enumerate(catalog.files):
        for row in range(*catalog.tensors(number).indices(catalog.table.n_tensors)):
            tensor = catalog.table.tensor(row)
            if tensor.payload is not None:
                groups[tensor.name][int(class_of[tensor.payload])].append(file.label)
    return {name: sorted(found.values()) for name, found in groups.items()}


@pytest.mark.parametrize("folder", ["ms_dp8_ckpt", "ms_dp4_real_ckpt", "ms_dp4_real_dedup_ckpt"])
def test_replica_groups_are_those_that_the_framework_read(folder: str) -> None:
    truth = expected(folder)["replicas_by_bytes"]
    found = _replicas_found(SAMPLES / folder)
    assert {name: sorted(groups) for name, groups in truth.items()} == found
    names = {name for file in expected(folder)["files"].values() for name in file["params"]}
    assert set(found) == names


def _replicated_nbytes(files: dict[str, Any]) -> int:
    """Bytes that a store of distinct tensors of at least 1 KiB saves, from the truth alone."""
    seen: set[tuple[int, str]] = set()
    saved = 0
    for file in files.values():
        for tensor in file["params"].values():
            if tensor.get("nbytes", 0) >= FLOOR:
                key = (tensor["nbytes"], tensor["sha256"])
                saved += tensor["nbytes"] if key in seen else 0
                seen.add(key)
    return saved


@pytest.mark.parametrize("folder", ["ms_dp8_ckpt", "ms_dp4_real_ckpt"])
def test_the_bytes_saved_are_the_replicated_ones_in_payloads_of_a_kibibyte(
    folder: str, tmp_path: Path
) -> None:
    slim(SAMPLES / folder, tmp_path / "store", min_saving=0)
    store = Store(str(tmp_path / "store").encode())
    used, places = 0, {}
    for part in store.parts():
        for entry in part.files:
            index = store.index(part, entry)
            if index is None:
                continue
            for row in range(index.table.n_payloads):
                if index.places.kind[row] == STORED:
                    name = part.containers[int(index.places.container[row])].name
                    nbytes = int(index.table.payload_nbytes[row])
                    used += nbytes
                    places[name, int(index.places.offset[row])] = nbytes
                else:
                    assert index.places.kind[row] == IN_SKELETON
                    assert index.table.payload_nbytes[row] < FLOOR
    saved = used - sum(places.values())
    assert saved == _replicated_nbytes(expected(folder)["files"]) > 0


def test_every_frozen_tensor_of_three_steps_is_stored_in_one_place(tmp_path: Path) -> None:
    slim(SAMPLES / "lora_steps", tmp_path / "store")
    store = Store(str(tmp_path / "store").encode())
    places: dict[str, set[tuple[bytes, int]]] = defaultdict(set)
    users: dict[str, int] = defaultdict(int)
    listed: dict[bytes, int] = defaultdict(int)
    containers = {c.name: c for part in store.parts() for c in part.containers}
    for container in containers.values():
        for digest in store.contents(container).digest:
            listed[digest.tobytes()] += 1
    for part in store.parts():
        for entry in part.files:
            if not entry.file.path.endswith(b"/model.safetensors"):
                continue
            index = store.index(part, entry)
            assert index is not None
            for tensor in map(index.table.tensor, range(index.table.n_tensors)):
                if "lora_" in tensor.name or tensor.nbytes < FLOOR:
                    continue
                assert tensor.payload is not None
                assert index.places.kind[tensor.payload] == STORED
                name = part.containers[int(index.places.container[tensor.payload])].name
                places[tensor.name].add((name, int(index.places.offset[tensor.payload])))
                users[tensor.name] += 1
                assert listed[index.places.digest[tensor.payload].tobytes()] == 1
    frozen = {
        name.removeprefix("['").removesuffix("']")
        for group in expected("lora_steps")["replicated_by_content"]
        for file, name in (place.split("::") for place in group["places"])
        if file.endswith("/model.safetensors") and group["nbytes"] >= FLOOR
    }
    assert set(places) == frozen and len(frozen) > 10
    assert set(users.values()) == {3}
    assert all(len(found) == 1 for found in places.values())
