"""When to look: on a cadence, and never for more than a share of the training's time."""

import math
from dataclasses import dataclass, field


@dataclass
class Cadence:
    """Steps at which one kind of look is due.

    Looks are due at multiples of `every`. After a look that took longer than its share of the time
    until the next one, that next one is put off until training has gone on long enough. The first
    look makes things ready for all and is not counted.

    Args:
        every: steps between looks.
        share: of the time, that looks may take; None for no limit.
        due: step of the next look.
    """

    every: int
    share: float | None
    due: int = 1
    _looks: int = field(default=0, repr=False)

    def looked(self, step: int, seconds: float, step_seconds: float) -> None:
        """Sets when the next look is due.

        Args:
            step: of the look just made.
            seconds: it took.
            step_seconds: that a step of training takes.
        """
        self._looks += 1
        wait = self.every
        if self.share and self._looks > 1 and step_seconds > 0:
            wait = max(wait, math.ceil(seconds / (self.share * step_seconds)))
        self.due = math.ceil((step + wait) / self.every) * self.every
        if wait == self.every:
            self.due = (step // self.every + 1) * self.every
