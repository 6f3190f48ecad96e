"""Bringing pages in, in the background."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors_bytes import safetensors_file
from sample_files import SAMPLES
from trees import body

from slimckpt import views
from slimckpt.errors import (
    ClosedError,
    DamagedFileError,
    OpaqueTensorError,
    UnknownTensorError,
)
from slimckpt.sources import files
from slimckpt.sources.backends import WARM, Backend
from slimckpt.views import Checkpoint
from slimckpt.views.prefetch import GAP, in_blocks
from slimckpt.views.providers import Stretch

Open = Callable[[Path], Checkpoint]
NBYTES = 3 * WARM
"""More than the kernel reads ahead by itself in most places."""


def two_tensors(root: Path) -> Path:
    root.mkdir()
    tensors = [(name, "U8", [NBYTES], body(ord(name), NBYTES)) for name in "ab"]
    (root / "model.safetensors").write_bytes(safetensors_file(tensors))
    return root


class Reads:
    """Where files were read by position, and how much at a time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, int, int]] = []
        real = os.preadv

        def preadv(fd: int, buffers: Any, offset: int) -> int:
            got = real(fd, buffers, offset)
            self.seen.append((os.readlink(f"/proc/self/fd/{fd}"), offset, got))
            return got

        monkeypatch.setattr(os, "preadv", preadv)


