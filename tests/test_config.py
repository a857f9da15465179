"""Config: what passes and what does not, the options of every group, and that none of it imports TensorFlow."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mp_hydra import checks, config
from mp_hydra.errors import ConfigError, DataError
from mp_hydra.paths import conf_dir

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parent.parent
# Options that leave a place for the user's own code, and what fills it.
NEEDED = {
    "model=custom": ["model._target_=my.model"],
    "dataset=custom": ["dataset._target_=my.data"],
    "optimizer=custom": ["optimizer._target_=my.Optimizer"],
    "schedule=custom": ["schedule._target_=my.Schedule"],
    "loss_scale=dynamic": ["precision=mixed_float16"],
    "loss_scale=fixed": ["precision=mixed_float16", "loss_scale.value=1024"],
}
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
NOT_INTEGERS = st.one_of(st.none(), st.booleans(), st.text(), FLOATS, st.lists(st.integers()))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


EVERY_OPTION = [f"{group}={option}" for group in config.GROUPS for option in options(group)]


def composed(*overrides: str) -> Any:
    config.register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", list(overrides))


def resolved(*overrides: str) -> dict[str, Any]:
    node = composed(*overrides)
    # ${hydra:...} is known only while a job runs.
    for callback in node.callbacks.values():
        callback.update({key: "here" for key in ("filename", "filepath", "log_dir") if key in callback})
    return config.resolve(node)


def lines(nested: dict[str, Any]) -> list[str]:
    return [str(error) for error in config.problems(nested)]


def at(key: str, value: object) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def keys(errors: Iterable[ConfigError]) -> list[str]:
    return [error.key for error in errors]


@given(st.integers(min_value=1))
@pytest.mark.parametrize("key", ["batch_size", "epochs", "compile.steps_per_execution", "loss_scale.growth_interval"])
def test_every_integer_from_1_is_a_valid_count(key: str, value: int) -> None:
    assert lines(at(key, value)) == []


@given(st.one_of(st.integers(max_value=0), NOT_INTEGERS))
@pytest.mark.parametrize("key", ["batch_size", "epochs", "compile.steps_per_execution", "loss_scale.growth_interval"])
def test_anything_but_an_integer_from_1_is_one_problem_of_a_count(key: str, value: object) -> None:
    found = config.problems(at(key, value))
    assert keys(found) == [key]
    assert str(found[0]).startswith(f"{key}=")


@given(st.integers())
def test_a_seed_is_valid_exactly_from_0_to_2_to_the_32_minus_1(value: int) -> None:
    assert (lines({"seed": value}) == []) == (0 <= value < 2**32)


@given(FLOATS)
def test_a_growth_factor_is_valid_exactly_if_finite_and_above_1(value: float) -> None:
    found = config.problems({"loss_scale": {"growth_factor": value}})
    assert keys(found) == ([] if 1 < value < math.inf else ["loss_scale.growth_factor"])


@given(FLOATS)
def test_a_backoff_factor_is_valid_exactly_between_0_and_1(value: float) -> None:
    found = config.problems({"loss_scale": {"backoff_factor": value}})
    assert keys(found) == ([] if 0 < value < 1 else ["loss_scale.backoff_factor"])


@given(FLOATS)
def test_a_learning_rate_is_valid_exactly_if_finite_and_above_0(value: float) -> None:
    found = config.problems({"optimizer": {"_target_": "keras.optimizers.SGD", "learning_rate": value}})
    assert keys(found) == ([] if 0 < value < math.inf else ["optimizer.learning_rate"])


POSITIVE = st.floats(min_value=1e-30, max_value=1e30)


@given(POSITIVE, POSITIVE, POSITIVE)
def test_the_initial_scale_is_valid_exactly_from_minimum_to_maximum(low: float, first: float, high: float) -> None:
    found = config.problems({"loss_scale": {"minimum": low, "initial": first, "maximum": high}})
    wrong = "minimum" if low > high else "initial"
    assert keys(found) == ([] if low <= first <= high else [f"loss_scale.{wrong}"])


@given(st.text(min_size=1), st.sets(st.text(min_size=1), min_size=1))
def test_a_suggestion_names_only_known_words(word: str, known: set[str]) -> None:
    hint = config.suggestion(word, known)
    start = "did you mean " if hint.startswith("did you mean ") else "known here: "
    assert any(hint.removeprefix(start).startswith(name) for name in known)


@given(st.text(min_size=4, alphabet="abcdefghij"), st.integers(min_value=0, max_value=3))
@example("aabaaa", 2)  # difflib takes the longest common run first, here the wrong one
def test_a_word_with_one_letter_missing_is_suggested(word: str, position: int) -> None:
    assume(len(word) > 4)
    assert config.suggestion(word[:position] + word[position + 1 :], [word, "xyz"]) == f"did you mean {word}?"


def test_a_suggestion_from_nothing_says_so() -> None:
    assert config.suggestion("word", []) == "known here: none"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("epochs", "three", "give an integer of at least 1; write it as a plain number, not as the text 'three'"),
        ("loss_scale.force", "maybe", "choose one of true, false"),
        ("loss_scale.value", "big", "give a number above 0 or null; write it as a plain number, not as the text 'big'"),
        ("epochs", 3, None),
        ("tracking.uri", 3, None),
        ("no.such.key", 3, None),
    ],
)
def test_advice_says_what_would_be_right_where_that_is_known(key: str, value: object, said: str | None) -> None:
    assert config.advice(key, value) == said


def test_all_problems_of_single_values_are_found_at_once() -> None:
    assert lines({"batch_size": 0, "epochs": 0}) == [
        "epochs=0: give an integer of at least 1",
        "batch_size=0: give an integer of at least 1, or max",
    ]


def test_a_number_that_is_not_finite_is_found_in_lists_and_in_nodes_that_nobody_knows() -> None:
    found = lines({"model": {"_target_": "my.model", "sizes": [1.0, math.inf], "deep": {"x": math.nan}}})
    assert found == ["model.sizes.1=inf: give a finite number", "model.deep.x=nan: give a finite number"]


@pytest.mark.parametrize("target", ["keras.optimizers.SGD", "my.Optimizer"])
@pytest.mark.parametrize(("key", "value"), [("momentum", 2.0), ("nesterov", "maybe"), ("epsilon", None)])
def test_arguments_are_judged_for_targets_of_keras_and_not_for_those_of_users(
    target: str, key: str, value: object
) -> None:
    found = config.problems({"optimizer": {"_target_": target, key: value}})
    assert keys(found) == ([f"optimizer.{key}"] if target.startswith("keras.") else [])


def test_what_every_target_gets_is_judged_for_users_targets_too() -> None:
    nested = {
        "optimizer": {"_target_": "my.Optimizer", "learning_rate": 0.0},
        "dataset": {"_target_": "my.data", "classes": 1, "validation_fraction": 1.0, "size": "large"},
    }
    assert keys(config.problems(nested)) == [
        "optimizer.learning_rate",
        "dataset.validation_fraction",
        "dataset.classes",
    ]


def test_a_precision_of_a_name_of_ones_own_may_mean_anything() -> None:
    assert lines({"precision": {"name": "mine", "policy": "mixed_float16", "tf32": False}}) == []


@pytest.mark.parametrize("mode", ["dynamic", "fixed"])
def test_scaling_of_float32_is_a_problem_unless_it_is_forced(mode: str) -> None:
    nested: dict[str, Any] = {
        "precision": {"name": "fp32", "policy": "float32", "tf32": False},
        "loss_scale": {"mode": mode, "value": 8.0 if mode == "fixed" else None, "force": False},
    }
    assert keys(config.problems(nested)) == ["loss_scale"]
    nested["loss_scale"]["force"] = True
    assert lines(nested) == []


def test_an_integer_becomes_a_float_exactly_where_a_number_need_not_be_one() -> None:
    found = resolved(
        "optimizer=sgd", "optimizer.learning_rate=1", "optimizer.clipnorm=2", "schedule=exponential", "epochs=1"
    )
    assert repr(found["optimizer"]["learning_rate"]) == "1.0"
    assert repr(found["optimizer"]["clipnorm"]) == "2.0"
    assert repr(found["schedule"]["initial_learning_rate"]) == "1.0"
    assert repr(found["epochs"]) == "1"
    assert found["optimizer"]["nesterov"] is False


def test_floats_for_integers_leave_the_config_they_come_from_alone() -> None:
    given_config = {"optimizer": {"_target_": "my.Optimizer", "learning_rate": 1, "momentum": 0}}
    assert repr(checks.with_floats(given_config)["optimizer"]) == (
        "{'_target_': 'my.Optimizer', 'learning_rate': 1.0, 'momentum': 0}"
    )
    assert repr(given_config["optimizer"]["learning_rate"]) == "1"


def test_a_schedule_as_the_learning_rate_passes() -> None:
    rate = "{_target_:keras.optimizers.schedules.ExponentialDecay,initial_learning_rate:1,decay_steps:5,decay_rate:0.5}"
    found = resolved(f"optimizer.learning_rate={rate}")
    assert found["optimizer"]["learning_rate"]["decay_steps"] == 5


@pytest.mark.parametrize("choice", EVERY_OPTION)
def test_every_option_of_every_group_composes_and_passes(choice: str) -> None:
    found = resolved(choice, *NEEDED.get(choice, []))
    assert found["epochs"] >= 1


@pytest.mark.parametrize("group", ["precision", "loss_scale", "tracking"])
def test_every_option_of_a_closed_group_has_the_same_keys(group: str) -> None:
    found = {option: list(OmegaConf.load(conf_dir() / group / f"{option}.yaml")) for option in options(group)}
    assert all(set(names) == set(found[options(group)[0]]) for names in found.values())


@pytest.mark.parametrize("option", options("precision"))
def test_an_option_of_precision_bears_its_own_name(option: str) -> None:
    assert resolved(f"precision={option}")["precision"]["name"] == option


def test_the_options_of_loss_scale_differ_in_their_mode_alone() -> None:
    found = {option: dict(composed(f"loss_scale={option}").loss_scale) for option in options("loss_scale")}
    assert {option: node.pop("mode") for option, node in found.items()} == {name: name for name in found}
    assert all(node == found["auto"] for node in found.values())


def test_the_numbers_of_loss_scale_in_conf_are_those_of_the_schema() -> None:
    schema = OmegaConf.structured(config.LossScaleConfig(mode="auto"))
    assert composed().loss_scale == schema


@pytest.mark.parametrize("option", options("experiment"))
def test_an_experiment_says_what_it_is_for_in_one_comment(option: str) -> None:
    text = (conf_dir() / "experiment" / f"{option}.yaml").read_text().splitlines()
    assert text[0] == "# @package _global_"
    assert text[1].startswith("# ")
    assert not text[2].startswith("#")


def test_experiments_choose_their_model_and_data() -> None:
    chosen = {option: resolved(f"experiment={option}") for option in options("experiment")}
    assert {option: (found["model"]["name"], found["dataset"]["name"]) for option, found in chosen.items()} == {
        "mnist_cnn": ("cnn", "mnist"),
        "resnet_synthetic": ("resnet", "synthetic"),
        "tokens": ("transformer", "synthetic"),
    }
    assert chosen["resnet_synthetic"]["dataset"]["shape"] == [32, 32, 3]
    assert chosen["resnet_synthetic"]["batch_size"] == 64
    assert chosen["tokens"]["dataset"]["kind"] == "tokens"


def test_the_command_line_wins_over_an_experiment() -> None:
    found = resolved("experiment=resnet_synthetic", "model=vit", "batch_size=8")
    assert (found["model"]["name"], found["batch_size"]) == ("vit", 8)


def test_no_callbacks_at_all_pass() -> None:
    assert resolved("callbacks=[]")["callbacks"] == {}
    assert resolved("~callbacks")["callbacks"] == {}


def test_several_callbacks_come_in_the_order_they_are_asked_for() -> None:
    assert list(resolved("callbacks=[early_stopping,csv]")["callbacks"]) == ["early_stopping", "csv"]


def test_keys_of_ones_own_at_the_top_are_free_for_interpolation() -> None:
    assert resolved("+width=48", "model.dense=${width}")["model"]["dense"] == 48


def test_every_key_without_a_value_gets_a_line() -> None:
    with pytest.raises(config.InvalidConfigError) as caught:
        resolved("batch_size=???", "model=custom", "~seed")
    assert sorted(str(caught.value).splitlines()) == [
        "batch_size=???: give a value",
        "model._target_=???: give a dotted path such as my_module.my_function",
        "seed=???: give a value",
    ]


def test_errors_arrive_whole_in_another_process() -> None:
    error = ConfigError("callbacks", {"a": [None, True]}, "no")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (type(again), str(again), again.key) == (ConfigError, "callbacks={a: [null, true]}: no", "callbacks")
    many = pickle.loads(pickle.dumps(config.InvalidConfigError([error, error])))  # noqa: S301
    assert (str(many), keys(many.errors)) == (f"{error}\n{error}", ["callbacks", "callbacks"])
    assert str(pickle.loads(pickle.dumps(DataError("two\nlines")))) == "two lines"  # noqa: S301


@pytest.fixture
def heavy_imports_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First on the path of every subprocess: packages that break whoever imports them."""
    for name in ("tensorflow", "keras", "mlflow", "sklearn"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} was imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.process
