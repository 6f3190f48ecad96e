"""Names in the order in which their bytes lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES
from trees import body, small_run

from slimckpt import views
from slimckpt.rewrite.slim import slim
from slimckpt.views import Checkpoint

Open = Callable[[Path], Checkpoint]
FOLDERS = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


def mapped_from() -> list[tuple[range, int, str]]:
    """Addresses that are mapped from files, the offset there, and the file, as the kernel says."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, _, path = (*line.split(maxsplit=5), "")[:6]
        first, last = (int(address, 16) for address in addresses.split("-"))
        found.append((range(first, last), int(offset, 16), path))
    return found


def lowest_address(array: np.ndarray) -> int:
    before = sum(
        min((dim - 1) * stride, 0) for dim, stride in zip(array.shape, array.strides, strict=True)
    )
    return array.__array_interface__["data"][0] + before


def test_names_come_as_their_bytes_lie_not_as_they_are_listed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for number, name in enumerate("zcma"):
            file.create_dataset(name, data=np.frombuffer(body(number, 2000), "<i4"))
        at = {name: file[name].id.get_offset() for name in file}
    with views.open(tmp_path) as ckpt:
        view = ckpt.rank(0)
        assert view.in_storage_order() == sorted(at, key=at.__getitem__) == list("zcma")
        assert list(view) == list("acmz")


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_name_comes_once_and_addresses_of_a_file_rise(
    folder: str, stored: bool, tmp_path: Path
) -> None:
    where = SAMPLES / folder
    if stored:
        slim(where, tmp_path / "store", min_saving=0)
        where = tmp_path / "store"
    with views.open(where) as ckpt:
        for file in ckpt.files.values():
            if file.condition != "understood":
                continue
            view = file.by_path
            order = view.in_storage_order()
            assert sorted(order) == sorted(view)
            arrays = [view[name] for name in order]
            maps, places = mapped_from(), []
            for array in arrays:
                low = lowest_address(array)
                places += [
                    (p, at + low - a.start) for a, at, p in maps if low in a and p[:1] == "/"
                ]
            assert places == sorted(places)


def test_files_come_one_after_the_other_by_path(tmp_path: Path, open_any: Open) -> None:
    root = tmp_path / "source"
    for file, names in (("b", "ny"), ("a", "xm"), ("c", "o")):
        (root / "rank_0").mkdir(parents=True, exist_ok=True)
        tensors = [(name, "F32", [400], body(ord(name), 1600)) for name in names]
        (root / "rank_0" / f"{file}.safetensors").write_bytes(safetensors_file(tensors))
    view = open_any(root).rank(0)
    assert view.in_storage_order() == list("xmnyo")
    assert view.by_path.in_storage_order() == list("xmnyo")


def test_tensors_without_bytes_come_last_in_the_order_of_the_view(
    tmp_path: Path, open_any: Open
) -> None:
    root = tmp_path / "source"
    root.mkdir()
    with h5py.File(root / "data.h5", "w") as file:
        file.create_dataset("a never written", (500,), "<f4")
        file.create_dataset("c empty", (0, 3), "<f4")
        file.create_dataset("d", data=np.frombuffer(body(1, 2000), "<i4"))
        file.create_dataset("b also never written", (500,), "<f4")
    view = open_any(root).rank(0)
    bare = [name for name in view if name != "d"]
    assert len(bare) == 3
    assert view.in_storage_order() == ["d", *bare]


def test_a_damaged_tensor_comes_last_and_hides_none(tmp_path: Path, monkeypatch: Any) -> None:
    root = small_run(tmp_path / "run")
    with views.open(root) as ckpt:
        view = ckpt.files["rank_0/net-1_1.ckpt"]
        assert view.in_storage_order() == ["embedding", "moment", "bias"]
        real = view._pieces

        def damaged(name: str) -> Any:
            if name == "embedding":
                raise ckpt._provider.damaged("embedding")
            return real(name)

        monkeypatch.setattr(view, "_pieces", damaged)
        assert view.in_storage_order() == ["moment", "bias", "embedding"]
