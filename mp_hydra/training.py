"""One run, from a checked config to a closed tracking run: the story in one screen."""

from __future__ import annotations

import json
import logging
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml

from mp_hydra import hardware, largest_batch, tracking
from mp_hydra.auto_precision import settle
from mp_hydra.memory_mode import resolved_mode
from mp_hydra.outcome import Ending, closing
from mp_hydra.precision import scoped_policy
from mp_hydra.startup import start_tensorflow
from mp_hydra.telemetry.memory import AllocatorMemory
from mp_hydra.tracking import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from mp_hydra.evaluation import Evaluation
    from mp_hydra.fitting import Fitted

log = logging.getLogger(__name__)


def train(
    config: Mapping[str, Any], *, output_dir: Path, working_dir: Path, tags: Mapping[str, str] | None = None
) -> float:
    """Train once and record it.

    Args:
        config: a resolved config, as `mp_hydra.config.resolve` gives it.
        output_dir: where artifacts are written before they are uploaded.
        working_dir: the directory that the user started from; relative paths and git state refer to it.
        tags: further tags of the run, such as those of the sweep that it belongs to.

    Returns:
        The objective: the metric that `config["objective"]` names; nan if it could not be measured.

    Raises:
        UserError: one line, for everything a user can put right.
    """
    start_tensorflow()
    settled = settle(config, directory=working_dir)
    sized = largest_batch.settle(settled.config, directory=working_dir)
    config = sized.config
    tags = {**settled.tags(), **sized.tags(), "mp_hydra.memory_resolved": resolved_mode(config), **(tags or {})}
    name = run_name(config, largest=sized.found is not None)
    run = tracking.open_run(
        tracking.Settings(**config["tracking"]),
        name=name,
        params=config,
        tags={**tracking.git_state(working_dir).tags(), **tags},
        spool=output_dir,
        cwd=working_dir,
    )
    policy = config["precision"]
    with (
        closing(run) as ending,
        _logs_kept(run, output_dir),
        scoped_policy(policy["policy"], tf32=policy["tf32"]) as scope,
    ):
        import keras

        from mp_hydra.audit.configured import audit_prepared
        from mp_hydra.console import summary
        from mp_hydra.evaluation import evaluate
        from mp_hydra.fitting import fit
        from mp_hydra.float32_losses import float32_losses
        from mp_hydra.preparation import load_data, prepare

        leftover = AllocatorMemory(hardware.training_device()).current_bytes() or 0
        keras.utils.set_random_seed(config["seed"])
        data = load_data(config)
        run.log_dataset(name=data.name, digest=data.digest, source=data.source, schema=None, profile=data.profile())
        prepared = prepare(config, data, scope, directory=working_dir)
        audit = audit_prepared(config, prepared, scope)
        for warning in audit.warnings:
            log.warning(warning)
        environment = {**hardware.environment(), "jit_compile": bool(prepared.model.jit_compile)}
        _write(output_dir / "environment.json", json.dumps(environment, indent=2))
        _write(output_dir / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
        settled.save(output_dir)
        sized.save(output_dir)
        audit.save(output_dir)
        sent = _upload(run, output_dir)

        with float32_losses(prepared.model):
            fitted = fit(config, prepared, run.log_metrics, leftover=leftover)
            evaluation = evaluate(prepared.model, data, config["batch_size"])
        fitted.save(output_dir)
        evaluation.save(output_dir)
        if config["tracking"]["log_model"]:
            from mp_hydra.saved_model import save_model

            save_model(prepared.model, data, output_dir / "model")
        metrics = _record(run, fitted, evaluation, ending)
        _upload(run, output_dir, already=sent)
    _show(name, run, summary(metrics, {**fitted.absent, **evaluation.absent}, fitted.last_skipped), output_dir)
    return metrics.get(config["objective"], math.nan)


def run_name(config: Mapping[str, Any], *, largest: bool) -> str:
    """What the run is called: the user's name for it, or model, dataset, precision, what else was asked for, and seed.

    Args:
        config: a resolved config.
        largest: whether its batch size was asked for as max.
    """
    if config["tracking"]["run_name"]:
        return str(config["tracking"]["run_name"])
    model, dataset = (config[group].get("name") or group for group in ("model", "dataset"))
    memory = config["memory"]["mode"]
    asked = [*([memory] if memory != "auto" else []), *(["largest"] if largest else [])]
    return "-".join([model, dataset, config["precision"]["name"], *asked, f"s{config['seed']}"])


def _record(run: tracking.Run, fitted: Fitted, evaluation: Evaluation, ending: Ending) -> dict[str, float]:
    run.log_metrics(evaluation.metrics, step=fitted.steps)
    absent = {**fitted.absent, **evaluation.absent}
    run.set_tags({f"mp_hydra.absent.{name}": reason for name, reason in absent.items()})
    run.set_tags({f"mp_hydra.{name}_source": source for name, source in fitted.sources.items()})
    if fitted.nonfinite:
        run.set_tags({"mp_hydra.nonfinite_gradient": fitted.nonfinite})
    if evaluation.absent:
        ending.outcome = Outcome.diverged
        ending.reason = "; ".join(f"{name}: {reason}" for name, reason in evaluation.absent.items())
        log.warning("the run diverged: %s", ending.reason)
    return {**fitted.metrics, **evaluation.metrics}


def _show(name: str, run: tracking.Run, rows: Sequence[tuple[str, str]], output_dir: Path) -> None:
    from mp_hydra.console import show_summary

    where = [f"files    {output_dir}"]
    if run.ui_command():
        where.append(f"look at  {run.ui_command()}")
    show_summary(name, rows, where)


def _write(path: Path, text: str) -> None:
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


@contextmanager
def _logs_kept(run: tracking.Run, directory: Path) -> Iterator[None]:
    """Send the logs in `directory` when the block ends, however it does: they grow until then."""
    try:
        yield
    finally:
        for item in sorted(directory.glob("*.log")):
            run.log_artifacts(item)


def _upload(run: tracking.Run, directory: Path, *, already: frozenset[Path] = frozenset()) -> frozenset[Path]:
    """Send what lies in `directory`, without what was sent before, logs and what waits there for the store; return the former."""
    files = (item for item in directory.iterdir() if item.suffix != ".log")
    items = {item for item in files if not item.name.startswith("mlflow-spool-")} - already
    for item in sorted(items):
        run.log_artifacts(item)
    return frozenset(items)
