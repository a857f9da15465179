"""`build`: what a target gets, whose models it takes, and the one line for each thing that can be wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mp_hydra.errors import ConfigError, ModelError
from mp_hydra.models.build import DataSpec, build

if TYPE_CHECKING:
    from collections.abc import Iterator

CONF = Path(__file__).parents[2] / "conf"
IMAGES = DataSpec(input_shape=(8, 8, 1), input_dtype="float32", outputs=10, classes=10, vocabulary=None)
VECTORS = DataSpec(input_shape=(6,), input_dtype="float32", outputs=3, classes=None, vocabulary=None)
TOKENS = DataSpec(input_shape=(7,), input_dtype="int32", outputs=2, classes=2, vocabulary=20)


def target(name: str, /, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **settings}


def ours(name: str, /, **settings: Any) -> dict[str, Any]:
    return {"_target_": f"mp_hydra.models.{name}", "name": name, **settings}


def sequential(units: int = 2, *, compiled: bool = False) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units)])
    if compiled:
        model.compile("sgd", "mse")
    return model


# What users bring


def function_of_the_data(input_shape: tuple[int, ...], classes: int, hidden: int = 4) -> keras.Model:
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(hidden), keras.layers.Dense(classes)])


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self, num_classes: int, units: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(units)
        self.head = keras.layers.Dense(num_classes)

    def call(self, x: Any) -> Any:
        return self.head(self.hidden(x))


received: dict[str, Any] = {}


def records_keywords(**kwargs: Any) -> keras.Model:
    received.clear()
    received.update(kwargs)
    return sequential()


def records_all(
    input_shape: Any,
    *,
    input_dtype: Any,
    outputs: Any,
    classes: Any = "default",
    num_classes: Any = "default",
    vocabulary: Any = "default",
    name: Any = "default",
) -> keras.Model:
    received.clear()
    received.update(locals())
    return sequential()


def takes_units(units: int) -> keras.Model:
    return sequential(units)


def takes_layers(layers: list[Any], sizes: Any = None) -> keras.Model:
    received.clear()
    received.update(sizes=sizes)
    return keras.Sequential(layers)


def takes_positional_only(units: int, /, width: int = 1) -> keras.Model:
    return sequential(units * width)


def returns_nothing() -> None:
    return None


def returns_a_layer() -> Any:
    return keras.layers.Dense(2)


def returns_a_class() -> Any:
    return Subclassed


class NoModel:
    pass


def raises_type_error() -> keras.Model:
    raise TypeError("the user's own")


def raises_value_error() -> keras.Model:
    raise ValueError("the user's own\nsecond line")


def refuses(size: int) -> Any:
    raise LookupError(f"no {size}")


number = 5


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    received.clear()


def test_a_function_gets_what_its_signature_names_of_the_data() -> None:
    model = build(target("function_of_the_data", hidden=5, name="label"), IMAGES)
    assert model.layers[0].units == 5
    assert model.output_shape == (None, 8, 8, 10)


def test_every_name_on_offer_arrives_and_the_label_where_it_is_named() -> None:
    build(target("records_all", name="label"), TOKENS)
    assert received == {
        "input_shape": (7,),
        "input_dtype": "int32",
        "outputs": 2,
        "classes": 2,
        "num_classes": 2,
        "vocabulary": 20,
        "name": "label",
    }


def test_what_the_data_lacks_leaves_the_targets_default() -> None:
    build(target("records_all"), VECTORS)
    assert received["classes"] == received["num_classes"] == received["vocabulary"] == received["name"] == "default"
    assert received["outputs"] == 3


def test_the_config_wins_over_the_data_null_included() -> None:
    build(target("records_all", outputs=7, classes=None), IMAGES)
    assert received["outputs"] == 7
    assert received["classes"] is None
    assert received["num_classes"] == 10


def test_keyword_catch_alls_get_the_config_and_nothing_of_the_data() -> None:
    build(target("records_keywords", units=3, name="label"), IMAGES)
    assert received == {"units": 3}


def test_positional_arguments_of_the_config_are_not_given_twice() -> None:
    build(target("records_all", _args_=[[4, 4, 1]]), IMAGES)
    assert received["input_shape"] == [4, 4, 1]


def test_a_class_of_the_user_is_a_target() -> None:
    model = build(target("Subclassed", units=4, name="label"), IMAGES)
    assert type(model) is Subclassed
    assert (model.hidden.units, model.head.units, model.built) == (4, 10, False)


def test_a_compiled_model_stays_compiled() -> None:
    assert build(target("sequential", compiled=True), VECTORS).compiled
    assert not build(target("sequential"), VECTORS).compiled


def test_nested_targets_are_built_and_containers_are_plain() -> None:
    layers = [{"_target_": "keras.layers.Dense", "units": 3}, {"_target_": "keras.layers.ReLU"}]
    model = build(target("takes_layers", layers=layers, sizes={"a": [1, 2]}), VECTORS)
    assert [type(layer).__name__ for layer in model.layers] == ["Dense", "ReLU"]
    assert type(received["sizes"]) is dict
    assert type(received["sizes"]["a"]) is list


def test_keras_own_sequential_is_a_target_and_gets_the_label() -> None:
    layers = [{"_target_": "keras.layers.Dense", "units": 3}]
    assert build({"_target_": "keras.Sequential", "layers": layers, "name": "mine"}, VECTORS).name == "mine"


def test_the_model_is_built_in_the_global_policy_nested_layers_included() -> None:
    layers = [{"_target_": "keras.layers.Dense", "units": 3}]
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = build(target("takes_layers", layers=layers), VECTORS)
    finally:
        keras.config.set_dtype_policy(before)
    assert (model.dtype_policy.name, model.layers[0].compute_dtype) == ("mixed_bfloat16", "bfloat16")


def test_the_config_is_not_changed() -> None:
    config = target("takes_units", units=3, name="label")
    before = dict(config)
    build(config, VECTORS)
    assert config == before


# Ours, from conf/


@pytest.mark.parametrize(
    ("option", "spec", "overrides"),
    [
        ("mlp", VECTORS, []),
        ("mlp", IMAGES, ["model.widths=[4]"]),
        ("cnn", IMAGES, []),
        ("resnet", IMAGES, ["model.depth=8"]),
        ("vit", IMAGES, ["model.depth=1"]),
        ("transformer", TOKENS, ["model.depth=1"]),
        ("application", IMAGES, []),
    ],
)
def test_each_option_of_conf_builds_a_model_for_its_data(option: str, spec: DataSpec, overrides: list[str]) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        node = compose(overrides=[f"+model={option}", *overrides])["model"]
    config = OmegaConf.to_container(node, resolve=True)
    assert isinstance(config, dict)
    model = build(config, spec)  # type: ignore[arg-type]
    assert config["name"] == option
    assert model.input_shape == (None, *(spec.input_shape or ()))
    assert model.output_shape == (None, spec.outputs)
    assert model.inputs[0].dtype == spec.input_dtype


def test_custom_without_a_target_asks_for_one() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose(overrides=["+model=custom"])["model"])
    with pytest.raises(ConfigError, match=r"^model\._target_=\?\?\?: give the dotted path of a function or class"):
        build(config, IMAGES)  # type: ignore[arg-type]


# Bad input


def line_of(config: dict[str, Any], spec: DataSpec, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        build(config, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "model._target_=null: give the dotted path"),
        ({"_target_": ""}, "model._target_='': give the dotted path"),
        ({"_target_": 5}, "model._target_=5: give the dotted path"),
        ({"_target_": "no_such_module.f"}, "model._target_=no_such_module.f: cannot be imported: No module named"),
        ({"_target_": "no_such_name"}, "model._target_=no_such_name: cannot be imported: No module named"),
        (
            {"_target_": "mp_hydra.models.cmm"},
            "model._target_=mp_hydra.models.cmm: cannot be imported: No module named",
        ),
        ({"_target_": "keras.Model.nothing"}, "model._target_=keras.Model.nothing: cannot be imported: type object"),
        ({"_target_": "a..b"}, "model._target_=a..b: cannot be imported: Error loading 'a..b': invalid dotstring."),
        ({"_target_": "mp_hydra.models"}, "model._target_=mp_hydra.models: Expected a callable target"),
        (target("number"), f"model._target_={__name__}.number: Expected a callable target"),
        (
            target("takes_units", unit=3),
            f"model.unit=3: {__name__}.takes_units takes no such argument; did you mean units?",
        ),
        (
            target("takes_units", units=3, x=1),
            f"model.x=1: {__name__}.takes_units takes no such argument; it takes units",
        ),
        (target("takes_units"), f"model.units=???: {__name__}.takes_units needs this argument"),
        (target("takes_units", units="???"), f"model.units=???: {__name__}.takes_units needs this argument"),
        (target("takes_units", _args_=[1, 2, 3]), "model._args_=[1, 2, 3]: they do not fit"),
        (target("takes_units", _args_=[1], units=2), "model._args_=[1]: they do not fit"),
        (target("Subclassed", _args_=[1, 2, 3]), "model._args_=[1, 2, 3]: they do not fit"),
        ({"_target_": "keras.Sequential", "layer": []}, "model.layer=[]: keras.Sequential takes no such argument; did"),
        (
            ours("cnn", filter=[3]),
            "model.filter=[3]: mp_hydra.models.cnn takes no such argument; did you mean filters?",
        ),
        (ours("cnn", dropout=2), "model.dropout=2: give a number"),
        (ours("resnet", depth=10), "model.depth=10: give 6n + 2 layers"),
        (ours("application", architecture="resnet50"), "model.architecture=resnet50: keras.applications has no such"),
        (
            target("takes_layers", layers=[{"_target_": "keras.layers.Dens"}]),
            "model=keras.layers.Dens: cannot be imported: No module named 'keras.layers.Dens'; correct",
        ),
    ],
)
def test_a_wrong_config_is_one_line_with_its_key(config: dict[str, Any], line: str) -> None:
    assert line_of(config, IMAGES, ConfigError).startswith(line)


def test_a_required_positional_only_argument_is_asked_for() -> None:
    assert line_of(target("takes_positional_only"), IMAGES, ConfigError).startswith("model._args_=???: ")
    assert build(target("takes_positional_only", _args_=[2], width=3), IMAGES).output_shape == (None, 6)


@pytest.mark.parametrize(
    ("config", "spec", "line"),
    [
        (
            ours("transformer"),
            IMAGES,
            "needs vocabulary, which this dataset does not have: choose a dataset of token seq",
        ),
        (
            ours("cnn"),
            VECTORS,
            "model=cnn needs images of shape (height, width, channels), but the inputs have shape (6,)",
        ),
        (ours("cnn"), TOKENS, "model=cnn needs images of shape (height, width, channels)"),
        (ours("mlp"), TOKENS, "the inputs are token ids: choose model=transformer"),
        (
            ours("mlp"),
            replace(VECTORS, input_shape=None),
            "needs input_shape, which this dataset does not have: choose",
        ),
        (
            target("function_of_the_data"),
            VECTORS,
            "needs classes, which this dataset does not have: choose a classification",
        ),
        (target("Subclassed"), VECTORS, "needs num_classes, which this dataset does not have: choose a classification"),
    ],
)
def test_a_dataset_that_lacks_what_the_model_needs_is_one_line(
    config: dict[str, Any], spec: DataSpec, line: str
) -> None:
    assert line in line_of(config, spec, ModelError)


@pytest.mark.parametrize(
    ("name", "came_back"),
    [
        ("returns_nothing", "None came back"),
        ("returns_a_layer", "an object of keras.src.layers.core.dense.Dense came back"),
        ("returns_a_class", f"the class {__name__}.Subclassed came back"),
        ("NoModel", f"an object of {__name__}.NoModel came back"),
    ],
)
def test_what_is_no_keras_model_is_named(name: str, came_back: str) -> None:
    line = line_of(target(name), IMAGES, ModelError)
    assert line == f"model._target_={__name__}.{name}: it must return a keras.Model, but {came_back}"


@pytest.mark.parametrize(("name", "kind"), [("raises_type_error", TypeError), ("raises_value_error", ValueError)])
def test_an_exception_of_the_users_code_comes_through_unchanged(name: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="the user's own") as caught:
        build(target(name), IMAGES)
    assert type(caught.value) is kind
    assert caught.traceback[-1].name == name


def test_an_exception_of_a_nested_target_comes_through_unchanged() -> None:
    with pytest.raises(LookupError, match="no 3") as caught:
        build(target("takes_layers", layers=[target("refuses", size=3)]), IMAGES)
    assert caught.traceback[-1].name == "refuses"


def test_an_exception_while_the_users_module_is_imported_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mp_hydra_test_broken.py").write_text("1 / 0\n")
    (tmp_path / "mp_hydra_test_needy.py").write_text("import mp_hydra_no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        build({"_target_": "mp_hydra_test_broken.f"}, IMAGES)
    line = line_of({"_target_": "mp_hydra_test_needy.f"}, IMAGES, ConfigError)
    assert "cannot be imported: No module named 'mp_hydra_no_such_module'" in line


def test_a_keras_error_in_one_of_our_builders_is_one_line() -> None:
    line = line_of(ours("cnn", input_shape=[8, 8, "x"]), IMAGES, ModelError)
    assert line.startswith("model=cnn needs images of shape")
    line = line_of(ours("mlp", input_shape=[-3]), IMAGES, ModelError)
    assert line.startswith("model._target_=mp_hydra.models.mlp: ")
