"""What cannot be copied, or must not be written to, ends in one clear error and no trace."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trees import open_ways_to, small_run, snapshot

from slimckpt.errors import (
    CheckFailedError,
    DestinationError,
    NothingToGainError,
    SlimckptError,
    UnfaithfulSourceError,
    UsageError,
)
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.verify import verify

NOBODY = 65534


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_run(tmp_path / "source", 1024)


def refused(error: type[SlimckptError], source: Path, target: Path, says: str) -> None:
    """Slimming ends in ``error`` and changes nothing around the source and the target."""
    before = snapshot_with_odd_entries(source.parent)
    for dry_run in (True, False):
        with pytest.raises(error, match=says) as caught:
            slim(source, target, min_saving=0, dry_run=dry_run)
        assert "\n" not in str(caught.value)
    assert snapshot_with_odd_entries(source.parent) == before


def snapshot_with_odd_entries(root: Path) -> object:
    """A snapshot; of what cannot be read without waiting, the name alone."""
    odd = [path for path in root.rglob("*") if path.is_fifo()]
    return [snapshot(path) for path in root.iterdir() if path not in odd], sorted(odd)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o020600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("making a device is not permitted here")


def socket_file(path: Path) -> None:
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(path.parent)  # addresses of sockets are short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.parametrize(
    ("make", "kind"), [(fifo, "a FIFO"), (device, "a device"), (socket_file, "a socket")]
)
def test_what_is_no_file_is_refused_by_name(
    source: Path, tmp_path: Path, make: Callable[[Path], None], kind: str
) -> None:
    make(source / "empty" / "odd")
    with pytest.raises(UnfaithfulSourceError, match=f"^empty/odd is {kind} and cannot be copied"):
        slim(source, tmp_path / "store", min_saving=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_fifo_named_like_a_manifest_does_not_hold_the_run_up(
    source: Path, tmp_path: Path
) -> None:
    os.mkfifo(source / "empty" / "slimckpt.json")
    with pytest.raises(UnfaithfulSourceError, match=r"slimckpt\.json is a FIFO"):
        slim(source, tmp_path / "store", min_saving=0)


AS_NOBODY = """
import os, sys
sys.path[:0] = {path!r}
import blake3, h5py, ml_dtypes, numpy, h5py.h5f, h5py.h5fd
from slimckpt.errors import SlimckptError
from slimckpt.rewrite.slim import slim
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.verify import verify
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({nobody})
    os.setuid({nobody})
try:
    {work}
except SlimckptError as error:
    print(type(error).__name__, error)
"""


def as_nobody(work: str) -> str:
    """What a process without root's rights prints."""
    code = AS_NOBODY.format(path=sys.path, nobody=NOBODY, work=work)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def open_place(tmp_path: Path) -> Path:
    """A directory that everybody can reach and write to."""
    open_ways_to(tmp_path)
    tmp_path.chmod(0o777)
    return tmp_path


@pytest.mark.parametrize("name", ["rank_1/net-1_1.ckpt", "args.json", "rank_1", "."])
def test_what_cannot_be_read_is_refused_by_name(open_place: Path, name: str) -> None:
    source = small_run(open_place / "source", 1024)
    (source / name).chmod(0o000)
    target = open_place / "store"
    said = as_nobody(f"slim({str(source)!r}, {str(target)!r}, min_saving=0)")
    assert said.startswith("UnfaithfulSourceError") and "Permission denied" in said
    assert name in said
    assert [path.name for path in open_place.iterdir()] == ["source"]
    (source / name).chmod(0o700)


def test_a_user_without_rights_gets_all_but_the_owner_back(open_place: Path) -> None:
    source = small_run(open_place / "source", 1024)
    (source / "args.json").chmod(0o444)
    (source / "rank_0").chmod(0o555)
    store, back = open_place / "store", open_place / "back"
    said = as_nobody(
        f"slim({str(source)!r}, {str(store)!r}, min_saving=0)\n"
        f"    restore({str(store)!r}, {str(back)!r})\n"
        f"    print(len(verify({str(store)!r}).problems))"
    )
    assert said == "0\n"

    def without_owner(root: Path) -> dict[bytes, tuple[object, ...]]:
        return {path: entry[:-1] for path, entry in snapshot(root).items()}

    assert without_owner(back) == without_owner(source)


