"""How a monitored training ended, as the run folder says it: by real processes where it matters."""

import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import joma
from joma.runs import Run, RunSummary, state_of

CHILD = """
import os, sys, time
import torch
from torch import nn
import joma
from joma.report import training

training.draw = lambda run: 1 / 0
folder, *several = sys.argv[1:]
for how in several:  # a fork each: torch takes seconds to import
    if os.fork() == 0:
        break
else:
    time.sleep(600)
folder = os.path.join(folder, how)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def step(monitor, value=None):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    monitor.step(loss if value is None else value)
    optimizer.zero_grad()


def report():
    os.write(1, f"{how} {os.getpid()}\\n".encode())


if how in ("raise", "nan", "wait", "fork"):
    with joma.Monitor(model, optimizer, every=1, run=folder) as monitor:
        step(monitor)
        step(monitor)
        if how == "wait":
            report()
            time.sleep(600)
        if how == "raise":
            raise RuntimeError("the disk is on fire")
        if how == "nan":
            for _ in range(3):
                step(monitor, float("nan"))
        if how == "fork":
            if (child := os.fork()) == 0:
                sys.exit(1)  # leaves the block
            os.waitpid(child, 0)
            assert '"running"' in open(folder + "/outcome.json").read()
else:
    monitor = joma.Monitor(model, optimizer, every=1, run=folder)
    step(monitor)
    if how == "crash":
        raise ValueError("unseen")
"""
ENDS = {
    "raise": ("died", "It failed with RuntimeError: the disk is on fire."),
    "crash": ("died", "It failed with ValueError: unseen."),
    "leave": ("unknown", "Its process left without closing the monitor."),
    "nan": ("diverged", "The loss is NaN since step 3 (3 of 5 steps)."),
    "fork": ("ended", ""),
}

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def settled(folder: Path) -> RunSummary:
    """Return the summary of a run once it is not running any more."""
    for _ in range(1200):
        if folder.is_dir() and (folder / "outcome.json").exists():
            summary = RunSummary.of(Run.open(folder))
            if summary.state != "running":
                return summary
        time.sleep(0.1)
    raise TimeoutError


def test_processes_that_end_break_off_and_are_killed(tmp_path: Path):
    words = [sys.executable, "-W", "ignore", "-c", CHILD, str(tmp_path), *ENDS, "wait"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, text=True, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout is not None
            how, number = process.stdout.readline().split()
            run = Run.open(tmp_path / how)
            assert state_of(run) == "running"
            assert run.config["optimizer"]["lr"] == 0.5
            os.kill(int(number), signal.SIGKILL)
            killed = settled(run.path)
            found = {name: settled(tmp_path / name) for name in ENDS}
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert (killed.state, killed.last_step) == ("died", 2)
    assert killed.last_loss is not None
    assert {name: (it.state, it.reason) for name, it in found.items()} == ENDS


_models: list[nn.Module] = []


def monitored(run: Any, **options: Any) -> joma.Monitor:
    model = nn.Linear(2, 2)
    _models.append(model)  # a monitor does not keep it
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    return joma.Monitor(model, optimizer, run=run, **options)


def test_ctrl_c_is_stopped_and_stop_on_says_why(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), monitored(tmp_path / "a"):
        raise KeyboardInterrupt
    assert state_of(Run.open(tmp_path / "a")) == "stopped"
    with monitored(tmp_path / "b", stop_on={"nan"}) as monitor:
        assert any(monitor.step(float("inf")) for _ in range(50))
    run = Run.open(tmp_path / "b")
    assert run.read_json("outcome") == {"status": "stopped", "stopped": monitor.stop_reason}
    assert state_of(run) == "diverged"


def test_the_outcome_of_somebody_elses_run_is_left_alone(tmp_path: Path):
    run = Run.create("train", {}, out=tmp_path / "own")
    run.write_json("outcome", {"status": "running", "mine": 1})
    with monitored(run):
        pass
    assert run.read_json("outcome") == {"status": "running", "mine": 1}


def test_a_resumed_run_is_running_again_and_ends_again(tmp_path: Path):
    with monitored(tmp_path / "run") as monitor:
        monitor.step(1.0)
    run = Run.open(tmp_path / "run")
    assert state_of(run) == "ended"
    with monitored(tmp_path / "run", step=1):
        assert run.read_json("outcome") == {"status": "running", "host": platform.node()}
        assert state_of(run) == "running"
    assert state_of(run) == "ended"
    with monitored(tmp_path / "run") as second:
        assert second.run is not None
        assert second.run.path == tmp_path / "run-2"
        assert state_of(run) == "ended"


def test_the_settings_of_the_optimizer_are_recorded(tmp_path: Path):
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 2.0}]
    first = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
    torch.optim.lr_scheduler.LambdaLR(first, lambda step: 0.0)  # a warm-up begins at nothing
    second = torch.optim.AdamW([torch.zeros(1)], lr=torch.tensor(0.5))
    monitor = joma.Monitor(model, [first, second], run=tmp_path / "run")
    monitor.close()
    config = Run.open(tmp_path / "run").config
    assert config["parameters"] == 6
    assert config["optimizer"]["0"]["name"] == "SGD"
    assert config["optimizer"]["0"]["lr"] == [1.0, 2.0]
    assert config["optimizer"]["0"]["momentum"] == 0.5
    assert config["optimizer"]["1"]["lr"] == 0.5


def test_the_picture_is_written_and_a_failure_never_ends_a_training(
    tmp_path: Path, monkeypatch, pictures: None
):
    from joma.report import training

    with monitored(tmp_path / "a") as monitor:
        monitor.step(1.0)
        figure = monitor.plot()
        assert figure is not None
        assert len(figure.axes) >= 2
    png = tmp_path / "a" / "figures" / "training.png"
    assert png.read_bytes().startswith(b"\x89PNG")
    assert Run.open(tmp_path / "a").verified
    assert monitor.plot() is not None  # also of one that is closed

    def broken(run: Run) -> None:
        raise ZeroDivisionError("no ink")

    monkeypatch.setattr(training, "draw", broken)
    with monitored(tmp_path / "b") as monitor:
        monitor.step(1.0)
    assert state_of(Run.open(tmp_path / "b")) == "ended"
    assert "figures/training.png not drawn" in monitor.summary()


def test_an_optimizer_inside_itself_does_not_hold_up_the_training(tmp_path: Path):
    model = nn.Linear(2, 2)

    class Endless:
        def __init__(self) -> None:
            self.param_groups = [{"params": [model.weight], "lr": 0.5}]

        @property
        def optimizer(self) -> "Endless":
            return self

    wrapped: Any = Endless()
    with joma.Monitor(model, wrapped, run=tmp_path / "run") as monitor:
        monitor.step(1.0)
    assert Run.open(tmp_path / "run").config["optimizer"] == {"name": "Endless", "lr": 0.5}


class Wrapping(torch.optim.Optimizer):
    """As Accelerate's: itself an Optimizer, with the real one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def test_the_optimizer_inside_a_wrapper_is_named(tmp_path: Path):
    model = nn.Linear(2, 2)
    wrapped = Wrapping(torch.optim.SGD(model.parameters(), lr=0.5))
    with joma.Monitor(model, wrapped, run=tmp_path / "run"):
        pass
    config = Run.open(tmp_path / "run").config
    assert (config["optimizer"]["name"], config["optimizer"]["lr"]) == ("SGD", 0.5)
