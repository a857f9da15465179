"""A forecast as text, Markdown and JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mp_hydra.forecast.line import REACH
from mp_hydra.report_files import markdown_table, save
from mp_hydra.sizes import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from mp_hydra.forecast.largest import LargestBatch
    from mp_hydra.forecast.limits import Memory
    from mp_hydra.forecast.points import Measured

FORMAT = 1  # of the JSON document
_PEAKS = ("precision", "batch", "peak", "band", "state", "gradients", "activations", "input")
_LARGEST = ("precision", "largest batch", "peak", "band", "measured", "error")


@dataclass(frozen=True)
class Row:
    """The peak at one batch size, and what it consists of.

    Attributes:
        batch_size: samples in the batch.
        peak_bytes: the most that the model holds at one time in training or evaluation.
        band: how far the true peak may lie from that, as a share of it, either way.
        dry_run: whether it was measured.
        state_bytes: variables and optimizer state, exactly.
        gradient_bytes: a gradient for each trainable variable.
        activation_bytes: the rest: what is kept for the backward pass, and temporaries.
        input_bytes: the batch.
    """

    batch_size: int
    peak_bytes: int
    band: float
    dry_run: bool
    state_bytes: int
    gradient_bytes: int
    activation_bytes: int
    input_bytes: int


def rows(measured: Measured, batch_sizes: Sequence[int]) -> tuple[Row, ...]:
    """The forecast of some batch sizes."""
    line, last = measured.line, measured.points[-1]
    found = []
    for size in batch_sizes:
        peak, state = line.bytes_at(size), min(line.state_bytes, line.bytes_at(size))
        of_input = min(round(last.input_bytes * size / last.batch_size), peak - state)
        gradients = min(line.gradient_bytes, peak - state - of_input)
        found.append(
            Row(
                size,
                peak,
                line.band_at(size),
                line.is_measured(size),
                state,
                gradients,
                peak - state - of_input - gradients,
                of_input,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class ByPrecision:
    """What was found for one precision.

    Attributes:
        precision: its name.
        device: where it was measured; None if it could not be.
        samples: training samples of the data set.
        settled: whether the peaks lay on a line that large batches will follow.
        stopped: why there were no larger dry runs, although they would have served; None where they would not.
        rows: by batch size.
        largest: the largest batch that fits the memory; None if there is none.
        problem: why something is missing; None if nothing is.
    """

    precision: str
    device: str | None = None
    samples: int = 0
    settled: bool = True
    stopped: str | None = None
    rows: tuple[Row, ...] = ()
    largest: LargestBatch | None = None
    problem: str | None = None

    def notes(self) -> Iterator[str]:
        """What a reader of the tables has to know of this precision, a line each."""
        if self.problem is not None:
            yield self.problem
        if self.rows and not self.settled:
            yield "the dry runs lie on no line that large batches will follow, so its bands are at least twice as wide"
        if self.rows and self.stopped is not None:
            yield f"no larger dry runs: {self.stopped}"
        if self.largest is None:
            return
        if self.largest.capped:
            yield f"{self.largest.batch_size} is the most that {self.samples} training samples allow, not the memory's limit"
        if self.largest.obstacle is not None:
            yield f"{self.largest.batch_size} was not tried out: {self.largest.obstacle}"
        for trial in self.largest.trials:
            if not trial.fits:
                took = trial.problem or f"it took {shown(trial.measured_bytes or 0)}"
                yield f"a batch of {trial.batch_size} was tried out before and did not fit: {took}"


@dataclass(frozen=True)
class Forecast:
    """The answer of `mp-hydra forecast`.

    Attributes:
        subject: model and data set.
        memory: what the largest batch is to fit into; None if nothing could be measured.
        precisions: what was found, in the order asked for.
    """

    subject: str
    memory: Memory | None
    precisions: tuple[ByPrecision, ...]

    @property
    def title(self) -> str:
        """The heading."""
        devices = sorted({found.device for found in self.precisions if found.device})
        return f"Forecast of peak training memory: {self.subject}{f', {devices[0]}' if devices else ''}"

    @property
    def failed(self) -> bool:
        """Whether a precision has no answer, or a batch that was tried out took more than the memory."""
        return any(found.problem is not None for found in self.precisions)

    def json(self) -> str:
        """The forecast as a JSON document, sizes in bytes."""
        document = {"format": FORMAT, **asdict(self)}
        document["memory"] = {**asdict(self.memory), "usable_bytes": self.memory.usable_bytes} if self.memory else None
        return json.dumps(document, indent=2) + "\n"

    def markdown(self) -> str:
        """The forecast as two tables and notes."""
        lines = [f"# {self.title}", "", *markdown_table(_PEAKS, self._peak_rows()), ""]
        if self.memory is not None:
            lines += [
                f"## Largest batch for {self._memory_line()}",
                "",
                *markdown_table(_LARGEST, self._largest_rows()),
                "",
            ]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes())]) + "\n"

    def save(self, directory: Path) -> list[Path]:
        """Write forecast.json and forecast.md into `directory`, which is made where it is missing."""
        return save(directory, "forecast", json=self.json(), markdown=self.markdown())

    def show(self, console: Console) -> None:
        """Print tables and notes."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        parts: list[tuple[str, Sequence[str], list[list[str]]]] = [(self.title, _PEAKS, self._peak_rows())]
        if self.memory is not None:
            parts.append((f"Largest batch for {self._memory_line()}", _LARGEST, self._largest_rows()))
        for title, columns, cells in parts:
            table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
            table.show_edge = table.pad_edge = False
            for index, name in enumerate(columns):
                table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
            before = None
            for row in cells:
                if before not in (None, row[0]) and columns is _PEAKS:
                    table.add_section()
                table.add_row(*(Text(cell) for cell in ([""] if row[0] == before else [row[0]]) + row[1:]))
                before = row[0]
            console.print(table)
            console.print()
        for note in self.notes():
            console.print(Text(note))

    def notes(self) -> Iterator[str]:
        """What a reader of the tables has to know, a line each."""
        for found in self.precisions:
            yield from (f"{found.precision}: {note}" for note in found.notes())
        if self.memory is not None and self.memory.allowance_bytes:
            yield f"allowance of {shown(self.memory.allowance_bytes)}: {self.memory.allowance_reason} (--allowance changes it)"
        yield f"band: so far may the true peak lie from the forecast, either way; wider beyond {REACH} times the largest dry run"

    def _memory_line(self) -> str:
        if self.memory is None:
            return ""
        allowance = f" less {shown(self.memory.allowance_bytes)}" if self.memory.allowance_bytes else ""
        return f"{shown(self.memory.total_bytes)}{allowance} ({self.memory.source})"

    def _peak_rows(self) -> list[list[str]]:
        return [
            [
                found.precision,
                str(row.batch_size),
                shown(row.peak_bytes),
                "dry run" if row.dry_run else f"{row.band:.0%}",
                *(shown(size) for size in (row.state_bytes, row.gradient_bytes, row.activation_bytes, row.input_bytes)),
            ]
            for found in self.precisions
            for row in found.rows
        ]

    def _largest_rows(self) -> list[list[str]]:
        cells = []
        for found in self.precisions:
            largest = found.largest
            if largest is None:
                cells.append([found.precision, "none", "", "", "", ""])
                continue
            error = largest.trials[-1].error if largest.trials else None
            cells.append(
                [
                    found.precision,
                    str(largest.batch_size),
                    shown(largest.predicted_bytes),
                    f"{largest.band:.0%}",
                    "" if largest.measured_bytes is None else shown(largest.measured_bytes),
                    "" if error is None else f"{error:+.1%}",
                ]
            )
        return cells
