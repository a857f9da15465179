"""The `mp-hydra` command: gradients of a configured model, what could not be sent, and what help costs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from click.testing import CliRunner

from mp_hydra import cli, tracking
from mp_hydra.tracking import Outcome, Settings, open_client, open_run
from mp_hydra.tracking.batch import Batch, Metric
from mp_hydra.tracking.spool import Header, Spool

if TYPE_CHECKING:
    from click.testing import Result

APP = Path(__file__).parent / "apps" / "own_model"
DIGITS = ("dataset=digits", "batch_size=32")


def typed(*words: str) -> Result:
    return CliRunner().invoke(cli.cli, list(words))


def main(*words: str) -> int:
    """The exit code of the console script."""
    with mock.patch.object(sys, "argv", ["mp-hydra", *words]), pytest.raises(SystemExit) as leaving:
        cli.main()
    return int(leaving.value.code or 0)


# --- audit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        (("model=mlp", "model.widths=[8]", "precision=mixed_float16", "loss_scale=dynamic"), {"dense_1", "logits"}),
        (("model=cnn", "callbacks=checkpoint"), {"conv_1", "conv_2", "dense", "logits"}),
    ],
)
def test_audit_shows_every_layer_and_writes_both_files(
    words: tuple[str, ...], layers: set[str], tmp_path: Path
) -> None:
    done = typed("audit", "--gradients", "--batches", "2", "--output", str(tmp_path / "audit"), *DIGITS, *words)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "audit" / "gradients.json").read_text())
    weights = {r["layer"].rpartition("/")[2]: r for r in found if r["kind"] == "weights"}
    assert layers == set(weights)
    logits = next(r for r in found if r["kind"] == "outputs" and r["layer"].endswith("logits"))
    assert logits["count"] == 2 * 32 * 10
    assert 0.5 / 32 < logits["largest"] < 1 / 32  # of the mean cross-entropy: (probability - target) / batch size
    assert "Gradients of outputs in float16's range" in done.output
    assert " keep every gradient" in done.output or "No scaling is needed" in done.output
    assert f"wrote {tmp_path / 'audit' / 'gradients.png'}" in done.output.replace("\n", "")


def test_audit_finds_a_users_model_where_the_command_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(APP / "my_model.py", tmp_path / "model_for_audit.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ("model=custom", "model._target_=model_for_audit.functional", "+model.hidden=4")
    done = typed("audit", "--gradients", "--batches", "1", *DIGITS, *words)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "audit" / "gradients.png").is_file()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("model=rnn",), "mp_hydra: model=rnn"),
        (("model.widht=[8]",), "mp_hydra: model.widht"),
        (("batch_size=0",), "mp_hydra: batch_size=0: "),
        (("dataset=npz", "dataset.path=none.npz"), "mp_hydra: "),
    ],
)
def test_bad_override_is_one_line_and_exit_code_1(
    words: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("audit", "--gradients", "--output", str(tmp_path / "audit"), *words) == 1
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith(line)
    assert "Traceback" not in said.err + said.out
    assert not (tmp_path / "audit").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("audit", "--format", "xml"), "'xml' is not one of 'text', 'markdown', 'json'"),
        (("audit", "--gradients", "--batches", "0"), "0 is not in the range x>=1"),
        (("sync",), "Missing argument 'SPOOL...'"),
        (("sync", "none.jsonl"), "'none.jsonl' does not exist"),
        (("train",), "No such command 'train'"),
    ],
)
def test_misuse_is_answered_with_usage_and_exit_code_2(words: tuple[str, ...], line: str) -> None:
    done = typed(*words)
    assert done.exit_code == 2
    assert line in done.output


# --- sync ------------------------------------------------------------------------------------------------------------


def test_sync_sends_a_spool_to_its_store_and_says_what_arrived(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    client = open_client(uri)
    run = open_run(Settings("local", uri=uri), name="n", params={}, tags={}, spool=tmp_path, cwd=tmp_path)
    run.close(Outcome.ok)
    assert run.run_id is not None
    assert run.experiment_id is not None
    spool = Spool(tmp_path / f"mlflow-spool-{run.run_id}.jsonl", Header(uri, run.experiment_id, run.run_id, "n"))
    spool.append(Batch(metrics=[Metric("loss", 0.5, 1_700_000_000_000, 3)], tags={"colour": "red"}))
    spool.release()
    done = typed("sync", str(spool.path))
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"run {run.run_id} on {uri}: 1 metric values, 1 tags, 0 parameters, 0 artifacts sent")
    stored = client.get_run(run.run_id)
    assert (stored.data.metrics, stored.data.tags["colour"]) == ({"loss": 0.5}, "red")
    assert not spool.path.exists()


def test_sync_calls_for_each_file_and_reports_what_arrived_and_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"mlflow-spool-{i}.jsonl" for i in (1, 2)]
    for file in files:
        file.write_text("")
    seen: list[Path] = []

    def sync(path: Path) -> Any:
        seen.append(path)
        return mock.Mock(
            run_id="r",
            uri="http://x",
            metrics=3,
            tags=2,
            params=1,
            artifacts=4,
            status="FINISHED",
            missing=["a.csv"],
            torn=True,
        )

    monkeypatch.setattr(tracking, "sync", sync)
    done = CliRunner().invoke(cli.cli, ["sync", *map(str, files)])
    assert done.exit_code == 0
    assert seen == files
    expected = "run r on http://x: 3 metric values, 2 tags, 1 parameters, 4 artifacts sent; status FINISHED"
    assert done.stdout.splitlines() == [expected] * 2
    assert done.stderr.count("  lost: a.csv is no longer there") == 2
    assert done.stderr.count("the last line was cut off") == 2


def test_file_that_is_no_spool_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.jsonl").write_text('{"format": "something else"}\n')
    assert main("sync", str(tmp_path / "odd.jsonl")) == 1
    said = capsys.readouterr().err
    assert said.startswith("mp_hydra: ")
    assert len(said.splitlines()) == 1


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("--help",), ("audit", "sync", "mp-hydra-train --help")),
        (("-h",), ("audit", "sync")),
        (
            ("audit", "--help"),
            ("--gradients", "--batches", "--output", "model=vit dataset=cifar10", "[default: audit]"),
        ),
        (("sync", "--help"), ("SPOOL...", "mlflow-spool-*.jsonl")),
    ],
)
def test_help_names_commands_options_and_an_example(words: tuple[str, ...], lines: tuple[str, ...]) -> None:
    done = typed(*words)
    assert done.exit_code == 0
    for line in lines:
        assert line in " ".join(done.output.split())


def test_version_is_that_of_the_package() -> None:
    from mp_hydra import __version__

    assert __version__ in typed("--version").output


@pytest.mark.process
def test_help_imports_neither_tensorflow_nor_mlflow() -> None:
    code = (
        "import sys\nfrom mp_hydra.cli import cli\n"
        "try:\n    cli.main(['audit', '--help'])\nfinally:\n"
        "    print('heavy:', sorted({'tensorflow', 'keras', 'mlflow', 'numpy', 'rich'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=APP.parents[2], capture_output=True, text=True, check=False)
    assert "--gradients" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("heavy: []")
