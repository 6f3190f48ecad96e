"""The laws on trees of files whose tensors lie in chunks, under compression, or nowhere.

Truth is numpy and h5py on the original files.
"""

import io
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hdf5_bytes import hdf5_file, make
from trees import dressed, snapshot
from zip_bytes import zip_file

import slimckpt
from slimckpt.errors import NotUnderstoodError, OpaqueTensorError, StoreDamagedError
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify

SHARED = np.random.default_rng(1).standard_normal((64, 50)).astype("<f4")


def weights(file: h5py.File, rank: int) -> None:
    own = np.random.default_rng(10 + rank).standard_normal((40, 30))
    file["shared"] = SHARED
    file["tied"] = file["shared"]
    file["big"] = SHARED.astype(">f4")
    for name, chunk, options in (
        ("rows", (8, 50), {}),
        ("edges", (9, 7), {}),
        ("gzip", (9, 7), {"compression": "gzip", "shuffle": True, "fletcher32": True}),
        ("lzf", (32, 32), {"compression": "lzf", "maxshape": (None, None)}),
    ):
        file.create_dataset(f"{name}/shared", data=SHARED, chunks=chunk, **options)
        file.create_dataset(f"{name}/own", data=own, chunks=(7, 9), **options)
    some = file.create_dataset("some", (300, 40), "<i4", chunks=(50, 40), fillvalue=-1)
    some[60:70] = rank
    file.create_dataset("never", (500,), "<f8", fillvalue=0.5)
    file["flags"] = np.arange(2000) % 3 == 0
    file["scalar"] = np.int64(rank)
    file["text"] = "not an array"
    make(file, "compact", np.arange(300), compact=True)


