"""What a job sees, what comes back from it, and how the launcher starts it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hydra.core.hydra_config import HydraConfig

from mp_hydra.errors import ConfigError
from mp_hydra.isolation import progress
from mp_hydra.isolation.devices import gpus, shares, slots, visible
from mp_hydra.isolation.environment import read_at_import, too_late
from mp_hydra.isolation.jobs import Cause, Progress
from mp_hydra.isolation.servers import servers
from mp_hydra.isolation.settings import Settings
from tests.isolation.isolated_driver import BARE, launch, left_over

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "apps" / "isolated" / "script_globals.py"

process = pytest.mark.process


# What a job sees


@process
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_everything_that_a_job_prints_goes_to_its_file(tmp_path: Path, start: str) -> None:
    def task(_: Any) -> str:
        import subprocess
        import sys

        print("printed")
        os.write(1, b"descriptor 1\n")
        os.write(2, b"descriptor 2\n")
        subprocess.run(["echo", "from a child"], check=True)
        print("caf\xe9", file=sys.stderr)
        return sys.stdin.read()

    launched = launch(task, tmp_path, [[]], f"hydra.launcher.start={start}")
    assert launched.value(0) == ""  # nothing to read
    assert launched.output(0) == "printed\ndescriptor 1\ndescriptor 2\nfrom a child\ncaf\xe9\n"
    assert launched.observer.jobs[0].output == tmp_path / "0" / "output.log"
    assert left_over() == []


@process
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_a_job_stands_where_the_launcher_stands(tmp_path: Path, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MP_HYDRA_TEST_LATE", "set after the server started")
    monkeypatch.setattr(sys, "argv", ["my_app.py", "--odd"])
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def task(_: Any) -> Any:
        import sys

        variable = os.environ["MP_HYDRA_TEST_LATE"], os.environ["MP_HYDRA_TEST_GIVEN"]
        return str(Path.cwd()), sys.argv, sys.path[0], variable, os.getsid(0) == os.getpid()

    settings = f"hydra.launcher.start={start}", "+hydra.launcher.env.MP_HYDRA_TEST_GIVEN=5"
    launched = launch(task, tmp_path / "jobs", [[]], *settings)
    assert launched.value(0) == (
        str(tmp_path),
        ["my_app.py", "--odd"],
        str(tmp_path / "modules"),
        ("set after the server started", "5"),
        True,
    )


@process
def test_a_job_is_a_process_of_its_own(tmp_path: Path) -> None:
    def task(_: Any) -> Any:
        import builtins

        before = getattr(builtins, "left_by_a_job", None)
        builtins.left_by_a_job = 1  # type: ignore[attr-defined]
        return os.getpid(), before

    launched = launch(task, tmp_path, [[], [], []])
    assert len({launched.value(number)[0] for number in range(3)}) == 3
    assert [launched.value(number)[1] for number in range(3)] == [None] * 3


@process
def test_the_servers_random_state_is_not_that_of_its_jobs(tmp_path: Path) -> None:
    def task(_: Any) -> Any:
        import random
        import sys

        assert "numpy" in sys.modules
        import numpy as np

        return float(np.random.rand()), random.random()  # noqa: NPY002

    launched = launch(task, tmp_path, [[], []], "hydra.launcher.preload=[numpy]")
    first, second = launched.value(0), launched.value(1)
    assert first[0] != second[0]
    assert first[1] != second[1]


@process
def test_hydra_and_the_sweep_know_a_job_by_the_same_number_and_directory(tmp_path: Path) -> None:
    def task(config: Any) -> Any:
        hydra = HydraConfig.get()
        return config.a, hydra.job.num, hydra.job.id, hydra.runtime.output_dir

    subdir = "hydra.sweep.subdir=n${hydra.job.num}-${hydra.job.override_dirname}"
    launched = launch(task, tmp_path, [["+a=1"], ["+a=2"]], subdir, first=5)
    expected = {n: str(tmp_path / f"n{n}-+a={a}") for n, a in ((5, 1), (6, 2))}
    assert [result.return_value for result in launched.returns] == [(1, 5, "5", expected[5]), (2, 6, "6", expected[6])]
    assert {n: str(job.output_dir) for n, job in launched.observer.jobs.items()} == expected
    assert launched.observer.planned == [5, 6]
    assert launched.observer.jobs[6].overrides == ("+a=2",)
    assert all(Path(directory, "output.log").exists() for directory in expected.values())
    assert [result.overrides for result in launched.returns] == [["+a=1"], ["+a=2"]]


@process
def test_a_directory_that_depends_on_chance_is_settled_once(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("mp_hydra_test_chance", lambda: os.urandom(4).hex(), replace=True)
    try:
        launched = launch(
            lambda _: HydraConfig.get().runtime.output_dir,
            tmp_path,
            [[]],
            "hydra.sweep.subdir=${mp_hydra_test_chance:}",
        )
    finally:
        OmegaConf.clear_resolver("mp_hydra_test_chance")
    assert launched.value(0) == str(launched.observer.jobs[0].output_dir)
    assert [path.name for path in tmp_path.iterdir()] == [launched.observer.jobs[0].output_dir.name]


@process
def test_a_failed_job_still_says_what_it_was(tmp_path: Path) -> None:
    launched = launch(lambda _: os._exit(1), tmp_path, [["+a=1"]])
    result = launched.returns[0]
    assert result.overrides == ["+a=1"]
    assert result.cfg == {"a": 1}
    assert result.hydra_cfg is not None
    assert result.hydra_cfg.hydra.runtime.output_dir == str(tmp_path / "0")


# Several at a time


@process
def test_no_more_jobs_run_at_a_time_than_asked_and_returns_keep_their_order(tmp_path: Path) -> None:
    def task(config: Any) -> Any:
        start = time.monotonic()
        time.sleep(0.5 if config.n == 0 else 0.2)
        return config.n, start, time.monotonic(), sorted(os.sched_getaffinity(0))

    launched = launch(
        task,
        tmp_path,
        [[f"+n={n}"] for n in range(4)],
        "hydra.launcher.n_jobs=2",
        "+hydra.launcher.env.CUDA_VISIBLE_DEVICES=''",
    )
    values = [launched.value(number) for number in range(4)]
    assert [value[0] for value in values] == [0, 1, 2, 3]
    at_once = [sum(start <= other < end for _, other, _, _ in values) for _, start, end, _ in values]
    assert max(sum(a <= t < b for _, a, b, _ in values) for _, t, _, _ in values) == 2, at_once
    assert launched.observer.events.index(("ended", 1)) < launched.observer.events.index(("ended", 0))
    used = [tuple(value[3]) for value in values]
    assert set(used) <= set(shares(2, sorted(os.sched_getaffinity(0))))
    assert used[0] != used[1] or len(os.sched_getaffinity(0)) == 1


@process
def test_jobs_at_a_time_get_the_gpus_in_turn_as_they_are_written(tmp_path: Path) -> None:
    def task(_: Any) -> Any:
        time.sleep(0.3)
        return os.environ["CUDA_VISIBLE_DEVICES"], len(os.sched_getaffinity(0))

    settings = "hydra.launcher.n_jobs=3", "+hydra.launcher.env.CUDA_VISIBLE_DEVICES='GPU-8a5f,MIG-02d1'"
    launched = launch(task, tmp_path, [[], [], []], *settings)
    everything = len(os.sched_getaffinity(0))
    assert [launched.value(n) for n in range(3)] == [
        ("GPU-8a5f", everything),
        ("MIG-02d1", everything),
        ("GPU-8a5f", everything),
    ]


def test_one_at_a_time_is_not_pinned() -> None:
    (slot,) = slots(1, ["0", "1"], {0, 1})
    assert (dict(slot.environ), slot.cores) == ({}, None)


@pytest.mark.parametrize(
    ("parts", "cores", "expected"),
    [
        (2, [0, 1, 2, 3], [(0, 1), (2, 3)]),
        (3, [0, 1, 2, 3], [(0, 1), (2,), (3,)]),
        (2, [3, 7], [(3,), (7,)]),
        (3, [4, 5], [(4,), (5,), (4,)]),
    ],
)
def test_cores_are_shared_as_equally_as_can_be(parts: int, cores: list[int], expected: list[tuple[int, ...]]) -> None:
    assert shares(parts, cores) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,1", ["0", "1"]),
        ("3", ["3"]),
        ("GPU-1f2e3d4c, MIG-GPU-5a/1/0", ["GPU-1f2e3d4c", "MIG-GPU-5a/1/0"]),
        ("0,-1,1", ["0"]),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_are_read_as_cuda_does(value: str, expected: list[str]) -> None:
    assert visible(value) == expected
    assert gpus({"CUDA_VISIBLE_DEVICES": value}) == expected


class FakeNvml:
    """Stands in for pynvml: two GPUs, the second of which MIG may divide into two devices with a gap between."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):  # noqa: N801, N818 - pynvml's name
        pass

    def __init__(self, *, driver: bool = True, mig: bool = False, broken: bool = False) -> None:
        self.driver, self.mig, self.broken, self.open = driver, mig, broken, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self.broken:
            raise self.NVMLError("lost")
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return index

    def nvmlDeviceGetMigMode(self, handle: Any) -> tuple[int, int]:  # noqa: N802
        if handle == 0:
            raise self.NVMLError("not supported")
        return int(self.mig), 1

    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes:  # noqa: N802
        return f"GPU-{handle}" if isinstance(handle, int) else f"MIG-{handle}".encode()

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> str:  # noqa: N802
        if index == 1:
            raise self.NVMLError_NotFound
        return f"{handle}.{index}"


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (FakeNvml(), ["GPU-0", "GPU-1"]),
        (FakeNvml(mig=True), ["GPU-0", "MIG-1.0", "MIG-1.2"]),
        (FakeNvml(driver=False), []),
    ],
    ids=["gpus", "mig", "no driver"],
)
def test_without_the_variable_the_driver_tells_the_gpus(
    fake: FakeNvml, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert gpus({}) == expected
    assert fake.open == 0


def test_a_driver_that_does_not_answer_is_an_error_and_not_a_machine_without_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(broken=True))
    with pytest.raises(ConfigError, match=r"n_jobs.*NVML does not tell .*lost.*CUDA_VISIBLE_DEVICES"):
        gpus({})


