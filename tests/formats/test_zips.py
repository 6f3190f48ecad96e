"""Zip archives: as Python and torch make them, and as no honest writer does."""

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from conformance import BytesSource
from hypothesis import given
from hypothesis import strategies as st
from sample_files import all_samples
from zip_bytes import zip_file

from slimckpt.errors import DamagedFileError, RefusedFileError, SlimckptError
from slimckpt.formats.zips import (
    DEFLATED,
    archive_start,
    check_members,
    decoded_head,
    first_name,
    read_members,
)

NAMES = st.text(min_size=1, max_size=9).filter(lambda t: t.isprintable() and "/" not in t)
TWO = {"a": b"first" * 9, "b": b"second" * 9}


def contents(data: bytes) -> dict[str, bytes]:
    source = BytesSource(data)
    members = read_members(source)
    assert check_members(source, members) is None
    return {member.name: decoded_head(source, member, member.nbytes) for member in members}


def edited(data: bytes, at: int, form: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


def central(data: bytes, number: int = 0) -> int:
    """Where an entry of the directory starts."""
    at = data.index(b"PK\1\2")
    for _ in range(number):
        at = data.index(b"PK\1\2", at + 1)
    return at


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=9).filter(
            lambda t: "\0" not in t and t.isprintable() and "/" not in t
        ),
        st.binary(max_size=99),
        max_size=5,
    ),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_what_python_writes_is_read(
    members: dict[str, bytes], packed: bool, zip64: bool, streamed: bool
) -> None:
    data = zip_file(members, members if packed else (), zip64=zip64, streamed=streamed)
    assert contents(data) == members


def test_what_torch_writes_is_read_as_python_reads_it() -> None:
    read = 0
    for path in all_samples():
        if path.suffix in (".pt", ".bin", ".pth") and zipfile.is_zipfile(path):
            data = path.read_bytes()
            try:
                members = read_members(BytesSource(data))
            except SlimckptError:
                continue
            with zipfile.ZipFile(path) as archive:
                assert [m.name for m in members] == archive.namelist(), path
                for member in members:
                    start, stop = member.offset, member.offset + member.stored_nbytes
                    if member.method != DEFLATED and member.crc:
                        with archive.open(member.name) as file:
                            file._expected_crc = None  # one sample is damaged on purpose
                            assert file.read() == data[start:stop], (path, member.name)
            read += 1
    assert read > 20


def test_the_name_of_the_first_member_is_in_the_head() -> None:
    assert first_name(zip_file(TWO)[:40]) == b"a"
    assert first_name(b"PK\3\4") == first_name(b"") == first_name(b"PK\5\6" + bytes(60)) == b""


def test_an_archive_may_end_in_a_comment() -> None:
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        archive.writestr("a", b"x")
        archive.comment = b"PK\5\6 not the end" * 100
    assert contents(memory.getvalue()) == {"a": b"x"}


def test_archives_one_after_another_are_told_apart() -> None:
    one, other = zip_file(TWO), zip_file({"c": b"x"}, zip64=True)
    source = BytesSource(one + other)
    assert archive_start(source, source.size) == len(one)
    assert archive_start(source, len(one)) == 0
    with pytest.raises(DamagedFileError, match="directory should end"):
        read_members(source)


def test_bytes_before_the_archive_are_damage_unless_its_offsets_count_them() -> None:
    with pytest.raises(DamagedFileError, match="directory should end"):
        contents(b"#!/bin/sh\n" + zip_file(TWO))
    memory = io.BytesIO(b"#!/bin/sh\n")
    memory.seek(0, io.SEEK_END)
    with zipfile.ZipFile(memory, "a") as archive:
        archive.writestr("a", b"x")
    assert contents(memory.getvalue()) == {"a": b"x"}


DATA = zip_file(TWO)
END = DATA.rindex(b"PK\5\6")


