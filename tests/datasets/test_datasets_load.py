"""`load`: what comes out of good data, whoever built it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mp_hydra.datasets import Data, Split, load

Builder = Callable[..., dict[str, Any]]

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    """Writes a user's module with `build()` returning a value, and gives the config that names it."""
    import sys

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "users_own_data.py").write_text("result = None\n\n\ndef build(**options):\n    return result\n")
    monkeypatch.delitem(sys.modules, "users_own_data", raising=False)
    import users_own_data  # type: ignore[import-not-found]

    def config(result: Any, **keys: Any) -> dict[str, Any]:
        users_own_data.result = result
        return {"_target_": "users_own_data.build", "name": "own", **keys}

    return config


def images(n: int = 20, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.integers(0, 256, (n, 4, 4), dtype=np.uint8)
    x[0, 0, 0] = 255
    return x, np.arange(n) % 4


def arrays(n: int = 20) -> Any:
    return images(n), images(8, seed=1)


def seen(split: Split, batch_size: int = 7, **keys: Any) -> tuple[np.ndarray, np.ndarray]:
    batches = [(x.numpy(), y.numpy()) for x, y in split.batches(batch_size, **keys)]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def test_pairs_of_arrays_become_train_validation_and_test(builder: Builder) -> None:
    data = load(builder(arrays()), seed=0)
    assert isinstance(data, Data)
    assert (data.train.size, data.validation and data.validation.size, data.test.size) == (18, 2, 8)
    assert (data.input_shape, data.input_dtype, data.classes, data.outputs) == ((4, 4, 1), "float32", 4, 4)
    assert data.vocabulary is None
    assert data.source == "users_own_data.build"


def test_a_given_validation_pair_is_used_and_nothing_is_taken_from_train(builder: Builder) -> None:
    data = load(builder((images(20), images(5, seed=2), images(8, seed=1)), validation_fraction=0.5), seed=0)
    assert (data.train.size, data.validation and data.validation.size, data.test.size) == (20, 5, 8)


@pytest.mark.parametrize("word", ["val", "validation"])
def test_a_mapping_may_name_validation_arrays_in_two_ways(builder: Builder, word: str) -> None:
    (x, y), (xt, yt) = arrays()
    given = {"x_train": x, "y_train": y, "x_test": xt, "y_test": yt, f"x_{word}": xt, f"y_{word}": yt, "source": "here"}
    data = load(builder(given), seed=0)
    assert data.validation is not None
    assert data.validation.size == 8
    assert data.source == "here"


def test_no_validation_where_the_fraction_is_zero(builder: Builder) -> None:
    data = load(builder(arrays(), validation_fraction=0.0), seed=0)
    assert data.validation is None
    assert data.train.size == 20


def test_8_bit_images_stay_8_bit_in_memory_and_come_out_as_float32_up_to_1(builder: Builder) -> None:
    data = load(builder(arrays(), validation_fraction=0.0), seed=0)
    assert data.train.samples.x.dtype == "uint8"  # type: ignore[attr-defined]
    x, y = seen(data.train)
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    np.testing.assert_allclose(x[..., 0], images()[0] / 255, rtol=1e-6)
    assert data.peak_input == pytest.approx(1.0)


def test_a_scale_replaces_the_automatic_one(builder: Builder) -> None:
    data = load(builder(arrays(), scale=2), seed=0)
    assert data.peak_input == 510
    assert seen(data.train)[0].max() == 510


def test_floats_are_left_alone_without_a_scale_and_peak_is_the_largest_magnitude(builder: Builder) -> None:
    x = np.array([[1.0, -7.5], [2.0, 3.0], [0.0, 1.0]])
    data = load(builder(((x, [0, 1, 1]), (x, [0, 1, 0])), validation_fraction=0.0), seed=0)
    assert data.peak_input == 7.5
    np.testing.assert_array_equal(seen(data.test)[0], x.astype(np.float32))
    assert data.input_shape == (2,)


@pytest.mark.parametrize(("size", "expected"), [(6, (6, 6, 1)), ([2, 8], (2, 8, 1))])
def test_images_are_resized_per_batch(builder: Builder, size: Any, expected: Any) -> None:
    data = load(builder(arrays(), image_size=size), seed=0)
    assert data.input_shape == expected
    x, _ = seen(data.train)
    assert x.shape == (18, *expected)
    assert x.dtype == np.float32
    assert 0 <= x.min() <= x.max() <= 1


def test_bilinear_resizing_to_half_keeps_the_mean_of_each_two_by_two_cell(builder: Builder) -> None:
    x, y = images(4)
    data = load(builder(((x, y), (x, y)), image_size=2, scale=1, validation_fraction=0.0), seed=0)
    np.testing.assert_allclose(seen(data.test)[0][..., 0], x.reshape(4, 2, 2, 2, 2).mean(axis=(2, 4)), rtol=1e-5)


def test_integer_rows_are_token_ids_and_the_vocabulary_spans_all_splits(builder: Builder) -> None:
    x, xt = np.array([[0, 3], [5, 2], [1, 1]]), np.array([[9, 0]])
    data = load(builder(((x, [0, 1, 1]), (xt, [0])), validation_fraction=0.0), seed=0)
    assert (data.input_dtype, data.input_shape, data.vocabulary, data.peak_input) == ("int32", (2,), 10, None)
    ids, _ = seen(data.train)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, x)


