"""What a run shows in the terminal: a progress bar while it trains, and a short summary at its end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mp_hydra.isolation.jobs import Progress as JobProgress
from mp_hydra.isolation.progress import report

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Row = tuple[str, str]


class ProgressBar(keras.callbacks.Callback):
    """A bar over all epochs in a terminal, one line an epoch elsewhere; in a sweep, reports to its launcher.

    It overrides no `on_train_batch_end`, which would make Keras wait for the device at each batch.
    """

    def __init__(self, *, epochs: int, batches: int, console: Console | None = None) -> None:
        super().__init__()
        self._epochs, self._batches = epochs, batches
        self._console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: Any = None
        self._epoch = 0
        self._figures: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        """Show the bar."""
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("batches"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("compiling", total=self._epochs * self._batches)
            self._progress.start()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Name the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Move the bar; rich redraws it at its own pace."""
        done, text = self._epoch * self._batches + batch, f"epoch {self._epoch + 1}/{self._epochs}"
        report(JobProgress(done / (self._epochs * self._batches), text, self._figures))
        if self._progress is not None:
            self._progress.update(self._task, completed=done, description=text)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Print the epoch's figures."""
        self._figures = {name: float(value) for name, value in (logs or {}).items()}
        figures = "  ".join(f"{name} {value:.4g}" for name, value in self._figures.items())
        text = f"epoch {epoch + 1}/{self._epochs}"
        self._console.print(f"{text}  {figures}", highlight=False, soft_wrap=True)
        report(JobProgress((epoch + 1) / self._epochs, text, self._figures))

    def on_train_end(self, logs: Any = None) -> None:
        """Take the bar away."""
        self.close()

    def close(self) -> None:
        """Give the terminal back, also where `fit` was left by an exception."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def summary(metrics: Mapping[str, float], absent: Mapping[str, str], last_skipped: int = 0) -> list[Row]:
    """The lines of the summary: name and figure, in the units a person reads.

    Args:
        metrics: the last value of each metric.
        absent: for metrics that could not be measured, the reason.
        last_skipped: the number of the last skipped step, counted from 1; 0 if none was.

    >>> summary({"test/accuracy": 0.98765, "time/step_ms": 12.3456, "time/step_ms_p95": 15.0}, {})
    [('test accuracy', '98.77 %'), ('step time', '12.3 ms (95 % below 15.0 ms)')]
    """
    rows: list[Row] = []
    for name, value in metrics.items():
        if name.startswith("test/"):
            shown = f"{100 * value:.2f} %" if "accuracy" in name else f"{value:.4g}"
            rows.append((name.replace("/", " "), shown))
    if "memory/training_mib" in metrics:
        peak, training = metrics["memory/peak_mib"], metrics["memory/training_mib"]
        rows.append(
            (
                "training memory",
                f"{training:.1f} MiB (peak {peak:.1f} MiB, variables and optimizer {metrics['memory/state_mib']:.1f} MiB)",
            )
        )
    if "time/step_ms" in metrics:
        rows.append(
            ("step time", f"{metrics['time/step_ms']:.1f} ms (95 % below {metrics['time/step_ms_p95']:.1f} ms)")
        )
    if "time/samples_per_second" in metrics:
        rows.append(("throughput", f"{metrics['time/samples_per_second']:,.0f} samples/s"))
    if "time/first_step_seconds" in metrics:
        rows.append(("first step", f"{metrics['time/first_step_seconds']:.2f} s, with tracing and compilation"))
    if "loss_scale/skipped_steps" in metrics:
        skipped, applied = metrics["loss_scale/skipped_steps"], metrics["loss_scale/applied_steps"]
        scale = metrics["loss_scale/value"]
        shown = f"2^{math.log2(scale):.0f}" if scale > 1 and math.log2(scale).is_integer() else f"{scale:g}"
        when = f", all in the first {last_skipped}" if last_skipped else ""
        rows.append(("loss scale", f"{shown}; {skipped:.0f} of {skipped + applied:.0f} steps skipped{when}"))
    if "energy/joules" in metrics:
        rows.append(("energy", f"{metrics['energy/joules']:.0f} J"))
    rows += [
        (name, f"not measured: {reason}")
        for name, reason in absent.items()
        if not name.startswith(("energy", "memory/device"))
    ]
    return rows


def show_summary(title: str, rows: Sequence[Row], closing_lines: Sequence[str], console: Console | None = None) -> None:
    """Print the summary table and the lines that say where to look further."""
    console = console or Console(stderr=True)
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    for name, figure in rows:
        table.add_row(name, figure)
    console.print(table)
    for line in closing_lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
