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
@click.argument("spool", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def sync(spool: tuple[Path, ...]) -> None:
    """Send what could not reach the tracking server: the mlflow-spool-*.jsonl files that a run named when it ended."""
    from mp_hydra import tracking

    for path in spool:
        report = tracking.sync(path)
        click.echo(
            f"run {report.run_id} on {report.uri}: {report.metrics} metric values, {report.tags} tags, {report.params} parameters, "
            f"{report.artifacts} artifacts sent{f'; status {report.status}' if report.status else ''}"
        )
        for lost in report.missing:
            click.echo(f"  lost: {lost} is no longer there", err=True)
        if report.torn:
            click.echo("  the last line was cut off when the run was killed, and is lost", err=True)


def main() -> None:
    """Run the command on `sys.argv`; a user's error is one line and exit code 1."""
    try:
        cli.main(prog_name="mp-hydra", standalone_mode=True)
    except UserError as error:
        click.echo(f"mp_hydra: {error}", err=True)
        sys.exit(1)
