"""When to look: on a cadence, and never for more than a share of the training's time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

_PATIENCE = 2
"""Of what all looks owe, how many times its own cost one of them waits for."""


@dataclass
class Cadence:
    """Steps at which one kind of look is due.

    Looks are due at multiples of `every`, but one that takes more than its share of the time since
    the one before is put off until training has gone on long enough to pay for it; what it will
    take is what the shorter of the last two took. The first makes things ready for all and takes
    long, while what comes soon after it is worth seeing: it puts nothing off by itself, but
    whatever looks of all kinds owe makes later ones wait, up to three times as long, until it is
    paid. From then on all together, the first among them, have taken their share at most, give or
    take half a look.

    Args:
        every: steps between looks.
        share: of the time, that looks of this kind may take; None for no limit.
        due: step of the next look.
    """

    every: int
    share: float | None
    due: int = 1
    _last: tuple[int, float, float] | None = field(default=None, repr=False)

    def looked(self, step: int, seconds: float, trained: float, owed: float) -> None:
        """Sets when the next look is due; one made before it was due changes nothing.

        Args:
            step: of the look just made.
            seconds: it took.
            trained: seconds of training until this look, looks left out.
            owed: seconds that looks of all kinds, this one among them, have taken beyond their
                share of `trained`; below 0 where they have taken less.
        """
        last = self._last
        if last is not None and step < self.due:
            return
        self._last = (step, trained, math.inf if last is None else seconds)
        self.due = (step // self.every + 1) * self.every
        if last is not None and self.share is not None:
            earned = self.share * (trained - last[1])
            usual = min(seconds, last[2])  # where one was held up, the next need not be
            wait = (usual + min(max(owed, 0.0), _PATIENCE * usual)) * (step - last[0])
            if wait > self.every * earned > 0:
                self.due = math.ceil((step + wait / earned) / self.every) * self.every


class Budget:
    """The time of a training, what measurements take of it, and when the next ones are due.

    Args:
        every: Steps between measurements.
        expensive: Steps between those that also measure what is expensive.
        share: Share of the training's time that measurements may take, or None for no limit.
        step: Step at which the training begins.

    Attributes:
        seconds: Total seconds spent measuring.
    """

    def __init__(self, every: int, expensive: int, share: float | None, step: int) -> None:
        self._share = share
        half = None if share is None else share / 2
        self._cadences = tuple(
            Cadence(apart, half, due=1 if step == 0 else (step // apart + 1) * apart)
            for apart in (every, expensive)
        )
        self.seconds = 0.0
        self._trained = self._aside = 0.0
        self._since = perf_counter()
        self._ended = False

    @property
    def due(self) -> list[int]:
        """The steps at which the next measurement and the next expensive one are due."""
        return [cadence.due for cadence in self._cadences]

    @due.setter
    def due(self, steps: Sequence[int]) -> None:
        for cadence, step in zip(self._cadences, steps, strict=True):
            cadence.due = step

    @property
    def limited(self) -> bool:
        """Whether measurements may be put off, so that when they come depends on clocks."""
        return self._share is not None

    @property
    def trained(self) -> float:
        """Seconds of training up to now, measurements left out."""
        return self._trained if self._ended else self._trained + perf_counter() - self._since

    def stop(self) -> None:
        """Stop the clock: the training has ended."""
        self._trained, self._ended = self.trained, True

    def begin(self, now: float) -> None:
        """Begin a measurement, or what else is not training."""
        self._trained += now - self._since

    def aside(self, began: float, *, expensive: bool = False) -> None:
        """Charge what took from `began` to now and was no measurement of its own.

        Args:
            began: When it began.
            expensive: Whether it belongs to the next expensive measurement.
        """
        took = perf_counter() - began
        self.seconds += took
        self._since += took
        if expensive:
            self._aside = took

    def pay(self, step: int, began: float, middle: float | None, ended: float) -> None:
        """Charge a measurement, and set when the next one is due.

        Args:
            step: The step.
            began: When it began.
            middle: When its expensive part began, None where it had none.
            ended: When it ended.
        """
        took = [ended - began]
        if middle is not None:
            took = [middle - began, ended - middle + self._aside]
        owed = self.seconds + ended - began - (self._share or 0.0) * self._trained
        for cadence, seconds in zip(self._cadences, took, strict=False):
            cadence.looked(step, seconds, self._trained, owed)
        self._since = perf_counter()
        self.seconds += self._since - began