def resident(path: Path) -> np.ndarray:
    """For each page of a file, whether it is in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        found = np.zeros(-(-len(array) // mmap.PAGESIZE), np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(len(array)),
            ctypes.c_void_p(found.ctypes.data),
        )
        assert not failed
        del array
    return found & 1


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    if resident(path).any():
        pytest.skip("this file system keeps its pages")


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_pages_of_all_tensors_are_in_the_page_cache(tmp_path: Path, backend: Any) -> None:
    path = two_tensors(tmp_path / "run") / "model.safetensors"
    with views.open(tmp_path / "run", backend) as ckpt:
        view = ckpt.rank(0)
        evict(path)
        assert view.prefetch().wait()
        assert resident(path)[1:].all()
        assert view["b"].tobytes() == body(ord("b"), NBYTES)


def test_only_what_is_asked_for_is_read_by_large_reads_one_behind_the_other(
    tmp_path: Path, open_any: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = open_any(two_tensors(tmp_path / "source")).rank(0)
    view["a"]  # with a stage, this brings the file there
    for names, tensors in (("b", 1), (["a"], 1), (None, 2), (iter("ba"), 2)):
        with monkeypatch.context() as patch:
            reads = Reads(patch)
            assert view.prefetch(names).wait()
        assert len({path for path, _, _ in reads.seen}) == 1
        seen = sorted((offset, got) for _, offset, got in reads.seen)
        assert 0 <= sum(got for _, got in seen) - tensors * NBYTES <= GAP
        assert all(got <= WARM for _, got in seen) and len(seen) <= tensors * NBYTES / WARM + 1
        assert [offset for offset, _ in seen[1:]] == [offset + got for offset, got in seen[:-1]]


def test_it_returns_at_once_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    warmed: list[int] = []

    def slow(self: Backend, path: bytes, offset: int, nbytes: int, size: int) -> None:
        begun.set()
        may_go_on.wait(20)
        warmed.append(offset)

    monkeypatch.setattr(Backend, "warm", slow)
    with views.open(two_tensors(tmp_path / "run")) as ckpt:
        view = ckpt.rank(0)
        ahead = view.prefetch()
        assert begun.wait(20) and not ahead.done
        assert not ahead.wait(0.01)
        assert view["a"][0] == body(ord("a"), 1)[0]
        ahead.cancel()
        may_go_on.set()
        assert ahead.wait(20) and ahead.done and "done" in repr(ahead)
        assert 1 <= len(warmed) <= 4 < 2 * NBYTES // WARM


def test_closing_the_checkpoint_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    real, warmed = Backend.warm, []

    def slow(self: Backend, path: bytes, offset: int, nbytes: int, size: int) -> None:
        begun.set()
        may_go_on.wait(20)
        real(self, path, offset, nbytes, size)
        warmed.append(offset)

    monkeypatch.setattr(Backend, "warm", slow)
    ckpt = views.open(two_tensors(tmp_path / "run"))
    ahead = ckpt.rank(0).prefetch()
    assert begun.wait(20)
    ckpt.close()
    may_go_on.set()
    with pytest.raises(ClosedError):
        ahead.wait()
    assert ahead.done and warmed == []


def test_a_process_ends_without_waiting_for_it(tmp_path: Path) -> None:
    two_tensors(tmp_path / "run")
    program = (
        "import sys, time, slimckpt\n"
        "from slimckpt.sources.backends import Backend, MmapBackend\n"
        "def warm(*_): print('begun', flush=True); time.sleep(60)\n"
        "MmapBackend.warm = warm\n"
        "ahead = slimckpt.open(sys.argv[1]).rank(0).prefetch()\n"
        "time.sleep(0.2)\n"
    )
    began = time.monotonic()
    command = [sys.executable, "-c", program, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert "begun" in done.stdout
    assert time.monotonic() - began < 30


def test_an_error_is_raised_by_waiting_and_other_files_are_read(
    tmp_path: Path, open_any: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "source"
    (root / "rank_0").mkdir(parents=True)
    for name in "ab":
        tensors = [(name, "U8", [5000], body(ord(name), 5000))]
        (root / "rank_0" / f"{name}.safetensors").write_bytes(safetensors_file(tensors))
    ckpt = open_any(root)
    view = ckpt.rank(0)
    places = {name: view._pieces(name)[0].path for name in "ab"}
    bad = Path(os.fsdecode(places["a"] or b""))
    if places["a"] == places["b"]:
        pytest.skip("both lie in one container")
    bad.write_bytes(bad.read_bytes()[:-1])
    reads = Reads(monkeypatch)
    ahead = view.prefetch()
    for _ in range(2):
        with pytest.raises(ckpt._provider.damaged, match=f"{bad.name} looks truncated"):
            ahead.wait()
    assert sum(got for _, _, got in reads.seen) >= 5000


def test_names_that_are_no_arrays_are_refused_at_once(open_any: Open) -> None:
    file = next(f for f in open_any(SAMPLES / "ms_edge").files.values() if f.opaque)
    with pytest.raises(UnknownTensorError, match="no such"):
        file.prefetch("no such")
    with pytest.raises(OpaqueTensorError):
        file.prefetch([*file, file.opaque[0]])


def test_a_damaged_tensor_is_an_error_of_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with views.open(two_tensors(tmp_path / "run")) as ckpt:
        view = ckpt.rank(0)
        real = view._pieces

        def pieces(name: str) -> list[Stretch]:
            if name == "a":
                raise DamagedFileError("tensor 'a'")
            return real(name)

        monkeypatch.setattr(view, "_pieces", pieces)
        reads = Reads(monkeypatch)
        with pytest.raises(DamagedFileError, match="tensor 'a'"):
            view.prefetch().wait()
        assert sum(got for _, _, got in reads.seen) == NBYTES


def test_on_a_network_what_was_brought_in_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "on_network", lambda directory: True)
    with views.open(two_tensors(tmp_path / "run")) as ckpt:
        view = ckpt.rank(0)
        reads = Reads(monkeypatch)
        view.prefetch("a").wait()
        assert sorted({offset for _, offset, _ in reads.seen})[:3] == [0, WARM, 2 * WARM]
        before = len(reads.seen)
        assert view["a"].tobytes() == body(ord("a"), NBYTES)
        assert len(reads.seen) == before
        assert view["b"].tobytes() == body(ord("b"), NBYTES)
        assert len(reads.seen) > before


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"x", b"y", None]), st.integers(0, 4 * WARM), st.integers(0, WARM)
        ),
        max_size=12,
    )
)
def test_reads_cover_all_pieces_in_order_and_little_else(
    pieces: list[tuple[bytes | None, int, int]],
) -> None:
    size = 5 * WARM
    runs = list(in_blocks(Stretch(path, at, n, size) for path, at, n in pieces))
    assert all(run.size == size and 0 < run.nbytes <= WARM for run in runs)
    assert all(run.offset // WARM == (run.offset + run.nbytes - 1) // WARM for run in runs)
    assert runs == sorted(runs, key=lambda run: (run.path, run.offset))
    for path in (b"x", b"y"):
        wanted, read = np.zeros(size, np.bool_), np.zeros(size, np.int8)
        for _, at, n in (piece for piece in pieces if piece[0] == path):
            wanted[at : at + n] = True
        for _, at, n, _ in (run for run in runs if run.path == path):
            read[at : at + n] += 1
        assert read.max(initial=0) <= 1 and (read[wanted] == 1).all()
        spare = np.flatnonzero((read == 1) & ~wanted)
        if len(spare):
            gaps = np.split(spare, np.flatnonzero(np.diff(spare) > 1) + 1)
            assert max(map(len, gaps)) <= GAP
