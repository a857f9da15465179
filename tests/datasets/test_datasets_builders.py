"""Our own builders: digits, the downloads, npz, image_directory, synthetic; and their files in conf/dataset."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

import mp_hydra.datasets as ours
from mp_hydra.datasets import Split, load
from mp_hydra.datasets.settings import COMMON_KEYS
from mp_hydra.errors import ConfigError, DataError

CONF = Path(__file__).parents[2] / "conf/dataset"


def config(group: str, **keys: Any) -> dict[str, Any]:
    """The config of conf/dataset/GROUP.yaml with some values replaced."""
    node = OmegaConf.to_container(OmegaConf.load(CONF / f"{group}.yaml"), resolve=True)
    assert isinstance(node, dict)
    return {**{str(key): value for key, value in node.items()}, **keys}


def read(split: Split) -> tuple[np.ndarray, np.ndarray]:
    batches = [(x.numpy(), y.numpy()) for x, y in split.batches(64)]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


# conf/dataset


@pytest.mark.parametrize("file", sorted(CONF.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_has_the_common_keys_and_its_builders_parameters(file: Path) -> None:
    node = config(file.stem)
    own = set(node) - COMMON_KEYS - {"_target_"}
    assert set(node) >= COMMON_KEYS
    if file.stem == "custom":
        assert own == set()
        return
    assert node["_target_"] == f"mp_hydra.datasets.{file.stem}"
    assert own == set(inspect.signature(getattr(ours, file.stem)).parameters) - COMMON_KEYS


def test_custom_without_a_target_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"dataset\._target_=null: give the dotted path"):
        load(config("custom"), seed=0)


# digits


def test_digits_are_8x8_images_between_0_and_1_with_a_fixed_stratified_fifth_for_testing() -> None:
    one, two = load(config("digits"), seed=0), load(config("digits"), seed=1)
    assert one.validation is not None
    assert (one.train.size + one.validation.size, one.test.size) == (1437, 360)
    assert (one.input_shape, one.classes, one.source) == ((8, 8, 1), 10, "sklearn.datasets.load_digits")
    assert one.peak_input == 1.0
    counts = np.bincount(one.test.labels(), minlength=10)
    assert counts.min() >= 34
    np.testing.assert_array_equal(read(one.test)[0], read(two.test)[0])
    assert one.digest == two.digest


# downloads


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_downloads_come_from_keras_and_a_failed_one_points_to_npz(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    def load_data() -> Any:
        labels = np.arange(8)[:, np.newaxis]
        return (np.zeros((8, 4, 4, 3), np.uint8), labels), (np.zeros((8, 4, 4, 3), np.uint8), labels)

    def no_network() -> Any:
        raise Exception("URL fetch failure on https://host/file: None -- unreachable")  # noqa: TRY002

    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", load_data)
    data = load(config(name), seed=0)
    assert (data.classes, data.source) == (100 if name == "cifar100" else 10, f"keras.datasets.{name}")
    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", no_network)
    with pytest.raises(DataError, match=rf"dataset {name}: .*URL fetch failure.*use dataset=npz dataset\.path=FILE"):
        load(config(name), seed=0)


# npz


def save(path: Path, **changes: Any) -> Path:
    x, y = np.arange(48, dtype=np.uint8).reshape(12, 2, 2), np.arange(12) % 3
    arrays = {"x_train": x, "y_train": y, "x_test": x[:6], "y_test": y[:6], **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def test_npz_reads_the_arrays_and_names_the_file_as_source(tmp_path: Path) -> None:
    path = save(tmp_path / "data.npz", class_names=np.array(["a", "b", "c"]))
    data = load(config("npz", path=str(path)), seed=0)
    assert data.validation is not None
    assert (data.train.size, data.validation.size, data.test.size, data.classes) == (11, 1, 6, 3)
    assert data.source == str(path)


def test_npz_takes_validation_arrays_and_class_count_from_the_file(tmp_path: Path) -> None:
    x = np.zeros((4, 2, 2), np.uint8)
    path = save(tmp_path / "data.npz", x_val=x, y_val=np.zeros(4, int), classes=np.array(5))
    data = load(config("npz", path=str(path)), seed=0)
    assert data.validation is not None
    assert (data.train.size, data.validation.size, data.classes) == (12, 4, 5)


def test_npz_paths_count_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "data.npz")
    monkeypatch.chdir(tmp_path)
    assert load(config("npz", path="data.npz"), seed=0).source == str(tmp_path / "data.npz")


def text_file(path: Path) -> None:
    path.write_text("hello")


def npy_file(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def cut_off(path: Path) -> None:
    save(path)
    path.write_bytes(path.read_bytes()[:300])


def damaged(path: Path) -> None:
    save(path, x_train=np.full((12, 50, 50), 7, np.uint8))
    contents = bytearray(path.read_bytes())
    contents[2000] ^= 0xFF
    path.write_bytes(bytes(contents))


BAD_FILES: dict[str, tuple[Any, str]] = {
    "missing": (lambda path: None, "there is no file {path}"),
    "directory": (lambda path: path.mkdir(), "{path} cannot be read: Is a directory"),
    "empty": (lambda path: path.touch(), "{path} cannot be read: it is no .npz file, or a damaged one"),
    "text": (text_file, "{path} cannot be read: it is no .npz file, or a damaged one"),
    "one array": (npy_file, "{path} holds a single array; save several with numpy.savez"),
    "cut off": (cut_off, "{path} cannot be read: it is no .npz file, or a damaged one"),
    "damaged member": (damaged, "x_train in {path} is damaged"),
    "missing arrays": (
        lambda path: save(path, x_test=None, y_test=None),
        "{path} has no x_test, y_test; it holds x_train, y_train",
    ),
    "pickled": (
        lambda path: save(path, x_train=np.array([{}] * 12)),
        "x_train in {path} holds pickled objects; save plain numeric arrays",
    ),
}


@pytest.mark.parametrize(("make", "line"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_npz_files_get_one_line_with_the_path(tmp_path: Path, make: Any, line: str) -> None:
    path = tmp_path / "data.npz"
    make(path)
    with pytest.raises(DataError) as caught:
        load(config("npz", path=str(path)), seed=0)
    assert f"dataset npz: {line.format(path=path)}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("group", ["npz", "image_directory"])
def test_a_path_must_be_given(group: str) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.path=null: give the path of"):
        load(config(group), seed=0)


# image_directory


def picture(path: Path, value: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    """A PNG or JPEG of one colour, (width, height)."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, (value,) * len(mode) if len(mode) > 1 else value).save(path)


