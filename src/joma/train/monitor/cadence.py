"""When to measure: densely at first, then on a cadence, for a share of the training's time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

EARLY_SECONDS = 120.0
"""How long measurements may take more than their share, and then as much as of that time."""
EARLY = 3
"""Measurements after the first that are made in that time whatever they take."""
_FIRST_TO_USUAL = 0.1  # a guess of what the second takes, from the first, which makes things ready


def following(step: int, every: int) -> int:
    """Return the step after `step` on a cadence: powers of two up to `every`, then its multiples.

    Args:
        step: A step, 0 or later.
        every: Steps between measurements.
    """
    doubled = 1 << step.bit_length()
    return doubled if doubled < every else (step // every + 1) * every


@dataclass
class Kind:
    """What is known of one kind of measurement.

    Attributes:
        every: Steps between them.
        due: Step at which the next one is due.
        seconds: What they have taken.
        made: How many there were.
        last: What the last one took, without the first.
        usual: What one takes; the shorter of the last two, since one may be delayed.
    """

    every: int
    due: int
    seconds: float = 0.0
    made: int = 0
    usual: float = 0.0
    last: float = field(default=math.inf, repr=False)

    def add(self, seconds: float) -> None:
        """Count one that took so long."""
        self.seconds += seconds
        self.made += 1
        if self.made == 1:
            self.usual = _FIRST_TO_USUAL * seconds
            return
        self.usual, self.last = min(seconds, self.last), seconds


class Budget:
    """The time of a training, what measurements take of it, and when the next ones are due.

    Without a limit, measurements are due at the steps of `following`, expensive ones at the first
    step and at multiples of their own number. With one, all that the monitor does takes at most its
    share of the training's time, from two minutes of training on: measurements are put off until
    there is time to pay for them. In the first two minutes what they may take of two minutes is
    spread over powers of a factor, two where that suffices. A few are made in any case.

    Half of the share is left to expensive measurements.

    Args:
        every: Steps between measurements.
        expensive: Steps between those that also measure what is expensive.
        share: Share of the training's time that measurements may take, or None for no limit.
        step: Step at which the training begins.

    Attributes:
        seconds: Total seconds spent measuring.
    """

    def __init__(self, every: int, expensive: int, share: float | None, step: int) -> None:
        self._share, self._begun = share, step
        later = (step // expensive + 1) * expensive
        self._usual = Kind(every, following(step, every))
        self._expensive = Kind(expensive, 1 if step == 0 else later)
        self.seconds = 0.0
        self._trained = self._standing = 0.0
        self._since = perf_counter()
        self._ended = False

    @property
    def due(self) -> list[int]:
        """The steps at which the next measurement and the next expensive one are due."""
        return [self._usual.due, self._expensive.due]

    @due.setter
    def due(self, steps: Sequence[int]) -> None:
        self._usual.due, self._expensive.due = steps

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

    def aside(self, began: float) -> None:
        """Charge what took from `began` to now and was no measurement of its own."""
        took = perf_counter() - began
        self.seconds += took
        self._since += took
        self._standing += took

    def pay(self, step: int, began: float, middle: float | None, ended: float) -> None:
        """Charge a measurement, and set when the next one is due.

        Args:
            step: The step.
            began: When it began.
            middle: When its expensive part began, None where it had none.
            ended: When it ended.
        """
        self._usual.add((ended if middle is None else middle) - began)
        if middle is not None:
            self._expensive.add(ended - middle)
        self._since = perf_counter()
        self.seconds += self._since - began
        self._plan(step, with_expensive=middle is not None)

    def _plan(self, step: int, *, with_expensive: bool) -> None:
        """Set when the next measurements are due, after one at `step`."""
        usual, expensive = self._usual, self._expensive
        on_time = step >= usual.due or step <= 1
        if on_time:  # one that was asked for changes nothing
            usual.due = following(step, usual.every)
        if with_expensive and step >= expensive.due:
            expensive.due = (step // expensive.every + 1) * expensive.every
        made = step - self._begun
        if self._share is None or made < 1 or self._trained <= 0:
            return
        a_step = self._trained / made
        if on_time:
            usual.due = max(usual.due, self._affordable(step, a_step))
        both = usual.usual + expensive.usual
        wait = max(
            self._seconds_until(both, 0.0),
            (expensive.seconds + expensive.usual) / (self._share / 2) - self._trained,
        )
        if self._trained + wait > EARLY_SECONDS:  # before, there is time for both
            expensive.due = max(expensive.due, _on(step + wait / a_step, expensive.every))

    def _affordable(self, step: int, a_step: float) -> int:
        """Return the step from which the next usual measurement can be paid for."""
        share, usual = self._share or 0.0, self._usual
        left = EARLY_SECONDS - self._trained
        room = share * EARLY_SECONDS - self.seconds - self._rate() * max(left, 0.0)
        several = max(room / max(usual.usual, 1e-9), EARLY + 1 - usual.made)
        if left > 0 and several >= 1:
            factor = ((step + left / a_step) / step) ** (1 / (several + 1)) if step else 1.0
            at = math.ceil(step * factor)
            return at if at < usual.every else _on(at, usual.every)
        half = share / 2 * self._trained - self._expensive.seconds
        reserve = min(max(half, 0.0), self._expensive.usual)
        wait = self._seconds_until(usual.usual, reserve)
        return _on(step + wait / a_step, usual.every)

    def _seconds_until(self, cost: float, reserve: float) -> float:
        """Return for how long to train until the share pays for `cost` and what was spent."""
        share = self._share or 0.0
        debt = self.seconds + cost + reserve - share * self._trained
        return max(debt, 0.0) / max(share - self._rate(), 0.1 * share)

    def _rate(self) -> float:
        """Return what steps without a measurement take, as a share of the training's time."""
        return self._standing / max(self._trained, 1e-9)


def _on(step: float, every: int) -> int:
    """Return the multiple of `every` at a step or after it."""
    return math.ceil(step / every) * every
