"""Progress on standard error: a bar on a terminal, otherwise a plain line now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

EVERY = 10.0
"""Seconds between plain lines."""

Advance = Callable[[], None]


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Advance]:
    """Shows how many of `total` are done; yields what to call when one more is.

    Nothing may be printed meanwhile, or it meets the bar.
    """
    show = _bar if sys.stderr.isatty() else _lines
    with show(what, total) as advance:
        yield advance


@contextlib.contextmanager
def _bar(what: str, total: int | None) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    if total is not None:
        columns.insert(2, MofNCompleteColumn())
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextlib.contextmanager
def _lines(what: str, total: int | None) -> Iterator[Advance]:
    done = 0
    start = time.monotonic()
    finished = threading.Event()

    def advance() -> None:
        nonlocal done
        done += 1

    def talk() -> None:  # from a thread, for one piece of work may take long
        while not finished.wait(EVERY):
            so_far = "" if total is None else f"{done} of {total}, "
            seconds = time.monotonic() - start
            with contextlib.suppress(OSError):  # nobody may be reading
                print(f"{what}: {so_far}{seconds:.0f} s", file=sys.stderr, flush=True)

    talker = threading.Thread(target=talk, daemon=True)
    talker.start()
    try:
        yield advance
    finally:
        finished.set()
        talker.join()
