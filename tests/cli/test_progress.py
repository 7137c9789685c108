"""Progress: a plain line now and then, a bar on a terminal."""

import io
import re
import time
from contextlib import redirect_stderr

import pytest

from joma.cli import _progress
from joma.cli._progress import progress, reports, weighted_progress


def wait_for(text: str, stream: io.StringIO) -> str:
    """The first line with this text, once it is there."""
    deadline = time.monotonic() + 600
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()[:1000]
        time.sleep(0.01)
    return next(line for line in stream.getvalue().splitlines() if text in line)


class TestLines:
    @pytest.fixture(autouse=True)
    def often(self, monkeypatch):
        monkeypatch.setattr(_progress, "EVERY", 0.02)

    def test_counted_work(self):
        with redirect_stderr(io.StringIO()) as stderr, progress("verify", 3) as advance:
            assert re.fullmatch(r"verify: 0 of 3, \d+ s", wait_for("0 of 3", stderr))
            advance()
            assert "left" in wait_for("1 of 3", stderr)
            advance()
            advance()
            assert "left" not in wait_for("3 of 3", stderr)

    def test_work_that_reports(self):
        with redirect_stderr(io.StringIO()) as stderr, reports("reproduce table1") as report:
            assert re.fullmatch(r"reproduce table1: \d+ s", wait_for(" s", stderr))
            report("C20", 5000, 10000)  # taken up again: nothing is known of its speed
            line = wait_for("C20", stderr)
            assert re.fullmatch(r"reproduce table1: C20, 5000 of 10000, \d+ s", line)
            report("C20", 9999, 10000)
            line = wait_for("9999 of", stderr)
            assert re.search(r": C20, 9999 of 10000, \d+ s, about \d+ s left$", line)
            report("C30", 0, 10000)
            assert "left" not in wait_for("C30", stderr)

    def test_the_time_left_is_what_the_speed_says(self):
        part = _progress._Part("training", first=100, began=10.0, done=200, total=500, at=30.0)
        assert part.seconds_left(30.0) == 60

    def test_the_time_left_counts_down_while_a_long_piece_is_under_way(self):
        part = _progress._Part("training", first=100, began=10.0, done=200, total=500, at=30.0)
        assert [part.seconds_left(30.0 + waited) for waited in (10, 50, 90)] == [50, 10, 1]

    def test_steady_time_left_never_rises(self):
        part = _progress._Part("", first=0, began=0.0, done=50, total=100, at=10.0, steady=True)
        assert part.seconds_left(10.0) == 10
        part.advance("", 51, 30.0)  # one slow piece
        assert part.seconds_left(30.0) == 10

    def test_weighted_work_is_shown_in_percent(self):
        with redirect_stderr(io.StringIO()) as stderr, weighted_progress("demo", 8.0) as advance:
            wait_for("demo: 0%", stderr)
            advance(6.0)
            assert "left" in wait_for("demo: 75%", stderr)

    def test_a_reader_that_left_stops_nothing(self):
        tried: list[str] = []

        class Closed(io.StringIO):
            def write(self, text: str) -> int:
                tried.append(text)
                raise BrokenPipeError

        with redirect_stderr(Closed()), reports("work") as report:
            report("", 1, 2)
            deadline = time.monotonic() + 600
            while len(tried) < 2:
                assert time.monotonic() < deadline, tried
                time.sleep(0.01)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestBar:
    @pytest.fixture(autouse=True)
    def wide(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setenv("TERM", "xterm")

    def test_it_shows_what_is_done(self):
        with redirect_stderr(Terminal()) as terminal, reports("reproduce table1") as report:
            report("[C20] training", 300, 10000)
            line = wait_for("300/10000", terminal)
            assert "reproduce table1: [C20] training" in line
            assert "left" in line

    def test_the_clock_goes_on_through_the_parts(self, monkeypatch):
        from rich.progress import Progress

        bars: list[Progress] = []
        enter = Progress.__enter__
        monkeypatch.setattr(Progress, "__enter__", lambda bar: bars.append(bar) or enter(bar))
        with redirect_stderr(Terminal()), reports("work") as report:
            (task,) = bars[0].tasks
            began = task.start_time
            report("one", 0, 10)
            report("one", 10, 10)
            assert task.finished
            report("two", 3, 10)
            assert (task.description, task.completed, task.total) == ("work: two", 3, 10)
            assert task.start_time == began
            assert not task.finished
