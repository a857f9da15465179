"""Which runs are compared, and what is said of those that are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mp_hydra.compare.identity import config_of, recipe_of
from mp_hydra.compare.pairing import pair
from tests.compare.made_runs import ENVIRONMENT, ended, run

if TYPE_CHECKING:
    from mp_hydra.compare.model import PairedGroup, Pairing


def only_group(pairing: Pairing) -> PairedGroup:
    assert len(pairing.groups) == 1
    return pairing.groups[0]


def pairs(group: PairedGroup) -> list[tuple[str, str, str | None, str]]:
    return [
        (row.label, one.mixed.name, one.baseline.name if one.baseline else None, one.problem)
        for row in group.rows
        for one in row.pairs
    ]


def test_runs_of_the_same_seed_are_paired_and_seeds_are_in_numeric_order() -> None:
    records = [run(precision, seed) for seed in (10, 2, 0) for precision in ("mixed_bfloat16", "fp32")]
    group = only_group(pair(records))
    assert pairs(group) == [
        ("mixed_bfloat16", f"cnn-digits-mixed_bfloat16-s{seed}", f"cnn-digits-fp32-s{seed}", "") for seed in (0, 2, 10)
    ]
    assert (group.label, group.problem, group.remarks, group.excluded) == ("model=cnn dataset=digits", "", (), ())


def test_tracking_names_output_paths_and_reporting_do_not_keep_runs_apart() -> None:
    other = {
        "tracking.run_name": "mine",
        "tracking.uri": "sqlite:///x.db",
        "log_every_batches": "0",
        "objective": "val/loss",
    }
    paths = [{"callbacks.checkpoint.filepath": f"/home/me/{place}/checkpoint.keras"} for place in "ab"]
    group = only_group(pair([run(params=paths[0]), run("mixed_float16", params={**other, **paths[1]})]))
    assert [one.compared for one in group.rows[0].pairs] == [True]


def test_a_callback_itself_keeps_runs_apart() -> None:
    stopping = {"callbacks.early_stopping.patience": "5"}
    assert len(pair([run(), run("mixed_float16", params=stopping)]).groups) == 2


def test_other_overrides_make_groups_of_their_own_labelled_by_what_differs() -> None:
    records = [
        run(precision, params={"batch_size": size}, name=f"{precision}-{size}")
        for size in ("64", "128")
        for precision in ("fp32", "mixed_float16")
    ]
    groups = pair(records).groups
    assert [group.label for group in groups] == [
        f"model=cnn dataset=digits batch_size={size}" for size in ("64", "128")
    ]
    assert [pairs(group) for group in groups] == [
        [("mixed_float16", f"mixed_float16-{size}", f"fp32-{size}", "")] for size in ("64", "128")
    ]


def test_a_group_is_labelled_by_the_model_alone_where_other_models_have_other_parameters() -> None:
    mlp = {"model.name": "mlp", "model.dense": None, "model.widths": "[8]"}
    assert [group.label for group in pair([run(), run(name="other", params=mlp)]).groups] == [
        "model=cnn dataset=digits",
        "model=mlp dataset=digits",
    ]


def test_a_run_of_another_batch_size_is_not_compared_and_the_reason_names_both() -> None:
    groups = pair([run(), run("mixed_float16", params={"batch_size": "128"})]).groups
    assert [group.problem for group in groups] == [
        "nothing to compare with the fp32 baseline",
        "no fp32 baseline; the nearest differs: batch_size 128, not 64",
    ]
    assert pairs(groups[1])[0][2:] == (None, "no fp32 baseline with seed 0")


def test_a_run_of_another_number_of_epochs_and_a_resumed_one_are_not_compared() -> None:
    groups = pair([run(), run("mixed_float16", params={"epochs": "5", "resume": "/home/me/a.keras"})]).groups
    assert groups[1].problem == "no fp32 baseline; the nearest differs: epochs 5, not 3; resume a checkpoint, not null"


def test_two_resumed_runs_are_compared_although_their_checkpoints_differ() -> None:
    records = [run(params={"resume": "/home/me/a.keras"}), run("mixed_float16", params={"resume": "/home/me/b.keras"})]
    assert only_group(pair(records)).rows[0].pairs[0].compared


def test_a_baseline_that_differs_in_nearly_everything_is_not_called_near() -> None:
    far = {"model.name": "mlp", "batch_size": "1", "epochs": "9", "optimizer.learning_rate": "1.0"}
    assert pair([run(params=far), run("mixed_float16")]).groups[1].problem == "no fp32 baseline"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dataset": ("digits", "ffffffff00000000")}, "data digest ffffffff, not a2c3f5a8"),
        ({"environment": {"versions": {"tensorflow": "2.20.0", "keras": "3.15.1"}}}, "tensorflow 2.20.0, not 2.21.0"),
        ({"environment": {"versions": {"tensorflow": "2.21.0", "keras": "3.14.0"}}}, "keras 3.14.0, not 3.15.1"),
        ({"environment": {"devices": [{"kind": "GPU", "name": "NVIDIA A100"}]}}, "device NVIDIA A100, not NVIDIA H200"),
        ({"environment": {"jit_compile": True}}, "XLA (jit_compile) on, not off"),
        ({"environment": {"xla": {"auto_jit": "autoclustering"}}}, "XLA (auto_jit) autoclustering, not off"),
        ({"environment": {"onednn": False}}, "oneDNN off, not on"),
    ],
)
def test_runs_of_one_config_in_other_circumstances_are_listed_with_the_reason(
    changes: dict[str, object], reason: str
) -> None:
    group = only_group(pair([run(), run("mixed_float16", name="twin"), run("mixed_float16", 1, name="odd", **changes)]))
    assert [(one.run.name, one.reason) for one in group.excluded] == [("odd", f"not comparable: {reason}")]
    assert [name for _, name, _, _ in pairs(group)] == ["twin"]


def test_the_only_mixed_run_in_other_circumstances_leaves_the_baseline_alone() -> None:
    group = only_group(pair([run(), run("mixed_float16", name="odd", dataset=("digits", "ffff"))]))
    assert group.problem == "nothing to compare with the fp32 baseline"
    assert [one.reason for one in group.excluded] == ["not comparable: data digest ffff, not a2c3f5a8"]


def test_on_a_cpu_the_number_of_cores_keeps_runs_apart_and_on_a_gpu_it_does_not() -> None:
    fewer = {"cpu": {"usable_cores": 2}}
    cpu = {"devices": [{"kind": "CPU", "name": "AMD EPYC"}]}
    assert only_group(pair([run(), run("mixed_float16", environment=fewer)])).rows
    group = only_group(pair([run(environment=cpu), run("mixed_float16", environment={**cpu, **fewer})]))
    assert [one.reason for one in group.excluded] == ["not comparable: usable CPU cores 2, not 16"]


def test_sweeps_of_one_config_on_two_devices_are_two_groups_and_never_mixed() -> None:
    slow = {"devices": [{"kind": "GPU", "name": "NVIDIA T4"}]}
    records = [
        run(precision, environment=environment, name=f"{precision}-{place}")
        for place, environment in (("fast", {}), ("slow", slow))
        for precision in ("fp32", "mixed_float16")
    ]
    groups = pair(records).groups
    assert [group.label for group in groups] == [
        "model=cnn dataset=digits device=NVIDIA H200",
        "model=cnn dataset=digits device=NVIDIA T4",
    ]
    assert [pairs(group)[0][1:3] for group in groups] == [
        ("mixed_float16-fast", "fp32-fast"),
        ("mixed_float16-slow", "fp32-slow"),
    ]


def test_a_finished_run_without_a_recorded_environment_is_compared_and_named_as_unchecked() -> None:
    group = only_group(
        pair([run(), run("mixed_float16", dataset=None, environment=dict.fromkeys(ENVIRONMENT), name="bare")])
    )
    assert group.rows[0].pairs[0].compared
    (remark,) = group.remarks
    assert remark.startswith("not checked: data digest, tensorflow, keras, device")
    assert remark.endswith("not recorded by bare")


def test_runs_of_which_nothing_is_recorded_say_that_nothing_was_checked() -> None:
    bare: dict[str, Any] = {"dataset": None, "environment": dict.fromkeys(ENVIRONMENT)}
    group = only_group(pair([run(**bare), run("mixed_float16", **bare)]))
    assert group.remarks == ("data, device and library versions were not checked: no run recorded them",)


def test_no_baseline_at_all_is_the_groups_problem_and_the_runs_stay_in_it() -> None:
    group = only_group(pair([run("mixed_float16"), run("mixed_bfloat16")]))
    assert group.problem == "no fp32 baseline"
    assert [row.label for row in group.rows] == ["mixed_float16", "mixed_bfloat16"]
    assert group.baselines == ()


def test_a_seed_without_its_baseline_is_shown_beside_those_that_have_one() -> None:
    group = only_group(pair([run(seed=0), run("mixed_float16", 0), run("mixed_float16", 1)]))
    assert [problem for *_, problem in pairs(group)] == ["", "no fp32 baseline with seed 1"]
    assert group.problem == ""


def test_a_baseline_of_a_seed_that_no_other_run_has_is_kept() -> None:
    group = only_group(pair([run(seed=0), run(seed=1), run("mixed_float16", 0)]))
    assert [one.seed for one in group.baselines] == ["0", "1"]


def test_of_two_baselines_the_newest_that_finished_counts_and_it_is_said() -> None:
    records = [
        run(name="old", started=1),
        run(name="new", started=2),
        ended("killed", "fp32", name="newest", started=3),
        run("mixed_float16"),
    ]
    group = only_group(pair(records))
    assert [one.name for one in group.baselines] == ["new"]
    assert group.remarks == ("3 baselines with seed 0: the newest that finished counts, new",)
    assert [(one.run.name, one.reason.partition(":")[0]) for one in group.excluded] == [
        ("old", "superseded"),
        ("newest", "superseded (killed)"),
    ]


def test_of_a_resumed_sweeps_runs_the_newest_that_finished_counts_and_the_others_are_superseded() -> None:
    records = [
        run(),
        ended("killed", "mixed_float16", name="first", started=1, reason="SIGTERM"),
        run("mixed_float16", name="second", started=2),
        ended("running", "mixed_float16", name="third", started=3),
    ]
    (row,) = only_group(pair(records)).rows
    assert [(one.mixed.name, one.compared) for one in row.pairs] == [("second", True)]
    assert {one.run.name: one.reason.partition(":")[0] for one in row.excluded} == {
        "first": "superseded (killed (SIGTERM))",
        "third": "superseded (running)",
    }


@pytest.mark.parametrize(
    ("outcome", "reason", "shown"),
    [
        ("out_of_memory", "8.0 GiB wanted", "out_of_memory (8.0 GiB wanted)"),
        ("error", "ValueError:\n  bad", "error (ValueError: bad)"),
        ("killed", "", "killed"),
        ("no_updates", "", "no_updates"),
        ("running", "", "still running"),
    ],
)
def test_a_run_that_did_not_finish_stays_in_its_row_with_outcome_and_reason(
    outcome: str, reason: str, shown: str
) -> None:
    group = only_group(pair([run(), ended(outcome, reason=reason)]))
    assert [problem for *_, problem in pairs(group)] == [shown]
    assert group.problem == ""


def test_a_diverged_run_is_a_result_that_is_compared() -> None:
    (one,) = only_group(pair([run(), ended("diverged", reason="test/loss: the value is nan")])).rows[0].pairs
    assert (one.compared, one.mixed.outcome) == (True, "diverged")


def test_only_failed_baselines_make_a_problem_that_tells_how_they_ended() -> None:
    group = only_group(pair([ended("out_of_memory", "fp32"), run("mixed_float16")]))
    assert group.problem == "no fp32 baseline has finished: out_of_memory"
    assert [problem for *_, problem in pairs(group)] == ["its fp32 baseline: out_of_memory"]


def test_only_failed_runs_of_both_kinds_give_rows_with_their_endings() -> None:
    group = only_group(pair([ended("error", "fp32"), ended("error", "mixed_float16")]))
    assert pairs(group)[0][3] == "error"
    assert group.problem == "no fp32 baseline has finished: error"


def test_loss_scales_make_rows_of_one_group_labelled_by_what_differs() -> None:
    fixed = {"loss_scale.mode": "fixed", "loss_scale.value": "1024.0"}
    records = [run(), run("mixed_float16", name="auto"), run("mixed_float16", name="fixed", params=fixed)]
    group = only_group(pair(records))
    assert [(label, base) for label, _, base, _ in pairs(group)] == [
        ("mixed_float16 loss_scale.mode=dynamic", "cnn-digits-fp32-s0"),
        ("mixed_float16 loss_scale.mode=fixed", "cnn-digits-fp32-s0"),
    ]


def test_two_fixed_scales_are_told_apart_by_their_value() -> None:
    records = [
        run("mixed_float16", name=value, params={"loss_scale.mode": "fixed", "loss_scale.value": value})
        for value in ("8.0", "16.0")
    ]
    assert [row.label for row in only_group(pair(records)).rows] == [
        "mixed_float16 loss_scale.value=8.0",
        "mixed_float16 loss_scale.value=16.0",
    ]


def test_settings_that_have_no_effect_make_no_rows() -> None:
    auto = {"precision.name": "mixed_bfloat16", "precision.policy": "mixed_bfloat16", "loss_scale.mode": "auto"}
    assert recipe_of({**auto, "loss_scale.initial": "1.0"}) == recipe_of({**auto, "loss_scale.initial": "2.0"})
    dynamic = {"precision.policy": "mixed_float16", "loss_scale.mode": "dynamic", "loss_scale.initial": "1.0"}
    assert recipe_of(dynamic) == recipe_of({**dynamic, "loss_scale.mode": "auto", "loss_scale.value": "4.0"})
    assert recipe_of(dynamic) != recipe_of({**dynamic, "loss_scale.initial": "2.0"})


def test_with_tf32_as_the_baseline_fp32_is_a_row() -> None:
    records = [run(precision) for precision in ("fp32", "tf32", "mixed_bfloat16")]
    group = only_group(pair(records, baseline="tf32"))
    assert [(label, base) for label, _, base, _ in pairs(group)] == [
        ("fp32", "cnn-digits-tf32-s0"),
        ("mixed_bfloat16", "cnn-digits-tf32-s0"),
    ]


def test_tf32_that_came_to_fp32_on_this_device_is_a_row_of_noise_and_said_to_be() -> None:
    group = only_group(pair([run(), run("tf32", tags={"mp_hydra.precision_resolved": "fp32"})]))
    assert [row.label for row in group.rows] == ["tf32"]
    assert group.remarks == ("tf32 came to fp32 on this device: its row shows noise alone",)


def test_a_tf32_baseline_that_came_to_fp32_is_named_and_not_called_a_row() -> None:
    tags = {"mp_hydra.precision_resolved": "fp32"}
    group = only_group(pair([run("tf32", tags=tags), run("mixed_float16")], baseline="tf32"))
    assert group.remarks == ("tf32 came to fp32 on this device",)


def test_a_run_of_which_little_is_known_goes_with_the_baseline_and_not_with_strangers() -> None:
    slow = {"devices": [{"kind": "GPU", "name": "NVIDIA T4"}]}
    strangers = [run("mixed_float16", seed, environment=slow) for seed in (1, 2)]
    bare = run("mixed_float16", 0, environment=dict.fromkeys(ENVIRONMENT), name="bare")
    group = only_group(pair([run(), *strangers, bare]))
    assert [(name, problem) for _, name, _, problem in pairs(group)] == [("bare", "")]
    assert {one.reason for one in group.excluded} == {"not comparable: device NVIDIA T4, not NVIDIA H200"}


def test_auto_counts_as_the_precision_that_it_came_to() -> None:
    auto = run("auto", tags={"mp_hydra.precision_resolved": "mixed_bfloat16"})
    assert [row.precision for row in only_group(pair([run(), auto])).rows] == ["mixed_bfloat16"]


def test_a_run_without_a_precision_is_in_no_group_and_named() -> None:
    nothing = {"precision.name": None}
    tags = {"mp_hydra.precision": None, "mp_hydra.precision_resolved": None}
    pairing = pair([run(), run(name="sweep of today", params=nothing, tags=tags)])
    assert [one.run.name for one in pairing.excluded] == ["sweep of today"]
    assert len(pairing.groups) == 1


def test_runs_with_hardly_any_params_are_grouped_by_their_tags() -> None:
    bare = dict.fromkeys(run().params)
    group = only_group(pair([run(params=bare), run("mixed_float16", params=bare)]))
    assert (group.label, pairs(group)[0][2:]) == ("all runs", ("cnn-digits-fp32-s0", ""))


def test_no_runs_give_no_groups() -> None:
    assert pair([]).groups == ()


def test_different_commits_are_told_and_do_not_keep_runs_apart() -> None:
    records = [
        run(precision, tags={"mlflow.source.git.commit": commit})
        for precision, commit in (("fp32", "a" * 40), ("mixed_float16", "b" * 40))
    ]
    assert only_group(pair(records)).remarks == ("the runs are of different git commits: aaaaaaaa, bbbbbbbb",)


def test_the_runs_whose_details_are_needed_leave_out_the_superseded() -> None:
    records = [run(), run("mixed_float16", name="old", started=1), run("mixed_float16", name="new", started=2)]
    assert pair(records).run_ids() == ["cnn-digits-fp32-s0", "new"]


def test_config_keeps_the_path_of_data_and_drops_the_output_of_callbacks() -> None:
    params = {
        "dataset.path": "/data/a.npz",
        "callbacks.csv.filename": "/home/me/out/epochs.csv",
        "callbacks.csv.append": "true",
    }
    assert config_of(params) == {"dataset.path": "/data/a.npz", "callbacks.csv.append": "true"}
