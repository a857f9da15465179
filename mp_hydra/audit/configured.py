"""The audit of a configured model: of one that is about to train, and of one that is only to be looked at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.audit.gathering import gather
from mp_hydra.audit.report import Audit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mp_hydra.precision import Scope
    from mp_hydra.preparation import Prepared


def audit_prepared(config: Mapping[str, Any], prepared: Prepared, scope: Scope) -> Audit:
    """The audit of a model that is ready to train; call it with the policy in force."""
    from mp_hydra.hardware import training_device

    data = prepared.data
    inputs = next(iter(data.train.batches(min(2, data.train.size))))[0]
    return Audit.of(
        gather(
            prepared.model,
            inputs,
            prepared.seen,
            scope,
            batch_size=config["batch_size"],
            device=training_device().partition(":")[0],
            scaling=prepared.optimizer.mode,
            peak_input=data.peak_input,
            pinned=config["precision"]["pinned"],
            memory=prepared.memory,
        )
    )


def audit(config: Mapping[str, Any]) -> Audit:
    """Build the configured model and look at it; what a run would refuse becomes a finding.

    Raises:
        UserError: for a config, a dataset or a model that cannot be built.
    """
    import keras

    from mp_hydra.auto_precision import settle
    from mp_hydra.precision import scoped_policy
    from mp_hydra.preparation import load_data, prepare
    from mp_hydra.startup import start_tensorflow

    start_tensorflow()
    config = settle(config, directory=Path.cwd()).config
    precision = config["precision"]
    with scoped_policy(precision["policy"], tf32=precision["tf32"]) as scope:
        keras.utils.set_random_seed(config["seed"])
        prepared = prepare(config, load_data(config, judge=False), scope, judge=False)
        return audit_prepared(config, prepared, scope)
