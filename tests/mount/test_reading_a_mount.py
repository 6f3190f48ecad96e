"""Every way to read a mounted file gives the bytes of the original, or an explained error."""

import errno
import hashlib
import mmap
import os
import platform
import random
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from mindspore_bytes import record
from mounts import running
from safetensors_bytes import safetensors_file
from trees import body, contents, small_run

from slimckpt.mount import mounted
from slimckpt.rewrite.slim import slim
from slimckpt.store.reader import Store

LARGE = 5 << 20
"""More than a request of the kernel can ask for."""


def mixed_run(root: Path) -> Path:
    """Two ranks of one file each: large and tiny tensors, shared, own and constant ones."""
    for rank in (0, 1):
        (root / f"rank_{rank}").mkdir(parents=True)
        tiny = [(f"tiny.{i}", "F32", [1024], body(100 + i, 4096)) for i in range(60)]
        (root / f"rank_{rank}" / "model.safetensors").write_bytes(
            safetensors_file(
                [
                    ("shared", "F32", [LARGE // 4], body(1, LARGE)),
                    *tiny,
                    ("own", "U8", [LARGE + 13], body(2 + rank, LARGE + 13)),
                    ("zeros", "F32", [LARGE // 4], bytes(LARGE)),
                    ("scalar", "F32", [1], body(3, 4)),
                ]
            )
        )
    (root / "whole.bin").write_bytes(body(7, 3_000_001))
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run")
    mixed_run(place / "source")
    slim(place / "source", place / "store", min_saving=0)
    return place


def test_random_reads_are_equal(run: Path, point: Path) -> None:
    chance = random.Random(5)
    with mounted(run / "store", point):
        for path in ("rank_0/model.safetensors", "rank_1/model.safetensors", "whole.bin"):
            expected = (run / "source" / path).read_bytes()
            with (point / path).open("rb", buffering=0) as file:
                for _ in range(300):
                    nbytes = chance.choice([1, 7, 4096, 65537, 1 << 20, 3_000_000])
                    at = chance.randrange(len(expected) + 10)
                    assert os.pread(file.fileno(), nbytes, at) == expected[at : at + nbytes]


def test_many_readers_at_once_each_get_their_bytes(run: Path, point: Path) -> None:
    expected = {
        path: hashlib.sha256(data).hexdigest() for path, data in contents(run / "source").items()
    }
    program = (
        "import hashlib, sys\n"
        "with open(sys.argv[1], 'rb', buffering=0) as file:\n"
        "    found = hashlib.sha256()\n"
        "    while data := file.read(int(sys.argv[2])):\n"
        "        found.update(data)\n"
        "print(found.hexdigest())"
    )

    def read(path: bytes, nbytes: int) -> str:
        command = [sys.executable, "-c", program, os.path.join(os.fsencode(point), path)]
        done = subprocess.run([*command, str(nbytes)], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    jobs = [(path, nbytes) for path in expected for nbytes in (10_000, 1 << 17, 4 << 20)] * 2
    with mounted(run / "store", point), ThreadPoolExecutor(len(jobs)) as executor:
        for (path, _), found in zip(jobs, executor.map(lambda j: read(*j), jobs), strict=True):
            assert found == expected[path]


def test_a_mounted_file_can_be_mapped(run: Path, point: Path) -> None:
    path = "rank_1/model.safetensors"
    expected = (run / "source" / path).read_bytes()
    with mounted(run / "store", point), (point / path).open("rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            for at in random.Random(6).sample(range(len(expected)), 500):
                assert mapped[at] == expected[at]
            assert mapped[:] == expected
        assert np.array_equal(
            np.memmap(point / path, np.uint8, "r"), np.frombuffer(expected, np.uint8)
        )


def test_what_was_read_is_not_asked_for_again(run: Path, point: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "store", tmp_path / "store")
    path = "rank_0/model.safetensors"
    expected = (run / "source" / path).read_bytes()
    with mounted(tmp_path / "store", point):
        assert (point / path).read_bytes() == expected
        # From here on the store could not be asked.
        for file in (tmp_path / "store").rglob("*"):
            if file.is_file():
                os.truncate(file, 0)
        assert (point / path).read_bytes() == expected


def containers_of(store: Path) -> list[Path]:
    found = [c.name for part in Store(os.fsencode(store)).parts() for c in part.containers]
    return sorted(store / os.fsdecode(name) for name in set(found))


def errors_of(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if line.startswith("slimckpt mount: ")]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "longer", "removed"])
def test_a_damaged_container_is_an_io_error_and_one_line_that_names_it(
    damage: str, run: Path, point: Path, tmp_path: Path
) -> None:
    shutil.copytree(run / "store", tmp_path / "store")
    (hurt,) = [path for path in containers_of(tmp_path / "store") if "rank_0" in str(path)]
    size = hurt.stat().st_size
    if damage == "removed":
        hurt.unlink()
    else:
        os.truncate(hurt, {"truncated": size - 1, "emptied": 0, "longer": size + 1}[damage])
    with (tmp_path / "log").open("wb") as log, mounted(tmp_path / "store", point, log=log):
        for _ in range(2):
            with pytest.raises(OSError) as caught:
                (point / "rank_0" / "model.safetensors").read_bytes()
            assert caught.value.errno == errno.EIO
        # The others do not lie in it.
        assert (point / "whole.bin").read_bytes() == body(7, 3_000_001)
        other = Path("rank_1/model.safetensors")
        assert (point / other).read_bytes() == (run / "source" / other).read_bytes()
    (line,) = errors_of(tmp_path / "log")
    assert str(hurt) in line and "input/output error" in line


def test_a_container_cut_while_it_is_mounted_is_an_io_error_where_it_is_missing(
    run: Path, point: Path, tmp_path: Path
) -> None:
    shutil.copytree(run / "store", tmp_path / "store")
    path = "rank_0/model.safetensors"
    with (
        (tmp_path / "log").open("wb") as log,
        mounted(tmp_path / "store", point, log=log),
        (point / path).open("rb", buffering=0) as file,
    ):
        assert file.read(100) == (run / "source" / path).read_bytes()[:100]
        # What was asked for ahead is kept by the kernel; the middle of the file was not.
        at = 2 * LARGE - 1000
        for container in containers_of(tmp_path / "store"):
            os.truncate(container, 5000)
        with pytest.raises(OSError) as caught:
            os.pread(file.fileno(), 10, at)
        assert caught.value.errno == errno.EIO
    assert errors_of(tmp_path / "log")


def test_a_damaged_index_is_an_io_error_when_its_file_is_opened(
    run: Path, point: Path, tmp_path: Path
) -> None:
    shutil.copytree(run / "store", tmp_path / "store")
    store = Store(os.fsencode(tmp_path / "store"))
    (part,) = store.parts()
    (entry,) = [e for e in part.files if e.file.path == b"rank_1/model.safetensors"]
    place = entry.index
    assert place is not None
    name = tmp_path / "store" / os.fsdecode(part.containers[place.container].name)
    with name.open("r+b") as file:
        file.seek(place.offset + place.nbytes // 2)
        flipped = bytes([file.read(1)[0] ^ 1])
        file.seek(-1, os.SEEK_CUR)
        file.write(flipped)
    with (tmp_path / "log").open("wb") as log, mounted(tmp_path / "store", point, log=log):
        with pytest.raises(OSError) as caught:
            (point / "rank_1" / "model.safetensors").open("rb")
        assert caught.value.errno == errno.EIO
    (line,) = errors_of(tmp_path / "log")
    assert "index of rank_1/model.safetensors is damaged" in line


def test_a_file_kept_whole_that_changed_is_not_shown_as_if_it_had_not(
    run: Path, point: Path, tmp_path: Path
) -> None:
    shutil.copytree(run / "store", tmp_path / "store")
    os.utime(tmp_path / "store" / "whole" / "whole.bin", ns=(1, 1))
    with (tmp_path / "log").open("wb") as log, mounted(tmp_path / "store", point, log=log):
        with pytest.raises(OSError) as caught:
            (point / "whole.bin").read_bytes()
        assert caught.value.errno == errno.EIO
    (line,) = errors_of(tmp_path / "log")
    assert "whole.bin was changed after it was slimmed" in line


@pytest.fixture
def dropped(tmp_path: Path) -> Path:
    """A store without the moments of two ranks; beside it the originals."""
    for rank in (0, 1):
        path = tmp_path / "source" / f"rank_{rank}" / "net-1_1.ckpt"
        path.parent.mkdir(parents=True)
        path.write_bytes(
            record("w", "Float32", [5000], body(1, 20_000))
            + record("adam_m.w", "Float32", [5000], body(10 + rank, 20_000))
            + record("b", "Float32", [3000], body(2, 12_000))
        )
    slim(tmp_path / "source", tmp_path / "store", min_saving=0, drop=["optimizer"])
    return tmp_path


def test_only_what_was_dropped_is_an_io_error_and_a_line_says_why(
    dropped: Path, point: Path
) -> None:
    path = "rank_1/net-1_1.ckpt"
    expected = (dropped / "source" / path).read_bytes()
    start = expected.index(body(11, 20_000))
    end = start + 20_000
    with (
        (dropped / "log").open("wb") as log,
        mounted(dropped / "store", point, log=log),
        (point / path).open("rb", buffering=0) as file,
    ):
        assert os.fstat(file.fileno()).st_size == len(expected)
        assert os.pread(file.fileno(), start, 0) == expected[:start]
        assert os.pread(file.fileno(), len(expected), end) == expected[end:]
        for at, nbytes in ((start, 1), (end - 1, 1), (start - 1, 2), (end - 1, 2), (0, end)):
            with pytest.raises(OSError) as caught:
                os.pread(file.fileno(), nbytes, at)
            assert caught.value.errno == errno.EIO
        kernel = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
        if kernel >= (6, 6):
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[:4096] == expected[:4096]
    (line,) = errors_of(dropped / "log")
    assert f"{path}: bytes {start} to {end} belong to a tensor that was left out" in line
    assert "--drop" in line


def test_more_files_than_a_shell_may_open_can_be_open_at_once(tmp_path: Path, point: Path) -> None:
    source = small_run(tmp_path / "source")
    for number in range(40):
        shutil.copytree(source / "rank_0", source / f"rank_{number + 2}")
        (source / f"rank_{number + 2}" / "more.bin").write_bytes(body(number, 100))
    slim(source, tmp_path / "store", min_saving=0)
    expected = (source / "rank_0" / "net-1_1.ckpt").read_bytes()
    few = f'ulimit -S -n 30; exec {sys.executable} -m slimckpt mount "$@"'
    command = ["bash", "-c", few, "bash", tmp_path / "store", point]
    with running(command, stderr=None) as process:
        assert process.stdout is not None and process.stdout.readline()
        files = [path.open("rb") for path in sorted(point.glob("rank_*/*"))]
        try:
            assert len(files) == 82
            found = [f.read() for f in files if f.name.endswith("/net-1_1.ckpt")]
            assert found[0] == expected and found[2:] == [expected] * 40
        finally:
            for file in files:
                file.close()
            process.terminate()
        assert process.wait(20) == 0
