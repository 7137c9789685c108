"""The laboratory in a real browser: sliders move curves, links restore them, nothing leaves."""

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from joma.report import laboratory

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

PARTS = ("theorem2", "theorem1", "theorem3", "eqn6", "hierarchies")
KEYS = dict(zip(PARTS, ("delta-0", "eta_z", "distance", "mu-1", "rho"), strict=True))
CURVES = "jomaLaboratory.drawn.map(p => p.series.filter(s => s.style !== 'dots').map(s => s.y))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("laboratory") / "laboratory.html"
    path.write_text(laboratory.page(), encoding="utf-8")
    return path.as_uri()


class Visit:
    """A page, what it requested and what went wrong on it."""

    def __init__(self, browser: Any, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.troubles: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def go(self, address: str) -> None:
        self.page.goto(address)
        self.settle()

    def settle(self) -> None:
        """Wait until the simulation has ended; polling in the page is against its own policy."""
        end = time.monotonic() + 120
        while not self.page.evaluate("Boolean(globalThis.jomaLaboratory?.done)"):
            assert time.monotonic() < end, "the simulation did not end"
            self.page.wait_for_timeout(30)

    def move(self, key: str, share: float) -> None:
        """Move a slider to a share of its way."""
        self.page.evaluate(
            """([key, share]) => {
              const slider = document.querySelector(`[data-key="set-${key}"]`);
              slider.value = Number(slider.min) + share * (slider.max - slider.min);
              slider.dispatchEvent(new Event("input", { bubbles: true }));
            }""",
            [key, share],
        )
        self.settle()

    def follow(self, link: str) -> None:
        """Follow a link within the page."""
        self.page.evaluate(
            """link => new Promise(done => {
              addEventListener("hashchange", () => setTimeout(done), { once: true });
              location.hash = link;
            })""",
            link,
        )
        self.settle()

    def close(self) -> None:
        assert self.troubles == []
        assert all(url.startswith(("file:", "data:")) for url in self.requests), self.requests
        self.context.close()


def test_every_part_loads_its_slider_moves_the_curves_and_its_link_restores_them(browser, address):
    visit = Visit(browser, viewport={"width": 1360, "height": 900})
    for part in PARTS:
        visit.go(f"{address}#{part}")
        before = visit.page.evaluate(CURVES)
        assert any(len(curve) > 1 for curve in before[0])
        assert visit.page.evaluate(
            "jomaLaboratory.drawn.some(p => p.series.some(s => s.style === 'dots'))"
        )
        visit.move(KEYS[part], 0.7)
        after = visit.page.evaluate(CURVES)
        assert after != before
        settings = visit.page.evaluate("jomaLaboratory.settings")
        # The page writes its link by a timer of 200 ms; timers end in order, however late.
        visit.page.evaluate("new Promise(done => setTimeout(done, 250))")
        link = visit.page.evaluate("location.hash")
        visit.follow("#eqn6&mu=1" if part != "eqn6" else "#theorem2&tau=2")
        visit.follow(link)
        assert visit.page.evaluate("jomaLaboratory.settings") == settings
        assert visit.page.evaluate(CURVES) == after
    visit.close()


def test_what_cannot_be_drawn_is_explained(browser, address):
    visit = Visit(browser)
    visit.go(f"{address}#theorem2&delta=0,0")
    assert "no token moves" in visit.page.inner_text("#problem")
    visit.go(f"{address}#theorem2&tau=abc&delta=1,0.5")
    assert "not a number for τ" in visit.page.inner_text("#note")
    visit.page.fill("#set-tau", "")
    visit.page.keyboard.press("Tab")
    assert visit.page.input_value("#set-tau") == "1"
    visit.close()


def test_it_fits_a_phone_and_a_dark_screen_and_works_with_keys(browser, address):
    visit = Visit(
        browser,
        viewport={"width": 390, "height": 800},
        color_scheme="dark",
        device_scale_factor=2,
        has_touch=True,
    )
    for part in PARTS:
        visit.go(f"{address}#{part}")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
        size = visit.page.evaluate(
            "(c => [c.width, c.clientWidth])(document.querySelector('canvas'))"
        )
        assert size[0] == 2 * size[1]
    visit.page.focus('[data-key="set-rho"]')
    visit.page.keyboard.press("ArrowLeft")
    visit.settle()
    assert visit.page.evaluate("jomaLaboratory.settings.rho") == 0.899
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert sum(int(part) for part in ground[4:-1].split(",")) < 120
    visit.close()