# How jobs start


@process
def test_the_server_is_kept_for_the_next_launch(tmp_path: Path) -> None:
    def parent(_: Any) -> int:
        return os.getppid()

    first = launch(parent, tmp_path / "a", [[], []])
    second = launch(parent, tmp_path / "b", [[]])
    assert first.value(0) == first.value(1) == second.value(0) != os.getpid()


@process
def test_one_idle_server_of_a_kind_is_kept(tmp_path: Path) -> None:
    first = launch(lambda _: os.getppid(), tmp_path / "a", [[]], "hydra.launcher.preload=[colorsys]").value(0)
    second = launch(lambda _: os.getppid(), tmp_path / "b", [[]]).value(0)
    assert first != second
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@process
def test_a_server_in_use_is_not_given_to_another_launch() -> None:
    first, second = servers.get(None, {}), servers.get(None, {})
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    try:
        assert first is not second
    finally:
        servers.release()
    assert servers.get(None, {}) in (first, second)
    servers.release()


@process
def test_a_copy_of_the_launcher_does_not_dismiss_its_server(tmp_path: Path) -> None:
    before = launch(lambda _: os.getppid(), tmp_path / "a", [[]]).value(0)
    pid = os.fork()
    if pid == 0:
        servers.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert launch(lambda _: os.getppid(), tmp_path / "b", [[]]).value(0) == before


