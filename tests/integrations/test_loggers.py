"""Dashboards that get every measurement."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import joma
from joma.integrations import loggers
from joma.train.monitor import Logger
from tests.train._watched import encoder, of_run, train


def test_an_event_file_says_what_the_run_folder_says(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    board = loggers.tensorboard(tmp_path / "board")
    assert not (tmp_path / "board").exists()  # before the first measurement
    model = encoder()
    with joma.Monitor(
        model, every=2, run=tmp_path / "run", budget=None, loggers=[board]
    ) as monitor:
        train(model, 5, after_step=monitor.step)
        [events] = (tmp_path / "board").iterdir()  # not closed yet: each measurement is flushed
        logged: dict[str, list[tuple[int, float]]] = {}
        for event in EventFileLoader(str(events)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0]
                logged.setdefault(value.tag, []).append((event.step, number))
    board.close()
    assert monitor.run is not None
    for name, where in {
        "loss": {},
        "attention_entropy/layer1/head0": {"layer": 1, "head": 0},
        "stable_rank/layer0/encoder.layers.0.linear1": {"module": "encoder.layers.0.linear1"},
        "gradient_norm/layer0/encoder.layers.0.linear1": {"module": "encoder.layers.0.linear1"},
    }.items():
        steps, values = of_run(monitor.run, name.split("/")[0], **where)
        measured = zip(steps, values, strict=True)
        # losses have all steps
        at = [(step, value) for step, value in measured if step in (1, 2, 4)]
        assert logged[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in at]
        assert logged[name]


class Account:
    """A run of a dashboard that notes what it is given."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.finished = 0

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        self.finished += 1


def installed(monkeypatch: pytest.MonkeyPatch, name: str, **module: Any) -> list[dict[str, Any]]:
    """Puts a package there whose `init` begins an Account; what init was called with."""
    begun: list[dict[str, Any]] = []

    def init(**options: Any) -> Account:
        begun.append(options)
        return module["account"]

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init, **module))  # type: ignore[arg-type]
    return begun


def test_weights_and_biases_draws_over_the_monitors_own_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account, active = Account(), Account()
    begun = installed(monkeypatch, "wandb", account=account, run=None)
    log: Logger = (board := loggers.wandb())
    assert begun == []
    log(3, {"loss": 1.5})
    log(5, {"loss": 1.0, "stable_rank/layer0/up": 7.0})
    board.close()
    assert begun == [{}]
    assert account.axes == [("joma/step", None), ("joma/*", "joma/step")]
    assert account.logged == [
        ({"joma/step": 3, "joma/loss": 1.5}, None),
        ({"joma/step": 5, "joma/loss": 1.0, "joma/stable_rank/layer0/up": 7.0}, None),
    ]
    assert account.finished == 1
    for run in (None, active):  # one that is active, or given, is not begun and not ended
        installed(monkeypatch, "wandb", account=account, run=active if run is None else None)
        board = loggers.wandb(run)
        board(1, {"loss": 2.0})
        board.close()
    assert len(active.logged) == 2
    assert active.finished == 0


def test_trackio_has_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account()
    begun = installed(monkeypatch, "trackio", account=account)
    board = loggers.trackio("mine", name="first")
    board(2, {"loss": math.pi})
    board.close()
    board.close()
    assert begun == [{"project": "mine", "name": "first"}]
    assert account.logged == [({"loss": math.pi}, 2)]
    assert account.finished == 1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("tensorboard", lambda: loggers.tensorboard("there")),
        ("wandb", loggers.wandb),
        ("trackio", loggers.trackio),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, name: str, make: Any) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ValueError, match=rf"needs {name}: pip install -c constraints.txt -e '\.\[track\]'"
    ):
        make()
