"""`mp-hydra forecast`: dry runs precision by precision, the table of peaks, and the largest batch that fits."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.app import composed
from mp_hydra.config import suggestion
from mp_hydra.errors import ConfigError, UserError
from mp_hydra.forecast.dry_run import measure
from mp_hydra.forecast.ladder import Goal
from mp_hydra.forecast.largest import Search, pipeline
from mp_hydra.forecast.limits import Memory, to_fit
from mp_hydra.forecast.points import Beside, Measured, Point
from mp_hydra.forecast.report import ByPrecision, Forecast, rows
from mp_hydra.paths import conf_dir
from mp_hydra.sizes import parse, parse_or_zero, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.status import Status

PRECISIONS = ("fp32", "mixed_bfloat16", "mixed_float16")
BATCH_SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Question:
    """What was asked for on the command line.

    Attributes:
        overrides: those of a run.
        memory: to fit into, such as "12GB"; None for what this machine has.
        batch_sizes: to forecast, such as "8,16,32"; None for the powers of two up to 256, and the config's own.
        precisions: such as "fp32,mixed_bfloat16"; None for the one in the overrides, or fp32 and the mixed ones.
        allowance: of the memory, for others than TensorFlow's allocator, such as "1GB"; None for the default.
        verify: whether the largest batch is tried out.
    """

    overrides: tuple[str, ...] = ()
    memory: str | None = None
    batch_sizes: str | None = None
    precisions: str | None = None
    allowance: str | None = None
    verify: bool = False


def ask(question: Question, console: Console, *, directory: Path | None = None) -> Forecast:
    """Make the dry runs and work out the answer.

    Args:
        question: what was asked for.
        console: where progress is shown.
        directory: what a relative `resume` refers to; None for the working directory.

    Raises:
        UserError: for a question that cannot be understood, or a config that cannot be used. What goes wrong with one precision
            alone is part of the answer.
    """
    configs = {name: _config(question.overrides, name) for name in _precisions(question)}
    first = next(iter(configs.values()))
    given = question.memory if question.memory is not None else first["memory"]["limit"]
    answer = _Answer(
        batch_sizes=_batch_sizes(question.batch_sizes, first["batch_size"]),
        given=None if given is None else parse(given, "memory.limit" if question.memory is None else "--memory"),
        allowance=None if question.allowance is None else parse_or_zero(question.allowance, "--allowance"),
        verify=question.verify,
        directory=directory or Path.cwd(),
    )
    found = [answer.about(name, config, console) for name, config in configs.items()]
    return Forecast(_subject(first), answer.memory, tuple(found))


@dataclass
class _Answer:
    """Answers for one precision after the other; the memory is settled by the first that can be measured."""

    batch_sizes: tuple[int, ...]
    given: int | None
    allowance: int | None
    verify: bool
    directory: Path
    memory: Memory | None = None

    def about(self, name: str, config: Mapping[str, Any], console: Console) -> ByPrecision:
        with console.status(f"{name}: starting a dry run") if console.is_terminal else nullcontext() as status:
            try:
                return self._measured(name, config, _Progress(name, console, status))
            except UserError as error:
                return ByPrecision(name, problem=str(error).removeprefix(f"precision={name}: "))

    def _measured(self, name: str, config: Mapping[str, Any], progress: _Progress) -> ByPrecision:
        goal = Goal(batch_sizes=self.batch_sizes, limit_bytes=None if self.given is None else self._usable())
        measured = measure(config, goal, directory=self.directory, heard=progress.heard)
        if self.memory is None:
            self.memory = self._memory(measured)
        found = ByPrecision(
            name,
            device=measured.device,
            samples=measured.samples,
            settled=measured.line.settled,
            stopped=measured.stopped,
            rows=rows(measured, self.batch_sizes),
        )
        if self.memory is None:
            return replace(found, problem="the memory of this machine cannot be read: give --memory, such as 12GB")
        beside = (
            Beside() if self.given is not None else pipeline(measured)
        )  # a card that is given holds the model alone
        search = Search(config, measured, self.memory, self.directory, beside)
        try:
            return replace(found, largest=search.largest(verify=self.verify, trying=progress.trying))
        except UserError as error:
            return replace(found, problem=str(error).removeprefix(f"precision={name}: "))

    def _memory(self, measured: Measured) -> Memory | None:
        own = measured.device_bytes
        if self.given is None and own is None:
            return None
        return to_fit(self.given, device=measured.device, device_bytes=own or 0, allowance=self.allowance)

    def _usable(self) -> int:
        return to_fit(self.given, device="", device_bytes=0, allowance=self.allowance).usable_bytes


@dataclass(frozen=True)
class _Progress:
    """Says in a terminal what goes on, and elsewhere nothing but what takes long."""

    name: str
    console: Console
    status: Status | None

    def heard(self, point: Point) -> None:
        took = f"{self.name}: a batch of {point.batch_size} took {shown(point.peak_bytes)}"
        if self.status is not None:
            self.status.update(f"{took}, going on")
        else:
            self.console.print(took, highlight=False)

    def trying(self, size: int) -> None:
        said = f"{self.name}: trying out a batch of {size}"
        if self.status is not None:
            self.status.update(said)
        else:
            self.console.print(said, highlight=False)


def _precisions(question: Question) -> tuple[str, ...]:
    if question.precisions is None:
        asked = [item.removeprefix("precision=") for item in question.overrides if item.startswith("precision=")]
        names = tuple(asked[-1].split(",")) if asked else PRECISIONS
    else:
        names = tuple(name.strip() for name in question.precisions.split(","))
    known = sorted(path.stem for path in (conf_dir() / "precision").glob("*.yaml"))
    for name in names:
        if name not in known and question.precisions is not None:
            raise ConfigError(
                "--precisions", question.precisions, f"there is no {name or 'nameless one'}; {suggestion(name, known)}"
            )
    return tuple(dict.fromkeys(names))


def _config(overrides: Sequence[str], name: str) -> Mapping[str, Any]:
    """The config under one precision; settings of loss scaling, which fp32 has no use for, do not keep it from being forecast."""
    kept = [item for item in overrides if not item.startswith("precision=")]
    if name in ("fp32", "tf32"):
        kept = [item for item in kept if not item.startswith(("loss_scale=", "loss_scale."))]
    config = composed([*kept, f"precision={name}", "callbacks=none"])  # theirs may want a run's output directory
    if config["precision"]["policy"] != "auto":
        return config
    from mp_hydra.auto_precision import settle
    from mp_hydra.startup import start_tensorflow

    start_tensorflow()
    return settle(config, directory=Path.cwd()).config


def _batch_sizes(text: str | None, configured: Any) -> tuple[int, ...]:
    if text is None:
        own = {configured} if isinstance(configured, int) else set[int]()
        return tuple(sorted({*BATCH_SIZES, *own}))
    sizes = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in sizes):
        raise ConfigError("--batch-sizes", text, "give integers of at least 1, such as 8,16,32")
    return tuple(sorted({int(part) for part in sizes}))


def _subject(config: Mapping[str, Any]) -> str:
    """What is forecast, in a few words: model, data set and memory mode."""
    model, dataset = (config[group].get("name") or group for group in ("model", "dataset"))
    mode = config["memory"]["mode"]
    return f"{model} on {dataset}{'' if mode == 'auto' else f', memory={mode}'}"
