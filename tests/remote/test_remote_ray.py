"""The launcher `ray` against a real local Ray cluster: Hydra's contract, faults of every kind, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hydra import version as hydra_version
from hydra.core.utils import JobStatus
from hydra.test_utils.launcher_common_tests import LauncherTestSuite
from omegaconf import OmegaConf

from mp_hydra.errors import ConfigError, UserError
from mp_hydra.isolation.jobs import Cause

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mp_hydra[ray]'")

from mp_hydra.remote.ray_jobs import Settings  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {"init": {}, "remote": {"num_cpus": 1}, "n_jobs": None, "timeout": None, "env": {}}
APP = """
import os, sys, threading, time
import hydra
from hydra.core.config_store import ConfigStore

ConfigStore.instance().store("config", {"do": "nothing"})

@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config):
    print("pid", os.getpid(), flush=True)
    open(config["do"], "w").write(str(os.getpid()))
    time.sleep(1000)

main()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster to which this process is connected."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or Ray writes a token into the home directory
    before = signal.getsignal(signal.SIGTERM)
    context = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield str(context.address_info["address"])
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)
    del os.environ["RAY_AUTH_MODE"]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(("launcher_name", "overrides"), [("ray", [])])
class TestRayLauncherKeepsHydrasContract(LauncherTestSuite):
    @pytest.fixture(autouse=True)
    def as_hydra_starts(self, hydra_restore_singletons: None) -> None:
        hydra_version.setbase("1.1")  # the suite expects no version base; an app that ran before has set one


class Watcher:
    """An observer as Hydra's context holds it."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def jobs_planned(self, jobs: Sequence[Any]) -> None:
        self.heard.append(("planned", len(jobs)))

    def job_started(self, job: Any) -> None:
        self.heard.append(("started", job.number))

    def job_ended(self, job: Any, end: Any) -> None:
        self.heard.append(("ended", job.number, end.cause))
        raise RuntimeError("an observer that raises changes nothing")

    def __getstate__(self) -> dict[str, Any]:
        return {"heard": []}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda **_: None
        raise AttributeError(name)


def _act(config: Any) -> Any:
    import threading

    deeds: dict[str, Callable[[], Any]] = {
        "return": lambda: (os.getpid(), os.getcwd(), list(sys.argv), os.environ.get("MINE")),  # noqa: PTH109
        "raise": lambda: 1 // 0,
        "exit": lambda: sys.exit(3),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hang": lambda: time.sleep(1000),
        "lock": threading.Lock,
    }
    return deeds[config.do]()


@pytest.fixture(scope="module")
def ended(cluster: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Watcher]:
    """What jobs that do these things gave, by what they did."""
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import HydraContext, RunMode

    from mp_hydra.isolation.plan import Sweep
    from mp_hydra.remote.ray_jobs import launch

    directory = tmp_path_factory.mktemp("ray")
    (directory / "config.yaml").write_text("do: nothing\n", encoding="utf-8")
    deeds = ["return", "raise", "exit", "kill", "lock", "return"]
    with initialize_config_dir(str(directory), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config(
            config_name="config",
            overrides=[f"hydra.sweep.dir={directory}/sweep", "hydra.job.name=deeds"],
            run_mode=RunMode.MULTIRUN,
        )
        watcher, callbacks = Watcher(), Callbacks()
        callbacks.callbacks.append(watcher)  # type: ignore[arg-type]
        sweep = Sweep(HydraContext(config_loader=hydra.config_loader, callbacks=callbacks), _act, config)
        settings = {**DEFAULTS, "env": {"MINE": "yes"}}
        with pytest.warns(UserWarning, match=r"^Callback Watcher\.job_ended raised RuntimeError: an observer"):
            returned = launch(sweep, Settings.checked(settings), [[f"do={deed}"] for deed in deeds], 10)
        with pytest.warns(UserWarning, match=r"^Callback Watcher\.job_ended"):
            returned += launch(sweep, Settings.checked({**settings, "timeout": 0.5}), [["do=hang"]], 16)
    results = dict(zip([*deeds[:-1], "last", "hang"], returned, strict=True))
    return results, watcher


def test_jobs_around_the_bad_ones_complete_each_in_a_worker_of_its_own_that_looks_like_the_sweeping_process(
    ended: tuple[dict[str, Any], Watcher],
) -> None:
    first, last = (ended[0][key].return_value for key in ("return", "last"))
    assert first[0] != last[0]
    assert first[1:] == last[1:] == (str(Path.cwd()), sys.argv, "yes")


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("exit", "it called sys.exit(3)"),
        ("kill", "died before it had a result"),
        ("hang", "hydra.launcher.timeout=0.5 seconds"),
        ("lock", "cannot be sent between processes: TypeError: cannot pickle '_thread.lock'"),
    ],
)
def test_a_job_without_a_result_is_failed_with_a_reason(
    ended: tuple[dict[str, Any], Watcher], deed: str, words: str
) -> None:
    result = ended[0][deed]
    assert result.status is JobStatus.FAILED
    assert result.overrides == [f"do={deed}"]
    assert OmegaConf.select(result.hydra_cfg, "hydra.runtime.output_dir").endswith(
        f"/sweep/{result.hydra_cfg.hydra.job.num}"
    )
    with pytest.raises(UserError) as caught:
        _ = result.return_value
    assert words in str(caught.value)


def test_the_exception_of_a_job_that_raises_comes_back_as_it_is(ended: tuple[dict[str, Any], Watcher]) -> None:
    with pytest.raises(ZeroDivisionError):
        _ = ended[0]["raise"].return_value


def test_observers_hear_of_every_job_and_of_what_ended_it(ended: tuple[dict[str, Any], Watcher]) -> None:
    heard = ended[1].heard
    assert heard[0] == ("planned", 6)
    assert {item[1:] for item in heard if item[0] == "ended"} == {
        (10, Cause.completed),
        (11, Cause.raised),
        (12, Cause.exited),
        (13, Cause.exited),
        (14, Cause.raised),
        (15, Cause.completed),
        (16, Cause.timeout),
    }
    # A worker that dies in its first moment may be gone before it is heard of.
    assert {10, 11, 12, 14, 15, 16} <= {item[1] for item in heard if item[0] == "started"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n_jobs": 0}, "hydra.launcher.n_jobs=0: give a number of jobs"),
        ({"timeout": -1}, "hydra.launcher.timeout=-1: give a number of seconds"),
        ({"remote": {"max_calls": 0}}, "hydra.launcher.remote.max_calls=0: the launcher sets it"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.checked({**DEFAULTS, **given})
    assert words in str(caught.value)


def test_without_ray_the_cure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from mp_hydra.remote import ray_jobs

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'mp_hydra\[ray\]'"):
        ray_jobs._connect(Settings.checked(DEFAULTS))


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], str | None]:
    """The token in the environment after a cluster has been prepared for, in a home that is empty."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def token() -> str | None:
        from mp_hydra.remote import ray_jobs

        monkeypatch.setattr(os, "environ", dict(os.environ))
        ray_jobs._set_token()
        return os.environ.get("RAY_AUTH_TOKEN")

    return token


