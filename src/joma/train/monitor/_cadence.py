"""When to look: on a cadence, and never for more than a share of the training's time."""

import math
from dataclasses import dataclass, field

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
