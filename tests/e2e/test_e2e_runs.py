"""Single runs on the digits: every number of the contract is there, and is what the model and the data make of it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import keras
import numpy as np
import pytest
import yaml

from tests.e2e.app_driver import Tracked, all_finite, git_repository, train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PRECISIONS = ("fp32", "tf32", "mixed_float16", "mixed_bfloat16")
COMPUTES_IN = {"fp32": "float32", "tf32": "float32", "mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
FIRST_SCALE = {"fp32": 1.0, "tf32": 1.0, "mixed_float16": 2.0**15, "mixed_bfloat16": 1.0}

ON_A_CPU = {
    *(f"{split}/{name}" for split in ("train", "val", "test") for name in ("loss", "accuracy")),
    "train/nonfinite_batches",
    *("loss_scale/value", "loss_scale/skipped_steps", "loss_scale/applied_steps"),
    *("gradients/global_norm", "gradients/global_norm_max"),
    *(f"memory/{name}_mib" for name in ("peak", "baseline", "training", "state", "host_peak")),
    *("time/first_step_seconds", "time/step_ms", "time/step_ms_p95", "time/samples_per_second"),
    *("time/epoch_seconds", "time/train_seconds"),
}
ON_A_GPU_ONLY = {"memory/device_used_peak_mib", "energy/joules"}

BATCH = 64
TRAINED_ON = 1294  # 1797 digits, less the 360 for testing, less a tenth of the rest for validation
TESTED_ON = 360
BATCHES = 21  # of 64, the last one smaller
# The cnn on 8x8x1: two convolutions (3x3), each halved by pooling, a dense layer of 128, ten logits.
LAYERS = 7
PARAMETERS = (9 * 1 * 32 + 32) + (9 * 32 * 64 + 64) + (2 * 2 * 64 * 128 + 128) + (128 * 10 + 10)


@dataclass(frozen=True)
class Finished:
    """A run, and the Keras state that it left behind in its process."""

    tracked: Tracked
    policy_after: str
    output_dir: Path


@dataclass(frozen=True)
class Session:
    """The four runs, typed in a working directory under git."""

    commit: str
    by_precision: dict[str, Finished]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One run in each precision, started under a global policy that none of them asks for."""
    cwd = tmp_path_factory.mktemp("work")
    commit = git_repository(cwd)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    try:
        finished = {}
        for name in PRECISIONS:
            out = cwd / name
            run = train(f"precision={name}", f"hydra.run.dir={out}", cwd=cwd)
            finished[name] = Finished(run, keras.config.dtype_policy().name, out)
        yield Session(commit, finished)
    finally:
        keras.config.set_dtype_policy(before)


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(session: Session, precision: str) -> Tracked:
    return session.by_precision[precision].tracked


def test_a_run_that_went_well_is_finished_and_ok(run: Tracked) -> None:
    assert (run.status, run.outcome) == ("FINISHED", "ok")


def test_every_metric_of_the_contract_that_a_cpu_can_have_is_there_and_no_other(run: Tracked) -> None:
    assert set(run.metrics) == ON_A_CPU
    assert all_finite(run.metrics)


def test_what_a_cpu_cannot_measure_has_a_reason_in_a_tag(run: Tracked) -> None:
    reasons = {key.removeprefix("mp_hydra.absent."): value for key, value in run.tags.items() if ".absent." in key}
    assert set(reasons) == ON_A_GPU_ONLY
    assert all(reasons.values())


def test_training_memory_is_peak_less_baseline_and_holds_at_least_the_first_activations(run: Tracked) -> None:
    peak, baseline, training = (run.metrics[f"memory/{name}_mib"] for name in ("peak", "baseline", "training"))
    assert training == pytest.approx(peak - baseline, abs=1e-9)
    of_the_first_convolution_in_16_bits = BATCH * 8 * 8 * 32 * 2 / 2**20
    assert of_the_first_convolution_in_16_bits < training < 100
    assert baseline >= run.metrics["memory/state_mib"]
    assert "allocator" in run.tags["mp_hydra.memory_source"]


