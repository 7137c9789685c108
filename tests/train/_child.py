"""The small ensemble, trained in a run folder; as a program, in processes that may be killed.

The program reads folders from its standard input and forks a process for each, which says its own
number and the steps it makes. So torch is imported once, however many processes there are. A dead
process keeps its number until the next line comes: who kills it cannot hit another.
"""

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet  # noqa: F401  (here and not in every process)
import torch

from joma.runs import Run
from joma.train import Ensemble, Fit, fit
from tests.runs._log import COLUMNS
from tests.train._small import ensemble

STEPS = 28
MEASURED_AT = (0, 1, 6, 12, 13, 20, STEPS)


def train(
    folder: Path,
    steps: int = STEPS,
    *,
    trained: Ensemble | None = None,
    measured: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Fit:
    """Begin or resume; a checkpoint is due at every opportunity.

    Args:
        folder: of the run.
        steps: to make.
        trained: the networks, if not the small ensemble.
        measured: is called with the step of each measurement, halfway through it.
        options: of `fit`.
    """
    run = Run.resume("small", {}, out=folder)
    networks = trained or ensemble()

    def measure(step: int) -> None:
        with networks.evaluating() as model:
            for layer, block in enumerate(model.blocks):
                norms = torch.stack([p.flatten(1).norm(dim=1) for p in block.parameters()])
                run.metrics.append(step, "norm", norms.sum(0).numpy(), layer=layer, bound=1e-9)
                if layer == 0:
                    measured(step)
        run.metrics.append(step, "scale", model.output.weight.std().item(), module="output")

    settings = {
        "measure": measure,
        "measure_at": MEASURED_AT,
        "checkpoint_seconds": 0.0,
        "keep_last": True,
    }
    return fit(networks, run, steps, **{**settings, **options})


class Ended(NamedTuple):
    """All that a training leaves: its log without times, and networks and moments in one file."""

    log: dict[str, Any]
    last: bytes

    @classmethod
    def of(cls, folder: Path) -> "Ended":
        run = Run.open(folder)
        log = run.metrics.read()
        columns = {
            name: log[name].tolist() if kind is object else log[name].tobytes()
            for name, kind in COLUMNS.items()
            if name != "time"
        }
        return cls(columns, file_of(folder, run.checkpoints.steps[0]).read_bytes())


def file_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:09d}.safetensors"


class Children:
    """Processes that train, one after the other, each forked from one that has imported torch."""

    MODULE = "tests.train._child"

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", self.MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._heard: list[str] = []

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        assert self._server.wait(600) == 0
        assert self._server.stdout is not None
        self._server.stdout.close()

    def live(self, folder: Path, moment: Callable[[], bool] = lambda: False) -> int:
        """Trains in a process that is killed when the moment comes; gives its exit code."""
        self._say(str(folder))
        process = self._hear("process")
        killed = False

        def kill_in_time() -> None:
            nonlocal killed
            if not killed and moment():
                os.kill(process, signal.SIGKILL)
                killed = True

        try:
            assert self._hear("dead", kill_in_time) == process
        except BaseException:
            os.kill(process, signal.SIGKILL)  # or it would outlive the test
            raise
        self._say("")
        code = self._hear("ended")
        assert code in (0, -signal.SIGKILL)
        return code

    def _say(self, line: str) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(f"{line}\n".encode())
        self._server.stdin.flush()

    def _hear(self, word: str, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The number that is said with a word; passes over what is said before."""
        assert self._server.stdout is not None
        deadline = time.monotonic() + 600
        while True:
            meanwhile()
            self._heard += (self._server.stdout.read() or b"").decode().splitlines()
            while self._heard:
                said, number = self._heard.pop(0).split()
                if said == word:
                    return int(number)
            assert self._server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(5e-4)


def after(seconds: float, folder: Path) -> Callable[[], bool]:
    """The moment so long after the run's folder was begun, however long the start takes."""
    end = 0.0

    def now() -> bool:
        nonlocal end
        if not end and (folder / "config.json").exists():
            end = time.monotonic() + seconds
        return 0 < end < time.monotonic()

    return now


def written(folder: Path, pattern: str, times: int = 1) -> Callable[[], bool]:
    """The moment at which such a file is being written, not for the first time but a later one."""
    seen: set[str] = set()

    def now() -> bool:
        there = os.listdir(folder) if folder.is_dir() else []
        seen.update(name for name in there if re.fullmatch(rf"\.{pattern}\.\w+\.tmp", name))
        return len(seen) >= times

    return now


def _say(word: str, number: int) -> None:
    os.write(1, f"{word} {number}\n".encode())  # at once: nobody hears half a line


def _live(folder: Path) -> None:
    """What a forked process does."""
    sync = os.fsync

    def slow_sync(descriptor: int) -> None:
        time.sleep(0.002)  # a slow disk: time to be killed between a write and its rename
        sync(descriptor)

    os.fsync = slow_sync
    _say("process", os.getpid())
    train(folder, progress=lambda step, _: _say("step", step))


def _serve() -> None:
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            try:
                _live(Path(line.rstrip("\n")))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
        _say("dead", process)
        sys.stdin.readline()
        _, status = os.waitpid(process, 0)
        _say("ended", os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _serve()
