"""Pages of runs in a real browser: they load, can be operated, and ask nobody."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from joma.report.html import page, payload
from joma.runs import Run
from tests.report._browser import DARK, DESKTOP, PHONE, launched, opened, until, violations
from tests.report._runs import HOSTILE, finding, made_run


@pytest.fixture(scope="module")
def browser():
    with launched() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def one(folder) -> str:
    """Address of the report of one run with a finding and a loss that becomes NaN."""
    run = made_run(folder / "one", findings=[finding(), finding(severity="note", layer=2)])
    run.metrics.append_many([61, 62], "loss", [[np.nan], [np.inf]])
    run.metrics.flush()
    return _written(folder / "one.html", page([payload(run)]))


@pytest.fixture(scope="module")
def two(folder) -> str:
    """Address of the report of two runs."""
    runs = [made_run(folder / f"run{k}", seed=k, config={"lr": k}) for k in (1, 2)]
    return _written(folder / "two.html", page([payload(run) for run in runs]))


def _written(path: Path, html: str) -> str:
    path.write_text(html, encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("options", [DESKTOP, PHONE, DARK], ids=["desktop", "phone", "dark"])
def test_loads_without_barriers(browser, one, two, options):
    for address in (one, two) if options is DESKTOP else (one,):
        with opened(browser, address, **options) as shown:
            assert shown.locator(".card").count() == 4
            shown.locator("#chart-stable_rank").scroll_into_view_if_needed()
            shown.wait_for_selector("#chart-stable_rank .uplot canvas")
            wide = shown.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, "the page scrolls sideways"
            assert violations(shown) == []


def test_pointer_zooms_all_charts(browser, one):
    with opened(browser, one, **DESKTOP) as shown:
        plot = shown.locator("#chart-loss .u-over")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        y = box["y"] + box["height"] / 2
        shown.mouse.move(box["x"] + box["width"] / 4, y)
        assert "loss" in shown.text_content(".tip")
        shown.mouse.down()
        shown.mouse.move(box["x"] + box["width"] / 2, y, steps=3)
        shown.mouse.up()
        shown.wait_for_selector("#reset:enabled")
        shown.mouse.move(5, 5)
        until(shown, "document.getElementById('range').textContent === 'steps 16–32'")
        label = shown.get_attribute("#chart-attention_entropy .lines", "aria-label")
        assert label.startswith("Attention entropy over steps")
        shown.click("#reset")
        shown.wait_for_selector("#reset:disabled", state="attached")
        assert shown.text_content("#range") == "steps 1–62"


def test_keyboard_reads_every_number(browser, one):
    with opened(browser, one, **DESKTOP) as shown:
        shown.locator("#chart-attention_entropy").scroll_into_view_if_needed()
        shown.wait_for_selector("#chart-attention_entropy .heat canvas")
        shown.focus("#chart-attention_entropy .heat")
        for key in ("ArrowDown", "ArrowRight"):
            shown.keyboard.press(key)
        said = shown.text_content("#say")
        assert "at step 6" in said
        assert "attention_entropy · encoder.layers.1.self_attn · self attention · layer 1" in said
        shown.keyboard.press("+")
        shown.wait_for_selector("#reset:enabled")
        shown.keyboard.press("0")
        shown.wait_for_selector("#reset:disabled", state="attached")
        button = shown.locator("#chart-attention_entropy .legend button").first
        button.press("Enter")
        until(shown, "document.querySelector('.legend button[aria-pressed=false]') !== null")


def test_findings_lead_to_their_charts(browser, one):
    with opened(browser, one, **DESKTOP) as shown:
        assert shown.locator(".finding .badge").first.text_content() == "warning"
        shown.locator(".finding .jump").first.click()
        until(shown, "document.activeElement.closest('.card')?.id === 'chart-attention_entropy'")
        until(
            shown,
            "document.querySelector('#chart-attention_entropy .lines .cursor')"
            "?.style.display === 'block'",
        )


def test_tables_and_downloads_have_whole_keys(browser, one):
    with opened(browser, one, **DESKTOP) as shown:
        shown.locator("#chart-loss .tools button", has_text="Table").click()
        cells = shown.locator("#chart-loss .numbers tbody tr").first.locator("td")
        assert cells.all_text_contents()[:8] == ["one", "loss", "–", "–", "–", "–", "0", "1"]
        with shown.expect_download() as saved:
            shown.locator("#chart-loss .tools button", has_text="CSV").click()
        lines = Path(saved.value.path()).read_text().splitlines()
        assert lines[0] == "run,metric,module,kind,layer,head,member,step,value,bound"
        assert len(lines) == 1 + 62 + 6
        assert "one,loss,,,,,0,61,NaN," in lines
        shown.click("#theme")
        assert shown.evaluate("document.documentElement.dataset.theme") == "dark"


def test_hostile_names_do_nothing(browser, folder):
    hostile = finding(sentence=HOSTILE, module=HOSTILE, advice=HOSTILE)
    run = made_run(folder / "bad", module=HOSTILE, findings=[hostile], config={HOSTILE: HOSTILE})
    address = _written(folder / "bad.html", page([payload(run)], title=HOSTILE))
    with opened(browser, address, **DESKTOP) as shown:
        assert shown.text_content("h1") == HOSTILE
        assert shown.locator(".finding .what").text_content() == HOSTILE
        assert shown.locator("img").count() == 0


def test_a_live_page_follows_its_run(browser, folder):
    run = made_run(folder / "live", status="running")
    with _served(run) as (address, changed), opened(browser, address, **DESKTOP) as shown:
        until(shown, "document.getElementById('connection').textContent !== ''")
        shown.click("#zoom-in")
        shown.wait_for_selector("#reset:enabled")
        zoomed = shown.text_content("#range")
        run.metrics.append_many([61, 62], "loss", [[2.0], [1.5]])
        run.metrics.flush()
        changed.set()
        until(shown, "document.querySelector('.strip').textContent.includes('62')")
        assert shown.text_content("#range") == zoomed
        assert shown.text_content("#chart-loss .legend .at") == "1.5"


_FRAMES = """async () => {
  const host = document.querySelector('#chart-loss .lines'), box = host.getBoundingClientRect();
  const frames = [];
  let before = performance.now();
  for (let k = 0; k < 120; k++) {
    host.dispatchEvent(new WheelEvent('wheel', {
      ctrlKey: true, deltaY: k % 60 < 30 ? -24 : 24, clientX: box.left + box.width / 2,
      clientY: box.top + 60, bubbles: true, cancelable: true,
    }));
    await new Promise(requestAnimationFrame);
    frames.push(performance.now() - before);
    before = performance.now();
  }
  return frames.sort((a, b) => a - b)[60];
}"""


@pytest.mark.slow
def test_a_hundred_thousand_points_zoom_smoothly(browser, folder):
    run = Run.create("monitor", {}, out=folder / "long")
    steps = np.arange(1, 100_001)
    noise = np.random.default_rng(0).normal(size=(steps.size, 1))
    run.metrics.append_many(steps, "loss", 2 + np.exp(-steps / 9000)[:, None] + 0.2 * noise)
    run.metrics.flush()
    html = page([payload(run, most_points=100_000)])
    with opened(browser, _written(folder / "long.html", html), **DESKTOP) as shown:
        shown.wait_for_selector("#chart-loss .uplot canvas")
        assert shown.evaluate(_FRAMES) < 1000 / 30


class _served:  # noqa: N801
    """A server of one run's live page that sends one event when told that the run changed."""

    def __init__(self, run: Run) -> None:
        changed = self.changed = threading.Event()
        over = self.over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/api/events":
                    self._send("text/event-stream", b": hello\n\n", ends=False)
                    while not over.is_set():
                        if changed.wait(0.05):
                            changed.clear()
                            event = json.dumps({"run": run.path.name, "version": "2"})
                            self.wfile.write(f"event: change\ndata: {event}\n\n".encode())
                elif self.path.startswith("/api/runs/"):
                    self._send("application/json", json.dumps(payload(run)).encode())
                else:
                    html = page([payload(run)], live=True, api="/api")
                    self._send("text/html; charset=utf-8", html.encode())

            def _send(self, kind, body, *, ends=True):
                self.send_response(200)
                self.send_header("Content-Type", kind)
                if ends:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_address[1]}/", self.changed

    def __exit__(self, *error):
        self.over.set()
        self.server.shutdown()
        self.server.server_close()
