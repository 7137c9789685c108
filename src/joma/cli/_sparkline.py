"""Curves in one line of text each."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from joma.runs import Curve

_BLOCKS, _LOST = "▁▂▃▄▅▆▇█", "×"
_ASCII, _ASCII_LOST = "_.-=+*#@", "x"


def sparklines(curves: Sequence["Curve"], width: int) -> list[str]:
    """Return curves as lines of blocks, the lowest for the least value of all.

    Columns are stretches of steps of equal length, the same for all curves. A column is the mean of
    the values in it, × where none of them is finite, and the one before where there are none.
    Terminals that have no blocks get characters of ASCII.

    Args:
        curves: The curves.
        width: Most columns.
    """
    first = min(int(curve.steps[0]) for curve in curves)
    steps = max(int(curve.steps[-1]) for curve in curves) - first + 1
    columns = max(1, min(width, steps, max(len(curve.steps) for curve in curves)))
    low, high = _range([curve.values for curve in curves])
    # Halves: the difference of two large numbers of opposite sign may not be finite.
    reach = high / 2 - low / 2
    signs, lost = (_BLOCKS, _LOST) if _has_blocks() else (_ASCII, _ASCII_LOST)
    lines = []
    for curve in curves:
        places = ((curve.steps - first) * columns) // steps
        line = " " * int(places[0])
        sign = lost
        for place in range(int(places[0]), int(places[-1]) + 1):
            own = curve.values[places == place]
            if own.size:
                sign = _sign(own[np.isfinite(own)], low, reach, signs) or lost
            line += sign
        lines.append(line)
    return lines


def _sign(finite: Any, low: float, reach: float, signs: str) -> str:
    if not finite.size:
        return ""
    share = (float(np.mean(finite / 2)) - low / 2) / reach if reach > 0 else 0.0
    return signs[min(max(int(share * len(signs)), 0), len(signs) - 1)]


def _range(several: Sequence[Any]) -> tuple[float, float]:
    """Return the least and the greatest finite value."""
    numbers = np.concatenate(several)
    finite = numbers[np.isfinite(numbers)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _has_blocks() -> bool:
    try:
        (_BLOCKS + _LOST).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
