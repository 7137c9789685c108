"""After how many steps the bound of a large matrix is computed on a GPU.

A bound takes as long as two to five steps of the iteration, and the answer must be waited for. So
a matrix is first checked where the last one of its shape was done: the weights of a model are
mostly alike. Where that was more than needed one half as far is tried, and where that was not
enough it is not tried again for some matrices.
"""

from joma.probes.spectrum._krylov import next_check

STOPS = (3, 4, 5, 6, 8, 10, 12, 15, 18, 22)
"""Applications of the Gram matrix after which bounds can be computed."""
_PATIENCE = 8
"""Matrices that are measured after a lower stop was not enough, until one is tried again."""


class Pace:
    """Where the matrices of one shape are checked: indices of `STOPS`."""

    def __init__(self) -> None:
        self._likely = 0
        self._wait = 0
        self._is_trial = False
        self._checks: list[tuple[int, float]] = []
        self._first = self._stop = 0
        self._restarted = False

    def begin(self) -> int:
        """Return where a new matrix is checked first."""
        self._checks, self._restarted = [], False
        self._first = self._stop = self._likely
        return self._stop

    def restart(self) -> int | None:
        """Return where to check first once more, from the start; None if that was done already."""
        if self._restarted or self._first == 0:
            return None
        self._checks, self._restarted, self._stop = [], True, 0
        return 0

    def next(self, share: float, tolerance: float) -> int | None:
        """Return where to check next, None where there is no further stop.

        Args:
            share: the bound at the last stop, as a share of the value; may be ∞.
            tolerance: wanted share.
        """
        if self._stop + 1 == len(STOPS):
            return None
        self._checks.append((STOPS[self._stop], share))
        wanted = next_check(self._checks, tolerance)
        later = range(self._stop + 1, len(STOPS) - 1)
        self._stop = next((stop for stop in later if STOPS[stop] >= wanted), len(STOPS) - 1)
        return self._stop

    def done(self, *, over: bool) -> None:
        """Note that the matrix was done at the last stop.

        Args:
            over: whether the bound was as small as it can be, so that less may have been enough.
        """
        if self._stop != self._first:
            self._likely = self._stop
            self._wait = _PATIENCE if self._is_trial else 0
            self._is_trial = False
            return
        self._is_trial = False
        if over and self._stop > 0:
            self._wait -= 1
            if self._wait <= 0:
                self._likely, self._is_trial = self._stop // 2, True
