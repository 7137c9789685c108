"""When to measure: densely at first, then on a cadence, for a share of the training's time."""

import math
import time
from dataclasses import dataclass, field

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
class _Cost:
    """What one kind of measurement takes.

    Attributes:
        seconds: What all have taken.
        made: How many there were.
        usual: What one takes; the shorter of the last two, since one may be delayed.
        last: What the last one took, without the first.
    """

    seconds: float = 0.0
    made: int = 0
    usual: float = 0.0
    last: float = field(default=math.inf, repr=False)

    def add(self, seconds: float) -> None:
        """Count a measurement that took some seconds."""
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
        due: The steps at which the next measurement and the next expensive one are due.
        seconds: Total seconds spent measuring.
        limited: Whether measurements may be put off, so that when they come depends on clocks.
    """

    def __init__(self, every: int, expensive: int, share: float | None, step: int) -> None:
        self._every, self._expensive_every = every, expensive
        self._share, self._begun, self.limited = share or 0.0, step, share is not None
        later = (step // expensive + 1) * expensive
        self.due = [following(step, every), 1 if step == 0 else later]
        self._usual, self._expensive = _Cost(), _Cost()
        self.seconds = 0.0
        self._trained = self._standing = 0.0
        self._since: float | None = time.perf_counter()

    @property
    def trained(self) -> float:
        """Seconds of training up to now, measurements left out."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._trained + running

    def stop(self) -> None:
        """Stop the clock: the training has ended."""
        self._trained, self._since = self.trained, None

    def begin(self, now: float) -> None:
        """Begin a measurement."""
        self._trained += now - (now if self._since is None else self._since)
        self._since = now

    def charge(self, began: float) -> None:
        """Charge what took from `began` to now and was no measurement of its own."""
        took = time.perf_counter() - began
        self.seconds += took
        self._standing += took
        if self._since is not None:
            self._since += took

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
        self._since = time.perf_counter()
        self.seconds += self._since - began
        due, expensive_due = self.due
        on_time = step >= due or step <= 1
        if on_time:  # one that was asked for changes nothing
            due = following(step, self._every)
        if middle is not None and step >= expensive_due:
            expensive_due = (step // self._expensive_every + 1) * self._expensive_every
        if self.limited and step > self._begun and self._trained > 0:
            a_step = self._trained / (step - self._begun)
            if on_time:
                due = max(due, self._affordable(step, a_step))
            costs = self._expensive.seconds + self._expensive.usual
            wait = max(
                self._seconds_until(self._usual.usual + self._expensive.usual, 0.0),
                costs / (self._share / 2) - self._trained,
            )
            if self._trained + wait > EARLY_SECONDS:  # before, there is time for both
                put_off = _on(step + wait / a_step, self._expensive_every)
                expensive_due = max(expensive_due, put_off)
        self.due = [due, expensive_due]

    def _affordable(self, step: int, a_step: float) -> int:
        """Return the step from which the next usual measurement can be paid for."""
        usual = self._usual
        left = EARLY_SECONDS - self._trained
        room = self._share * EARLY_SECONDS - self.seconds - self._rate() * max(left, 0.0)
        several = max(room / max(usual.usual, 1e-9), EARLY + 1 - usual.made)
        if left > 0 and several >= 1:
            factor = ((step + left / a_step) / step) ** (1 / (several + 1)) if step else 1.0
            at = math.ceil(step * factor)
            return at if at < self._every else _on(at, self._every)
        half = self._share / 2 * self._trained - self._expensive.seconds
        reserve = min(max(half, 0.0), self._expensive.usual)
        wait = self._seconds_until(usual.usual, reserve)
        return _on(step + wait / a_step, self._every)

    def _seconds_until(self, cost: float, reserve: float) -> float:
        """Return for how long to train until the share pays for `cost` and what was spent."""
        debt = self.seconds + cost + reserve - self._share * self._trained
        return max(debt, 0.0) / max(self._share - self._rate(), 0.1 * self._share)

    def _rate(self) -> float:
        """Return what steps without a measurement take, as a share of the training's time."""
        return self._standing / max(self._trained, 1e-9)


def _on(step: float, every: int) -> int:
    """Return the multiple of `every` at a step or after it."""
    return math.ceil(step / every) * every
