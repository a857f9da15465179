"""An audit as text, Markdown and JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mp_hydra.audit.facts import Layer, Model, Reach, reach
from mp_hydra.audit.findings import Finding, Severity, findings
from mp_hydra.report_files import markdown_table, save

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

_COLUMNS = (
    *("layer", "class", "policy", "computes in", "in", "out", "parameters", "outputs"),
    *("kept in fp32", "kept"),
)
_POLICY, _COMPUTES, _NUMBERS = 2, 3, 6  # columns: left out in a terminal, the one that matters, the first right-aligned
_COLOURS = {Severity.error: "red", Severity.warning: "yellow", Severity.note: "cyan"}


@dataclass(frozen=True)
class Audit:
    """What every layer of a model computes in, what is wrong with it, and how much its policy reaches."""

    policy: str
    batch_size: int
    layers: Sequence[Layer]
    findings: Sequence[Finding] = field(default_factory=list)
    reach: Reach | None = None
    untraceable: str | None = None

    @classmethod
    def of(cls, model: Model) -> Audit:
        """Apply all rules."""
        return cls(model.policy, model.batch_size, model.layers, findings(model), reach(model), model.untraceable)

    def worst(self) -> Severity | None:
        """The severity of the worst finding; None if there is none."""
        return next((s for s in Severity if any(found.severity is s for found in self.findings)), None)

    def fails(self, *, strict: bool) -> bool:
        """Whether a build should fail: on errors; with `strict` also on warnings."""
        return self.worst() is Severity.error or (strict and self.worst() is Severity.warning)

    @property
    def warnings(self) -> list[str]:
        """Errors and warnings, a line each."""
        return [found.line() for found in self.findings if found.severity is not Severity.note]

    def summary(self) -> str:
        """One sentence on what the policy reaches."""
        if self.reach is None:
            return f"What {self.policy} reaches is not known: {self.untraceable or 'the model was not traced'}."
        kept, single = _size(self.reach.kept_bytes), _size(self.reach.kept_bytes_float32)
        if self.policy == "float32" and self.reach.kept_bytes == self.reach.kept_bytes_float32:
            return f"A batch of {self.batch_size} keeps about {single} for the backward pass."
        flops = "no matrix products" if self.reach.flops is None else f"{self.reach.flops:.0%} of the matrix FLOPs"
        ratio = "" if self.reach.kept_ratio is None else f" ({self.reach.kept_ratio:.2f} times)"
        stock = ""
        if self.reach.kept_bytes_stock != self.reach.kept_bytes:
            stock = f"; stock Keras would keep {_size(self.reach.kept_bytes_stock)}"
        return (
            f"{self.policy} reaches {self.reach.parameters:.0%} of the parameters and {flops}; a batch of {self.batch_size} "
            f"keeps about {kept} for the backward pass instead of {single}{ratio}{stock}."
        )

    def json(self) -> str:
        """The report as a JSON document."""
        document = {
            "policy": self.policy,
            "batch_size": self.batch_size,
            "warnings": self.warnings,
            "findings": [found.asdict() for found in self.findings],
            "reach": self.reach.asdict() if self.reach else None,
            "untraceable": self.untraceable,
            "layers": [layer.asdict(self.batch_size) for layer in self.layers],
        }
        return json.dumps(document, indent=2) + "\n"

    def markdown(self) -> str:
        """The report as findings and a table."""
        lines = [f"# Precision of each layer under {self.policy}", "", self.summary(), ""]
        lines += [f"- **{found.severity.value}** ({found.code}) {found.line()}" for found in self.findings]
        lines += [""] if self.findings else []
        lines += markdown_table(_COLUMNS, [self._row(layer) for layer in self.layers], left=_NUMBERS)
        return "\n".join(lines) + "\n"

    def save(self, directory: Path) -> list[Path]:
        """Write audit.json and audit.md into `directory`, which is made where it is missing."""
        return save(directory, "audit", json=self.json(), markdown=self.markdown())

    def show(self, console: Console) -> None:
        """Print table, findings and summary."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"Precision of each layer under {self.policy}", title_justify="left")
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
        for index, name in enumerate(_COLUMNS):
            if index != _POLICY:
                table.add_column(name, overflow="fold", justify="left" if index < _NUMBERS else "right")
        for layer in self.layers:
            row = self._row(layer)
            row[_COMPUTES] += self._told(layer)
            cells = [
                Text(_short(cell) if _POLICY < i < _NUMBERS else cell) for i, cell in enumerate(row) if i != _POLICY
            ]
            cells[_COMPUTES - 1].stylize("bold" if layer.inside else "")
            table.add_row(*cells)
        console.print(table)
        for found in self.findings:
            head = Text(f"{found.severity.value} ", style=_COLOURS[found.severity]).append(f"({found.code}) ", "dim")
            console.print(head.append(f"{found.where()}{found.reason}", "default"), soft_wrap=True)
            console.print(Text(f"    {found.cure}"), soft_wrap=True)
        console.print(self.summary() if self.findings else f"Nothing found. {self.summary()}", highlight=False)

    def _told(self, layer: Layer) -> str:
        """Why it differs from the policy, where it does and was told to."""
        record = layer.record
        if record.overridden:
            return ", overridden"
        return ", given" if record.dtype_given and record.policy != self.policy else ""

    def _row(self, layer: Layer) -> list[str]:
        record, traced = layer.record, layer.traced
        row = [record.path, record.class_name, f"{record.policy}{self._told(layer)}"]
        inside = f"{layer.computes_in} inside" if layer.inside else layer.computes_in
        if traced is None:
            return [*row, f"{record.compute_dtype}, as declared", "", "", str(record.parameters), "", "", ""]
        return [
            *(*row, inside, ", ".join(traced.input_dtypes), ", ".join(traced.output_dtypes), str(record.parameters)),
            *(
                str(traced.output_elements // self.batch_size),
                _size(traced.kept_bytes_float32),
                _size(traced.kept_bytes),
            ),
        ]


def _size(count: float) -> str:
    """Bytes for people.

    >>> _size(0), _size(768), _size(2048), _size(3 * 2**20)
    ('0', '768 B', '2.0 KiB', '3.0 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B" if count else "0"


def _short(text: str) -> str:
    """Dtype names that leave room for paths in a terminal.

    >>> _short("bfloat16, float16, float32 inside")
    'bf16, f16, f32 inside'
    """
    return text.replace("float", "f")
