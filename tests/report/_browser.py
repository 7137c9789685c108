"""A real browser for tests, and what every page must satisfy in it."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AXE = "JOMA_AXE"
"""Environment variable with the path of axe.min.js, where no package brings it."""

DESKTOP = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "device_scale_factor": 2}
DARK = {**DESKTOP, "color_scheme": "dark"}


@contextmanager
def launched() -> Iterator[Any]:
    """Start Chromium; the test is skipped where it or Playwright is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """Open a page that must log no error, show no dialog and ask nobody but its own origin."""
    context = browser.new_context(**options)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on(
        "console",
        lambda it: wrong.append(it.text) if it.type in ("error", "warning") else None,
    )
    page.on("request", lambda it: None if _is_own(it.url, address) else wrong.append(it.url))
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    yield page
    assert not wrong, wrong
    context.close()


def until(page: Any, expression: str, seconds: float = 120.0) -> None:
    """Wait until an expression is true; the page's policy forbids Playwright's own way."""
    for _ in range(int(seconds / 0.05)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never became true: {expression}")


def _is_own(url: str, address: str) -> bool:
    if address.startswith("file:"):
        return url == address or url.startswith(("data:", "blob:"))
    return url.startswith((address.split("/", 3)[0] + "//" + address.split("/", 3)[2], "data:"))


def violations(page: Any) -> list[str]:
    """Return what axe-core calls serious or critical; skips where axe-core is missing."""
    page.evaluate(_axe().read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{it['id']}: {node['html'][:120]}"
        for it in found
        if it["impact"] in ("serious", "critical")
        for node in it["nodes"]
    ]


def _axe() -> Path:
    if AXE in os.environ:
        return Path(os.environ[AXE])
    spec = importlib.util.find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip(f"axe-core is not installed, and {AXE} does not name its axe.min.js")
    return Path(spec.origin).with_name("axe.min.js")