def arrays(rank: int) -> dict[str, np.ndarray]:
    own = np.random.default_rng(20 + rank).standard_normal((40, 30))
    return {
        "shared": SHARED,
        "fortran": np.asfortranarray(SHARED),
        "layers.0/own": own,
        "big": own.astype(">f8"),
        "step": np.array(rank),
        "none": np.zeros((0, 5)),
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("encoded") / "run"
    for rank in range(2):
        folder = root / f"rank_{rank}"
        folder.mkdir(parents=True)
        for libver in ("earliest", "latest"):
            data = hdf5_file(lambda file, r=rank: weights(file, r), libver, userblock_size=512)
            (folder / f"{libver}.h5").write_bytes(data)
        np.savez(folder / "plain.npz", **arrays(rank))
        np.savez_compressed(folder / "packed.npz", **arrays(rank))
        np.save(folder / "one.npy", arrays(rank)["fortran"])
        about = {"metadata.json": b"{}", "config.json": b"{}"}
        archive = {**about, "model.weights.h5": hdf5_file(lambda f, r=rank: weights(f, r))}
        (folder / "model.keras").write_bytes(zip_file(archive))
        (folder / "packed.keras").write_bytes(zip_file(archive, archive))
    return dressed(root, root.parent / "dressed")


@pytest.fixture(scope="module")
def store(tree: Path) -> Path:
    slim(tree, tree.parent / "store", min_saving=0)
    return tree.parent / "store"


def read(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every array of a file, by numpy or h5py."""
    if path.suffix == ".npy":
        yield path.stem, np.load(path)
    elif path.suffix == ".npz":
        with np.load(path) as archive:
            yield from ((name, archive[name]) for name in archive.files)
    elif path.name == "packed.keras":
        return
    else:
        data: Any = path.read_bytes()
        if path.suffix == ".keras":
            data = zipfile.ZipFile(path).read("model.weights.h5")
        with h5py.File(io.BytesIO(data)) as file:
            names: list[str] = []
            file.visit(names.append)
            for name in [*names, "tied"]:
                if isinstance(file[name], h5py.Dataset) and name != "text":
                    yield name, file[name][()]


def same(found: np.ndarray, truth: Any) -> bool:
    truth = np.asarray(truth)
    return (found.dtype, found.shape) == (truth.dtype, truth.shape) and bool(
        found.tobytes() == truth.tobytes()
    )


def files_of(tree: Path) -> list[Path]:
    return [
        path
        for path in sorted(tree.rglob("*"))
        if path.suffix in (".h5", ".npz", ".npy", ".keras") and not path.is_symlink()
    ]


def test_a_tree_of_encoded_tensors_comes_back_identical(
    tree: Path, store: Path, tmp_path: Path
) -> None:
    before = snapshot(tree)
    checked = verify(store, against=tree)
    assert (checked.problems, checked.notes, checked.safe) == ([], [], True)
    restore(store, tmp_path / "back")
    assert snapshot(tmp_path / "back") == before
    way_out = [sys.executable, "-I", "-S", store / "restore.py", tmp_path / "without"]
    subprocess.run(way_out, check=True, capture_output=True)
    assert snapshot(tmp_path / "without") == before


def test_what_ranks_have_in_common_is_stored_once(tree: Path, store: Path) -> None:
    """Contiguous, in chunks of whole rows, in npz: one array is one copy."""
    in_tree = sum(path.read_bytes().count(SHARED.tobytes()) for path in files_of(tree))
    in_store = sum(
        path.read_bytes().count(SHARED.tobytes()) for path in store.rglob("*") if path.is_file()
    )
    assert in_tree >= 8 and in_store == 1


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_views_are_what_numpy_and_h5py_read(tree: Path, store: Path, backend: Any) -> None:
    compared = 0
    for place in (tree, store):
        with slimckpt.open(place, backend) as checkpoint:
            for path in files_of(tree):
                view = checkpoint.files[str(path.relative_to(tree))]
                truth = dict(read(path))
                assert set(view) == set(truth), path
                for name, array in truth.items():
                    assert same(view[name], array), (path, name)
                    assert not view[name].flags.writeable
                    compared += 1
    assert compared > 2 * 2 * 60


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_writable_tensors_are_independent_but_for_those_tied_in_the_file(
    tmp_path: Path, backend: Any
) -> None:
    def write(file: h5py.File) -> None:
        for name in ("one", "other"):
            file.create_dataset(name, data=SHARED, chunks=(9, 7), compression="gzip")
            file.create_dataset(f"never {name}", (500,), "<f4", fillvalue=0.5)
        file["tied"] = file["one"]
        make(file, "compact", SHARED[0], compact=True)

    folder = tmp_path / "run" / "rank_0"
    folder.mkdir(parents=True)
    (folder / "w.h5").write_bytes(hdf5_file(write))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for place in ("run", "store"):
        with slimckpt.open(tmp_path / place, backend) as checkpoint:
            view = checkpoint.rank(0, writable=True)
            for name in ("one", "never one", "compact"):
                view[name][...] = 7
            assert (view["one"] == 7).all() and (view["tied"] == 7).all()
            assert same(view["other"], SHARED)
            assert (view["never one"] == 7).all() and (view["never other"] == 0.5).all()
            assert same(checkpoint.rank(0)["one"], SHARED)
            assert same(checkpoint.rank(0)["compact"], SHARED[0])


def test_strings_are_no_arrays_and_packed_weights_are_bytes(tree: Path, store: Path) -> None:
    for place in (tree, store):
        with slimckpt.open(place) as checkpoint:
            with pytest.raises(OpaqueTensorError):
                checkpoint.files["rank_0/latest.h5"]["text"]
            view = checkpoint.files["rank_1/packed.keras"]
            assert (list(view), view.opaque) == ([], ("model.weights.h5",))
            inside = zipfile.ZipFile(tree / "rank_1/packed.keras").read("model.weights.h5")
            assert view.raw("model.weights.h5") == inside


def test_a_filter_that_is_not_undone_fails_its_tensor_alone(tmp_path: Path) -> None:
    def write(file: h5py.File) -> None:
        file["w"] = SHARED
        numbers = np.arange(4000, dtype="<i4")
        file.create_dataset("scaled", data=numbers, chunks=(1000,), scaleoffset=0)

    for rank in range(2):
        folder = tmp_path / "run" / f"rank_{rank}"
        folder.mkdir(parents=True)
        (folder / "w.h5").write_bytes(hdf5_file(write))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    for place in ("run", "store"):
        with slimckpt.open(tmp_path / place) as checkpoint:
            view = checkpoint.rank(1)
            assert same(view["w"], SHARED)
            with pytest.raises(NotUnderstoodError, match=r"w\.h5: tensor 'scaled'.*scaleoffset"):
                view["scaled"]
    assert verify(tmp_path / "store", against=tmp_path / "run").safe


def test_a_tensor_that_no_memory_holds_decoded_says_so(tmp_path: Path) -> None:
    def write(file: h5py.File) -> None:
        options = {"chunks": (1024,), "maxshape": (None,)}
        file.create_dataset("vast", (2**50,), "<f8", **options)[5] = 1

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "w.h5").write_bytes(hdf5_file(write))
    told = pytest.raises(NotUnderstoodError, match=rf"'vast'.*no memory.*{2**53} bytes")
    with slimckpt.open(tmp_path / "run") as checkpoint, told:
        checkpoint.rank()["vast"]


def test_damage_of_a_decoded_tensor_names_it(tmp_path: Path) -> None:
    def write(file: h5py.File) -> None:
        file.create_dataset("packed", data=SHARED, chunks=(64, 50), compression="gzip")

    for rank in range(2):
        folder = tmp_path / "run" / f"rank_{rank}"
        folder.mkdir(parents=True)
        (folder / "w.h5").write_bytes(hdf5_file(write))
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    stored = hdf5_file(write)
    with h5py.File(io.BytesIO(stored)) as file:
        chunk = file["packed"].id.read_direct_chunk((0, 0))[1]
    (container,) = (tmp_path / "store" / "shared").iterdir()
    data = bytearray(container.read_bytes())
    data[data.index(chunk) + len(chunk) // 2] ^= 0xFF
    container.chmod(0o600)
    container.write_bytes(data)
    with slimckpt.open(tmp_path / "store") as checkpoint:
        view = checkpoint.rank(0)
        with pytest.raises(StoreDamagedError, match=r"tensor 'packed'.*deflated bytes"):
            view["packed"]


def test_verify_tells_of_a_member_that_was_damaged_before_it_was_slimmed(tmp_path: Path) -> None:
    for rank in range(2):
        folder = tmp_path / "run" / f"rank_{rank}"
        folder.mkdir(parents=True)
        np.savez(folder / "w.npz", w=SHARED, v=SHARED + 1)
        data = bytearray((folder / "w.npz").read_bytes())
        data[data.index(SHARED.tobytes()) + 9] ^= 1
        (folder / "w.npz").write_bytes(data)
    slim(tmp_path / "run", tmp_path / "store", min_saving=0)
    checked = verify(tmp_path / "store", against=tmp_path / "run")
    assert len(checked.problems) == 2
    assert all("'w.npy' has CRC32" in problem for problem in checked.problems)
