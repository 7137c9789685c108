"""Saying once, in one sentence, that a loss or weight is not finite, and which one was first."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from joma.train.monitor._faults import LOG, Faults
from joma.train.monitor._finite import NAMED, FiniteWatch
from joma.train.monitor._processes import Processes
from joma.train.monitor._recorder import Recorder
from joma.train.monitor._row import Row

NOT_FINITE = "where numbers stop being finite"


class Alarm:
    """Watches losses and weights, and reports the first that is not finite.

    Args:
        processes: The processes that train the model.
        faults: Where failures are noted.
    """

    def __init__(self, processes: Processes, faults: Faults) -> None:
        self._processes, self._faults = processes, faults
        self._finite = FiniteWatch()
        self._begun: int | None = None
        self._quiet_until = 0

    @property
    def alarmed(self) -> bool:
        """Whether a loss or weight was seen that is not finite."""
        return self._finite.alarmed

    def is_quiet(self, step: int, loss: Tensor | float | None) -> bool:
        """Return whether `check` would do nothing now: the loss is on a GPU and no check is due.

        Args:
            step: The step.
            loss: Its loss.
        """
        return step < self._quiet_until and isinstance(loss, Tensor) and loss.is_cuda

    def check(
        self,
        model: nn.Module,
        step: int,
        loss: Tensor | float | None,
        report: Callable[[], object],
    ) -> None:
        """Check a step's loss, and the weights if there is time for it.

        Args:
            model: The model, after the step.
            step: The step.
            loss: Its loss. One on a GPU is not waited for.
            report: Called where the alarm is raised.
        """
        finite = self._finite
        if finite.located or self._faults.is_off(NOT_FINITE):
            return
        if isinstance(loss, Tensor) and loss.device.type == "cpu":
            loss = float(loss)
        if isinstance(loss, float):
            self.see_loss(step, loss)
        if finite.due or (finite.alarmed and not finite.reported):
            self._faults.tried(
                NOT_FINITE, lambda: finite.check(model, step, loss), effect="not located"
            )
        else:
            self._wait(step)
        if finite.alarmed and not finite.reported:
            report()

    def _wait(self, step: int) -> None:
        """Be quiet for half of the steps until the next check, by what a step has taken so far."""
        if self._begun is None:
            self._begun = step
        elif step > self._begun:
            a_step = self._finite.seconds / (step - self._begun)
            self._quiet_until = step + int(0.5 * self._finite.seconds_until_due / a_step)

    def share(self, model: nn.Module, step: int, report: Callable[[], object]) -> None:
        """Learn of weights that are not finite in the shards of other processes."""
        finite = self._finite
        if not self._processes.together:
            return
        self._faults.tried(NOT_FINITE, lambda: finite.check(model, step), effect="not located")
        if self._processes.any(self._faults.is_off(NOT_FINITE)):
            return
        finite.share(self._processes)
        if finite.alarmed and not finite.reported:
            report()

    def see_loss(self, step: int, loss: float) -> None:
        """Look at a loss that is known by now."""
        if not math.isfinite(loss) and self._finite.bad_loss is None:
            self._finite.bad_loss = (step, loss)
            self._finite.alarmed = True

    def report(self, model: nn.Module, step: int, recorder: Recorder) -> None:
        """Say once what is not finite, and since when."""
        finite = self._finite
        finite.reported = True
        with torch.no_grad():
            finite.scan_gradients(model)
        weights = finite.weights()
        sentence = finite.sentence(weights)
        if not self._processes.first or sentence is None:
            return
        LOG.warning(sentence)
        rows = [Row("not_finite", float(bad.step), bad.name, bad.layer) for bad in weights[:NAMED]]
        recorder.rows(step, rows)

    def sentence(self) -> str | None:
        """Return what is not finite in one sentence, None where everything is."""
        finite = self._finite
        return self._faults.tried(
            NOT_FINITE, lambda: finite.sentence(finite.weights()), effect="not located"
        )
