"""Progress on standard error: a bar on a terminal, otherwise a plain line now and then."""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

EVERY = 10.0
"""Seconds between plain lines."""

_BAR_WIDTH = 42
"""Columns of a terminal that the counts and the times take next to the bar and the words."""

_LEAST_BAR = 8
"""Columns that are left to the bar where the words are long."""

Advance = Callable[[], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """Takes what is being done, how much of it is done, and how much there is.

    Attributes:
        say: Prints a line without meeting the bar.
    """

    show: Callable[[str, int, int], None]
    say: Say

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far the work is.

        Args:
            what: What is being done.
            done: How much of it is done.
            total: How much there is.
        """
        self.show(what, done, total)


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Advance]:
    """Show how many of `total` are done; yield what to call when one more is.

    Nothing may be printed meanwhile, or it meets the bar.
    """
    done = 0
    with reports(what) as report:
        report("", done, total)

        def advance() -> None:
            nonlocal done
            done += 1
            report("", done, total)

        yield advance


@contextlib.contextmanager
def weighted_progress(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show how much of `total` is done, in percent; yield what to call with a piece's cost.

    The pieces may end in any order and in any thread. The estimated time left never rises.
    """
    lock, done = threading.Lock(), 0.0
    with reports(what, steady=True) as report:
        report("", 0, 100)

        def advance(cost: float) -> None:
            nonlocal done
            with lock:
                done += cost
                report("", min(round(100 * done / total), 100), 100)

        yield advance


@contextlib.contextmanager
def reports(title: str, *, steady: bool = False) -> Iterator[Report]:
    """Show work that reports itself how far it is; yield what to call with it.

    Nothing may be printed meanwhile but with `say`, or it meets the bar.

    Args:
        title: What is done, in a word or two.
        steady: Whether the work is counted in percent, and the time left may only fall: for pieces
            that differ in what they take.
    """
    show = _bar if sys.stderr.isatty() else _lines
    with show(title, steady) as report:
        yield report


@dataclass
class _Part:
    """How far a part of the work is, and from where its speed is known.

    The time left is estimated when work was done and counts down until more is, so that it does not
    rise while a long piece is under way.
    """

    what: str
    first: int
    began: float
    done: int
    total: int
    at: float
    steady: bool = False
    least: float = math.inf

    def advance(self, what: str, done: int, now: float) -> None:
        """Note that this much is done by now."""
        self.what = what
        if done != self.done:
            self.done, self.at = done, now

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds left, or None where nothing is known of the speed."""
        if self.done <= self.first or self.done >= self.total:
            return None
        speed = (self.done - self.first) / max(self.at - self.began, 1e-9)
        left = max((self.total - self.done) / speed - (now - self.at), 1.0)
        if self.steady:
            left = self.least = min(left, self.least)
        return left


class _Parts:
    """The part of the work that is under way."""

    def __init__(self, steady: bool) -> None:
        self.now: _Part | None = None
        self._steady = steady

    def report(self, what: str, done: int, total: int) -> _Part:
        """Note how far the work is; less than before begins another part."""
        clock = time.monotonic()
        if self.now is None or self.now.total != total or done < self.now.done:
            self.now = _Part(what, done, clock, done, total, clock, self._steady)
        self.now.advance(what, done, clock)
        return self.now


@contextlib.contextmanager
def _bar(title: str, steady: bool) -> Iterator[Report]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    parts = _Parts(steady)

    class Left(ProgressColumn):
        def render(self, task: Any) -> Text:
            seconds = parts.now.seconds_left(time.monotonic()) if parts.now else None
            if seconds is None:
                return Text("-:--:-- left" if parts.now else "")
            whole = timedelta(seconds=round(seconds))
            return Text(f"{whole} left", style="progress.remaining")

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        Left(),
        console=console,
        transient=True,
        expand=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        shown = bar.add_task(escape(title), total=None, count="")
        task = bar.tasks[0]

        def report(what: str, done: int, total: int) -> None:
            if done < task.completed:  # another part of the work: its speed is its own
                began = task.start_time
                bar.reset(shown)
                task.start_time = began
            parts.report(what, done, total)
            words = f"{title}: {what}" if what else title
            most = max(console.width - _BAR_WIDTH - _LEAST_BAR, len(title))
            bar.update(
                shown,
                description=escape(words if len(words) <= most else f"{words[: most - 1]}…"),
                completed=done,
                total=total,
                count=f"{done}%" if steady else f"{done}/{total}",
            )

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False)

        yield Report(report, say)


@contextlib.contextmanager
def _lines(title: str, steady: bool) -> Iterator[Report]:
    start = time.monotonic()
    parts = _Parts(steady)
    finished = threading.Event()

    def talk() -> None:  # from a thread, for one piece of work may take long
        while not finished.wait(EVERY):
            now = time.monotonic()
            words = [f"{now - start:.0f} s"]
            part = parts.now
            if part is not None:
                words.insert(0, f"{part.done}%" if steady else f"{part.done} of {part.total}")
                if part.what:
                    words.insert(0, part.what)
                left = part.seconds_left(now)
                words[-1] += "" if left is None else f", about {left:.0f} s left"
            with contextlib.suppress(OSError):  # nobody may be reading
                print(f"{title}: {', '.join(words)}", file=sys.stderr, flush=True)

    def report(what: str, done: int, total: int) -> None:
        parts.report(what, done, total)

    talker = threading.Thread(target=talk, daemon=True)
    talker.start()
    try:
        yield Report(report, lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        finished.set()
        talker.join()