@process
def test_a_preloaded_module_is_there_when_a_job_starts(tmp_path: Path) -> None:
    def task(_: Any) -> bool:
        import sys

        return "colorsys" in sys.modules

    assert launch(task, tmp_path / "a", [[]], "hydra.launcher.preload=[colorsys]").value(0) is True
    assert launch(task, tmp_path / "b", [[]]).value(0) is False


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def hear(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Hydra's logging setup would take away pytest's handler."""
    monkeypatch.setattr("mp_hydra.isolation.launch.configure_log", lambda *_: None)
    caplog.set_level("INFO")
    return caplog


@process
def test_a_module_that_cannot_be_imported_is_a_warning(tmp_path: Path, hear: pytest.LogCaptureFixture) -> None:
    launched = launch(lambda _: 1, tmp_path, [[]], "hydra.launcher.preload=[no_such_module,colorsys]")
    assert launched.value(0) == 1
    (warning,) = warnings_of(hear)
    assert warning.startswith("no_such_module could not be imported before the jobs: ModuleNotFoundError")


UNSAFE = {
    "starts_thread": "import threading, time; threading.Thread(target=time.sleep, args=(100,), daemon=True).start()",
    "ends_process": "import os; os._exit(3)",
    "uses_gpu": "import os; kept = os.open(os.environ['FAKE_GPU'], os.O_RDONLY)",
}


@process
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("starts_thread", "the preloaded modules have started threads"),
        ("ends_process", "its preload ended with exit code 3"),
    ],
)
def test_where_forking_is_unsafe_jobs_are_fresh_interpreters_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hear: pytest.LogCaptureFixture, module: str, reason: str
) -> None:
    (tmp_path / f"{module}.py").write_text(UNSAFE[module])
    monkeypatch.syspath_prepend(str(tmp_path))

    def task(_: Any) -> Any:
        import sys

        return module in sys.modules

    assert launch(task, tmp_path / "a", [[]], f"hydra.launcher.preload=[{module}]").value(0) is False
    (line,) = [record.getMessage() for record in hear.records if record.getMessage().startswith("Launching")]
    assert line.startswith(f"Launching 1 job, one at a time: a fresh interpreter for each, because {reason}")
    with pytest.raises(ConfigError, match=f"hydra.launcher.start=fork: {reason}"):
        launch(task, tmp_path / "b", [[]], f"hydra.launcher.preload=[{module}]", "hydra.launcher.start=fork")
    assert not list((tmp_path / "b").glob("*/output.log"))
    assert left_over() == []


@process
@pytest.mark.parametrize("where", ["+hydra.launcher.env.KERAS_BACKEND=jax", "+hydra.job.env_set.KERAS_BACKEND=jax"])
def test_a_variable_that_the_server_has_read_gives_a_fresh_interpreter(
    tmp_path: Path, hear: pytest.LogCaptureFixture, where: str
) -> None:
    def task(_: Any) -> Any:
        return os.environ["KERAS_BACKEND"], Path("/proc/self/environ").read_bytes().count(b"KERAS_BACKEND=jax\0")

    assert launch(task, tmp_path / "a", [[]], where).value(0) == ("jax", 1)  # from the start of the process
    assert "KERAS_BACKEND of job 0 is read before it starts" in warnings_of(hear)[0]
    with pytest.raises(ConfigError, match=r"start=fork: KERAS_BACKEND of job 0.*preload_env"):
        launch(task, tmp_path / "b", [[]], where, "hydra.launcher.start=fork")


@process
def test_variables_of_the_server_are_those_of_its_jobs(tmp_path: Path, hear: pytest.LogCaptureFixture) -> None:
    settings = "+hydra.launcher.preload_env.KERAS_BACKEND=torch", "hydra.launcher.start=fork"
    assert launch(lambda _: os.environ["KERAS_BACKEND"], tmp_path, [[]], *settings).value(0) == "torch"
    assert warnings_of(hear) == []


@pytest.mark.parametrize(
    "name",
    [
        "TF_ENABLE_ONEDNN_OPTS",
        "TF_CPP_MIN_LOG_LEVEL",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "KERAS_HOME",
        "PYTHONHASHSEED",
        "LD_PRELOAD",
        "MALLOC_ARENA_MAX",
        "TF2_BEHAVIOR",
        "PYTHONPATH",
    ],
)
def test_what_is_read_at_import_is_too_late_for_a_fork(name: str) -> None:
    assert read_at_import(name)
    assert too_late({name: "1"}, {name: "2"}) == too_late({}, {name: "1"}) == too_late({name: "1"}, {}) == [name]
    assert too_late({name: "1"}, {name: "1"}) == []


@pytest.mark.parametrize(
    "name",
    [
        "TF_NUM_INTRAOP_THREADS",
        "XLA_FLAGS",
        "TF_XLA_FLAGS",
        "TF_DETERMINISTIC_OPS",
        "CUDA_VISIBLE_DEVICES",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "TF_GPU_ALLOCATOR",
        "TZ",
        "HOME",
    ],
)
def test_what_is_read_later_is_each_jobs_own(name: str) -> None:
    assert too_late({name: "1"}, {name: "2"}) == []


# Settings

GOOD: dict[str, Any] = {
    "n_jobs": 1,
    "start": "auto",
    "preload": [],
    "timeout": None,
    "grace": 5.0,
    "env": {},
    "preload_env": {},
    "output": "file",
    "main": "value",
}


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("n_jobs", 0, "at least 1"),
        ("n_jobs", True, "at least 1"),
        ("start", "spawn", "choose auto, fork or exec"),
        ("timeout", 0, "above 0, or null for no limit"),
        ("timeout", math.nan, "above 0, or null for no limit"),
        ("grace", -1, "0 or more"),
        ("output", "screen", "choose file or inherit"),
        ("main", "copy", "choose value or import"),
        ("preload", ["a module"], "names of modules"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(name: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        Settings.checked({**GOOD, name: value})
    assert str(caught.value).startswith(f"hydra.launcher.{name}=")
    assert "\n" not in str(caught.value)


def test_a_bad_variable_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^hydra\.launcher\.env\.A=B=1"):
        Settings.checked({**GOOD, "env": {"A=B": "1"}})


def test_output_of_several_jobs_does_not_mix_on_the_terminal() -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.output=inherit: hydra\.launcher\.n_jobs must be 1"):
        Settings.checked({**GOOD, "output": "inherit", "n_jobs": 2})


# The script's own globals, and output on the terminal


def run_script(directory: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", "+n=1,2", "hydra/launcher=isolated", BARE, f"hydra.sweep.dir={directory}", *settings]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, env=environ, check=False
    )


@process
def test_a_global_that_cannot_travel_is_named_with_the_way_out(tmp_path: Path) -> None:
    ended = run_script(tmp_path)
    assert ended.returncode == 1
    line = ended.stderr.splitlines()[-1]
    assert "the global LOCK of the script, a _thread.lock, cannot be sent" in line
    assert "hydra.launcher.main=import" in line
    assert not (tmp_path / "0").exists()


@process
def test_imported_anew_the_script_has_its_own_globals_and_is_not_started_again(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "hydra.launcher.main=import", "hydra.launcher.output=inherit")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("words of the script __mp_main__") == 2
    assert not (tmp_path / "0" / "output.log").exists()


# Progress


def test_outside_a_job_a_report_goes_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    progress.report_to(None)
    progress.report(Progress(0.5, "epoch 1/2"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def report_file(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "progress"
    progress.report_to(file)
    yield file
    progress.report_to(None)


def test_a_report_is_read_as_it_was_told(report_file: Path) -> None:
    assert progress.read(report_file) is None
    told = Progress(0.5, "epoch 1/2", {"loss": 0.25, "overflow": math.inf})
    progress.report(told)
    assert progress.read(report_file) == told
    assert [path.name for path in report_file.parent.iterdir()] == ["progress"]


def test_reports_come_five_times_a_second_at_most_but_for_the_last(report_file: Path) -> None:
    for fraction in (0.1, 0.2, 1.0):
        progress.report(Progress(fraction))
        if fraction < 1:
            assert progress.read(report_file) == Progress(0.1)
    assert progress.read(report_file) == Progress(1.0)


def test_a_report_to_a_launcher_that_is_gone_does_not_disturb_the_job(tmp_path: Path) -> None:
    progress.report_to(tmp_path / "gone" / "progress")
    try:
        progress.report(Progress(0.5))
    finally:
        progress.report_to(None)


@process
def test_reports_of_running_jobs_reach_the_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, Progress]] = []
    monkeypatch.setattr(
        "mp_hydra.isolation.display.Display.progress", lambda _self, job, report: shown.append((job.number, report))
    )

    def task(_: Any) -> None:
        from mp_hydra.isolation.jobs import Progress
        from mp_hydra.isolation.progress import report

        report(Progress(0.5, "half", {"loss": 2.0}))
        time.sleep(0.6)
        report(Progress(1.0, "whole", {"loss": 1.0}))  # and ends at once

    launch(task, tmp_path, [[]])
    assert shown == [(0, Progress(0.5, "half", {"loss": 2.0})), (0, Progress(1.0, "whole", {"loss": 1.0}))]


# Observers


@process
def test_an_observer_that_fails_is_a_warning_and_the_jobs_go_on(tmp_path: Path) -> None:
    class Bad:
        def job_ended(self, job: Any, end: Any) -> None:
            raise ValueError("no")

        def on_job_start(self, **_: Any) -> None: ...

    with pytest.warns(UserWarning, match=r"Callback Bad\.job_ended raised ValueError: no"):
        launched = launch(lambda _: 1, tmp_path, [[], []], callbacks=[Bad()])
    assert launched.ok(0)
    assert launched.ok(1)


# TensorFlow


@process
def test_tensorflow_trains_in_each_of_several_forked_jobs(tmp_path: Path, hear: pytest.LogCaptureFixture) -> None:
    def task(_: Any) -> Any:
        import sys

        there = "tensorflow" in sys.modules and "keras" in sys.modules
        import keras
        import numpy as np
        import tensorflow as tf

        keras.utils.set_random_seed(0)
        fresh = (
            tf.config.experimental.get_memory_info("CPU:0")["current"] if tf.config.list_physical_devices("GPU") else 0
        )
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=False)
        history = model.fit(np.ones((8, 4), "float32"), np.ones((8, 1), "float32"), verbose=0)
        return there, history.history["loss"][0], fresh

    settings = "hydra.launcher.preload=[tensorflow,keras]", "hydra.launcher.start=fork", "hydra.launcher.timeout=120"
    launched = launch(task, tmp_path, [[], []], *settings)
    assert launched.value(0) == launched.value(1)
    assert launched.value(0)[0] is True
    assert launched.end(0).cause is Cause.completed
    assert (launched.end(0).cpu_seconds or 0) > 0
    assert (launched.end(0).max_rss_bytes or 0) > 2**27


@process
def test_a_device_that_the_preload_initialised_forbids_forking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hear: pytest.LogCaptureFixture
) -> None:
    # The module that TensorFlow would have, with the state that its first op leaves.
    module = "import sys, types\ncontext = types.ModuleType('tensorflow.python.eager.context')\n"
    module += "context._context = types.SimpleNamespace(_initialized=True)\nsys.modules[context.__name__] = context\n"
    (tmp_path / "eager_at_import.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert launch(lambda _: 1, tmp_path / "a", [[]], "hydra.launcher.preload=[eager_at_import]").value(0) == 1
    assert "because TensorFlow's devices are initialised after the preload" in hear.text


def test_the_plugin_costs_a_start_of_hydra_next_to_nothing() -> None:
    code = (
        "import sys, hydra.plugins.launcher, hydra.core.config_store; before = set(sys.modules); "
        "import hydra_plugins.mp_hydra_isolated_launcher; print(*set(sys.modules) - before)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(ended.stdout.split()) == {"hydra_plugins", "hydra_plugins.mp_hydra_isolated_launcher"}
