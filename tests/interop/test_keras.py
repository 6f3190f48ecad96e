"""What Keras itself writes goes through slimckpt and is loaded by Keras again.

Truth is the variables of the models in memory: the views of the slim checkpoint and of the
original directory must hold them bit for bit, and the restored files must load as the originals
do. Run by ``scripts/interop``.
"""

import filecmp
import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import pytest

import slimckpt
from slimckpt.rewrite.verify import verify

STEPS = (1, 2, 3)
RANKS = range(2)


class Scale(keras.layers.Layer):
    """A layer with variables of its own, one of them not trained."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")

    def call(self, x: Any) -> Any:
        return x * self.scale


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    entry = keras.layers.Input((8,))
    embedding = keras.layers.Embedding(1000, 24, name="embedding", trainable=False)
    x = keras.layers.LSTM(16, name="lstm")(embedding(entry))
    x = keras.layers.LayerNormalization(name="norm")(Scale(name="scale")(x))
    half = keras.layers.Dense(64, name="half", dtype="mixed_bfloat16")(x)
    x = keras.layers.Dense(5, name="head", dtype="float32")(half)
    model = keras.Model(entry, x)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss="mse")
    return model


def variables(model: keras.Model) -> list[tuple[str, np.ndarray]]:
    """Weights and state of the optimizer, by path; seeds of dropout are not saved."""
    found = [v for v in model.variables if "seed_generator" not in v.path]
    return [(v.path, np.asarray(v)) for v in [*found, *model.optimizer.variables]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("keras") / "run"
    random = np.random.default_rng(0)
    x, y = random.integers(0, 200, (64, 8)), random.standard_normal((64, 5))
    model, truth = build(), {}
    for step in STEPS:
        model.fit(x, y, epochs=1, verbose=0)
        for rank in RANKS:  # data parallel: every process saves the same
            folder = root / f"rank_{rank}" / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            model.save(folder / "model.keras")
            model.save_weights(folder / "model.weights.h5")
        truth[f"checkpoint-{step}"] = variables(model)
    return root, truth


@pytest.fixture(scope="module")
def store(run: tuple[Path, dict[str, Any]]) -> Path:
    made = run[0].parent / "store"
    slimckpt.slim(run[0], made)
    return made


def digests(arrays: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Arrays by value, sorted: what they are called in the file is Keras' affair."""
    return sorted((array.dtype.name, array.shape, array.tobytes()) for array in arrays)


def test_the_views_hold_the_variables_of_the_model(
    run: tuple[Path, dict[str, Any]], store: Path
) -> None:
    root, truth = run
    for place in (root, store):
        with slimckpt.open(place) as checkpoint:
            for path in sorted(root.rglob("model.*")):
                view = checkpoint.files[str(path.relative_to(root))]
                assert view.format in ("keras", "hdf5")
                wanted = [array for _, array in truth[path.parent.name]]
                assert digests(view.values()) == digests(wanted), path


def test_what_the_optimizer_holds_is_under_its_name_in_its_order(
    run: tuple[Path, dict[str, Any]], store: Path
) -> None:
    model = keras.saving.load_model(
        run[0] / "rank_0/checkpoint-3/model.keras", custom_objects={"Scale": Scale}
    )
    with slimckpt.open(store) as checkpoint:
        view = checkpoint.files["rank_1/checkpoint-3/model.keras"]
        for number, variable in enumerate(model.optimizer.variables):
            found = view[f"optimizer/vars/{number}"]
            assert np.array_equal(found, np.asarray(variable)), variable.path


def test_restored_files_are_the_originals_and_load_alike(
    run: tuple[Path, dict[str, Any]], store: Path, tmp_path: Path
) -> None:
    root, truth = run
    assert verify(store, against=root).safe
    slimckpt.restore(store, tmp_path / "back")
    for path in sorted(root.rglob("model.*")):
        back = tmp_path / "back" / path.relative_to(root)
        assert filecmp.cmp(path, back, shallow=False)
        wanted = truth[path.parent.name]
        if path.suffix == ".keras":
            model = keras.saving.load_model(back, custom_objects={"Scale": Scale})
        else:
            model = build()
            model.optimizer.build(model.trainable_variables)
            model.load_weights(back)
        found = variables(model)
        assert [array.tobytes() for _, array in found] == [array.tobytes() for _, array in wanted]


def test_replicas_and_what_is_frozen_are_stored_once(
    run: tuple[Path, dict[str, Any]], store: Path
) -> None:
    """Two ranks, three steps, two files each: a frozen embedding is one copy of twelve."""
    root, truth = run
    embedding = dict(truth["checkpoint-1"])["embedding/embeddings"].tobytes()

    def copies(place: Path) -> int:
        return sum(p.read_bytes().count(embedding) for p in place.rglob("*") if p.is_file())

    assert (copies(root), copies(store)) == (12, 1)
    nbytes = [
        sum(p.stat().st_size for p in place.rglob("*") if p.is_file()) for place in (root, store)
    ]
    assert nbytes[1] < nbytes[0] / 2
