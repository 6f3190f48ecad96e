"""What every format must do: subclass :class:`FormatTests` and say what its files are."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_files import all_samples

from slimckpt.encodings import decoder
from slimckpt.errors import DamagedFileError, SlimckptError
from slimckpt.formats import FORMATS, Format, Found, examine
from slimckpt.model import TableBuilder, gaps
from slimckpt.sources.positioned import FileSource


@dataclass(frozen=True)
class Truth:
    """What one tensor is, known from elsewhere than the code under test."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str
    path: str = ""

    @staticmethod
    def of(name: str, dtype: str, shape: Iterable[int], body: bytes, path: str = "") -> Truth:
        return Truth(name, dtype, tuple(shape), len(body), sha256(body).hexdigest(), path or name)


@dataclass(frozen=True)
class Example:
    """A sound file and its tensors, in the order in which the format gives them.

    ``whole_prefixes`` are the lengths to which it can be cut and still be a sound, shorter file.
    """

    data: bytes
    tensors: list[Truth]
    whole_prefixes: frozenset[int] = field(default_factory=frozenset)


class BytesSource:
    """A file in memory that counts what is read of it."""

    def __init__(self, data: bytes, label: str = "it") -> None:
        self.data = data
        self.label = label
        self.size = len(data)
        self.nbytes_read = 0

    def read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise DamagedFileError(f"{self.label}: {offset}+{nbytes} of {self.size}")
        self.nbytes_read += nbytes
        return self.data[offset : offset + nbytes]


def body_of(data: bytes, found: Found, payload: int) -> bytes:
    return b"".join(data[at : at + nbytes] for at, nbytes in found.table.spans(payload))


