"""Curves in one line of text."""

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCKS, _LOST = "▁▂▃▄▅▆▇█", "×"
_ASCII, _ASCII_LOST = "_.-=+*#@", "x"


def sparkline(values: Any, width: int, scale: tuple[float, float] | None = None) -> str:
    """Return a curve as a line of blocks, the lowest for the least value.

    A column is the mean of the values it stands for, and × where none of them is finite. Terminals
    that have no blocks get characters of ASCII.

    Args:
        values: The numbers, in their order.
        width: Most columns; a shorter curve takes as many as it has numbers.
        scale: The values of the lowest and the highest block; otherwise the curve's own.
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0:
        return ""
    means = np.array([_mean(part) for part in np.array_split(numbers, min(width, numbers.size))])
    signs, lost = (_BLOCKS, _LOST) if _has_blocks() else (_ASCII, _ASCII_LOST)
    low, high = scale or scale_of([means])
    # Halves: the difference of two large numbers of opposite sign may not be finite.
    reach = high / 2 - low / 2
    with np.errstate(invalid="ignore"):
        share = (means / 2 - low / 2) / reach if reach > 0 else np.zeros_like(means)
        share = np.clip(share, 0.0, 1.0)
    return "".join(
        signs[min(int(at * len(signs)), len(signs) - 1)] if np.isfinite(mean) else lost
        for at, mean in zip(share, means, strict=True)
    )


def scale_of(several: Iterable[Any]) -> tuple[float, float]:
    """Return the least and the greatest finite value of curves."""
    numbers = np.concatenate([np.asarray(values, dtype=np.float64) for values in several])
    finite = numbers[np.isfinite(numbers)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _mean(part: NDArray[np.float64]) -> float:
    finite = part[np.isfinite(part)]
    return float(np.mean(finite)) if finite.size else float("nan")


def _has_blocks() -> bool:
    try:
        (_BLOCKS + _LOST).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