@pytest.mark.parametrize("kind", ["file", "empty directory", "directory", "link", "dangling link"])
def test_a_destination_that_exists_is_refused(source: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "store"
    if kind == "file":
        target.write_bytes(b"mine")
    elif kind.endswith("link"):
        target.symlink_to(source if kind == "link" else "nowhere")
    else:
        target.mkdir()
        if kind == "directory":
            (target / "file").write_bytes(b"mine")
    refused(DestinationError, source, target, "exists")


def test_a_destination_inside_the_source_is_refused(source: Path, tmp_path: Path) -> None:
    refused(DestinationError, source, source / "empty" / "store", "lies inside")
    refused(DestinationError, source, source / "store", "lies inside")
    (tmp_path / "way in").symlink_to(source / "empty")
    refused(DestinationError, source, tmp_path / "way in" / "store", "lies inside")
    (tmp_path / "way to").symlink_to(source)
    refused(DestinationError, tmp_path / "way to", source / "store", "lies inside")


def test_a_destination_around_the_source_or_the_source_itself_is_refused(
    source: Path, tmp_path: Path
) -> None:
    refused(DestinationError, source, tmp_path, "exists")
    refused(DestinationError, source, source, "exists")


def test_a_destination_whose_name_begins_like_the_source_is_fine(
    source: Path, tmp_path: Path
) -> None:
    slim(source, tmp_path / "source.slim", min_saving=0)
    assert verify(tmp_path / "source.slim", against=source).safe


def test_a_missing_parent_is_refused(source: Path, tmp_path: Path) -> None:
    refused(UsageError, source, tmp_path / "no" / "store", "does not exist; make it first")


def test_a_source_that_is_no_directory_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "store"
    refused(UsageError, tmp_path / "missing", target, "No such file")
    refused(UsageError, source / "args.json", target, "is not a directory")
    (tmp_path / "loop").symlink_to("loop")
    refused(UsageError, tmp_path / "loop", target, "loop")
    os.mkfifo(tmp_path / "fifo")
    refused(UsageError, tmp_path / "fifo", target, "is not a directory")


def test_a_source_that_is_a_store_is_refused_and_add_is_named(source: Path, tmp_path: Path) -> None:
    slim(source, tmp_path / "store", min_saving=0)
    refused(NothingToGainError, tmp_path / "store", tmp_path / "again", "slimckpt add")
    (tmp_path / "store" / "slimckpt.json").unlink()
    refused(NothingToGainError, tmp_path / "store", tmp_path / "again", "slimckpt add")


def test_a_link_to_a_directory_is_a_source_like_the_directory(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("source")
    slim(tmp_path / "link", tmp_path / "store", min_saving=0)
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)
    assert verify(tmp_path / "store", against=tmp_path / "link").safe


@pytest.mark.parametrize("min_saving", [-1, 101, float("nan")])
def test_a_threshold_that_is_no_percentage_is_refused(
    source: Path, tmp_path: Path, min_saving: float
) -> None:
    with pytest.raises(UsageError, match="percentage"):
        slim(source, tmp_path / "store", min_saving=min_saving)
    with pytest.raises(UsageError, match="jobs"):
        slim(source, tmp_path / "store", jobs=0)


def test_a_damaged_file_is_kept_whole_with_a_warning_or_with_strict_refused(
    source: Path, tmp_path: Path
) -> None:
    path = source / "checkpoint-10" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result = slim(source, tmp_path / "store", min_saving=0)
    assert [name for name, _ in result.kept_whole].count("checkpoint-10/model.safetensors") == 1
    assert len(result.warnings) == 1 and "checkpoint-10/model.safetensors" in result.warnings[0]
    with pytest.raises(CheckFailedError, match=r"checkpoint-10/model\.safetensors"):
        slim(source, tmp_path / "strict", min_saving=0, strict=True)
    assert not (tmp_path / "strict").exists()


def test_an_empty_directory_has_nothing_to_gain_but_can_be_slimmed(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(NothingToGainError, match="there are no files"):
        slim(tmp_path / "source", tmp_path / "store")
    slim(tmp_path / "source", tmp_path / "store", min_saving=0)
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(tmp_path / "source")


def test_a_dry_run_predicts_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    predicted = slim(source, tmp_path / "store", min_saving=0, dry_run=True)
    assert snapshot(tmp_path) == before
    real = slim(source, tmp_path / "store", min_saving=0)
    assert (predicted.dry_run, real.dry_run) == (True, False)
    assert predicted.store_nbytes >= real.store_nbytes
    assert predicted.store_inodes >= real.store_inodes
    assert predicted.source_nbytes == real.source_nbytes
    assert real.store_inodes == len(snapshot(tmp_path / "store"))
