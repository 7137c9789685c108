"""Work in several processes that Ctrl-C ends at once."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from joma.errors import JomaError

if TYPE_CHECKING:
    from concurrent.futures import Future

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