@pytest.mark.usefixtures("heavy_imports_fail")
def test_help_lists_groups_options_and_examples_without_importing_tensorflow() -> None:
    done = run("train.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    shown = [path.name for path in conf_dir().iterdir() if path.is_dir() and path.name != "hydra"]
    for group in shown:
        assert f"\n{group}: {', '.join(options(group))}\n" in done.stdout
    assert "precision" in shown
    for text in ("python train.py precision=mixed_float16\n", "python train.py -m ", "epochs=3  batch_size=64  seed=0"):
        assert text in done.stdout


@pytest.mark.process
@pytest.mark.usefixtures("heavy_imports_fail")
def test_cfg_job_shows_the_whole_config_without_importing_tensorflow() -> None:
    done = run("train.py", "--cfg", "job", "precision=mixed_float16", "experiment=tokens")
    assert (done.returncode, done.stderr) == (0, "")
    found = OmegaConf.create(done.stdout)
    assert (found.precision.policy, found.model.name, found.batch_size) == ("mixed_float16", "transformer", 64)


@pytest.mark.process
@pytest.mark.usefixtures("heavy_imports_fail")
def test_a_wrong_value_is_answered_before_tensorflow_is_imported(tmp_path: Path) -> None:
    done = run("train.py", "batch_size=0", f"hydra.run.dir={tmp_path}/run")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mp_hydra: batch_size=0: give an integer of at least 1, or max\n"


@pytest.mark.process
@pytest.mark.usefixtures("heavy_imports_fail")
def test_importing_and_composing_import_nothing_heavy() -> None:
    program = (
        "import sys; from hydra import compose, initialize_config_dir; import mp_hydra.app; from mp_hydra import config, paths\n"
        "config.register()\n"
        "with initialize_config_dir(str(paths.conf_dir()), version_base='1.3'): config.resolve(compose('config'))\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'tensorflow', 'keras', 'mlflow', 'numpy', 'PIL'}))"
    )
    done = run("-c", program)
    assert (done.stderr, done.stdout) == ("", "[]\n")
