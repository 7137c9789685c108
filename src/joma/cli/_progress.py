"""Progress on standard error: a bar on a terminal, otherwise a plain line now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

EVERY = 10.0
"""Seconds between plain lines."""

_BAR_WIDTH = 50
"""Columns of a terminal that the bar, the counts and the times take next to the words."""

_SPEED_OVER = 120.0
"""Seconds of work that the bar's remaining time is estimated from."""

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
def reports(title: str) -> Iterator[Report]:
    """Show work that reports itself how far it is; yield what to call with it.

    Nothing may be printed meanwhile but with `say`, or it meets the bar.
    """
    show = _bar if sys.stderr.isatty() else _lines
    with show(title) as report:
        yield report


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        speed_estimate_period=_SPEED_OVER,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        shown = bar.add_task(escape(title), total=None, count="", left="")
        task = bar.tasks[0]

        def report(what: str, done: int, total: int) -> None:
            if done < task.completed:  # another part of the work: its speed is its own
                began = task.start_time
                bar.reset(shown)
                task.start_time = began
            words = f"{title}: {what}" if what else title
            most = max(console.width - _BAR_WIDTH, len(title))
            bar.update(
                shown,
                description=escape(words if len(words) <= most else f"{words[: most - 1]}…"),
                completed=done,
                total=total,
                count=f"{done}/{total}",
                left="left",
            )

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield Report(report, say)


@dataclass
class _Part:
    """How far a part of the work is, and from where its speed is known."""

    what: str
    first: int
    began: float
    done: int
    total: int

    def left(self, now: float) -> str:
        if self.done <= self.first or self.done >= self.total:
            return ""
        seconds = (now - self.began) / (self.done - self.first) * (self.total - self.done)
        return f", about {seconds:.0f} s left"


@contextlib.contextmanager
def _lines(title: str) -> Iterator[Report]:
    start = time.monotonic()
    part: _Part | None = None
    finished = threading.Event()

    def report(what: str, done: int, total: int) -> None:
        nonlocal part
        if part is None or part.total != total or done < part.done:
            part = _Part(what, done, time.monotonic(), done, total)
        part.what, part.done = what, done

    def talk() -> None:  # from a thread, for one piece of work may take long
        while not finished.wait(EVERY):
            now = time.monotonic()
            words = [f"{now - start:.0f} s"]
            if part is not None:
                words.insert(0, f"{part.done} of {part.total}")
                if part.what:
                    words.insert(0, part.what)
                words[-1] += part.left(now)
            with contextlib.suppress(OSError):  # nobody may be reading
                print(f"{title}: {', '.join(words)}", file=sys.stderr, flush=True)

    talker = threading.Thread(target=talk, daemon=True)
    talker.start()
    try:
        yield Report(report, lambda line: print(line, file=sys.stderr, flush=True))
    finally:
        finished.set()
        talker.join()
