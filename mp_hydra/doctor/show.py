"""The doctor's answer as tables for a terminal and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mp_hydra.capabilities import Speed, bfloat16_in_hardware, float16_in_hardware, tensor_cores
from mp_hydra.doctor import judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from mp_hydra.capabilities import Device
    from mp_hydra.doctor.facts import Facts
    from mp_hydra.doctor.measure import Measured

SCHEMA = 1
_GIB = 2**30
_SAYS = {True: "yes", False: "no", None: "not known"}


def machine(facts: Facts, console: Console) -> None:
    """What is known without TensorFlow: versions, driver, processor, store."""
    table = _table("Machine", "", "")
    versions = facts.software.versions
    shown = [f"{name} {version or 'not installed'}" for name, version in versions.items()]
    table.add_row("software", ", ".join([f"Python {facts.software.python}", *shown]))
    table.add_row("TensorFlow is built for", _build(facts))
    libraries = ", ".join(f"{name} {version}" for name, version in facts.software.cuda_packages.items())
    table.add_row("CUDA libraries", libraries or "none installed by pip")
    table.add_row("NVIDIA driver", _driver(facts))
    for gpu in facts.driver.gpus:
        memory = "" if gpu.memory_bytes is None else f", {gpu.memory_bytes / _GIB:.0f} GiB"
        capability = (
            "not known" if gpu.compute_capability is None else ".".join(str(part) for part in gpu.compute_capability)
        )
        mig = ", divided by MIG" if gpu.mig else ""
        table.add_row("GPU", f"{gpu.name or 'without a name'}{memory}, compute capability {capability}{mig}")
    memory = "" if facts.cpu.memory_bytes is None else f", {facts.cpu.memory_bytes / _GIB:.0f} GiB"
    table.add_row("CPU", f"{facts.cpu.model or 'not known'}, {facts.cpu.usable_cores or 'unknown'} cores{memory}")
    table.add_row("CPU flags that matter", " ".join(facts.cpu.flags) or "none")
    said = facts.store.said if facts.store.reachable else f"not usable: {facts.store.said}"
    table.add_row("MLflow store", f"{facts.store.uri or ''} {said}".strip())
    console.print(table)


def _build(facts: Facts) -> str:
    build = facts.software.build
    if build is None:
        return "not known"
    if not build.get("is_cuda_build"):
        return "CPUs only" if not build.get("is_rocm_build") else "ROCm"
    kernels = " ".join(build.get("cuda_compute_capabilities") or ())
    return f"CUDA {build.get('cuda_version')}, cuDNN {build.get('cudnn_version')}, kernels for {kernels}"


def _driver(facts: Facts) -> str:
    driver = facts.driver
    if driver.problem is not None:
        return f"NVML does not answer: {driver.problem}"
    return f"{driver.version or 'of unknown version'}, for CUDA up to {driver.cuda or 'not known'}; NVML answers"


def verdicts(facts: Facts, measured: Sequence[Measured], console: Console) -> None:
    """What TensorFlow sees, the precisions, the measurement, what precision=auto comes to, and the findings."""
    if facts.tensorflow is not None and facts.tensorflow.problem is None:
        console.print(_tensorflow(facts))
    for device, found in judge.policies(facts):
        table = _table(f"Precisions on {device.shown}", "precision", "runs", "speed", "why")
        if measured:
            table.add_column("measured here", overflow="fold")
        for verdict in found:
            row = [verdict.precision, _SAYS[verdict.runs], verdict.speed.value, verdict.reason]
            if measured:
                row.append(_confronted(judge.confront(verdict, measured), verdict.speed))
            table.add_row(*row)
        console.print(table)
    if measured:
        console.print(_measurement(measured))
    choice = judge.automatic(facts)
    console.print(f"precision=auto comes to {choice.name} here: {choice.reason}", highlight=False, markup=False)
    styles = {"error": "bold red", "warning": "yellow", "note": "cyan"}
    for finding in judge.findings(facts):
        console.print(f"{finding.severity}: ", style=styles[finding.severity], end="")
        console.print(_sentence(finding), highlight=False, markup=False, soft_wrap=True)


def _sentence(finding: judge.Finding) -> str:
    return finding.text if finding.cure is None else f"{finding.text}; {finding.cure}"


def _tensorflow(facts: Facts) -> Table:
    table = _table("What TensorFlow would train on", "device", "tensor cores", "float16", "bfloat16", "TF32")
    for device in judge.devices(facts):
        table.add_row(
            device.shown,
            _SAYS[tensor_cores(device)] if device.kind == "GPU" else "-",
            _SAYS[float16_in_hardware(device)],
            _SAYS[bfloat16_in_hardware(device)],
            _tf32(device, facts),
        )
    found = facts.tensorflow
    if found is not None:
        loaded = "".join(f", {name} {version} loaded" for name, version in found.loaded.items())
        table.caption = f"XLA auto-clustering {found.auto_jit}, oneDNN {_onednn(found.onednn)}{loaded}"
        table.caption_justify = "left"
    return table


def _onednn(on: bool | None) -> str:
    return {True: "on", False: "off", None: "not known"}[on]


def _tf32(device: Device, facts: Facts) -> str:
    if device.kind != "GPU" or device.compute_capability is None or device.compute_capability < (8, 0):
        return "no"
    allowed = facts.tensorflow is not None and facts.tensorflow.tf32_allowed
    return f"yes, {'on' if allowed else 'off'} by default; precision= decides"


def _confronted(confrontation: judge.Confrontation, speed: Speed) -> str:
    if confrontation.ratio is None:
        return "-" if speed is Speed.reference else "not measured"
    shown = f"{confrontation.ratio:.2g} times float32"
    remark = {True: "as expected", False: f"not what {speed.value} means: trust the measurement", None: ""}[
        confrontation.agrees
    ]
    return f"{shown}, {remark}".rstrip(", ")


def _measurement(measured: Sequence[Measured]) -> Table:
    dtypes = list(dict.fromkeys(one.dtype for one in measured))
    table = _table(
        "Measured here, forward and backward: median ms (times as fast as float32, and its middle half)",
        "operation",
        "on",
    )
    for dtype in dtypes:
        table.add_column(dtype, justify="right", no_wrap=True)
    for operation in dict.fromkeys(one.operation for one in measured):
        row = {one.dtype: one for one in measured if one.operation == operation}
        shape = next(iter(row.values())).shape
        table.add_row(operation, shape, *(_cell(row.get(dtype)) for dtype in dtypes))
    problems = [f"{one.operation} in {one.dtype}: {one.problem}" for one in measured if one.problem]
    table.caption, table.caption_justify = "; ".join(problems) or None, "left"
    return table


def _cell(one: Measured | None) -> str:
    if one is None or one.milliseconds is None:
        return "-"
    shown = f"{one.milliseconds:.3g}"
    if one.dtype == "float32" or one.ratio is None or one.quartiles is None:
        return shown
    low, high = one.quartiles
    return f"{shown} ({one.ratio:.2g}, {low:.2g}-{high:.2g})"


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.show_header = any(columns)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def as_json(facts: Facts, measured: Sequence[Measured]) -> dict[str, Any]:
    """Everything, ready for `json.dumps`; the keys are a contract, and `schema` counts their changes."""
    found = judge.findings(facts)
    return {
        "schema": SCHEMA,
        **asdict(facts),
        "precisions": [
            {
                "device": device.name,
                "kind": device.kind,
                "compute_capability": device.compute_capability,
                "tensor_cores": tensor_cores(device),
                "float16_in_hardware": float16_in_hardware(device),
                "bfloat16_in_hardware": bfloat16_in_hardware(device),
                "verdicts": [
                    {
                        "precision": verdict.precision,
                        "runs": verdict.runs,
                        "speed": verdict.speed.value,
                        "reason": verdict.reason,
                        "measured": asdict(judge.confront(verdict, measured)) if measured else None,
                    }
                    for verdict in verdicts
                ],
            }
            for device, verdicts in judge.policies(facts)
        ],
        "auto": asdict(judge.automatic(facts)),
        "measured": [asdict(one) for one in measured],
        "findings": [asdict(finding) for finding in found],
        "exit_code": judge.exit_code(found),
    }
