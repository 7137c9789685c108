"""Ways to break a formula."""

from collections.abc import Callable
from typing import Any


def scaled_output(formula: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """The formula times a factor."""
    return lambda *args, **kwargs: factor * formula(*args, **kwargs)


def scaled_argument(formula: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """The formula with its first argument off by a factor."""
    return lambda first, *args, **kwargs: formula(factor * first, *args, **kwargs)