def test_state_memory_is_three_float32_numbers_a_parameter_under_adam(run: Tracked) -> None:
    counters_and_metrics = run.metrics["memory/state_mib"] * 2**20 - PARAMETERS * 3 * 4
    assert 0 <= counters_and_metrics <= 1024


def test_host_memory_is_that_of_a_process_with_tensorflow_in_it(run: Tracked) -> None:
    assert 200 < run.metrics["memory/host_peak_mib"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_throughput_times_step_time_is_the_batch_size(run: Tracked) -> None:
    samples_a_step = run.metrics["time/samples_per_second"] * run.metrics["time/step_ms"] / 1000
    # A median against a mean, on a machine that does other things as well.
    assert BATCH / 3 < samples_a_step < BATCH * 1.5


def test_times_are_in_the_order_that_their_meanings_give(run: Tracked) -> None:
    figures = run.metrics
    assert 0 < figures["time/step_ms"] <= figures["time/step_ms_p95"]
    assert figures["time/step_ms"] / 1000 < figures["time/first_step_seconds"] < figures["time/epoch_seconds"]
    assert figures["time/train_seconds"] == pytest.approx(figures["time/epoch_seconds"])  # there was one epoch


def test_every_batch_is_an_applied_or_a_skipped_step_and_the_step_axis_counts_both(run: Tracked) -> None:
    assert run.metrics["loss_scale/applied_steps"] + run.metrics["loss_scale/skipped_steps"] == BATCHES
    assert run.metrics["train/nonfinite_batches"] == 0
    for metric in ("train/loss", "val/loss", "test/loss", "loss_scale/value", "memory/training_mib"):
        assert run.steps(metric)[-1] == BATCHES


def test_the_loss_scale_is_keras_first_one_for_float16_and_one_elsewhere(run: Tracked, precision: str) -> None:
    assert run.metrics["loss_scale/value"] == FIRST_SCALE[precision]
    assert run.metrics["loss_scale/skipped_steps"] == 0


def test_gradient_norms_are_those_of_the_unscaled_gradient(session: Session, precision: str) -> None:
    figures, exact = (session.by_precision[name].tracked.metrics for name in (precision, "fp32"))
    assert 0 < figures["gradients/global_norm"] <= figures["gradients/global_norm_max"]
    assert figures["gradients/global_norm"] == pytest.approx(exact["gradients/global_norm"], rel=0.05)


def test_a_cnn_learns_from_one_epoch_of_digits_the_same_in_every_precision(session: Session, precision: str) -> None:
    figures, exact = (session.by_precision[name].tracked.metrics for name in (precision, "fp32"))
    assert 0.5 < figures["test/accuracy"] <= 1
    assert 0 < figures["test/loss"] < 2.30  # of ten equal guesses: ln 10
    assert figures["test/loss"] == pytest.approx(exact["test/loss"], rel=0.02)


def test_fp32_and_tf32_are_bit_identical_where_no_hardware_has_tf32(session: Session) -> None:
    fp32, tf32 = (session.by_precision[name].tracked for name in ("fp32", "tf32"))
    assert tf32.metrics["test/loss"] == fp32.metrics["test/loss"]
    assert tf32.tags["mp_hydra.precision"] == "tf32"
    assert tf32.tags["mp_hydra.precision_resolved"] == "fp32"


def test_recorded_predictions_give_the_reported_accuracy_exactly(run: Tracked) -> None:
    samples = run.arrays("predictions.npz")
    label, predicted, correct = samples["label"], samples["predicted"], samples["correct"]
    assert len(label) == len(predicted) == len(correct) == TESTED_ON
    assert np.array_equal(correct, label == predicted)
    # Keras divides in float32.
    assert np.float32(correct.sum()) / np.float32(TESTED_ON) == np.float32(run.metrics["test/accuracy"])


def test_predictions_of_every_precision_are_of_the_same_samples_in_the_same_order(session: Session) -> None:
    labels = [finished.tracked.arrays("predictions.npz")["label"] for finished in session.by_precision.values()]
    assert all(np.array_equal(labels[0], other) for other in labels[1:])


def test_step_times_are_kept_for_every_step_after_the_warm_up(run: Tracked) -> None:
    milliseconds = run.arrays("step_times.npz")["milliseconds"]
    assert len(milliseconds) == BATCHES - 3
    assert np.median(milliseconds) == pytest.approx(run.metrics["time/step_ms"])


def test_the_audit_counts_the_layers_in_the_precision_asked_for_and_a_float32_head(
    run: Tracked, precision: str
) -> None:
    audit = run.json("audit.json")
    dtypes = Counter(layer["compute_dtype"] for layer in audit["layers"])
    assert dtypes == Counter({COMPUTES_IN[precision]: LAYERS - 1}) + Counter({"float32": 1})
    assert sum(layer["parameters"] for layer in audit["layers"]) == PARAMETERS
    assert (run.artifacts / "audit.md").read_text(encoding="utf-8").startswith("# Precision of each layer")


def test_the_environment_names_versions_and_the_tf32_switch_of_this_run(run: Tracked, precision: str) -> None:
    environment = run.json("environment.json")
    assert environment["versions"]["keras"] == keras.__version__
    assert environment["devices"][0]["device"] == "CPU:0"
    assert environment["tf32"] == {"allowed": precision != "fp32", "pays": False}
    assert environment["jit_compile"] is False


def test_the_config_artifact_is_what_the_run_was_given(run: Tracked, precision: str) -> None:
    config = yaml.safe_load((run.artifacts / "config.yaml").read_text(encoding="utf-8"))
    assert (config["precision"]["name"], config["epochs"], config["batch_size"]) == (precision, 1, BATCH)
    assert (run.artifacts / ".hydra" / "overrides.yaml").is_file()


def test_files_in_the_output_directory_are_the_artifacts(session: Session, precision: str) -> None:
    finished = session.by_precision[precision]
    local = {path.name for path in finished.output_dir.iterdir()}
    assert {path.name for path in finished.tracked.artifacts.iterdir()} == local


def test_parameters_are_the_flattened_config_with_the_same_keys_in_every_run(session: Session) -> None:
    runs = {name: finished.tracked.params for name, finished in session.by_precision.items()}
    assert all(params.keys() == runs["fp32"].keys() for params in runs.values())
    differing = {key for key in runs["fp32"] if len({params[key] for params in runs.values()}) > 1}
    assert differing == {"precision.name", "precision.policy", "precision.tf32"}
    assert runs["mixed_float16"]["precision.policy"] == "mixed_float16"
    assert runs["mixed_float16"]["optimizer.learning_rate"] == "0.001"


def test_the_dataset_is_an_input_of_the_run_with_one_digest_for_all_precisions(session: Session) -> None:
    inputs = [finished.tracked.run.inputs.dataset_inputs for finished in session.by_precision.values()]
    assert all(len(each) == 1 and each[0].dataset.name == "digits" for each in inputs)
    assert len({each[0].dataset.digest for each in inputs}) == 1


def test_the_commit_of_the_working_directory_is_recorded_with_a_clean_tree(session: Session, run: Tracked) -> None:
    assert run.tags["mlflow.source.git.commit"] == session.commit
    assert run.tags["mp_hydra.git_dirty"] == "false"


def test_a_run_name_says_model_dataset_precision_and_seed(run: Tracked, precision: str) -> None:
    assert run.run.info.run_name == f"cnn-digits-{precision}-s0"


def test_the_global_policy_of_the_process_is_what_it_was_before_the_run(session: Session, precision: str) -> None:
    assert session.by_precision[precision].policy_after == "float64"
