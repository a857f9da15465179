"""The census of a model as a report: JSON for programs, Markdown for people."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mp_hydra.precision import LayerRecord


@dataclass(frozen=True)
class Audit:
    """What every layer computes in, under which policy, and what the user should know about it."""

    policy: str
    layers: Sequence[LayerRecord]
    warnings: Sequence[str]

    def json(self) -> str:
        """The report as a JSON document."""
        layers = [layer.asdict() for layer in self.layers]
        return json.dumps({"policy": self.policy, "warnings": list(self.warnings), "layers": layers}, indent=2) + "\n"

    def markdown(self) -> str:
        """The report as a table with a heading."""
        lines = [f"# Precision of each layer under {self.policy}", ""]
        lines += [f"- {warning}" for warning in self.warnings]
        lines += ["", "| layer | class | computes in | parameters | dtype given |", "|---|---|---|---:|---|"]
        lines += [
            f"| {layer.path} | {layer.class_name} | {layer.compute_dtype} | {layer.parameters} "
            f"| {'yes' if layer.dtype_given else ''} |"
            for layer in self.layers
        ]
        return "\n".join(lines) + "\n"

    def save(self, directory: Path) -> None:
        """Write audit.json and audit.md."""
        (directory / "audit.json").write_text(self.json(), encoding="utf-8")
        (directory / "audit.md").write_text(self.markdown(), encoding="utf-8")
