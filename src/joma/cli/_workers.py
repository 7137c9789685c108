"""Work in several processes that Ctrl-C ends at once."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from joma.cli._show import Record
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
        yield _Here
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with _one_thread_each():
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_ignore_interrupt)

        def submit(function: Callable[..., Record], *arguments: Any) -> "Future[Record]":
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


def gather(
    futures: Sequence["Future[Record] | _Here"], advance: Callable[[], None]
) -> list[Record]:
    """Return the results in the order of the futures; call `advance` as each is there."""
    from concurrent.futures.process import BrokenProcessPool

    records: list[Record] = []
    for future in futures:
        try:
            records.append(future.result())
        except BrokenProcessPool as error:
            raise JomaError(
                "a worker process was killed, perhaps for want of memory; fewer --jobs need less"
            ) from error
        advance()
    return records


def gather_as_completed(
    futures: Sequence["Future[Record] | _Here"],
    costs: Sequence[float],
    advance: Callable[[float], None],
) -> list[Record]:
    """Return the results in the order of the futures; report the cost of each as it is done."""
    from concurrent.futures import Future

    pending = [future for future in futures if isinstance(future, Future)]
    for future, cost in zip(futures, costs, strict=True):
        if isinstance(future, Future):
            future.add_done_callback(lambda _, cost=cost: advance(cost))
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    if pending:
        return gather(futures, nothing)
    records: list[Record] = []
    for future, cost in zip(futures, costs, strict=True):
        records += gather([future], nothing)
        advance(cost)
    return records


class _Here:
    """Work that this process does when its result is asked for."""

    def __init__(self, function: Callable[..., Record], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def result(self) -> Record:
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


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let the processes that are started in the block compute with one thread each."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: value or "1" for name, value in before.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
