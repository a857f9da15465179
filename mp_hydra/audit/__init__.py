"""What a model really computes in, layer by layer, and what is wrong with it: facts, findings, and their rendering."""

from mp_hydra.audit.findings import Finding, Severity
from mp_hydra.audit.report import Audit

__all__ = ["Audit", "Finding", "Severity"]