def separate(root: Path) -> Path:
    for label, name in enumerate(("cat", "dog")):
        for i in range(5):
            picture(root / "train" / name / f"{i}.png", 100 * label + i)
        picture(root / "test" / name / "0.png", 100 * label + 9)
    (root / "train/cat/.DS_Store").write_text("not an image")
    return root


def test_image_folders_become_classes_in_alphabetical_order(tmp_path: Path) -> None:
    data = load(config("image_directory", path=str(separate(tmp_path)), validation_fraction=0.0), seed=0)
    assert (data.train.size, data.test.size, data.classes, data.input_shape) == (10, 2, 2, (4, 6, 3))
    assert data.source == str(tmp_path)
    x, y = read(data.train)
    assert x.dtype == np.float32
    np.testing.assert_allclose(x[:, 0, 0, 0] * 255, [0, 1, 2, 3, 4, 100, 101, 102, 103, 104], rtol=1e-5)
    np.testing.assert_array_equal(y, [0] * 5 + [1] * 5)
    np.testing.assert_array_equal(data.train.labels(), y)
    assert data.peak_input == pytest.approx(109 / 255)


def test_image_batches_shuffle_by_seed_with_labels_attached(tmp_path: Path) -> None:
    data = load(config("image_directory", path=str(separate(tmp_path)), validation_fraction=0.0), seed=0)

    def order(seed: int) -> list[int]:
        values = []
        for x, y in data.train.batches(3, shuffle_seed=seed):
            colour = np.rint(x.numpy()[:, 0, 0, 0] * 255).astype(int)
            np.testing.assert_array_equal(colour >= 100, y.numpy() == 1)
            values += colour.tolist()
        return values

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]


