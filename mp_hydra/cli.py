"""The `mp-hydra` command."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mp_hydra import __version__
from mp_hydra.errors import UserError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def cli() -> None:
    """Mixed precision for Keras, measured. To train: mp-hydra-train --help."""


@cli.command()
@click.option("--gradients", is_flag=True, required=True, help="Where each layer's gradients lie in float16's range.")
@click.option(
    "--batches", default=3, show_default=True, type=click.IntRange(min=1), help="Training batches to look at."
)
@click.option(
    "--output", default="audit", show_default=True, type=click.Path(path_type=Path), help="Directory to write to."
)
@click.argument("overrides", nargs=-1)
def audit(overrides: tuple[str, ...], *, gradients: bool, batches: int, output: Path) -> None:  # noqa: ARG001 - required
    """Look at the configured model without training it.

    OVERRIDES are those of mp-hydra-train, such as model=vit dataset=cifar10. Gradients are taken in float32, whatever the
    precision, and then placed in float16's range.
    """
    from rich.console import Console

    from mp_hydra import gradient_report
    from mp_hydra.app import composed

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # a user's modules lie where the command is typed
    config = composed([*overrides, "precision=fp32", "loss_scale=none", "callbacks=none"])
    ranges = gradient_report.measure(config, batches)
    gradient_report.show(ranges, Console())
    for path in gradient_report.save(ranges, output):
        click.echo(f"wrote {path}")


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
