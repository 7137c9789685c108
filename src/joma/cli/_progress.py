"""Progress on standard error: a bar on a terminal, otherwise a plain line now and then."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from joma.errors import printable

EVERY = 10.0
"""Seconds between plain lines."""

_REDRAWN_EVERY = 0.1
_BAR = 20


class ProgressLine:
    """Takes what is being done, how much of it is done, and how much there is.

    The time left is estimated when work was done and counts down until more is, so that it does not
    rise while a long piece is under way.
    """

    def __init__(self, title: str) -> None:
        self._title, self._what = title, ""
        self._done, self._total = 0, 0
        self._began = self._at = self._start = time.monotonic()
        self._first = 0
        self._bar = sys.stderr.isatty()
        self._lock = threading.Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far the work is.

        Args:
            what: What is being done.
            done: How much of it is done; less than before begins another part of the work.
            total: How much there is.
        """
        with self._lock:
            now = time.monotonic()
            if total != self._total or done < self._done:
                self._first, self._began = done, now
            if (done, total) != (self._done, self._total):
                self._at = now
            self._what, self._done, self._total = what, done, total

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        with self._lock:
            print(f"\r\x1b[K{line}" if self._bar else line, file=sys.stderr, flush=True)

    def show_until(self, finished: threading.Event) -> None:
        """Print the line again and again: from a thread, for one piece of work may take long."""
        while not finished.wait(_REDRAWN_EVERY if self._bar else EVERY):
            with contextlib.suppress(OSError, ValueError), self._lock:  # nobody may be reading
                end = "" if self._bar else "\n"
                print(self._line(time.monotonic()), end=end, file=sys.stderr, flush=True)
        if self._bar:
            with contextlib.suppress(OSError, ValueError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _line(self, now: float) -> str:
        elapsed = timedelta(seconds=int(now - self._start))
        words = [self._what] * bool(self._what)
        if self._total:
            words.append(f"{self._done} of {self._total}")
        words.append(f"{elapsed}")
        left = self._seconds_left(now)
        if left is not None:
            words.append(f"about {timedelta(seconds=round(left))} left")
        line = printable(f"{self._title}: {', '.join(words)}")
        if not self._bar:
            return line
        full = _BAR * self._done // self._total if self._total else 0
        line = f"[{'#' * full}{' ' * (_BAR - full)}] {line}"
        return f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}"

    def _seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds left, or None where nothing is known of the speed."""
        if self._done <= self._first or self._done >= self._total:
            return None
        each = (self._at - self._began) / (self._done - self._first)
        return max((self._total - self._done) * each - (now - self._at), 1.0)


@contextlib.contextmanager
def reports(title: str) -> Iterator[ProgressLine]:
    """Show work that reports itself how far it is; yield what to call with it.

    Nothing may be printed meanwhile but with `say`, or it meets the bar.

    Args:
        title: What is done, in a word or two.
    """
    line, finished = ProgressLine(title), threading.Event()
    thread = threading.Thread(target=line.show_until, args=(finished,), daemon=True)
    thread.start()
    try:
        yield line
    finally:
        finished.set()
        thread.join()