def test_integer_rows_with_a_scale_are_numbers(builder: Builder) -> None:
    x = np.array([[-4, 3], [5, 2]])
    data = load(builder(((x, [0, 1]), (x, [0, 1])), validation_fraction=0.0, scale=0.5), seed=0)
    assert (data.input_dtype, data.vocabulary, data.peak_input) == ("float32", None, 2.5)
    np.testing.assert_array_equal(seen(data.test)[0], x / 2)


def test_a_vocabulary_of_the_builder_is_kept(builder: Builder) -> None:
    x = np.array([[0, 3], [5, 2]])
    made = {"x_train": x, "y_train": [0, 1], "x_test": x, "y_test": [0, 1], "vocabulary": 100}
    assert load(builder(made), seed=0).vocabulary == 100


@pytest.mark.parametrize(("shape", "outputs"), [((20,), 1), ((20, 1), 1), ((20, 3), 3)])
def test_float_labels_are_regression_targets_of_one_row_a_sample(builder: Builder, shape: Any, outputs: Any) -> None:
    random = np.random.default_rng(0)
    part = (images()[0], random.normal(size=shape))
    data = load(builder((part, part), validation_fraction=0.0), seed=0)
    assert (data.classes, data.outputs) == (None, outputs)
    assert data.test.labels().dtype == np.float32
    np.testing.assert_array_equal(seen(data.test)[1], part[1].reshape(20, outputs).astype(np.float32))


def test_column_labels_are_squeezed(builder: Builder) -> None:
    x, y = images()
    data = load(builder(((x, y[:, np.newaxis]), (x, y)), validation_fraction=0.0), seed=0)
    np.testing.assert_array_equal(data.train.labels(), y)


def test_a_class_seen_only_in_the_test_set_counts(builder: Builder) -> None:
    x, _ = images(4)
    assert load(builder(((x, [0, 1, 0, 1]), (x, [0, 1, 2, 6]))), seed=0).classes == 7


def test_more_classes_than_the_data_show_can_be_asked_for(builder: Builder) -> None:
    assert load(builder(arrays(), classes=12), seed=0).outputs == 12


def test_every_sample_comes_once_per_epoch_and_a_small_last_batch_is_kept(builder: Builder) -> None:
    x = np.arange(23, dtype=np.float32)[:, np.newaxis]
    data = load(builder(((x, np.arange(23) % 2), (x, np.arange(23) % 2)), validation_fraction=0.0), seed=0)
    batches = data.train.batches(5, shuffle_seed=1)
    for _ in range(2):
        sizes = [len(y) for _, y in batches]
        assert sizes == [5, 5, 5, 5, 3]
        assert sorted(np.concatenate([x.numpy()[:, 0] for x, _ in batches])) == list(range(23))


def test_train_and_validation_together_are_the_training_set(builder: Builder) -> None:
    x = np.arange(50, dtype=np.float32)[:, np.newaxis]
    data = load(builder(((x, np.arange(50) % 2), (x, np.arange(50) % 2)), validation_fraction=0.3), seed=5)
    assert data.validation is not None
    assert data.validation.size == 15
    both = np.concatenate([seen(data.train)[0], seen(data.validation)[0]])[:, 0]
    assert sorted(both) == list(range(50))