def test_a_cluster_gets_a_token_of_its_own_that_is_in_no_file(token: Callable[[], str | None], tmp_path: Path) -> None:
    assert len(token() or "") == 64
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_what_the_user_says_of_tokens_stands(
    name: str, token: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "mine")
    assert token() == ("mine" if name == "RAY_AUTH_TOKEN" else None)


def test_the_token_file_of_the_user_stands(token: Callable[[], str | None], tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("mine", encoding="utf-8")
    assert token() is None


@contextmanager
def sweeping(directory: Path, script: Path, *words: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A sweep in a process of its own, which does not outlive the block; what it says is in `said` in the directory.

    It and all that it starts has the directory as its home.
    """
    home = {"HOME": str(directory), "MP_HYDRA_HOME": str(directory), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        str(script),
        "--multirun",
        "hydra/launcher=ray",
        *words,
        f"hydra.sweep.dir={directory}/sweep",
    ]
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (directory / "said").open("wb") as said:
        process = subprocess.Popen(command, cwd=directory, env={**own, **home, **environ}, stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def eventually(condition: Callable[[], object], process: subprocess.Popen[bytes] | None, said: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process is None or process.poll() is None, said.read_text(errors="replace")
        assert time.monotonic() < deadline, said.read_text(errors="replace")
        time.sleep(0.1)


def alive(home: Path) -> list[str]:
    """The command lines of the processes that have this home."""
    found, mark = [], f"MP_HYDRA_HOME={home}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_text().replace("\0", " ").strip())
    return found


AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # they see within a minute that their cluster is gone


def jobs_of(directory: Path) -> list[int]:
    """The process ids of the jobs `a` and `b` of `APP`, once they have started."""
    return [int(text) for name in "ab" if (file := directory / name).exists() and (text := file.read_text())]


OWN = tuple(f"+hydra.launcher.init.{setting}" for setting in ("num_cpus=2", "include_dashboard=false"))


def test_sigterm_stops_the_jobs_in_a_cluster_that_goes_on(cluster: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    said = tmp_path / "said"
    with sweeping(tmp_path, tmp_path / "app.py", "do=a,b", RAY_ADDRESS=cluster, RAY_AUTH_MODE="disabled") as sweep:
        eventually(lambda: len(jobs_of(tmp_path)) == 2, sweep, said)
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait(30) == 128 + signal.SIGTERM, said.read_text(errors="replace")
    assert not [job for job in jobs_of(tmp_path) if Path(f"/proc/{job}").exists()]
    assert ray.cluster_resources()["CPU"] == 4


def test_a_sweep_that_is_killed_leaves_no_job_and_nothing_of_the_cluster_but_agents_of_rays(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    said = tmp_path / "said"
    with sweeping(tmp_path, tmp_path / "app.py", "do=a", *OWN) as sweep:
        eventually(lambda: jobs_of(tmp_path), sweep, said)
        sweep.kill()
        sweep.wait()
        eventually(lambda: set(alive(tmp_path)) <= AGENTS, None, said)


def test_ctrl_c_ends_the_runs_as_killed_and_the_cluster_and_leaves_nothing_at_home(tmp_path: Path) -> None:
    from mp_hydra.tracking import open_client

    said = tmp_path / "said"
    words = ("model=mlp", "model.widths=[8]", "epochs=100000", "seed=0,1", "+hydra.launcher.init.num_cpus=1")
    with sweeping(tmp_path, ROOT / "train.py", *words, "+hydra.launcher.init.include_dashboard=false") as sweep:
        eventually(lambda: b"epoch 2/" in said.read_bytes(), sweep, said)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(30) == 130
    lines = said.read_text(errors="replace").splitlines()
    assert lines[-1] == "mp_hydra: interrupted"
    assert not any("Traceback" in line for line in lines)
    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert {(run.info.status, run.data.tags["mp_hydra.outcome"]) for run in runs} == {("KILLED", "killed")}
    child, parent = sorted(runs, key=lambda run: "mlflow.parentRunId" not in run.data.tags)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert not alive(tmp_path)
    assert not (tmp_path / ".ray").exists()
