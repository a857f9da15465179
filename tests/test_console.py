"""What a run shows: the lines of the summary, and the progress bar in a terminal and elsewhere."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mp_hydra.console import ProgressBar, show_summary, summary


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def text(shown: Console) -> str:
    file = shown.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.mark.parametrize(
    ("metrics", "row"),
    [
        ({"test/accuracy": 0.98765}, ("test accuracy", "98.77 %")),
        ({"test/sparse_top_k_categorical_accuracy": 1.0}, ("test sparse_top_k_categorical_accuracy", "100.00 %")),
        ({"test/loss": 0.123456}, ("test loss", "0.1235")),
        (
            {"memory/peak_mib": 100.04, "memory/training_mib": 60.06, "memory/state_mib": 12.34},
            ("training memory", "60.1 MiB (peak 100.0 MiB, variables and optimizer 12.3 MiB)"),
        ),
        ({"time/step_ms": 12.345, "time/step_ms_p95": 15.0}, ("step time", "12.3 ms (95 % below 15.0 ms)")),
        ({"time/samples_per_second": 12345.6}, ("throughput", "12,346 samples/s")),
        ({"time/first_step_seconds": 1.234}, ("first step", "1.23 s, with tracing and compilation")),
        ({"energy/joules": 1234.5}, ("energy", "1234 J")),
    ],
)
def test_figure_is_shown_in_units_that_a_person_reads(metrics: dict[str, float], row: tuple[str, str]) -> None:
    assert summary(metrics, {}) == [row]


@pytest.mark.parametrize(
    ("scale", "shown"), [(32768.0, "2^15"), (2.0, "2^1"), (1.0, "1"), (1000.0, "1000"), (0.5, "0.5")]
)
def test_loss_scale_is_shown_as_a_power_of_two_where_it_is_one(scale: float, shown: str) -> None:
    metrics = {"loss_scale/value": scale, "loss_scale/skipped_steps": 3.0, "loss_scale/applied_steps": 7.0}
    assert summary(metrics, {}) == [("loss scale", f"{shown}; 3 of 10 steps skipped")]


def test_last_skipped_step_is_named_where_it_is_known() -> None:
    metrics = {"loss_scale/value": 1024.0, "loss_scale/skipped_steps": 3.0, "loss_scale/applied_steps": 97.0}
    (row,) = summary(metrics, {}, last_skipped=5)
    assert row == ("loss scale", "2^10; 3 of 100 steps skipped, all in the first 5")


def test_what_is_absent_is_shown_with_its_reason_but_for_what_only_a_gpu_has() -> None:
    absent = {"time/step_ms": "all warm-up", "energy/joules": "no GPU", "memory/device_used_peak_mib": "no GPU"}
    assert summary({}, absent) == [("time/step_ms", "not measured: all warm-up")]


def test_summary_prints_title_rows_and_closing_lines_without_eating_brackets() -> None:
    shown = console(terminal=False)
    show_summary(
        "cnn-digits", [("test loss", "0.5")], ["look at  mlflow ui --backend-store-uri sqlite:///a[b].db"], shown
    )
    lines = [line.rstrip() for line in text(shown).splitlines()]
    assert lines[0] == "cnn-digits"
    assert "test loss" in lines[1]
    assert lines[-1].endswith("sqlite:///a[b].db")


def walk(bar: ProgressBar, *, epochs: int = 2, batches: int = 3) -> None:
    bar.on_train_begin()
    for epoch in range(epochs):
        bar.on_epoch_begin(epoch)
        for batch in range(batches):
            bar.on_train_batch_begin(batch)
        bar.on_epoch_end(epoch, {"loss": 0.123456 / (epoch + 1), "accuracy": 1.0})
    bar.on_train_end()


def test_one_line_an_epoch_where_there_is_no_terminal() -> None:
    shown = console(terminal=False)
    walk(ProgressBar(epochs=2, batches=3, console=shown))
    assert text(shown).splitlines() == ["epoch 1/2  loss 0.1235  accuracy 1", "epoch 2/2  loss 0.06173  accuracy 1"]


def test_terminal_shows_a_bar_and_gets_its_cursor_back() -> None:
    shown = console(terminal=True)
    bar = ProgressBar(epochs=2, batches=3, console=shown)
    walk(bar)
    bar.close()
    assert "epoch 2/2  loss 0.06173" in text(shown)
    assert text(shown).count("\x1b[?25l") == text(shown).count("\x1b[?25h") == 1


def test_bar_counts_batches_over_all_epochs() -> None:
    bar = ProgressBar(epochs=2, batches=3, console=console(terminal=True))
    bar.on_train_begin()
    bar.on_epoch_begin(1)
    bar.on_train_batch_begin(2)
    assert bar._progress is not None
    task = bar._progress.tasks[0]
    assert (task.completed, task.total, task.description) == (5, 6, "epoch 2/2")
    bar.close()


def test_close_gives_the_terminal_back_after_an_exception_and_can_be_called_again() -> None:
    shown: Any = console(terminal=True)
    bar = ProgressBar(epochs=1, batches=1, console=shown)
    bar.on_train_begin()
    bar.close()
    bar.close()
    assert text(shown).count("\x1b[?25h") == 1
