"""When to look: on a cadence, and never for more than a share of the training's time."""

import math
from dataclasses import dataclass, field


@dataclass
class Cadence:
    """Steps at which one kind of look is due.

    Looks are due at multiples of `every`. After a look that took longer than its share of the time
    until the next one, that next one is put off until training has gone on long enough. The first
    look makes things ready for all and takes long, while what comes soon after it is worth seeing:
    it puts nothing off by itself, but is owed, and later looks wait up to twice as long until it is
    paid. From then on all looks together, the first among them, have taken their share at most.
    Looks made before they were due, by hand or beside another kind, are owed in the same way.

    Args:
        every: steps between looks.
        share: of the time, that looks may take; None for no limit.
        due: step of the next look.
    """

    every: int
    share: float | None
    due: int = 1
    _last: tuple[int, float] | None = field(default=None, repr=False)
    _owed: float = field(default=0.0, repr=False)

    def looked(self, step: int, seconds: float, trained: float) -> None:
        """Sets when the next look is due.

        Args:
            step: of the look just made.
            seconds: it took.
            trained: seconds of training until this look, looks left out.
        """
        last = self._last
        if last is not None and step < self.due:
            self._owed += seconds
            return
        self._last = (step, trained)
        self.due = (step // self.every + 1) * self.every
        if last is not None and self.share is not None:
            earned = self.share * (trained - last[1])
            self._owed = max(self._owed - earned, 0.0)
            wait = (seconds + min(self._owed, seconds)) * (step - last[0])
            if wait > self.every * earned > 0:
                self.due = math.ceil((step + wait / earned) / self.every) * self.every
        self._owed += seconds