def test_a_validation_folder_is_used(tmp_path: Path) -> None:
    separate(tmp_path)
    picture(tmp_path / "validation/dog/0.png", 7)
    data = load(config("image_directory", path=str(tmp_path)), seed=0)
    assert data.validation is not None
    assert (data.train.size, data.validation.size, data.validation.labels().tolist()) == (10, 1, [1])


def test_without_a_test_folder_a_fixed_share_of_each_class_is_held_out(tmp_path: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        for i in range(10):
            picture(tmp_path / name / f"{i}.png", 100 * label + i)
    sets = [load(config("image_directory", path=str(tmp_path), test_fraction=0.3), seed=seed) for seed in (0, 1)]
    assert [(s.train.size, s.validation and s.validation.size, s.test.size) for s in sets] == [(13, 1, 6)] * 2
    assert np.bincount(sets[0].test.labels()).tolist() == [3, 3]
    np.testing.assert_array_equal(read(sets[0].test)[0], read(sets[1].test)[0])


def test_images_of_different_sizes_and_formats_are_resized_and_converted_to_grey(tmp_path: Path) -> None:
    for part in ("train", "test"):
        picture(tmp_path / part / "a" / "0.png", 51, (5, 7), "L")
        picture(tmp_path / part / "b" / "0.jpg", 102, (9, 3))
    data = load(
        config("image_directory", path=str(tmp_path), image_size=[4, 6], channels=1, validation_fraction=0.0), seed=0
    )
    assert data.input_shape == (4, 6, 1)
    np.testing.assert_allclose(read(data.train)[0][:, 2, 2, 0], [0.2, 0.4], atol=0.01)


def test_the_digest_of_images_changes_with_the_content_of_one_file(tmp_path: Path) -> None:
    def digest(seed: int) -> str:
        return load(config("image_directory", path=str(tmp_path)), seed=seed).digest

    separate(tmp_path)
    before = digest(0)
    assert digest(1) == before
    picture(tmp_path / "test/dog/0.png", 50)
    assert digest(0) != before


def test_images_of_different_sizes_need_image_size(tmp_path: Path) -> None:
    picture(separate(tmp_path) / "train/cat/9.png", 5, (8, 8))
    with pytest.raises(DataError, match=r"x_train has samples of different shapes .*; set dataset\.image_size"):
        load(config("image_directory", path=str(tmp_path)), seed=0)


def truncated(root: Path) -> None:
    path = root / "train/cat/1.png"
    path.write_bytes(path.read_bytes()[:40])


def text_as_png(root: Path) -> None:
    (root / "test/dog/0.png").write_text("hello")


def stray(root: Path) -> None:
    (root / "train/cat/notes.txt").write_text("hello")


def emptied(root: Path) -> None:
    (root / "test/dog/0.png").unlink()


def new_class(root: Path) -> None:
    picture(root / "test/bird/0.png", 5)


def no_test(root: Path) -> None:
    (root / "test").rename(root / "other")


BAD_FOLDERS: dict[str, tuple[Any, str]] = {
    "truncated file": (truncated, "{root}/train/cat/1.png cannot be read as an image: "),
    "text file": (text_as_png, "{root}/test/dog/0.png cannot be read as an image: Unknown image file format"),
    "stray file": (stray, "{root}/train/cat/notes.txt is no PNG, JPEG, BMP or GIF file"),
    "empty class": (emptied, "{root}/test/dog is empty; give every class at least one image"),
    "class only in test": (new_class, "{root}/test/bird is a class that {root}/train does not have"),
    "no test": (no_test, "{root} has train/ but no test/"),
}


@pytest.mark.parametrize(("spoil", "line"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_bad_image_folders_get_one_line_with_the_path(tmp_path: Path, spoil: Any, line: str) -> None:
    spoil(separate(tmp_path))
    with pytest.raises(DataError) as caught:
        load(config("image_directory", path=str(tmp_path)), seed=0)
    assert f"dataset image_directory: {line.format(root=tmp_path)}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_classes_and_a_missing_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no class folders"):
        load(config("image_directory", path=str(tmp_path)), seed=0)
    with pytest.raises(DataError, match="nowhere is no directory"):
        load(config("image_directory", path=str(tmp_path / "nowhere")), seed=0)


def test_a_class_too_small_to_share_is_named(tmp_path: Path) -> None:
    picture(tmp_path / "cat/0.png", 5)
    with pytest.raises(DataError, match=r"cat has 1 images, of which test_fraction=0.2 leaves none for training"):
        load(config("image_directory", path=str(tmp_path)), seed=0)


@pytest.mark.parametrize(("key", "value"), [("channels", 4), ("test_fraction", 0), ("test_fraction", 1.0)])
def test_bad_image_directory_values_name_their_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"dataset\.{key}={value}: give "):
        load(config("image_directory", path=str(tmp_path), **{key: value}), seed=0)


# synthetic


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [("image", None, (32, 32, 3)), ("image", [9, 7, 1], (9, 7, 1)), ("vector", [5], (5,)), ("tokens", [12], (12,))],
)
def test_synthetic_data_have_the_shape_and_size_asked_for(kind: str, shape: Any, expected: Any) -> None:
    data = load(config("synthetic", kind=kind, shape=shape, size=40, test_size=10, classes=4), seed=0)
    assert data.validation is not None
    assert (data.train.size, data.validation.size, data.test.size) == (36, 4, 10)
    assert (data.input_shape, data.classes) == (expected, 4)
    assert data.vocabulary == (1000 if kind == "tokens" else None)


