"""Backends: bytes of files as arrays, mapped or read."""

import gc
import hashlib
import logging
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from slimckpt.errors import ClosedError, DamagedFileError, StoreDamagedError, UsageError
from slimckpt.sources import backends, files
from slimckpt.sources.backends import (
    MAP_PRIVATE_FROM,
    WARM,
    Backend,
    MmapBackend,
    PreadBackend,
    make_backend,
)
from slimckpt.sources.files import is_network, on_network

SIZE = 3 * MAP_PRIVATE_FROM + 12345
DATA = np.random.default_rng(7).bytes(SIZE)


@pytest.fixture
def path(tmp_path: Path) -> bytes:
    file = tmp_path / "data"
    file.write_bytes(DATA)
    return os.fsencode(file)


class BackendTests:
    """Inherited by the tests of each backend."""

    kind: ClassVar[type[Backend]]

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        made = self.kind()
        yield made
        made.close()

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(0, SIZE), (0, 1), (1, 4096), (4095, 2), (SIZE - 1, 1), (SIZE, 0)]
    )
    def test_a_view_is_the_bytes_of_the_range(
        self, backend: Backend, path: bytes, offset: int, nbytes: int
    ) -> None:
        found = backend.view(path, offset, nbytes, SIZE)
        assert (found.dtype, found.shape) == (np.uint8, (nbytes,))
        assert found.tobytes() == DATA[offset : offset + nbytes]

    @pytest.mark.parametrize("nbytes", [0, 1, 5000, 2 * MAP_PRIVATE_FROM])
    def test_a_view_cannot_be_written_to(self, backend: Backend, path: bytes, nbytes: int) -> None:
        found = backend.view(path, 3, nbytes, SIZE)
        assert not found.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            found[:] = 0

    @pytest.mark.parametrize("offset", [0, 1, 4095, 70_001])
    @pytest.mark.parametrize("after", [0, 1, 16, 31, 32, 2048, 4095])
    @pytest.mark.parametrize("nbytes", [0, 1, 5000, 65_536, 1 << 20, (2 << 20) + 7, WARM + 70_000])
    def test_memory_is_filled_wherever_it_lies(
        self, backend: Backend, tmp_path: Path, offset: int, after: int, nbytes: int
    ) -> None:
        """Where it begins, ``after`` the offset modulo a page, decides how bytes are brought."""
        data = np.random.default_rng(nbytes).bytes(offset + nbytes + 1)
        (tmp_path / "data").write_bytes(data)
        room = np.full(nbytes + 2 * 4096, 0xA5, np.uint8)
        start = (offset + after - room.ctypes.data) % 4096
        memory = room[start : start + nbytes]
        assert not nbytes or (memory.ctypes.data - offset) % 4096 == after
        backend.read_into(os.fsencode(tmp_path / "data"), offset, memory, len(data))
        assert memory.tobytes() == data[offset : offset + nbytes]
        assert (room[:start] == 0xA5).all() and (room[start + nbytes :] == 0xA5).all()

    @pytest.mark.parametrize("offset", [0, 1, 4097, 70_001])
    @pytest.mark.parametrize("nbytes", [0, 1, 1000, MAP_PRIVATE_FROM, 2 * MAP_PRIVATE_FROM + 7])
    def test_private_memory_can_be_written_to_and_the_file_stays(
        self, backend: Backend, path: bytes, offset: int, nbytes: int
    ) -> None:
        one = backend.private(path, offset, nbytes, SIZE)
        other = backend.private(path, offset, nbytes, SIZE)
        assert one.tobytes() == DATA[offset : offset + nbytes]
        one[:] = 0xA5
        assert other.tobytes() == DATA[offset : offset + nbytes]
        assert one.tobytes() == b"\xa5" * nbytes
        view = backend.view(path, offset, nbytes, SIZE)
        assert view.tobytes() == DATA[offset : offset + nbytes]
        assert Path(os.fsdecode(path)).read_bytes() == DATA

    @pytest.mark.parametrize("way", ["view", "private"])
    def test_a_file_that_became_shorter_or_longer_is_an_error_that_says_so(
        self, backend: Backend, path: bytes, way: str
    ) -> None:
        for nbytes in (10, 2 * MAP_PRIVATE_FROM):
            with pytest.raises(
                DamagedFileError,
                match=f"data looks truncated: expected {SIZE + 1} bytes, found {SIZE}",
            ):
                getattr(backend, way)(path, 0, nbytes, SIZE + 1)
            with pytest.raises(DamagedFileError, match=f"was changed: .* {SIZE - 1} .* {SIZE}"):
                getattr(backend, way)(path, 0, nbytes, SIZE - 1)

    @pytest.mark.parametrize("way", ["view", "private"])
    @pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (SIZE, 1), (0, SIZE + 1)])
    def test_a_range_outside_the_file_is_an_error(
        self, backend: Backend, path: bytes, way: str, offset: int, nbytes: int
    ) -> None:
        with pytest.raises(DamagedFileError, match=f"bytes {offset} to {offset + nbytes}"):
            getattr(backend, way)(path, offset, nbytes, SIZE)

    @pytest.mark.parametrize("way", ["view", "private"])
    def test_a_missing_file_a_directory_and_a_fifo_are_errors(
        self, backend: Backend, tmp_path: Path, way: str
    ) -> None:
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "directory").mkdir()
        for name, why in (
            ("missing", "No such file"),
            ("directory", "expected a regular file"),
            ("fifo", "expected a regular file"),
        ):
            with pytest.raises(DamagedFileError, match=f"{name}: {why}"):
                getattr(backend, way)(os.fsencode(tmp_path / name), 0, 1, 1)

    def test_the_class_of_errors_is_the_callers_choice(self, path: bytes) -> None:
        with pytest.raises(StoreDamagedError, match="truncated"):
            self.kind(StoreDamagedError).view(path, 0, 1, SIZE + 1)

    def test_arrays_stay_valid_when_the_backend_is_closed_and_gone(self, path: bytes) -> None:
        backend = self.kind()
        view = backend.view(path, 5, 100_000, SIZE)
        private = backend.private(path, 5, 2 * MAP_PRIVATE_FROM, SIZE)
        backend.close()
        del backend
        gc.collect()
        os.unlink(path)
        assert view.tobytes() == DATA[5:100_005]
        assert private.tobytes() == DATA[5 : 5 + 2 * MAP_PRIVATE_FROM]

    def test_a_closed_backend_gives_nothing(self, backend: Backend, path: bytes) -> None:
        backend.view(path, 0, 1, SIZE)
        backend.close()
        backend.close()
        for way in (backend.view, backend.private):
            with pytest.raises(ClosedError):
                way(path, 0, 1, SIZE)

    def test_no_descriptor_stays_open_after_an_error(self, backend: Backend, path: bytes) -> None:
        before = os.listdir("/proc/self/fd")
        for way in (backend.view, backend.private):
            with pytest.raises(DamagedFileError):
                way(path, 0, 2 * MAP_PRIVATE_FROM, SIZE + 1)
        assert os.listdir("/proc/self/fd") == before


