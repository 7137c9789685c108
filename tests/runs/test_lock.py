"""One process at a time in a run folder: really two processes, kills and forks."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from joma.runs import Run
from tests.runs._failing import contents

HOLD = """
import os, sys, time
from joma.runs import Run

with Run.open(sys.argv[1]).locked():
    if "fork" in sys.argv and os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    if "fork" not in sys.argv:
        print("locked", flush=True)
    time.sleep(600)
"""

# Other tests leave threads; the forks here do nothing that could wait for one.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

IN_USE = "run folder {} is in use by another process; wait for it or use another folder"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create("fit", {"seed": 1}, out=tmp_path / "run")


@contextlib.contextmanager
def another_process(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Holds the lock until it is killed, and what it said when it had it."""
    command = [sys.executable, "-c", HOLD, str(folder), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


def is_free(folder: Path) -> bool:
    """Whether somebody else, who has the folder open for himself, could lock it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def in_fork(do: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if do() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refused(folder: Path) -> bool:
    try:
        with Run.open(folder).locked():
            return False
    except ValueError:
        return True


def test_another_process_is_refused_and_removes_nothing_until_a_kill(run: Run):
    run.write_json("outcome", {"status": "running"})
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / ".step-000000001.safetensors.0123456789ab.tmp").write_bytes(b"half")
    before = contents(run.path)
    with another_process(run.path) as (holder, _):
        for enter in (
            lambda: run.locked().__enter__(),
            lambda: Run.resume("fit", {"seed": 1}, out=run.path),
            lambda: Run.create("fit", {"seed": 1}, out=run.path, existing="restart"),
        ):
            with pytest.raises(ValueError) as error:  # noqa: PT011 - compared whole below
                enter()
            assert str(error.value) == IN_USE.format(run.path)
            assert contents(run.path) == before
        assert Run.open(run.path) == run  # reading is not refused
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run.locked():
            pass
    assert contents(run.path) == before  # no lock file is left
    Run.resume("fit", {"seed": 1}, out=run.path)
    assert not list((run.path / "checkpoints").iterdir())


def test_a_process_may_nest_it(run: Run, monkeypatch):
    monkeypatch.chdir(run.path.parent)
    with run.locked(), Run.open("run").locked():
        Run.resume("fit", {"seed": 1}, out="run")
        Run.create("fit", {"seed": 1}, out=run.path, existing="restart")
        assert not is_free(run.path)
    assert is_free(run.path)


def test_it_ends_when_the_block_fails_and_when_a_run_is_made(run: Run):
    with pytest.raises(KeyError), run.locked():
        raise KeyError
    assert is_free(run.path)
    Run.resume("fit", {"seed": 1}, out=run.path)
    assert is_free(run.path)


def test_somebody_else_in_the_same_process_is_refused(run: Run):
    descriptor = os.open(run.path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert refused(run.path)
    os.close(descriptor)
    assert not refused(run.path)


def test_a_fork_does_not_have_the_lock_of_its_parent(run: Run):
    with run.locked():
        assert in_fork(lambda: refused(run.path))
    assert in_fork(lambda: not refused(run.path))


def test_a_fork_that_leaves_the_block_leaves_the_lock_to_its_parent(run: Run):
    lock = run.locked()
    lock.__enter__()

    def leave() -> bool:
        lock.__exit__(None, None, None)
        return not is_free(run.path)

    assert in_fork(leave)
    assert not is_free(run.path)
    lock.__exit__(None, None, None)
    assert is_free(run.path)


def test_a_fork_does_not_keep_the_lock_of_a_parent_that_was_killed(run: Run):
    with another_process(run.path, "fork") as (holder, fork):
        try:
            assert not is_free(run.path)
            holder.kill()
            holder.wait()
            os.kill(int(fork), 0)  # still there
            assert is_free(run.path)
        finally:
            os.kill(int(fork), signal.SIGKILL)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks(run: Run, monkeypatch, code: int):
    def flock(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with run.locked(), run.locked():
        Run.resume("fit", {"seed": 1}, out=run.path)
    if opened:
        assert len(os.listdir("/proc/self/fd")) == opened


def test_another_failure_is_not_hidden(run: Run, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"), run.locked():
        pass
