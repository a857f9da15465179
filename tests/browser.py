"""Headless Chromium, as Debian packages it, for tests of pages."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHROMIUM, _CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
_missing = [str(path) for path in (_CHROMIUM, _CHROMEDRIVER) if not path.exists()]
needs_browser = pytest.mark.skipif(bool(_missing), reason=f"not there: {', '.join(_missing)}")


@contextmanager
def browser(profile: Path, *, width: int = 1600) -> Iterator[Any]:
    """A browser that asks nothing of the network by itself; `get_log` tells what pages ask for and complain of.

    Args:
        profile: an empty folder of its own.
        width: of the window, in pixels.
    """
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(_CHROMIUM)
    switches = ("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync")
    quiet = ("disable-background-networking", "disable-component-update", "disable-dev-shm-usage")
    for switch in (*switches, *quiet, f"window-size={width},2400", f"user-data-dir={profile}"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(_CHROMEDRIVER)))
    try:
        driver.get("about:blank")  # what the browser's own first page asks for is nobody's business
        driver.get_log("performance")
        yield driver
    finally:
        driver.quit()
