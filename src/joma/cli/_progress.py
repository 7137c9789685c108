"""Long work: its progress on standard error, and several processes that Ctrl-C ends at once."""

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from joma.errors import JomaError, printable

if TYPE_CHECKING:
    from concurrent.futures import Future

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


Submit = Callable[..., Any]
"""Takes a function and its arguments; returns what `gather` takes."""


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[Submit]:
    """Yield a `submit(function, *arguments)` that runs work in `jobs` processes, or here if one.

    Processes are spawned and compute with one thread each. When the block is interrupted they are
    stopped at once.
    """
    if jobs == 1:
        yield _LocalWork
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # of the processes: libraries here have read them
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_ignore_interrupt)

    def submit(function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        with _blocking_interrupts():
            return pool.submit(function, *arguments)

    try:
        yield submit
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    pool.shutdown()


def gather(futures: "Sequence[Future[Any] | _LocalWork]", done: Callable[[int], None]) -> list[Any]:
    """Return the results in the order of the futures.

    Args:
        futures: What `submit` returned.
        done: Called with the place of each future as it is done.
    """
    from concurrent.futures import Future, as_completed
    from concurrent.futures.process import BrokenProcessPool

    places = {future: place for place, future in enumerate(futures)}
    several = [future for future in futures if isinstance(future, Future)]
    results: dict[int, Any] = {}
    for future in as_completed(several) if several else futures:
        try:
            results[places[future]] = future.result()
        except BrokenProcessPool as error:
            raise JomaError(
                "a worker process was killed, perhaps for want of memory; fewer --jobs need less"
            ) from error
        done(places[future])
    return [results[place] for place in range(len(futures))]


class _LocalWork:
    """Work that this process does when its result is asked for."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def result(self) -> Any:
        return self._function(*self._arguments)


def _ignore_interrupt() -> None:
    """Ignore Ctrl-C, which reaches every process of a terminal: the first answers for all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _blocking_interrupts() -> Iterator[None]:
    """Block Ctrl-C until the block ends; a process started in it never receives one.

    Without this, one that is still importing when Ctrl-C comes would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