def elements_of(data: bytes, found: Found, row: int) -> bytes:
    """The bytes of a tensor's elements in C order, decoded, filled in or gathered by strides."""
    tensor = found.table.tensor(row)
    if tensor.payload is None:
        fill = tensor.fill or b""
        return fill * (tensor.nbytes // max(len(fill), 1))
    stored = np.frombuffer(body_of(data, found, tensor.payload), np.uint8)
    lengths = [span.nbytes for span in found.table.spans(tensor.payload)]
    stream = decoder(tensor.encoding)(stored, lengths)
    if tensor.strides is None:
        return stream[tensor.offset : tensor.offset + tensor.nbytes].tobytes()
    itemsize = tensor.nbytes // max(math.prod(tensor.shape), 1)
    strides = [stride * itemsize for stride in tensor.strides]
    return np.ndarray(tensor.shape, f"V{itemsize}", stream, tensor.offset, strides).tobytes()


def truth_found(data: bytes, found: Found) -> list[Truth]:
    """What a format found, in the shape of the truth."""
    tensors = []
    for row in range(found.table.n_tensors):
        tensor, body = found.table.tensor(row), elements_of(data, found, row)
        tensors.append(Truth.of(tensor.name, tensor.dtype, tensor.shape, body, tensor.path))
        assert tensor.nbytes == len(body), tensor
    return tensors


def spans_of(found: Found) -> np.ndarray:
    columns = found.table.columns
    return np.stack([columns["span_offset"], columns["span_nbytes"]], axis=1)


def assert_spans_are_sound(found: Found, size: int) -> None:
    """Spans lie inside the file and apart from each other."""
    end = 0
    for offset, nbytes in sorted(map(tuple, spans_of(found).tolist())):
        assert offset >= end and nbytes >= 0
        end = offset + nbytes
    assert end <= size


def assert_never_silently_wrong(data: bytes, formats: Iterable[Format] = FORMATS) -> Found:
    """Whatever ``data`` is, it is understood with sound spans or reported, never a crash."""
    for candidate in formats:
        try:
            candidate.locate(BytesSource(data), TableBuilder())
        except SlimckptError as error:
            assert "it" in str(error)
    found = examine(BytesSource(data))
    if found.condition == "understood":
        assert_spans_are_sound(found, len(data))
    else:
        assert found.problem
        assert found.table.n_tensors == found.table.n_payloads == 0
    return found


class FormatTests:
    """Inherited by the tests of each format."""

    format: ClassVar[Format]

    def examples(self) -> dict[str, Example]:
        """Small files made by code: every corner of the format in at most about a kilobyte each."""
        raise NotImplementedError

    def samples(self) -> dict[str, Example]:
        """Real files that are understood, with the truth of their framework."""
        raise NotImplementedError

    def large(self, nbytes: int) -> tuple[bytes, int]:
        """A file with ``nbytes`` of payload, and how many tensors it has."""
        raise NotImplementedError

    def claims(self, sample: Path) -> bool:
        """Whether a sample is of this format, readable or not."""
        raise NotImplementedError

    def magics(self) -> list[bytes]:
        """Beginnings after which anything may come in a hostile file."""
        raise NotImplementedError

    def _all(self) -> Iterator[tuple[str, Example]]:
        yield from self.examples().items()
        yield from self.samples().items()

    def test_every_tensor_is_found_with_its_dtype_shape_and_bytes(self) -> None:
        for name, example in self._all():
            found = examine(BytesSource(example.data))
            assert (found.format, found.condition) == (self.format.name, "understood"), name
            assert truth_found(example.data, found) == example.tensors, name

    def test_there_are_samples_of_the_real_writer(self) -> None:
        assert self.samples()

    def test_skeleton_and_payloads_spliced_give_the_file_back(self) -> None:
        for name, example in self._all():
            found = examine(BytesSource(example.data))
            spans = spans_of(found)
            rebuilt = bytearray(b"\xee" * len(example.data))
            for offset, nbytes in [*gaps(spans, len(example.data)), *spans.tolist()]:
                rebuilt[offset : offset + nbytes] = example.data[offset : offset + nbytes]
            assert bytes(rebuilt) == example.data, name
            assert_spans_are_sound(found, len(example.data))

    def test_a_file_cut_at_any_byte_is_not_understood(self) -> None:
        for name, example in self.examples().items():
            for length in range(len(example.data)):
                found = assert_never_silently_wrong(example.data[:length], [self.format])
                whole = length in example.whole_prefixes
                assert (found.condition == "understood") == whole, (name, length)
                assert found.format in (self.format.name, "unknown"), (name, length)

    def test_a_sample_cut_around_any_payload_is_not_understood(self) -> None:
        for name, example in self.samples().items():
            spans = spans_of(examine(BytesSource(example.data))).tolist()
            edges = {edge for at, nbytes in spans for edge in (at, at + nbytes - 1)}
            for length in edges - example.whole_prefixes:
                found = assert_never_silently_wrong(example.data[:length], [self.format])
                assert found.condition != "understood", (name, length)

    def test_a_single_flipped_bit_outside_the_payloads_never_crashes(self) -> None:
        for example in self.examples().values():
            spans = spans_of(examine(BytesSource(example.data)))
            for offset, nbytes in gaps(spans, len(example.data)):
                for at in range(offset, offset + nbytes):
                    for bit in range(8):
                        damaged = bytearray(example.data)
                        damaged[at] ^= 1 << bit
                        assert_never_silently_wrong(bytes(damaged), [self.format])

    def test_trailing_bytes_are_not_silently_accepted(self) -> None:
        for name, example in self._all():
            for tail in (b"\0", b"\n", b"{", b"}", b" ", b"\x0a\x00", bytes(100), b"tail" * 9):
                found = assert_never_silently_wrong(example.data + tail, [self.format])
                assert found.condition != "understood", (name, tail)

    def test_payloads_are_not_read(self) -> None:
        data, tensors = self.large(64 * 1024 * 1024)
        source = BytesSource(data)
        found = examine(source)
        assert found.table.n_tensors == tensors
        assert source.nbytes_read <= 64 * 1024 * (2 * tensors + 2)

    def test_locating_a_file_on_disk_does_not_depend_on_its_suffix(self, tmp_path: Path) -> None:
        for index, (name, example) in enumerate(self.examples().items()):
            for suffix in ("", ".pt", ".safetensors", ".ckpt", ".h5", ".txt"):
                path = tmp_path / f"{index}{suffix}"
                path.write_bytes(example.data)
                with FileSource(os.fsencode(path)) as source:
                    found = examine(source)
                assert found.format == self.format.name, (name, suffix)
                assert truth_found(example.data, found) == example.tensors, (name, suffix)

    def test_no_other_format_claims_its_files(self) -> None:
        for name, example in self._all():
            head, size = example.data[:4096], len(example.data)
            assert [f.name for f in FORMATS if f.matches(head, size)] == [self.format.name], name

    def test_it_claims_none_of_the_samples_of_other_formats(self) -> None:
        for path in all_samples():
            with path.open("rb") as file:
                head = file.read(4096)
            claimed = self.format.matches(head, path.stat().st_size)
            assert claimed == self.claims(path), path

    def test_it_claims_no_ordinary_file(self) -> None:
        ordinary = {
            "empty": b"",
            "newline": b"\n",
            "newlines": b"\n" * 5000,
            "text that starts with a newline": b"\nHello\nworld\n" * 400,
            "indented text": b"\n\n\tclass A:\n\t\tpass\n",
            "blank lines of text": b"\n\n\nSome text here.\n" * 50,
            "json": b'{"weight": [1, 2, 3]}',
            "padded json": b"        " + b'{"weight": {"dtype": "F32"}}',
            "json lines": b'{"a": 1}\n' * 800,
            "zeros": bytes(5000),
            "ones": b"\xff" * 5000,
            "zip": b"PK\x03\x04" + bytes(60),
            "pickle": b"\x80\x02}q\x00.",
            "hdf5": b"\x89HDF\r\n\x1a\n" + bytes(60),
            "elf": b"\x7fELF\x02\x01\x01" + bytes(60),
            "onnx": b"\x08\x07\x12\x07pytorch\x1a\x041.13" + bytes(60),
            "accented": "\né à\né à ü\n".encode() * 400,
            "a few tags": b"\x08\x01\x12\x04abcd\x12\x04abcd",
        }
        for name, data in ordinary.items():
            assert not self.format.matches(data[:4096], len(data)), name

    def test_random_bytes_after_a_valid_beginning_never_crash(self) -> None:
        @given(st.sampled_from(self.magics()), st.binary(max_size=200))
        @settings(max_examples=200)
        def search(magic: bytes, rest: bytes) -> None:
            assert_never_silently_wrong(magic + rest, [self.format])

        search()

    def test_a_sound_file_with_random_bytes_in_it_never_crashes(self) -> None:
        bodies = [example.data for example in self.examples().values()]

        @given(st.sampled_from(bodies), st.integers(0, 2**16), st.binary(min_size=1, max_size=12))
        @settings(max_examples=300)
        def search(body: bytes, at: int, patch: bytes) -> None:
            at %= len(body)
            assert_never_silently_wrong(body[:at] + patch + body[at + len(patch) :], [self.format])
            assert_never_silently_wrong(body[:at] + patch + body[at:], [self.format])
            assert_never_silently_wrong(body[:at] + body[at + len(patch) :], [self.format])

        search()
