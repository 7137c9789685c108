"""The work behind the commands, as functions of plain values that another process can run."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma.errors import JomaError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from joma.experiments import Request
    from joma.runs import Run

Record = dict[str, Any]
Submit = Callable[..., Any]
"""Takes a function and its arguments; gives what `gather` takes."""


def check_claim(claim: str, seed: int) -> Record:
    """Measures one claim, by its id."""
    from joma.experiments.claims import CLAIMS, check

    found = next(candidate for candidate in CLAIMS if candidate.id == claim)
    return check(found, seed).as_json()


def reproduce_experiment(
    name: str,
    folder: Path | None,
    request: "Request",
    *,
    resume: bool = False,
    begun: Callable[[Path], None] = lambda _: None,
) -> Record:
    """Makes one figure or table in its own run folder, by its name.

    Args:
        name: of the experiment.
        folder: where to write, if not the default.
        request: what is asked of it.
        resume: whether a run in the folder is resumed although it has finished. One that trains
            networks always is; another is started over where it did not finish.
        begun: is told the run folder once it is there.
    """
    from joma.experiments import EXPERIMENTS
    from joma.runs import Run, is_run

    experiment = EXPERIMENTS[name]
    start = time.perf_counter()
    resumed = resume or experiment.resumable
    enter = Run.resume if resumed else partial(Run.create, existing="restart")
    run = enter(name, request.config, out=folder, device=request.device)
    begun(run.path)
    with run.locked(), closing(run) as outcome:
        try:
            result = experiment.reproduce(run, request)
        except ValueError as error:
            # What is in the folder, or that it was removed, is for the user to fix.
            if experiment.resumable or not is_run(run.path):
                raise
            raise RuntimeError(f"experiment {name} failed") from error
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":
                raise
            raise JomaError(
                f"the GPU has too little memory free for {name}; a smaller --scale or --hidden "
                "needs less, and --device cpu none of it"
            ) from error
        outcome.update(verdict=result.verdict.value, finding=result.finding)
    return {
        "name": name,
        "title": experiment.title,
        "published": experiment.published,
        **request.config,
        "device": request.device,
        "groups": list(request.groups),
        "finding": result.finding,
        "verdict": result.verdict.value,
        "table": [{key: _plain(value) for key, value in row.items()} for row in result.table],
        "paragraphs": list(result.paragraphs),
        "run": str(run.path),
        "figures": [str(path) for path in run.figures],
        "tables": run.tables,
        "seconds": round(time.perf_counter() - start, 2),
    }


def _plain(value: Any) -> Any:
    """A cell as JSON has it: NumPy's numbers as Python's, None for what is not finite."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def closing(run: "Run") -> Iterator[Record]:
    """Keeps `outcome.json` true: running, then done with what the block put in, or how it broke.

    A block that ends in another way than done puts its own "status" in.

    Written at the start too, so that a run that was killed, or that is started over, never
    shows an outcome that is not its own.
    """
    outcome: Record = {}
    try:
        run.write_json("outcome", {"status": "running"})
        yield outcome
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        # On a full disk, or where the folder is gone, this fails too; the first error counts.
        with contextlib.suppress(OSError, JomaError):
            run.write_json("outcome", {**outcome, "status": status})
        raise
    run.write_json("outcome", {"status": "done", **outcome})


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[Submit]:
    """Yields a `submit(function, *arguments)` that runs work in `jobs` processes, or here if one.

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
            with _interrupts_held():
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
    """Results in the order of the futures; `advance` is called as each is there."""
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


class _Here:
    """Work done in this process, when its result is asked for."""

    def __init__(self, function: Callable[..., Record], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments

    def result(self) -> Record:
        return self._function(*self._arguments)


def _ignore_interrupt() -> None:
    """Ctrl-C reaches every process of a terminal; the first one answers for all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits until the block ends; a process started in it never sees one.

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
