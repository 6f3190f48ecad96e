"""A slim checkpoint shows nobody what the source did not show them."""

import os
from pathlib import Path

import pytest
from mindspore_bytes import record
from trees import body, snapshot

from slimckpt.model import Stat
from slimckpt.rewrite.access import Access, Guard
from slimckpt.rewrite.restore import restore
from slimckpt.rewrite.slim import slim

OTHER_GROUP = 12345


def readers(path: Path, top: Path) -> set[str]:
    """Who can read a file below ``top``: by its mode and the modes of the directories above."""
    found = {"group", "others"}
    for who, read, search in (("group", 0o040, 0o010), ("others", 0o004, 0o001)):
        above = [p for p in path.parents if p == top or top in p.parents]
        if not path.stat().st_mode & read or not all(p.stat().st_mode & search for p in above):
            found.discard(who)
    return found


def make(root: Path, files: dict[str, tuple[int, int]]) -> Path:
    """Files by name, each of its mode and with one tensor made of its seed."""
    for name, (mode, seed) in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        data = record("shared", "Float32", [1024], body(0, 4096))
        (root / name).write_bytes(data + record("own", "Float32", [1024], body(seed, 4096)))
        (root / name).chmod(mode)
    root.chmod(0o755)
    return root


def holders(store: Path, needle: bytes) -> list[Path]:
    return [p for p in store.rglob("*") if p.is_file() and needle in p.read_bytes()]


@pytest.mark.parametrize("private", [0o400, 0o600, 0o640, 0o440, 0o604, 0o000])
def test_no_container_is_more_readable_than_the_strictest_file_in_it(
    tmp_path: Path, private: int
) -> None:
    if private == 0 and os.getuid() != 0:
        pytest.skip("only root reads a file of mode 0")
    source = make(tmp_path / "source", {"a.ckpt": (0o644, 1), "b.ckpt": (private, 2)})
    slim(source, tmp_path / "store", min_saving=0)
    strict = readers(source / "b.ckpt", source)
    for needle, allowed in (
        (body(1, 4096), {"group", "others"}),
        (body(2, 4096), strict),
        (body(0, 4096), strict),
    ):
        found = holders(tmp_path / "store", needle)
        assert len(found) == 1
        assert readers(found[0], tmp_path / "store") <= allowed
    assert readers(holders(tmp_path / "store", body(1, 4096))[0], tmp_path / "store")
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


def test_a_closed_directory_hides_what_open_files_in_it_hold(tmp_path: Path) -> None:
    source = make(
        tmp_path / "source",
        {"open/a.ckpt": (0o644, 1), "closed/b.ckpt": (0o644, 2), "closed/deep/c.ckpt": (0o644, 3)},
    )
    (source / "closed" / "notes.txt").write_bytes(body(9, 500))
    (source / "closed").chmod(0o700)
    slim(source, tmp_path / "store", min_saving=0)
    for seed, hidden in ((1, False), (2, True), (3, True), (0, True)):
        (found,) = holders(tmp_path / "store", body(seed, 4096))
        assert (readers(found, tmp_path / "store") == set()) == hidden, found
    (found,) = holders(tmp_path / "store", body(9, 500))
    assert readers(found, tmp_path / "store") == set()


def test_a_closed_root_closes_the_store(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a.ckpt": (0o644, 1), "b.ckpt": (0o644, 2)})
    source.chmod(0o700)
    slim(source, tmp_path / "store", min_saving=0)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            assert readers(path, tmp_path / "store") == set(), path


def test_the_work_directory_is_closed_while_it_is_filled(tmp_path: Path) -> None:
    from slimckpt import effects

    source = make(tmp_path / "source", {"a.ckpt": (0o600, 1), "b.ckpt": (0o600, 2)})
    modes: set[int] = set()

    def look(effect: str, path: bytes) -> None:
        work = tmp_path / "store.slimckpt-part"
        if work.exists() and effect == "write":
            modes.add(work.stat().st_mode & 0o077)

    with effects.observe(look):
        slim(source, tmp_path / "store", min_saving=0)
    assert modes == {0}


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to other groups")
def test_a_container_of_two_groups_is_for_neither(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a.ckpt": (0o640, 1), "b.ckpt": (0o640, 2)})
    os.chown(source / "b.ckpt", -1, OTHER_GROUP)
    slim(source, tmp_path / "store", min_saving=0)
    (shared,) = holders(tmp_path / "store", body(0, 4096))
    assert shared.stat().st_mode & 0o077 == 0
    (own,) = holders(tmp_path / "store", body(2, 4096))
    assert (own.stat().st_gid, own.stat().st_mode & 0o777) == (OTHER_GROUP, 0o640)
    restore(tmp_path / "store", tmp_path / "back")
    assert snapshot(tmp_path / "back") == snapshot(source)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to other groups")
def test_a_store_keeps_the_group_and_setgid_of_its_source(tmp_path: Path) -> None:
    source = make(tmp_path / "source", {"a.ckpt": (0o640, 1), "b.ckpt": (0o640, 2)})
    for path in (source, source / "a.ckpt", source / "b.ckpt"):
        os.chown(path, -1, OTHER_GROUP)
    source.chmod(0o2770)
    slim(source, tmp_path / "store", min_saving=0)
    store = tmp_path / "store"
    for path in [store, *store.rglob("*")]:
        assert path.stat().st_gid == OTHER_GROUP, path
        if path.is_dir():
            assert path.stat().st_mode & 0o7777 == 0o2770, path
    for seed in (0, 1, 2):
        (found,) = holders(store, body(seed, 4096))
        assert found.stat().st_mode & 0o777 == 0o640


def test_the_guard_knows_who_reaches_a_file_through_its_directories() -> None:
    def stat(mode: int, uid: int = 1, gid: int = 1) -> Stat:
        return Stat(mode, 0, uid, gid)

    guard = Guard(
        [
            (b"", stat(0o755)),
            (b"group", stat(0o750)),
            (b"group/open", stat(0o777)),
            (b"odd", stat(0o705)),
        ]
    )
    assert guard.mode(b"f", stat(0o644)) == 0o644
    assert guard.mode(b"group/f", stat(0o644)) == 0o640
    assert guard.mode(b"group/open/f", stat(0o666)) == 0o660
    assert guard.mode(b"odd/f", stat(0o664)) == 0o604
    assert guard.mode(b"f", stat(0o4755)) == 0o755
    assert guard.strictest([(b"f", stat(0o644)), (b"group/f", stat(0o644))]) == Access(0o640, 1, 1)
    assert guard.strictest([(b"f", stat(0o755, 1, 2)), (b"f", stat(0o604, 3, 2))]) == Access(
        0o604, None, 2
    )
