"""What a run has to tell the store, and how it is sent.

Everything in a batch may be sent twice without harm: metrics carry the time at which they were measured, and MLflow
drops a value that it holds already; parameters and tags are overwritten with themselves, artifacts with the same file.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mp_hydra.tracking.store import quiet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

METRICS_PER_CALL = 1000
PARAMS_AND_TAGS_PER_CALL = 100
_PER_RECORD_ERRORS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST"}


class Metric(NamedTuple):
    """One finite value of a series; the time is in milliseconds since the epoch."""

    key: str
    value: float
    timestamp: int
    step: int


class Dataset(NamedTuple):
    """A data set that a run used, as MLflow records it."""

    name: str
    digest: str
    source: str
    schema: str | None
    profile: str | None
    context: str


class Artifact(NamedTuple):
    """A file or a directory to copy into ``target`` (None: the top) of the run's artifacts."""

    path: str
    target: str | None


class End(NamedTuple):
    """How and when (milliseconds since the epoch) a run ended; the status is one of MLflow's."""

    status: str
    time: int


@dataclass
class Batch:
    """Things to send, by kind; the end of the run goes last."""

    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    datasets: list[Dataset] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    end: End | None = None

    def __bool__(self) -> bool:
        return any(getattr(self, part.name) for part in fields(self))

    def add(self, other: Batch) -> None:
        """Take in what ``other`` holds; its tags and its end win."""
        self.metrics += other.metrics
        self.params |= other.params
        self.tags |= other.tags
        self.datasets += other.datasets
        self.artifacts += other.artifacts
        self.end = other.end or self.end

    def calls(self) -> Iterator[Batch]:
        """The same things in pieces, each of which is one call to MLflow, in the order of sending."""
        for params in _chunks(self.params.items(), PARAMS_AND_TAGS_PER_CALL):
            yield Batch(params=dict(params))
        for tags in _chunks(self.tags.items(), PARAMS_AND_TAGS_PER_CALL):
            yield Batch(tags=dict(tags))
        for metrics in _chunks(self.metrics, METRICS_PER_CALL):
            yield Batch(metrics=metrics)
        for dataset in self.datasets:
            yield Batch(datasets=[dataset])
        for artifact in self.artifacts:
            yield Batch(artifacts=[artifact])
        if self.end:
            yield Batch(end=self.end)

    def to_json(self) -> dict[str, Any]:
        """The filled parts, in plain JSON types."""
        return {key: value for key, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Batch:
        """The inverse of `to_json`.

        Raises:
            TypeError: ``data`` does not have this form.
        """
        end = data.get("end")
        return cls(
            metrics=[Metric(*item) for item in data.get("metrics", ())],
            params=dict(data.get("params", {})),
            tags=dict(data.get("tags", {})),
            datasets=[Dataset(*item) for item in data.get("datasets", ())],
            artifacts=[Artifact(*item) for item in data.get("artifacts", ())],
            end=End(*end) if end else None,
        )


def send(client: Any, run_id: str, batch: Batch) -> tuple[Batch, Exception | None]:
    """Send a batch with an MlflowClient; never raises an ordinary exception.

    A piece that the store refuses for what it is (a file that cannot be read, a value that the store does not take)
    does not keep the others back. Any other failure, such as a server that does not answer, ends the attempt.

    Returns:
        What has not been sent, and the first error; an empty batch and None if all went well.
    """
    left, first = Batch(), None
    with quiet():
        calls = batch.calls()
        for call in calls:
            error = _try(client, run_id, call)
            if error is None:
                continue
            first = first or error
            left.add(call)
            if not _concerns_this_call_only(error):
                break
        for call in calls:
            left.add(call)
    return left, first


def _try(client: Any, run_id: str, call: Batch) -> Exception | None:
    try:
        _send_one(client, run_id, call)
    except Exception as error:  # noqa: BLE001 - whatever the store raises, training goes on
        return error
    return None


def _send_one(client: Any, run_id: str, call: Batch) -> None:
    from mlflow import entities

    if call.params or call.tags or call.metrics:
        client.log_batch(
            run_id,
            metrics=[entities.Metric(*metric) for metric in call.metrics],
            params=[entities.Param(*item) for item in call.params.items()],
            tags=[entities.RunTag(*item) for item in call.tags.items()],
            synchronous=True,  # whatever MLFLOW_ENABLE_ASYNC_LOGGING says: failures must arrive here
        )
    for item in call.datasets:
        dataset = entities.Dataset(item.name, item.digest, "mp_hydra", item.source, item.schema, item.profile)
        tags = [entities.InputTag("mlflow.data.context", item.context)]
        client.log_inputs(run_id, [entities.DatasetInput(dataset, tags)])
    for artifact in call.artifacts:
        if not Path(artifact.path).exists():
            raise FileNotFoundError(2, "there is no such file", artifact.path)
        client.log_artifact(run_id, artifact.path, artifact.target)
    if call.end:
        client.set_terminated(run_id, call.end.status, call.end.time)


def _concerns_this_call_only(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno is not None and not isinstance(error, (ConnectionError, TimeoutError))
    return getattr(error, "error_code", None) in _PER_RECORD_ERRORS


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
