"""When a monitor measures: on a cadence, and for a share of the training's time.

The clock is the test's own. A measurement takes as long as its logger says.
"""

import re
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import joma
from joma.runs import Run
from tests.train._watched import of_run


class Simulated:
    """A training whose steps and measurements take given times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> None:
        self.now = self.trained = 0.0
        self.steps: list[int] = []
        self.expensive: list[int] = []
        self.taken = [0.0, 0.0, 0.0]
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        metrics = ["stable_rank", "effective_rank"]
        self.monitor = joma.Monitor(
            self.model, run=folder, metrics=metrics, loggers=[self._take_long], **options
        )
        self.step = options.get("step", 0)

    def train(
        self, until: float, a_step: float, first: float, usual: float, expensive: float
    ) -> None:
        """Train for some seconds, measurements left out."""
        self.taken = [first, usual, expensive]
        while self.trained < until:
            self.step += 1
            self.now += a_step
            self.trained += a_step
            self.monitor.step()

    def _take_long(self, step: int, values: Any) -> None:
        first, usual, expensive = self.taken
        self.now += usual if self.steps else first
        self.steps.append(step)
        if any(name.startswith("effective_rank") for name in values):
            self.expensive.append(step)
            self.now += expensive


@pytest.mark.parametrize("share", [0.003, 0.01, 0.05])
@pytest.mark.parametrize(
    ("every", "a_step", "first", "usual", "expensive"),
    [(10, 1.0, 0.6, 0.02, 0.3), (100, 0.02, 0.6, 0.02, 0.05), (100, 0.1, 0.0, 0.001, 0.001)],
)
def test_measurements_take_their_share_from_two_minutes_on(
    share: float, every: int, a_step: float, first: float, usual: float, expensive: float,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The allowance of two minutes at 1% is 1.2 s; what is given as a share of it scales."""
    taken = [share / 0.01 * seconds for seconds in (first, usual, expensive)]
    one = Simulated(monkeypatch, tmp_path / "run", every=every, budget=share)
    for until in (120.0, 200.0, 300.0):
        one.train(until, a_step, *taken)
        # A measurement may end just beyond what was earned when it was planned.
        assert one.monitor.seconds <= share * until + sum(taken[1:])
    assert len(one.steps) >= 4
    assert all(step < every or step % every == 0 for step in one.steps)
    assert all(step == 1 or step % (10 * every) == 0 for step in one.expensive)
    one.monitor.close()
    one.now += 1000  # closed
    said = re.search(r"([\d.]+)% of the training's time", one.monitor.summary())
    assert said is not None
    assert float(said[1]) == pytest.approx(100 * one.monitor.seconds / one.trained, abs=0.1)


def test_cheap_measurements_come_at_powers_of_two_and_then_on_the_cadence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Simulated(monkeypatch, tmp_path / "run", every=100)
    one.train(5.0, 0.01, 0.01, 0.001, 0.0)
    assert one.steps == [1, 2, 4, 8, 16, 32, 64, 100, 200, 300, 400, 500]


def test_what_a_long_first_measurement_took_is_paid_back_and_few_come_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: 0.9 s at first, then 0.07 s, and steps of 27 ms."""
    one = Simulated(monkeypatch, tmp_path / "run", every=100)
    one.train(119.0, 0.027, 0.9, 0.07, 0.2)
    assert 3 <= len(one.steps) <= 6
    assert one.steps[-1] >= 400  # they are spread over the two minutes
    assert one.monitor.seconds < 2.0
    one.train(300.0, 0.027, 0.9, 0.07, 0.2)
    assert one.monitor.seconds <= 0.01 * 300 + 0.1
    one.train(600.0, 0.027, 0.9, 0.07, 0.2)
    assert 0.008 * 600 < one.monitor.seconds <= 0.01 * 600 + 0.2
    assert 0.2 * len(one.expensive) > 0.2 * 0.07 * len(one.steps)  # of each kind a good share
    one.monitor.close()


def test_without_a_limit_measurements_are_always_on_the_cadence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Simulated(monkeypatch, tmp_path / "run", every=7, budget=None)
    one.train(150.0, 1.0, 1e3, 1e3, 1e3)
    assert one.steps == [1, 2, 4, *range(7, 151, 7)]
    assert one.expensive == [1, 70, 140]
    one.monitor.measure()  # one that was asked for changes nothing
    one.train(155.0, 1.0, 1e3, 1e3, 1e3)
    assert one.steps[-2:] == [150, 154]
    one.monitor.close()
    resumed = Simulated(monkeypatch, tmp_path / "run", every=7, budget=None, step=3)
    resumed.train(30.0, 1.0, 0.0, 0.0, 0.0)
    assert resumed.steps == [4, 7, 14, 21, 28]
    assert of_run(Run.open(tmp_path / "run"), "stable_rank", module="0")[0][:3] == [1, 2, 4]
