"""The `mp-hydra` command."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mp_hydra import __version__
from mp_hydra.errors import TrackingError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Mixed precision for Keras, measured. To train: mp-hydra-train --help."""


@cli.command()
@click.option("--format", "form", default="text", show_default=True, type=click.Choice(["text", "markdown", "json"]))
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings, too, not on errors alone.")
@click.option("--gradients", is_flag=True, help="Where each layer's gradients lie in float16's range, too.")
@click.option("--bisect", is_flag=True, help="Instead: find the layers that have to be float32 for the model to work.")
@click.option(
    "--batches", default=3, show_default=True, type=click.IntRange(min=1), help="For --gradients and --bisect."
)
@click.option(
    "--output", default="audit", show_default=True, type=click.Path(path_type=Path), help="Directory to write to."
)
@click.argument("overrides", nargs=-1)
def audit(
    overrides: tuple[str, ...],
    *,
    form: str,
    strict: bool,
    gradients: bool,
    bisect: bool,
    batches: int,
    output: Path,
) -> None:
    """Look at the configured model without training it: what each layer computes in, and what is wrong with it.

    OVERRIDES are those of mp-hydra-train, such as model=vit dataset=cifar10. Exits with 1 if there is an error among the
    findings. With --gradients, gradients are taken in float32, whatever the precision, and then placed in float16's range.
    With --bisect, some steps are taken with ever fewer layers in float32, until none of them can be spared; exits with 1 if
    the model fails without them.
    """
    from rich.console import Console

    from mp_hydra import culprit, gradient_report
    from mp_hydra.app import composed
    from mp_hydra.audit import configured

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # a user's modules lie where the command is typed
    config = composed([*overrides, "callbacks=none"])  # theirs may want a run's output directory
    if bisect:
        result = culprit.bisect(config, batches)
        click.echo("\n".join(result.lines()))
        sys.exit(0 if result.trouble is None else 1)
    single = composed([*overrides, *gradient_report.IN_FLOAT32]) if gradients else None
    found = configured.audit(config)
    if form == "text":
        found.show(Console())
    else:
        click.echo(found.json() if form == "json" else found.markdown(), nl=False)
    written = found.save(output)
    if single is not None:
        ranges = gradient_report.measure(single, batches)
        if form == "text":
            gradient_report.show(ranges, Console())
        written += gradient_report.save(ranges, output)
    for path in written:
        click.echo(f"wrote {path}", err=form != "text")
    if found.fails(strict=strict):
        sys.exit(1)


@cli.command()
@click.option("--memory", metavar="SIZE", help="To fit into, such as 12GB or 16GiB.  [default: what this machine has]")
@click.option(
    "--batch-sizes", metavar="LIST", help="To forecast.  [default: 8,16,32,64,128,256 and the configured one]"
)
@click.option(
    "--precisions", metavar="LIST", help="[default: that of the overrides, or fp32,mixed_bfloat16,mixed_float16]"
)
@click.option("--verify", is_flag=True, help="Run the largest batch for real, evaluation included.")
@click.option(
    "--allowance",
    metavar="SIZE",
    help="What of the memory is not TensorFlow's to give out.  [default: 2GiB of a given memory, for what a GPU adds]",
)
@click.option("--format", "form", default="text", show_default=True, type=click.Choice(["text", "markdown", "json"]))
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), help="Directory to write both files to.")
@click.argument("overrides", nargs=-1)
def forecast(
    overrides: tuple[str, ...],
    *,
    memory: str | None,
    batch_sizes: str | None,
    precisions: str | None,
    verify: bool,
    allowance: str | None,
    form: str,
    output: Path | None,
) -> None:
    """Predict the peak training memory by precision and batch size, and the largest batch that fits.

    OVERRIDES are those of mp-hydra-train, such as model=vit dataset=cifar10 memory=lean. A few steps are trained at small
    batches, each precision in a process of its own; no GPU is needed. Exits with 1 if a precision has no answer.
    """
    from rich.console import Console

    from mp_hydra.forecast.story import Question, ask

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # a user's modules lie where the command is typed
    question = Question(overrides, memory, batch_sizes, precisions, allowance, verify)
    found = ask(question, Console(stderr=True))
    if form == "text":
        found.show(Console())
    else:
        click.echo(found.json() if form == "json" else found.markdown(), nl=False)
    for path in found.save(output) if output is not None else ():
        click.echo(f"wrote {path}", err=form != "text")
    if found.failed:
        sys.exit(1)


