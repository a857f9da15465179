"""One run, from a checked config to a closed tracking run: the story in one screen."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mp_hydra import hardware, tracking
from mp_hydra.audit import Audit
from mp_hydra.errors import UserError
from mp_hydra.outcome import Ending, closing
from mp_hydra.precision import resolved_name, scoped_policy
from mp_hydra.startup import start_tensorflow
from mp_hydra.tracking import Outcome

log = logging.getLogger(__name__)


class NoUpdates(UserError):
    """A training in which no step was applied: the weights are what they were at the start."""


def train(config: Mapping[str, Any], *, output_dir: Path, working_dir: Path, sweep: str | None = None) -> float:
    """Train once and record it.

    Args:
        config: a resolved config, as `mp_hydra.config.resolve` gives it.
        output_dir: where artifacts are written before they are uploaded.
        working_dir: the directory that the user started from; relative paths and git state refer to it.
        sweep: the sweep that the run belongs to.

    Returns:
        The objective: the metric that `config["objective"]` names; nan if the run diverged and has none.

    Raises:
        UserError: one line, for everything a user can put right.
    """
    start_tensorflow()
    precision, remark = resolved_name(config["precision"]["name"], hardware.devices())
    if remark:
        log.warning(remark)
    run = tracking.open_run(
        tracking.Settings(**config["tracking"]),
        name=run_name(config),
        params=config,
        tags=_tags(config, precision, sweep, working_dir),
        spool=output_dir,
        cwd=working_dir,
    )
    with (
        closing(run) as ending,
        scoped_policy(config["precision"]["policy"], tf32=config["precision"]["tf32"]) as scope,
    ):
        import keras

        from mp_hydra.preparation import load_data, prepare

        keras.utils.set_random_seed(config["seed"])
        data = load_data(config)
        run.log_dataset(name=data.name, digest=data.digest, source=data.source, schema=None, profile=_profile(data))
        prepared = prepare(config, data, scope)
        for warning in prepared.warnings:
            log.warning(warning)
        environment = {**hardware.environment(), "jit_compile": bool(prepared.model.jit_compile)}
        _write(output_dir / "environment.json", json.dumps(environment, indent=2))
        _write(output_dir / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
        Audit(scope.policy, prepared.layers, prepared.warnings).save(output_dir)
        sent = _upload(run, output_dir, already=set())
        return _fit_and_report(config, prepared, run, ending, output_dir, sent)


def _fit_and_report(
    config: Mapping[str, Any], prepared: Any, run: Any, ending: Ending, output_dir: Path, sent: set[Path]
) -> float:
    from mp_hydra.console import show_summary, summary
    from mp_hydra.evaluation import evaluate
    from mp_hydra.fitting import fit

    fitted = fit(config, prepared, run.log_metrics)
    if fitted.applied == 0:
        ending.outcome = Outcome.no_updates
        raise NoUpdates(
            f"none of {fitted.steps} steps was applied: every gradient was inf or nan. Try a smaller learning rate, loss_scale=dynamic, "
            f"precision=mixed_bfloat16, or look for values in the data that float16 cannot hold"
        )
    evaluation = evaluate(prepared.model, prepared.data, config["batch_size"])
    evaluation.save(output_dir)
    run.log_metrics(evaluation.metrics, step=fitted.steps)
    metrics, absent = {**fitted.metrics, **evaluation.metrics}, {**fitted.absent, **evaluation.absent}
    run.set_tags({f"mp_hydra.absent.{name}": reason for name, reason in absent.items()})
    run.set_tags({f"mp_hydra.{name}_source": source for name, source in fitted.sources.items()})
    if evaluation.absent:
        ending.outcome, ending.reason = Outcome.diverged, "; ".join(f"{k}: {v}" for k, v in evaluation.absent.items())
        log.warning("the run diverged: %s", ending.reason)
    if config["tracking"]["log_model"]:
        from mp_hydra.tracking.model import save_model

        save_model(prepared.model, prepared.optimizer, prepared.data, output_dir / "model")
    _upload(run, output_dir, already=sent)
    lines = [f"files    {output_dir}"] + ([f"look at  {run.ui_command()}"] if run.ui_command() else [])
    show_summary(run_name(config), summary(metrics, absent), lines)
    return metrics.get(config["objective"], math.nan)


def run_name(config: Mapping[str, Any]) -> str:
    """What the run is called: the user's name for it, or model, dataset, precision and seed."""
    if config["tracking"]["run_name"]:
        return str(config["tracking"]["run_name"])
    model, dataset = (config[group].get("name") or group for group in ("model", "dataset"))
    return f"{model}-{dataset}-{config['precision']['name']}-s{config['seed']}"


def _tags(config: Mapping[str, Any], precision: str, sweep: str | None, working_dir: Path) -> dict[str, str]:
    git = tracking.git_state(working_dir)
    tags = {
        "mp_hydra.precision": config["precision"]["name"],
        "mp_hydra.precision_resolved": precision,
        "mp_hydra.sweep": sweep,
        "mp_hydra.git_commit": git.commit,
        "mp_hydra.git_dirty": None if git.dirty is None else str(git.dirty).lower(),
        "mlflow.source.git.commit": git.commit,
    }
    return {key: value for key, value in tags.items() if value is not None}


def _profile(data: Any) -> str:
    parts = {
        "train": data.train.size,
        "validation": data.validation.size if data.validation else 0,
        "test": data.test.size,
    }
    return json.dumps({**parts, "classes": data.classes, "shape": data.input_shape})


def _write(path: Path, text: str) -> None:
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _upload(run: tracking.Run, directory: Path, *, already: set[Path]) -> set[Path]:
    """Send what lies in `directory`, without what was sent before and what waits there for the store; return what was sent."""
    items = {item for item in directory.iterdir() if not item.name.endswith(".jsonl")} - already
    for item in sorted(items):
        run.log_artifacts(item)
    return items