class TestPread(BackendTests):
    kind = PreadBackend

    def test_it_never_maps(
        self, backend: Backend, path: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mmap, "mmap", None)
        assert backend.view(path, 0, SIZE, SIZE).tobytes() == DATA
        assert backend.private(path, 0, SIZE, SIZE).tobytes() == DATA


class TestMmap(BackendTests):
    kind = MmapBackend

    def test_a_file_is_mapped_once_and_views_share_its_pages(
        self, backend: Backend, path: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = backend.view(path, 0, SIZE, SIZE)
        monkeypatch.setattr(backends, "_mmap", None)
        monkeypatch.setattr(os, "open", None)
        for offset in range(0, SIZE, 100_000):
            assert np.shares_memory(first, backend.view(path, offset, 1, SIZE))

    def test_private_memory_of_less_than_a_mebibyte_takes_no_mapping(
        self, backend: Backend, path: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backends, "_mmap", None)
        found = backend.private(path, 1, MAP_PRIVATE_FROM - 1, SIZE)
        assert found.tobytes() == DATA[1:MAP_PRIVATE_FROM]

    def test_large_private_memory_is_copy_on_write_pages_of_the_range_alone(
        self, backend: Backend, path: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        real = backends._mmap

        def spy(*args: Any) -> mmap.mmap:
            asked.append(args[1:])
            return real(*args)

        monkeypatch.setattr(backends, "_mmap", spy)
        granularity = mmap.ALLOCATIONGRANULARITY
        backend.private(path, granularity + 5, MAP_PRIVATE_FROM, SIZE)
        assert asked == [(MAP_PRIVATE_FROM + 5, mmap.ACCESS_COPY, granularity)]

    def test_where_mapping_is_refused_files_are_read_and_it_is_said_once(
        self,
        backend: Backend,
        path: bytes,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def refuse(*args: Any, **kept: Any) -> None:
            raise OSError(19, "No such device")

        monkeypatch.setattr(mmap, "mmap", refuse)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                view = backend.view(path, 7, 3000, SIZE)
                private = backend.private(path, 7, 2 * MAP_PRIVATE_FROM, SIZE)
        assert view.tobytes() == DATA[7:3007]
        assert not view.flags.writeable
        assert private.tobytes() == DATA[7 : 7 + 2 * MAP_PRIVATE_FROM]
        private[:] = 0
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "No such device" in caplog.text and "data" in caplog.text
        assert hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).digest() == (
            hashlib.sha256(DATA).digest()
        )

    def test_on_a_network_each_block_is_read_once_before_it_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = 5 * WARM + 17
        file = tmp_path / "far"
        file.write_bytes(bytes(size))
        reads: list[tuple[int, int]] = []
        real = os.preadv

        def spy(fd: int, buffers: list[memoryview], offset: int) -> int:
            reads.append((offset, sum(map(len, buffers))))
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", spy)
        backend = MmapBackend()
        backend.view(os.fsencode(file), 0, size, size)
        assert reads == []
        monkeypatch.setattr(files, "on_network", lambda directory: True)
        for offset in (WARM + 5, WARM + 500, 2 * WARM - 1):
            backend.view(os.fsencode(file), offset, 10, size)
        assert reads == [(WARM, WARM), (2 * WARM, WARM)]
        backend.private(os.fsencode(file), 0, size, size)
        assert sorted(reads) == [(block * WARM, WARM) for block in range(6)]


def test_the_default_maps_and_an_unknown_name_is_refused() -> None:
    assert isinstance(make_backend(None), MmapBackend)
    assert isinstance(make_backend("mmap"), MmapBackend)
    assert isinstance(make_backend("pread"), PreadBackend)
    with pytest.raises(UsageError, match="'dma'"):
        make_backend("dma")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("nfs", True),
        ("nfs4", True),
        ("cifs", True),
        ("smb3", True),
        ("lustre", True),
        ("fuse.sshfs", True),
        ("fuse", True),
        ("beegfs", True),
        ("fuseblk", False),
        ("ext4", False),
        ("xfs", False),
        ("btrfs", False),
        ("tmpfs", False),
        ("overlay", False),
    ],
)
def test_network_file_systems_are_known_by_name(name: str, network: bool) -> None:
    assert is_network(name) is network


def test_a_directory_is_on_a_network_when_the_mount_of_its_device_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for kind, expected in (("nfs4", True), ("ext4", False)):
        on_network.cache_clear()
        monkeypatch.setattr(files, "_mounts", lambda kind=kind: [(number, kind)])
        assert on_network(os.fsencode(tmp_path)) is expected
    monkeypatch.undo()
    on_network.cache_clear()
    assert not on_network(b"/no/such/directory")
    assert files._mounts()


def test_pages_that_are_let_go_come_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    nbytes = 64 << 20
    path.write_bytes(bytes(range(256)) * (nbytes // 256))
    backend = MmapBackend()

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text()
        (block,) = re.findall(rf"{re.escape(str(path))}\n(?:.*\n)*?Rss:\s+(\d+) kB", text)
        return int(block) * 1024

    array = backend.view(bytes(path), 0, nbytes, nbytes)
    total = int(array.sum())
    assert resident() > nbytes / 2
    backend.unload()
    assert resident() < nbytes / 2
    assert int(array.sum()) == total == 255 * 128 * (nbytes // 256)
    PreadBackend().unload()
