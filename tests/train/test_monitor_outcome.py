"""How a monitored training ended, as the run folder says it: by real processes where it matters."""

import os
import signal
import subprocess
import sys
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
from joma.train.monitor.record import Recorder

Recorder.draw = lambda self: None
how, folder = sys.argv[1:]
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)


def step(monitor, value=None):
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    optimizer.step()
    monitor.step(loss if value is None else value)
    optimizer.zero_grad()


if how in ("wait", "raise", "nan", "fork"):
    with joma.Monitor(model, optimizer, every=1, run=folder) as monitor:
        step(monitor)
        step(monitor)
        if how == "wait":
            print("ready", flush=True)
            time.sleep(600)
        if how == "raise":
            raise RuntimeError("the disk is on fire")
        if how == "nan":
            for _ in range(3):
                step(monitor, float("nan"))
        if how == "fork":
            child = os.fork()
            if child == 0:
                sys.exit(1)  # leaves the block
            os.waitpid(child, 0)
            print(open(folder + "/outcome.json").read().split()[2], flush=True)
else:
    monitor = joma.Monitor(model, optimizer, every=1, run=folder)
    step(monitor)
    if how == "crash":
        raise ValueError("unseen")
"""


def child(how: str, folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-W", "ignore", "-c", CHILD, how, str(folder)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(words, text=True, **pipes)


@pytest.mark.parametrize(
    ("how", "state", "reason"),
    [
        ("raise", "died", "It failed with RuntimeError: the disk is on fire."),
        ("crash", "died", "It failed with ValueError: unseen."),
        ("leave", "unknown", "Its process left without closing the monitor."),
        ("nan", "diverged", "not finite"),
    ],
)
def test_a_process_that_ends(tmp_path: Path, how: str, state: str, reason: str):
    with child(how, tmp_path / "run") as process:
        process.wait(120)
    summary = RunSummary.of(Run.open(tmp_path / "run"))
    assert summary.state == state
    assert reason in summary.reason


def test_a_process_that_is_killed(tmp_path: Path):
    with child("wait", tmp_path / "run") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        run = Run.open(tmp_path / "run")
        assert state_of(run) == "running"
        assert run.config["optimizer"]["lr"] == 0.5
        process.send_signal(signal.SIGKILL)
        process.wait()
    summary = RunSummary.of(run)
    assert (summary.state, summary.last_step) == ("died", 2)
    assert summary.last_loss is not None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_that_leaves_the_block_does_not_end_the_run(tmp_path: Path):
    with child("fork", tmp_path / "run") as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == '"running"'
        process.wait()
    assert state_of(Run.open(tmp_path / "run")) == "ended"


def monitored(run: Any, **options: Any) -> joma.Monitor:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    return joma.Monitor(model, optimizer, run=run, **options)


def test_ctrl_c_is_stopped_and_stop_on_says_why(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), monitored(tmp_path / "a"):
        raise KeyboardInterrupt
    assert state_of(Run.open(tmp_path / "a")) == "stopped"
    with monitored(tmp_path / "b", stop_on={"nan"}) as monitor:
        monitor.step(1.0)
        assert monitor.step(float("inf"))
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
        assert run.read_json("outcome") == {"status": "running"}
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
