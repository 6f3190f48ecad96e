"""Keras' own archives: HDF5 inside zip."""

import json
from pathlib import Path

import numpy as np
from conformance import BytesSource, Example, FormatTests, Truth, elements_of, truth_found
from hdf5_bytes import hdf5_file
from sample_files import SAMPLES, expected
from test_hdf5_format import SPELLING, W, truth_of
from zip_bytes import zip_file

from slimckpt.formats import check, examine
from slimckpt.formats.keras import Keras

FOLDER = SAMPLES / "keras_adam"
ABOUT = {"metadata.json": b'{"keras_version": "3"}', "config.json": b"{}"}


def weights(libver: str = "latest") -> bytes:
    return hdf5_file(lambda file: file.update({"layers/up/vars/0": W}), libver)


class TestKeras(FormatTests):
    format = Keras()

    def examples(self) -> dict[str, Example]:
        name = "layers/up/vars/0"
        packed = {**ABOUT, "model.weights.h5": weights()}
        opaque = Truth.of("model.weights.h5", "opaque:hdf5", (), weights())
        return {
            "one": Example(zip_file(packed), [truth_of(name, W)]),
            "deflated": Example(zip_file(packed, packed), [opaque]),
            "none": Example(zip_file(ABOUT), []),
        }

    def samples(self) -> dict[str, Example]:
        return {
            name: Example(
                (FOLDER / name).read_bytes(),
                [
                    Truth(n, SPELLING[p["dtype"]], tuple(p["shape"]), p["nbytes"], p["sha256"], n)
                    for n, p in sorted(file["params"].items())
                ],
            )
            for name, file in expected("keras_adam")["files"].items()
            if name.endswith(".keras")
        }

    def large(self, nbytes: int) -> tuple[bytes, int]:
        body = hdf5_file(lambda file: file.update({"w": np.ones(nbytes, np.uint8)}))
        return zip_file({**ABOUT, "model.weights.h5": body}), 1

    def claims(self, sample: Path) -> bool:
        return sample.suffix == ".keras"

    def magics(self) -> list[bytes]:
        data = zip_file({**ABOUT, "model.weights.h5": weights()})
        return [data[:50], data[:200]]


def test_names_in_two_files_of_weights_start_with_the_file() -> None:
    data = zip_file({**ABOUT, "model.weights.h5": weights(), "other.h5": weights("earliest")})
    names = [f"{member}/layers/up/vars/0" for member in ("model.weights.h5", "other.h5")]
    assert truth_found(data, examine(BytesSource(data))) == [truth_of(name, W) for name in names]


def test_a_compressed_file_of_weights_is_kept_and_said_not_to_be_read() -> None:
    data = zip_file({**ABOUT, "model.weights.h5": weights()}, ["model.weights.h5"])
    found = examine(BytesSource(data))
    assert found.facts == {"model.weights.h5": "compressed, so its tensors are not read"}
    assert elements_of(data, found, 0) == weights()


def test_damaged_weights_are_damage_of_the_archive() -> None:
    data = zip_file({**ABOUT, "model.weights.h5": weights()[:-1]})
    found = examine(BytesSource(data))
    assert found.condition == "damaged" and "truncated" in (found.problem or "")


def test_an_archive_that_only_starts_like_one_is_not_understood() -> None:
    found = examine(BytesSource(zip_file({"config.json": json.dumps({}).encode()})))
    assert (found.format, found.condition) == ("keras", "opaque")


def test_members_may_lie_in_any_order() -> None:
    members = {"assets/": b"", "assets/words.txt": b"a", "model.weights.h5": weights(), **ABOUT}
    data = zip_file(members)
    found = examine(BytesSource(data))
    assert (found.format, found.condition) == ("keras", "understood")
    assert truth_found(data, found) == [truth_of("layers/up/vars/0", W)]


def test_other_archives_are_none_even_where_they_are_cut() -> None:
    for members in (
        {"a.txt": b"", "config.json": b"{}"},
        {"a.txt": b"", "b.npy": b""},
        {"a/": b""},
    ):
        data = zip_file(members)
        assert examine(BytesSource(data)).format == "unknown"
        assert examine(BytesSource(data[:-1])).format == "unknown"


def test_every_member_is_checked_by_its_checksum() -> None:
    for name in expected("keras_adam")["files"]:
        if name.endswith(".keras"):
            data = bytearray((FOLDER / name).read_bytes())
            assert check("keras", BytesSource(bytes(data))) is None
            data[len(data) // 2] ^= 1
            assert "model.weights.h5" in (check("keras", BytesSource(bytes(data))) or "")


def test_what_is_found_in_an_archive_is_what_is_found_in_its_weights_alone() -> None:
    for step in (1, 2):
        inside = (FOLDER / f"model-{step}.keras").read_bytes()
        alone = (FOLDER / f"model-{step}.weights.h5").read_bytes()
        one, other = (truth_found(data, examine(BytesSource(data))) for data in (inside, alone))
        assert one == other