def test_each_sample_keeps_its_own_label_when_shuffled(builder: Builder) -> None:
    x = np.arange(40, dtype=np.float32)[:, np.newaxis]
    data = load(builder(((x, np.arange(40) % 7), (x, np.arange(40) % 7))), seed=0)
    got, y = seen(data.train, shuffle_seed=3)
    np.testing.assert_array_equal(got[:, 0] % 7, y)


def test_the_order_follows_from_the_seed_and_changes_between_epochs(builder: Builder) -> None:
    data = load(builder(arrays(200), validation_fraction=0.0), seed=0)

    def two_epochs(seed: int) -> list[list[int]]:
        batches = data.train.batches(64, shuffle_seed=seed)
        return [np.concatenate([x.numpy().sum(axis=(1, 2, 3)) for x, _ in batches]).tolist() for _ in range(2)]

    first, second = two_epochs(1)
    assert first != second
    assert two_epochs(1) == [first, second]
    assert two_epochs(2)[0] != first


def test_labels_are_in_the_order_of_the_unshuffled_batches(builder: Builder) -> None:
    data = load(builder(arrays(50)), seed=0)
    assert data.validation is not None
    for split in (data.train, data.validation, data.test):
        np.testing.assert_array_equal(split.labels(), seen(split)[1])


def test_the_validation_split_follows_from_the_run_seed_unless_split_seed_is_set(builder: Builder) -> None:
    def held_out(seed: int, **keys: Any) -> list[int]:
        split = load(builder(arrays(200), **keys), seed=seed).validation
        assert split is not None
        index: list[int] = split.index.tolist()
        return index

    assert held_out(0) == held_out(0)
    assert held_out(0) != held_out(1)
    assert held_out(0, split_seed=7) == held_out(1, split_seed=7)


def test_the_digest_is_of_the_content_and_not_of_scale_or_split(builder: Builder) -> None:
    before = load(builder(arrays()), seed=0).digest
    assert len(before) == 32
    assert set(before) <= set("0123456789abcdef")
    assert load(builder(arrays(), scale=3, image_size=8, validation_fraction=0.5), seed=9).digest == before
    (x, y), test = arrays()
    x[3, 2, 1] ^= 1
    assert load(builder(((x, y), test)), seed=0).digest != before
    y = y.copy()
    x[3, 2, 1] ^= 1
    y[0] = 3
    assert load(builder(((x, y), test)), seed=0).digest != before


def test_the_digest_tells_apart_equal_bytes_of_another_shape(builder: Builder) -> None:
    x = np.arange(8, dtype=np.float32)
    one, two = x.reshape(4, 2), x.reshape(4, 2, 1)
    digests = {load(builder(((v, [0, 1, 0, 1]), (v, [0, 1, 0, 1]))), seed=0).digest for v in (one, two)}
    assert len(digests) == 2


@pytest.mark.parametrize("dtype", [">f4", ">i4", "float16", "bool"])
def test_unusual_number_types_are_read_as_their_values(builder: Builder, dtype: str) -> None:
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    data = load(builder(((x, [0, 1]), (x, [1, 0])), validation_fraction=0.0), seed=0)
    np.testing.assert_array_equal(seen(data.train)[0], x.astype(np.float32))


def test_keras_trains_on_the_batches_and_knows_the_number_of_steps(builder: Builder) -> None:
    data = load(builder(arrays(30), validation_fraction=0.0), seed=0)
    assert int(data.train.batches(8, shuffle_seed=0).cardinality()) == math.ceil(30 / 8)


# tf.data


def stream(n: int = 20, *, seed: int = 0) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(images(n, seed))


def test_tf_data_sets_give_the_same_batches_as_their_arrays(builder: Builder) -> None:
    arrays_data = load(builder(arrays()), seed=4)
    stream_data = load(builder((stream(), stream(8, seed=1))), seed=4)
    for field in ("input_shape", "input_dtype", "classes", "outputs", "vocabulary", "peak_input"):
        assert getattr(stream_data, field) == getattr(arrays_data, field)
    for part in ("train", "validation", "test"):
        ours, theirs = seen(getattr(stream_data, part)), seen(getattr(arrays_data, part))
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
        np.testing.assert_array_equal(ours[1], theirs[1])
        np.testing.assert_array_equal(getattr(stream_data, part).labels(), theirs[1])


