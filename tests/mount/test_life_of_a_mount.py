"""A mount begins with one line or one clear error, and leaves nothing behind."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounts import is_mounted, running, take_away, until
from trees import small_run, snapshot

from slimckpt.errors import MountError
from slimckpt.mount import mounted
from slimckpt.rewrite.slim import slim

COMMAND = [sys.executable, "-m", "slimckpt", "mount"]
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    small_run(tmp_path / "source")
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    return tmp_path / "store"


@contextlib.contextmanager
def mounting(store: Path, point: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, mounted; killed at the end if it still runs."""
    with running([*COMMAND, store, point]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"%s: 5 files, 33.3 KB mounted\n" % bytes(point)
            yield process
        finally:
            process.kill()
            process.wait()
            if is_mounted(point):
                subprocess.run(["umount", "-l", point], check=False)


def test_a_second_mount_on_a_first_is_refused_and_named(
    store: Path, point: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with mounting(store, point):
        with pytest.raises(MountError, match="code 2"), mounted(store, point):
            pass
        assert "something is mounted there already; `fusermount -u" in capfd.readouterr().err


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_ends_a_mount_well_and_leaves_nothing(
    number: signal.Signals, store: Path, point: Path
) -> None:
    with mounting(store, point) as process:
        assert (point / "args.json").read_bytes() == b'{"lr": 0.1}\n'
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr is not None and process.stderr.read() == b""
        assert not is_mounted(point)
        assert list(point.iterdir()) == []


def test_a_signal_takes_a_mount_away_from_who_has_files_open(store: Path, point: Path) -> None:
    with mounting(store, point) as process:
        fd = os.open(point / "rank_0" / "net-1_1.ckpt", os.O_RDONLY)
        process.terminate()
        assert process.wait(20) == 0
        assert not is_mounted(point)
        with pytest.raises(OSError) as caught:
            os.pread(fd, 10, 0)
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
        with contextlib.suppress(OSError):
            os.close(fd)


def test_a_mount_that_is_unmounted_from_outside_is_done(store: Path, point: Path) -> None:
    with mounting(store, point) as process:
        take_away(point)
        assert process.wait(20) == 0
        assert process.stderr is not None and process.stderr.read() == b""


def test_a_busy_mount_is_not_unmounted_from_outside_unless_it_is_meant(
    store: Path, point: Path
) -> None:
    with mounting(store, point) as process:
        path = point / "rank_0" / "net-1_1.ckpt"
        expected = (store.parent / "source" / path.relative_to(point)).read_bytes()
        with path.open("rb", buffering=0) as file:
            with pytest.raises(subprocess.CalledProcessError):
                take_away(point)
            assert is_mounted(point) and process.poll() is None
            subprocess.run(["umount", "-l", point], check=True)
            assert file.read() == expected
        assert process.wait(20) == 0


def test_an_ignored_signal_stays_ignored(store: Path, point: Path) -> None:
    command = ["nohup", *map(str, COMMAND), store, point]
    with running(command) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert (point / "args.json").read_bytes() == b'{"lr": 0.1}\n'
        process.terminate()
        assert process.wait(20) == 0


def test_a_signal_at_any_moment_of_the_start_leaves_no_mount(store: Path, point: Path) -> None:
    chance = random.Random(1)
    codes = set()
    for _ in range(12):
        with running([*COMMAND, store, point]) as process:
            time.sleep(0.1 + chance.random() * 0.5)
            process.terminate()
            # Before anything was mounted it is a command that was stopped.
            codes.add(process.wait(20))
        assert not is_mounted(point)
    assert codes <= {0, 4, -signal.SIGTERM}  # the last before it could listen


def test_what_a_killed_mount_leaves_is_named_with_the_way_on(store: Path, point: Path) -> None:
    with mounting(store, point) as process:
        process.kill()
        process.wait()
        assert is_mounted(point)
        again = subprocess.run([*COMMAND, store, point], capture_output=True, text=True)
        assert again.returncode == 2
        assert again.stdout == ""
        assert "Transport endpoint is not connected" in again.stderr
        assert f"`fusermount -u {point}`" in again.stderr
        take_away(point)
        with mounted(store, point):
            assert (point / "args.json").read_bytes() == b'{"lr": 0.1}\n'


def test_a_line_that_nobody_reads_ends_the_mount(store: Path, point: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run([*COMMAND, store, point], stdout=writing, timeout=20, check=False)
    os.close(writing)
    assert ran.returncode == 1
    assert not is_mounted(point)


def test_a_process_that_is_killed_inside_the_context_takes_its_mount_along(
    store: Path, point: Path
) -> None:
    program = (
        "import sys, time; from slimckpt.mount import mounted\n"
        "with mounted(*sys.argv[1:]): print('inside', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(store), str(point)]
    with running(command, stderr=None) as process:
        assert process.stdout is not None and process.stdout.readline() == b"inside\n"
        assert is_mounted(point)
        process.kill()
    assert until(lambda: not is_mounted(point))


def test_a_context_that_fails_is_unmounted_too(store: Path, point: Path) -> None:
    with pytest.raises(ZeroDivisionError), mounted(store, point):
        assert is_mounted(point)
        raise ZeroDivisionError
    assert not is_mounted(point)


def test_a_context_that_cannot_be_mounted_says_so(tmp_path: Path, store: Path, point: Path) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        pytest.raises(MountError, match="ended in code 2"),
        mounted(store, tmp_path / "missing", log=log),
    ):
        pass
    assert "make it: mkdir" in (tmp_path / "log").read_text()


def test_paths_may_be_relative_and_the_point_a_link(
    store: Path, point: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(store.parent)
    Path("link").symlink_to(point.name)
    with mounted("store", "link"):
        assert is_mounted(point)
        assert snapshot("link/.") == snapshot("source")
    assert not is_mounted(point)


@pytest.mark.skipif(os.geteuid() != 0, reason="drops the capabilities of root")
def test_a_mount_that_is_not_permitted_names_what_it_needs(store: Path, point: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    bare = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
    ran = subprocess.run([*bare, *COMMAND, store, point], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"slimckpt: {point} cannot be mounted on by this user: ")
    assert "SYS_ADMIN" in ran.stderr and ran.stderr.count("\n") == 1
    assert not is_mounted(point)


def test_the_kernel_may_ask_for_a_mebibyte_at_a_time(store: Path, point: Path) -> None:
    with mounted(store, point):
        device = point.stat().st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        setting = Path("/sys/class/bdi") / number / "read_ahead_kb"
        if not os.access(setting, os.W_OK):
            pytest.skip("this user may not set how far the kernel reads ahead")
        assert until(lambda: setting.read_text() == "1024\n", 1.0)