def features(kind: str, x: np.ndarray) -> np.ndarray:
    """Pixels, numbers or, for tokens, how often each id occurs."""
    if kind == "tokens":
        return np.stack([np.bincount(row, minlength=1000) for row in x]).astype(float)
    return x.reshape(len(x), -1)


@pytest.mark.parametrize("kind", ["image", "vector", "tokens"])
def test_synthetic_data_can_be_learned_but_not_perfectly(kind: str) -> None:
    """The nearest class mean gets nearly the best possible 0.91, where chance is 0.1."""
    data = load(config("synthetic", kind=kind), seed=0)
    (x, y), (xt, yt) = read(data.train), read(data.test)
    x, xt = features(kind, x), features(kind, xt)
    means = np.stack([x[y == label].mean(axis=0) for label in range(10)])
    nearest = ((xt[:, np.newaxis] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert 0.7 <= (nearest == yt).mean() <= 0.96


def test_synthetic_data_follow_from_data_seed_and_not_from_the_run_seed() -> None:
    small = {"size": 20, "test_size": 5, "shape": [4, 4, 1]}
    digests = [load(config("synthetic", **small), seed=seed).digest for seed in (0, 1)]
    assert digests[0] == digests[1]
    assert load(config("synthetic", **small, data_seed=1), seed=0).digest != digests[0]


def test_synthetic_tokens_leave_id_0_to_padding() -> None:
    x, _ = read(load(config("synthetic", kind="tokens"), seed=0).test)
    assert 1 <= x.min() <= x.max() <= 999


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"kind": "images"}, "dataset.kind=images: give one of image, vector, tokens"),
        ({"shape": [32, 32]}, "dataset.shape=[32, 32]: kind=image takes [height, width, channels]"),
        ({"shape": [0, 4, 1]}, "dataset.shape=[0, 4, 1]: "),
        ({"kind": "vector", "shape": 4}, "dataset.shape=4: kind=vector takes [features]"),
        ({"size": 0}, "dataset.size=0: give an integer of at least 2"),
        ({"size": 1e3}, "dataset.size=1000.0: give an integer"),
        ({"test_size": 0}, "dataset.test_size=0: give an integer of at least 1"),
        ({"noise": 1.5}, "dataset.noise=1.5: give a number from 0 to 1"),
        ({"kind": "tokens", "vocabulary": 20}, "dataset.vocabulary=20: give an integer of at least 21"),
    ],
)
def test_bad_synthetic_values_name_their_key(keys: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(config("synthetic", **keys), seed=0)
    assert line in str(caught.value)


@pytest.mark.process
def test_importing_the_package_imports_no_heavy_library() -> None:
    code = "import sys, mp_hydra.datasets; print({'tensorflow', 'keras', 'sklearn', 'PIL'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=CONF.parents[1], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