def test_tf_data_sets_shuffle_by_seed_and_know_their_number_of_batches(builder: Builder) -> None:
    data = load(builder({"train": stream(50), "test": stream(8, seed=1)}), seed=0)
    batches = data.train.batches(10, shuffle_seed=1)
    assert int(batches.cardinality()) == 5
    first = seen(data.train, shuffle_seed=1)[0]
    np.testing.assert_array_equal(first, seen(data.train, shuffle_seed=1)[0])
    assert not np.array_equal(first, seen(data.train, shuffle_seed=2)[0])
    assert sorted(first.sum(axis=(1, 2, 3))) == sorted(seen(data.train)[0].sum(axis=(1, 2, 3)))


def test_the_digest_of_a_tf_data_set_changes_with_one_pixel_and_not_with_the_split(builder: Builder) -> None:
    import tensorflow as tf

    x, y = images()
    test = stream(8, seed=1)
    before = load(builder((stream(), test)), seed=0).digest
    assert load(builder((stream(), test), validation_fraction=0.4), seed=3).digest == before
    x[5, 1, 1] ^= 1
    assert load(builder((tf.data.Dataset.from_tensor_slices((x, y)), test)), seed=0).digest != before


def test_tf_data_images_of_different_sizes_are_resized_to_one(builder: Builder) -> None:
    import tensorflow as tf

    def samples():
        for i in range(6):
            yield np.full((4 + i, 5, 3), 10 * i, np.uint8), i % 2

    spec = (tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((), tf.int32))
    sets = [tf.data.Dataset.from_generator(samples, output_signature=spec) for _ in range(2)]
    data = load(builder(sets, image_size=[4, 5]), seed=0)
    assert data.input_shape == (4, 5, 3)
    x, _ = seen(data.test)
    np.testing.assert_allclose(x[:, 0, 0, 0], np.arange(6) * 10 / 255, rtol=1e-5)


def test_nested_tf_data_pass_as_they_are(builder: Builder) -> None:
    import tensorflow as tf

    given = ({"a": np.ones((6, 2), np.float32), "b": np.arange(6)}, np.arange(6) % 3)
    sets = [tf.data.Dataset.from_tensor_slices(given) for _ in range(2)]
    data = load(builder(sets, validation_fraction=0.0), seed=0)
    assert (data.input_shape, data.classes, data.peak_input) == (None, 3, None)
    x, _ = next(iter(data.test.batches(6)))
    assert set(x) == {"a", "b"}
    np.testing.assert_array_equal(x["b"], np.arange(6))


def test_random_augmentation_of_training_samples_is_allowed(builder: Builder) -> None:
    import tensorflow as tf

    noisy = stream().map(lambda x, y: (tf.cast(x, tf.float32) + tf.random.normal((4, 4)), y))
    plain = stream(8, seed=1).map(lambda x, y: (tf.cast(x, tf.float32), y))
    assert load(builder((noisy, plain)), seed=0).train.size == 18


# classes and keys handed to the builder


def test_classes_reach_a_builder_that_takes_them_and_null_does_not() -> None:
    config = {"_target_": "mp_hydra.datasets.synthetic", "kind": "vector", "size": 50, "test_size": 10}
    assert load({**config, "classes": 3}, seed=0).classes == 3
    assert load({**config, "classes": None}, seed=0).classes == 10


@pytest.mark.skipif(
    not (REPOSITORY.parent / "shared/data/mnist.npz").exists(),
    reason="no ../shared/data/mnist.npz beside the repository",
)
def test_the_real_mnist_file_loads() -> None:
    path = REPOSITORY.parent / "shared/data/mnist.npz"
    data = load({"_target_": "mp_hydra.datasets.npz", "name": "npz", "path": str(path)}, seed=0)
    assert data.validation is not None
    assert (data.train.size, data.validation.size, data.test.size) == (54000, 6000, 10000)
    assert (data.input_shape, data.classes, data.source) == ((28, 28, 1), 10, str(path.resolve()))
    assert data.peak_input == pytest.approx(1.0)
