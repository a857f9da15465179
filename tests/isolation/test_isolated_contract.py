"""Hydra's stock suites for launchers, unmodified, on the launcher `isolated`."""

from __future__ import annotations

import pytest
from hydra import version as hydra_version
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.test_utils.launcher_common_tests import BatchedSweeperTestSuite, IntegrationTestSuite, LauncherTestSuite

from hydra_plugins.mp_hydra_isolated_launcher import IsolatedLauncher

pytestmark = pytest.mark.process

BARE = "hydra.launcher.preload=[]"


@pytest.fixture(autouse=True)
def as_hydra_starts(hydra_restore_singletons: None) -> None:
    """The suites expect Hydra without a version base; an app that ran before in this process has set one."""
    hydra_version.setbase("1.1")


def test_hydra_discovers_the_launcher() -> None:
    assert IsolatedLauncher.__name__ in [found.__name__ for found in Plugins.instance().discover(Launcher)]


@pytest.mark.parametrize(("launcher_name", "overrides"), [("isolated", [BARE])])
class TestLauncher(LauncherTestSuite):
    """One and two jobs, config groups, resolvers, bad keys."""


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("isolated", [BARE, "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])],
)
class TestBatches(BatchedSweeperTestSuite):
    """A sweeper that launches more than once."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({"defaults": [{"override hydra/launcher": "isolated"}]}, ["-m", BARE])],
)
class TestIntegration(IntegrationTestSuite):
    """Whole applications: job names, directories, the working directory."""
