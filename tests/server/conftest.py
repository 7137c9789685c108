"""Run folders and a server in a thread."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from joma.runs import Run
from joma.server import RunServer
from tests.server._client import PATIENCE, Client

MakeRun = Callable[..., Run]
Serve = Callable[..., Client]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that makes a run of a few rows in `runs/NAME`."""
    return functools.partial(write_run, tmp_path / "runs")


def write_run(
    root: Path, name: str = "first", rows: int = 20, done: bool = True, **config: Any
) -> Run:
    """Return a new run in `root/name`."""
    run = Run.create("mine", config, out=root / name)
    for step in range(rows):
        run.metrics.append(step, "loss", 1 / (step + 1))
        run.metrics.append(step, "attention_entropy", 2.0, module="h.0", layer=0)
    run.metrics.flush()
    if done:
        run.write_json("outcome", {"status": "done"})
    return run


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that serves `runs` in a thread until the test ends."""
    with contextlib.ExitStack() as around:

        def start(**options: Any) -> Client:
            root = tmp_path / "runs"
            root.mkdir(exist_ok=True)
            return Client(around.enter_context(serving(root, **options)).address)

        yield start


@contextlib.contextmanager
def serving(runs: Any, **options: Any) -> Iterator[RunServer]:
    """Serve in a thread for the block."""
    started = threading.Event()
    server = RunServer(runs, **{"port": 0, **options}, on_start=lambda _: started.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(PATIENCE)  # imports take long on a busy machine
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()
