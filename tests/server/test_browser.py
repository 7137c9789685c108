"""A real browser follows a run."""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from joma.runs import Run
from tests.report._browser import launched
from tests.server._client import PATIENCE, Client
from tests.server.conftest import MakeRun, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as started:
        yield started


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """Return a tab that may neither complain nor ask another machine."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    troubles: list[str] = []
    page.on("console", lambda it: troubles.append(it.text) if it.type == "error" else None)
    page.on("pageerror", lambda it: troubles.append(str(it)))
    page.on(
        "request",
        lambda it: (
            None
            if it.url.startswith(("http://127.0.0.1:", "data:", "blob:"))
            else troubles.append(it.url)
        ),
    )
    yield page
    page.close()
    assert troubles == []


def flush(run: Run, step: int) -> float:
    """Log a step, and return when it was flushed."""
    run.metrics.append(step, "loss", 1 / step)
    run.metrics.append(step, "attention_entropy", 2.0, module="h.0", layer=0)
    run.metrics.flush()
    return time.monotonic()


def test_rows_appear_after_their_flush(tab: Any, make_run: MakeRun, tmp_path):
    run = make_run("live", done=False)
    with serving(tmp_path / "runs") as server, run.locked():
        id = Client(server.address).id_of("live")
        tab.goto(f"{server.address.url}runs/{id}")
        tab.wait_for_selector("#connection:has-text('live')")
        took = []
        for step in range(41, 46):
            flushed = flush(run, step)
            tab.wait_for_selector(f"#summary >> text=/\\b{step}\\b/")
            took.append(time.monotonic() - flushed)
        print(f"rows appear {', '.join(f'{it:.2f}' for it in took)} s after their flush")


_HIDE = """hidden => {
  Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""


def test_a_hidden_page_holds_no_stream_and_catches_up(tab: Any, make_run: MakeRun, tmp_path):
    run = make_run("live", done=False)
    with serving(tmp_path / "runs") as server, run.locked():
        id = Client(server.address).id_of("live")
        tab.goto(f"{server.address.url}runs/{id}")
        tab.wait_for_selector("#connection:has-text('live')")
        tab.evaluate(_HIDE, True)
        flush(run, 88)
        tab.wait_for_timeout(1000)
        assert "88" not in tab.text_content("#summary")
        tab.evaluate(_HIDE, False)
        tab.wait_for_selector("#summary >> text=/\\b88\\b/")


def test_the_connection_says_nothing_of_how_a_run_ended(tab: Any, make_run: MakeRun, tmp_path):
    damaged = make_run("damaged")
    (damaged.path / "outcome.json").write_text("{")
    with serving(tmp_path / "runs") as server:
        tab.goto(f"{server.address.url}runs/{Client(server.address).id_of('damaged')}")
        tab.wait_for_selector("#connection:has-text('connected')")
        assert tab.text_content("#summary .pill") == "damaged"
        shutil.rmtree(damaged.path)
        tab.wait_for_selector("#connection:has-text('removed')")


def test_the_list_follows_runs_that_begin_and_end(tab: Any, make_run: MakeRun, tmp_path):
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs") as server:
        tab.goto(server.address.url)
        run = make_run("late", done=False)
        with run.locked():
            run.write_json("outcome", {"status": "running"})
            tab.wait_for_selector("tr:has-text('late') .pill.running")
            run.write_json("outcome", {"status": "done"})
        tab.wait_for_selector("tr:has-text('late') .pill.ended")
        tab.click("tr a")
        tab.wait_for_selector("h1:has-text('late')")
        tab.click("a.home")
        tab.wait_for_selector("tr:has-text('late')")
        tab.click("text=Laboratory")
        tab.wait_for_selector("input[type=range]")


def test_pages_work_behind_a_proxy_that_adds_a_prefix(tab: Any, make_run: MakeRun, tmp_path):
    run = make_run("live", done=False)
    with serving(tmp_path / "runs") as server, prefixed(server.address.port) as url, run.locked():
        tab.goto(url)
        tab.click("tr a")
        tab.wait_for_selector("#connection:has-text('live')")
        assert tab.url.startswith(f"{url}runs/live-")
        flush(run, 77)
        tab.wait_for_selector("#summary >> text=/\\b77\\b/")
        tab.click("a.home")
        tab.wait_for_selector("tr:has-text('live')")
        assert tab.url == url
        tab.close()  # before the proxy ends its connections


def test_runs_are_chosen_in_the_list_and_compared(tab: Any, make_run: MakeRun, tmp_path):
    make_run("one")
    make_run("two", lr=0.1)
    with serving(tmp_path / "runs") as server:
        tab.goto(server.address.url)
        for name in ("one", "two"):
            tab.check(f"input[aria-label='Compare {name}']")
        tab.click("text=Compare 2 runs")
        tab.wait_for_selector("h1:has-text('2 runs')")


@contextlib.contextmanager
def prefixed(port: int) -> Iterator[str]:
    """Serve another server under a prefix, which is taken off, as Jupyter's proxy does."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.removeprefix("/user/me/proxy/8765")
            assert path != self.path, f"{self.path} left the prefix"
            connection = HTTPConnection("127.0.0.1", port)
            connection.request("GET", path, headers=dict(self.headers))
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the browser left the page
                while data := answer.read1(65536):
                    self.wfile.write(data)
            connection.close()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}/user/me/proxy/8765/"
    finally:
        proxy.shutdown()
        proxy.server_close()