@pytest.mark.parametrize(
    ("at", "form", "value", "kind", "why"),
    [
        (central(DATA) + 8, "<H", 1, RefusedFileError, "'a' is encrypted"),
        (central(DATA) + 8, "<H", 1 << 6, RefusedFileError, "'a' is encrypted"),
        (central(DATA) + 34, "<H", 1, RefusedFileError, "several disks"),
        (END + 4, "<H", 1, RefusedFileError, "several disks"),
        (END + 8, "<H", 1, RefusedFileError, "several disks"),
        (END + 12, "<I", 5, DamagedFileError, "members in a directory"),
        (END + 16, "<I", 5, DamagedFileError, "directory should end"),
        (END + 20, "<H", 1, DamagedFileError, "found none"),
        (central(DATA) + 10, "<H", 8, DamagedFileError, "contradicts"),
        (central(DATA) + 16, "<I", 5, DamagedFileError, "contradicts"),
        (central(DATA) + 20, "<I", 44, DamagedFileError, "44 bytes, expected 45"),
        (central(DATA) + 28, "<H", 2, DamagedFileError, "it: "),
        (central(DATA) + 46, "<B", ord("c"), DamagedFileError, "contradicts"),
        (central(DATA, 1) + 42, "<I", 0, DamagedFileError, "contradicts"),
        (central(DATA, 1) + 42, "<I", 2**32 - 2, DamagedFileError, "it: "),
        (central(DATA) + 42, "<I", 2**32 - 1, DamagedFileError, "it: "),
        (6, "<H", 1, DamagedFileError, "contradicts"),
        (8, "<H", 8, DamagedFileError, "contradicts"),
        (14, "<I", 9, DamagedFileError, "contradicts"),
        (18, "<I", 9, DamagedFileError, "contradicts"),
        (22, "<I", 9, DamagedFileError, "contradicts"),
        (26, "<H", 2, DamagedFileError, "contradicts"),
        (28, "<H", 200, DamagedFileError, "reaches into the directory"),
        (28, "<H", 20, DamagedFileError, "overlap"),
        (30, "<B", ord("c"), DamagedFileError, "contradicts"),
        (0, "<B", 0, DamagedFileError, "contradicts"),
    ],
)
def test_an_archive_that_contradicts_itself_is_not_read(
    at: int, form: str, value: int, kind: type[SlimckptError], why: str
) -> None:
    with pytest.raises(kind, match=why):
        read_members(BytesSource(edited(DATA, at, form, value)))


def test_a_name_that_is_there_twice_is_damage() -> None:
    data = zip_file({"aa": b"x", "ab": b"y"}).replace(b"ab", b"aa")
    with pytest.raises(DamagedFileError, match="'aa' is there twice"):
        read_members(BytesSource(data))


def test_two_members_on_the_same_bytes_are_damage() -> None:
    """The quine and bomb of overlapping members: the second one lies inside the first."""
    inner = zip_file({"b": b"x"})
    data = zip_file({"a": inner[: inner.index(b"PK\1\2")], "b": b"x"})
    at = central(data, 1) + 42
    with pytest.raises(DamagedFileError, match="overlap"):
        read_members(BytesSource(edited(data, at, "<I", 31)))


def test_more_members_than_16_bits_count_are_read() -> None:
    members = {f"{n}": b"" for n in range(70_000)}
    found = read_members(BytesSource(zip_file(members)))
    assert [member.name for member in found] == list(members)


def test_names_are_code_page_437_unless_they_say_otherwise() -> None:
    data = zip_file({"a": b"x"}).replace(b"a", b"\x81")
    assert list(contents(data)) == ["ü"]
    data = zip_file({"ü": b"x"}).replace("ü".encode(), b"\xff\xfe")
    with pytest.raises(DamagedFileError, match="UTF-8"):
        read_members(BytesSource(data))


@pytest.mark.parametrize("deflated", [False, True])
def test_checksums_are_checked_over_megabytes(deflated: bool) -> None:
    """Also where output ends exactly where a block does, and inflates a thousandfold."""
    for nbytes in (1, 4 * 1024 * 1024, 3 * 4 * 1024 * 1024, 9_000_001):
        for body in (bytes(nbytes), np.random.default_rng(1).bytes(nbytes)):
            data = zip_file({"a": body}, ["a"] if deflated else [])
            source = BytesSource(data)
            (member,) = read_members(source)
            assert member.crc == zlib.crc32(body)
            assert check_members(source, [member]) is None
            wrong = check_members(source, [member._replace(crc=member.crc ^ 1)])
            assert wrong is not None and "'a'" in wrong
            assert check_members(source, [member._replace(crc=0)]) is None


def test_the_head_of_a_deflated_member_is_decoded_without_the_rest() -> None:
    body = np.random.default_rng(1).bytes(5_000_000)
    source = BytesSource(zip_file({"a": body}, ["a"]))
    (member,) = read_members(source)
    source.nbytes_read = 0
    assert decoded_head(source, member, 100) == body[:100]
    assert source.nbytes_read < 10_000
