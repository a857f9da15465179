"""The page of a comparison in a browser: what it asks for, what is read back from it, how it fits a phone, contrast."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mp_hydra.compare.report import page
from tests.browser import browser, needs_browser
from tests.compare import report_data as data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mp_hydra.compare.model import Comparison

PHONE = 360

pytestmark = [pytest.mark.browser, pytest.mark.process, needs_browser]
everything = pytest.mark.parametrize("make", data.ALL, ids=lambda make: make.__name__)

READ_FIGURES = """
return Array.from(document.querySelectorAll('[data-figure]')).map(
  found => [found.dataset.figure, found.dataset.row, found.dataset.value, found.textContent, found.getBoundingClientRect().width])
"""
# WCAG 2.2: the ratio of relative luminances of a text and of what is painted behind it.
LOW_CONTRAST = """
const channel = part => { part /= 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4 }
const numbers = colour => colour.match(/[\\d.]+/g).map(Number)
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b)
const behind = start => {
  for (let node = start; node; node = node.parentElement) {
    const colour = numbers(getComputedStyle(node).backgroundColor)
    if (colour.length < 4 || colour[3] === 1) return colour
  }
  return [255, 255, 255]
}
const found = []
for (const node of document.querySelectorAll('body *')) {
  const own = Array.from(node.childNodes).filter(child => child.nodeType === 3).map(child => child.data).join('').trim()
  if (!own || node.tagName === 'title') continue
  const drawn = node instanceof SVGElement
  const style = getComputedStyle(node)
  const onBar = drawn && node.classList.contains('inside')
  const back = onBar ? numbers(getComputedStyle(node.previousElementSibling).fill) : behind(node)
  const [one, two] = [light(numbers(drawn ? style.fill : style.color)), light(back)]
  const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05)
  if (ratio < 4.5) found.push([own, ratio])
}
return found
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium that tells what a page asks for."""
    with browser(tmp_path_factory.mktemp("profile"), width=1280) as driver:
        yield driver


@pytest.fixture
def visit(driver: Any, tmp_path: Path) -> Callable[..., str]:
    """Open the page of a comparison; the answer is its address."""

    def open_page(comparison: Comparison, *, width: int = 1280, scheme: str = "light") -> str:
        path = tmp_path / "comparison.html"
        path.write_text(page.render(comparison), encoding="utf-8")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme_now = {"name": "prefers-color-scheme", "value": scheme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme_now]})
        driver.get_log("performance")
        driver.get_log("browser")
        driver.get(path.as_uri())
        return path.as_uri()

    return open_page


@everything
def test_the_page_makes_no_request_and_no_error(
    driver: Any, visit: Callable[..., str], make: Callable[[], Comparison]
) -> None:
    address = visit(make())
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [address]
    assert driver.get_log("browser") == []


def test_the_figures_read_back_from_the_browser_are_those_of_the_comparison(
    driver: Any, visit: Callable[..., str]
) -> None:
    comparison = data.three_groups()
    visit(comparison)
    read = {
        (name, where): (float(value), width) for name, where, value, _, width in driver.execute_script(READ_FIGURES)
    }
    assert all(width > 0 for _, width in read.values())
    for g, group in enumerate(comparison.groups):
        for r, row in enumerate(group.rows):
            where = f"{g}.{r}"
            assert read["training_memory.ratio", where][0] == row.training_memory.ratio.value
            assert read["peak_memory.mixed", where][0] == row.peak_memory.mixed.value
            assert read["step_time.mixed", where][0] == row.step_time.mixed.value
            assert read["speed", where][0] == row.speed.value
            assert read["accuracy.difference", where][0] == row.accuracy.difference.value
            assert (
                read["accuracy.difference.low", where][0],
                read["accuracy.difference.high", where][0],
            ) == row.accuracy.difference.interval


@everything
@pytest.mark.parametrize("width", [PHONE, 800, 1280])
def test_the_page_is_never_wider_than_its_window(
    driver: Any, visit: Callable[..., str], make: Callable[[], Comparison], width: int
) -> None:
    visit(make(), width=width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width


def test_every_figure_and_every_text_of_a_plot_is_in_sight_and_legible_on_a_phone(
    driver: Any, visit: Callable[..., str]
) -> None:
    visit(data.three_groups(), width=PHONE)
    outside, small = driver.execute_script("""
      const shown = Array.from(document.querySelectorAll('[data-figure], svg.plot text'))
      const boxes = shown.map(found => [found.textContent, found.getBoundingClientRect()])
      const drawn = Array.from(document.querySelectorAll('svg.plot text'))
      const size = found => parseFloat(getComputedStyle(found).fontSize) * found.getScreenCTM().a
      return [boxes.filter(([_, box]) => box.width === 0 || box.left < 0 || box.right > window.innerWidth).map(([text]) => text),
              drawn.filter(found => size(found) < 9).map(found => found.textContent)]
    """)
    assert outside == []
    assert small == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground_by_4_5_to_1(driver: Any, visit: Callable[..., str], scheme: str) -> None:
    for make in (data.three_groups, data.mixed_fates, data.no_baseline):
        visit(make(), scheme=scheme)
        assert driver.execute_script(LOW_CONTRAST) == []


def test_light_and_dark_follow_what_the_reader_prefers(driver: Any, visit: Callable[..., str]) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        visit(data.ordinary(), scheme=scheme)
        grounds.append(driver.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 24, 29)"]


def test_a_name_that_looks_like_a_script_is_shown_and_not_run(driver: Any, visit: Callable[..., str]) -> None:
    visit(data.hostile())
    assert data.HOSTILE in driver.execute_script("return document.body.innerText")
    assert driver.execute_script("return document.scripts.length") == 0
