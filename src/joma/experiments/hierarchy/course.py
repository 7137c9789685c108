"""How the attention of one layer moved: what it took up first, what it let go, what followed.

All of it is said of a height's ratio against what the same untrained network had: random weights
have favourites too, and those are not learned. A change is that of the ratio's logarithm; it counts
where its mean over seeds is more than `SURE` standard errors from zero.
"""

from dataclasses import dataclass

import numpy as np

from joma.experiments.hierarchy.networks import HEIGHTS

MARK = np.log(1.1)
"""A height is taken up when its ratio is a tenth above that of the untrained network."""

SURE = 3.0
"""How many standard errors a change must have."""

APART = 2.0
"""How many standard errors must lie between two heights, or they move together."""


@dataclass(frozen=True, eq=False)
class LayerCurves:
    """One layer of a group while it learns.

    Attributes:
        steps: The steps of the measurements, the first 0.
        ratio: Share of the attention to other tokens that each height gets, over what evenly
            spread attention would give it, (heights, steps, seeds).
        shuffled: The same for the same attention with the tree under wrong leaves.
        entropy: Entropy of the attention, mean over queries, in nats, (steps, seeds).
    """

    steps: tuple[int, ...]
    ratio: np.ndarray
    shuffled: np.ndarray
    entropy: np.ndarray

    @property
    def change(self) -> np.ndarray:
        """Logarithm of the ratio over that of the same untrained network; shape as the ratio."""
        logarithm = np.log(self.ratio)
        return logarithm - logarithm[:, :1]


@dataclass(frozen=True)
class LayerCourse:
    """What happened in one layer.

    Attributes:
        first: The heights that were taken up first: at the first measurement at which one is above
            `MARK`, that one and all that are not `APART` from it; none if nothing was taken up.
        begun: The step of that measurement.
        taken_up: For each height, the first step at which it is above `MARK`; None if never.
        peak: The step at which the lowest of the first begins to fall back, by the most it does.
        trough: The step at which it has; the same step where it never falls.
        falls_back: Whether that is more than the error.
        followers: The heights above that one that rise between the two.
        dip: The step of the lowest entropy.
        bounces: Whether the entropy falls to it and rises again.
    """

    first: tuple[int, ...]
    begun: int | None
    taken_up: tuple[int | None, ...]
    peak: int | None
    trough: int | None
    falls_back: bool
    followers: tuple[int, ...]
    dip: int
    bounces: bool

    @property
    def low_first(self) -> bool:
        """Whether the tokens that co-occur most with the query came first, before all others."""
        return self.first == HEIGHTS[:1]


def course(curves: LayerCurves) -> LayerCourse:
    """Return what happened in a layer."""
    change, steps = curves.change, curves.steps
    up = (change.mean(-1) >= MARK) & _sure(change)
    taken_up = tuple(steps[int(own.argmax())] if own.any() else None for own in up)
    dip = int(curves.entropy.mean(-1).argmin())
    down, again = curves.entropy[dip] - curves.entropy[0], curves.entropy[-1] - curves.entropy[dip]
    bounces = bool(_sure(-down) and _sure(again))
    if not up.any():
        return LayerCourse((), None, taken_up, None, None, False, (), steps[dip], bounces)
    begun = int(up.any(0).argmax())
    now = change[:, begun]
    ahead = int(np.where(up[:, begun], now.mean(-1), -np.inf).argmax())
    together = ~_sure(now[ahead] - now, APART)
    first = tuple(h for h, with_it in zip(HEIGHTS, together, strict=True) if with_it)
    lowest = HEIGHTS.index(first[0])
    peak, trough = _largest_fall(change[lowest].mean(-1))
    later = change[:, trough] - change[:, peak]
    rises = _sure(later)
    return LayerCourse(
        first=first,
        begun=steps[begun],
        taken_up=taken_up,
        peak=steps[peak],
        trough=steps[trough],
        falls_back=bool(_sure(-later[lowest])),
        followers=tuple(h for h, own in zip(HEIGHTS, rises, strict=True) if own and h > first[0]),
        dip=steps[dip],
        bounces=bounces,
    )


def _largest_fall(curve: np.ndarray) -> tuple[int, int]:
    """Return from where to where a curve falls the most; twice the last place if it never falls."""
    highest = np.maximum.accumulate(curve)
    trough = int((highest - curve).argmax())
    if highest[trough] == curve[trough]:
        return len(curve) - 1, len(curve) - 1
    return int(curve[: trough + 1].argmax()), trough


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over seeds, the last axis."""
    return values.std(-1, ddof=1) / np.sqrt(values.shape[-1])


def _sure(values: np.ndarray, errors: float = SURE) -> np.ndarray:
    """Return where the mean over seeds is positive by more than that many standard errors."""
    return values.mean(-1) > errors * standard_error(values)
