"""The monitor of a training, or nothing where it is off."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from joma.runs import Run
from joma.train.findings import Judgement
from joma.train.language._trainer import Trainer
from joma.train.monitor import Monitor

STATE = "monitor."
"""What the names of the monitor's tensors in a checkpoint begin with."""


class Watch:
    """What the loop asks of a monitor.

    Args:
        trainer: of the model that is watched.
        run: where to; None on other processes than the first.
        begun: the step it goes on from.
        state: what `state` gave at that step; empty on other processes than the first.

    Raises:
        ValueError: for settings that do not fit the model.
    """

    def __init__(
        self, trainer: Trainer, run: Run | None, begun: int, state: Mapping[str, NDArray[Any]]
    ) -> None:
        self.entropy: float | None = None
        """The mean attention entropy of the last look that saw it, in nats."""
        self._monitor: Monitor | None = None
        settings = trainer.config.monitor
        if not settings.off:
            self._monitor = Monitor(
                trainer.model,
                trainer.optimizer,
                every=settings.every,
                run=run,
                held=[{"input_ids": trainer.held(settings.windows)}],
                metrics=settings.metrics,
                theorem1=settings.theorem1,
                seed=trainer.config.training.seed,
                loggers=(self._hear,),
                budget=settings.budget or None,
                step=begun,
                stop_on=settings.stop_on or (),
            )
            if begun:
                tensors = {name: torch.from_numpy(array) for name, array in state.items()}
                self._monitor.load_state_dict(tensors)

    def begin(self) -> None:
        """Looks at what the model is before it learns."""
        if self._monitor is not None:
            self._monitor.begin()

    def close(self) -> None:
        """Writes what is left."""
        if self._monitor is not None:
            self._monitor.close()

    def step(self) -> bool:
        """Record an update, while the gradients that made it are there.

        Returns:
            Whether the training should stop; the same on all processes.
        """
        # The loop logs the loss, of all processes.
        return self._monitor is not None and self._monitor.step()

    @property
    def stop_reason(self) -> str | None:
        """Why the training should stop, None where it should not."""
        return None if self._monitor is None else self._monitor.stop_reason

    def judge_by(self, name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        """Let losses count for the findings that the loop writes to the run folder itself.

        Args:
            name: "loss" or "validation_loss".
            steps: Their steps.
            values: One for each step.
        """
        if self._monitor is not None:
            self._monitor._take(name, steps, values)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the monitor needs to be resumed, by name; all processes go through it."""
        if self._monitor is not None:
            for name, tensor in self._monitor.state_dict().items():
                yield f"{STATE}{name}", tensor

    @property
    def seconds(self) -> float:
        """That looks have taken."""
        return 0.0 if self._monitor is None else self._monitor.seconds

    def judgement(self) -> Judgement:
        """Return what was found, and what could not be judged."""
        return Judgement() if self._monitor is None else self._monitor.judgement

    def lines(self) -> tuple[str, ...]:
        """Return what was found in plain words, as the monitor's summary has it."""
        return () if self._monitor is None else tuple(self._monitor.summary().splitlines()[1:])

    def _hear(self, step: int, values: Mapping[str, float]) -> None:
        seen = [value for name, value in values.items() if name.startswith("attention_entropy/")]
        if seen:
            self.entropy = fmean(seen)