@cli.command()
@click.option("--measure", is_flag=True, help="Time a few operations in every dtype, too: about 20 seconds.")
@click.option(
    "--quick", is_flag=True, help="Do not import TensorFlow: answers in a fraction of a second, without its view."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of tables.")
@click.option("--uri", help="The MLflow store to look at.  [default: as for a run]")
def doctor(*, measure: bool, quick: bool, as_json: bool, uri: str | None) -> None:
    """Say what this machine computes fast in, why, and what is in the way.

    Exits with 1 if there is a GPU that cannot be used.
    """
    from rich.console import Console

    from mp_hydra.doctor.story import examine

    if measure and quick:
        raise click.UsageError("--measure needs TensorFlow, which --quick leaves alone")
    sys.exit(examine(Console(), quick=quick, measure=measure, as_json=as_json, uri=uri))


def _store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Where a command looks for runs: the default store, unless it is told otherwise."""
    uri = click.option(
        "--uri", help="The MLflow store: sqlite:///<file> or http(s)://<server>.  [default: as for a run]"
    )
    experiment = click.option(
        "--experiment", help="Where the latest sweep is looked for.  [default: in all experiments]"
    )
    return uri(experiment(command))


@cli.command()
@_store_options
@click.option("--baseline", default="fp32", show_default=True, help="The precision that the others are compared with.")
@click.option(
    "--margin", default=0.1, show_default=True, help="Accuracy counts as equivalent within so many percentage points."
)
@click.option(
    "--require", metavar="CONDITIONS", help="Exit with 1 unless they hold: accuracy=equivalent,memory<=0.6,speed>=1.2"
)
@click.option(
    "-o",
    "--output",
    multiple=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the comparison to a file; .html, .md, .csv or .json decides the form. May be repeated.",
)
@click.option(
    "--publish/--no-publish", default=True, show_default=True, help="Put it into the sweep's parent run, too."
)
@click.argument("sweep", nargs=-1)
def compare(
    sweep: tuple[str, ...],
    *,
    uri: str | None,
    experiment: str | None,
    baseline: str,
    margin: float,
    require: str | None,
    output: tuple[Path, ...],
    publish: bool,
) -> None:
    """Compare the precisions of a sweep: memory, time, accuracy, and what follows.

    SWEEP is the id of a sweep's parent run, a sweep's directory, an experiment, or several ids of runs; without one the latest
    sweep is compared.
    """
    from rich.console import Console

    from mp_hydra.compare import gate, pages, story
    from mp_hydra.compare.collect import Store
    from mp_hydra.compare.report import terminal
    from mp_hydra.tracking import Settings, store_uri

    forms = {path: story.form(path) for path in output}
    conditions = gate.parse(require) if require is not None else ()
    target = None if not sweep else sweep[0] if len(sweep) == 1 else sweep
    comparison, selection = story.compare(
        target,
        Store.open(store_uri(Settings(uri=uri))),
        cwd=Path.cwd(),
        experiment=experiment,
        baseline=baseline,
        margin=margin,
    )
    terminal.show(comparison, Console())
    for path, render in forms.items():
        story.write(path, render(comparison))
        click.echo(f"wrote {path}")
    failed = gate.failures(comparison, conditions) if conditions else []
    for line in failed:
        click.echo(f"mp_hydra: {line}", err=True)
    if publish:
        story.publish(comparison, selection)
        for line in pages.announced(pages.sweep_pages(selection), selection.store.uri):
            click.echo(line)
    if failed:
        sys.exit(1)


@cli.command()
@_store_options
@click.option("--port", default=5000, show_default=True, type=click.IntRange(1, 65535), help="On 127.0.0.1.")
@click.option("--open", "open_browser", is_flag=True, help="Open the latest sweep's comparison in a browser.")
def ui(*, uri: str | None, experiment: str | None, port: int, open_browser: bool) -> None:
    """Start the MLflow UI on the store, and say which pages are worth opening; Ctrl-C ends it."""
    import webbrowser

    from mp_hydra import tracking
    from mp_hydra.compare.collect import Store
    from mp_hydra.compare.pages import latest_pages
    from mp_hydra.outcome import Terminated, sigterm_raises
    from mp_hydra.tracking.store import sqlite_path
    from mp_hydra.ui import HOST, served

    store = Store.open(tracking.store_uri(tracking.Settings(uri=uri)))
    local = sqlite_path(store.uri) is not None
    base = f"http://{HOST}:{port}" if local else store.name
    pages = latest_pages(store, experiment, base)
    try:
        with sigterm_raises(), served(store.uri, port) if local else contextlib.nullcontext() as server:
            for name, address in pages.items():
                click.echo(f"{name:<9}{address}")
            if open_browser:
                webbrowser.open(pages.get("compare") or pages["ui"])
            if server is not None:
                click.echo("Ctrl-C ends it")
                server.wait()
    except (KeyboardInterrupt, Terminated):
        return
    if server is not None:
        raise TrackingError(f"the MLflow server ended by itself, with exit status {server.returncode}")


@cli.command()
@click.argument("spool", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def sync(spool: tuple[Path, ...]) -> None:
    """Send what could not reach the tracking server: the mlflow-spool-*.jsonl files that a run named when it ended."""
    from mp_hydra import tracking

    for path in spool:
        report = tracking.sync(path)
        click.echo(
            f"run {report.run_id} on {report.uri}: {report.metrics} metric values, {report.tags} tags, "
            f"{report.params} parameters, {report.artifacts} artifacts sent{f'; status {report.status}' if report.status else ''}"
        )
        for lost in report.missing:
            click.echo(f"  lost: {lost} is no longer there", err=True)
        if report.torn:
            click.echo("  the last line was cut off when the run was killed, and is lost", err=True)


def main() -> None:
    """Run the command on `sys.argv`; a user's error is one line and exit code 1."""
    from mp_hydra.config import InvalidConfigError

    try:
        cli.main(prog_name="mp-hydra", standalone_mode=True)
    except (UserError, InvalidConfigError) as error:
        for line in str(error).splitlines():
            click.echo(f"mp_hydra: {line}", err=True)
        sys.exit(1)
