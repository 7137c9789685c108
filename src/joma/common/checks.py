"""Checks of single settings; each error names the setting, what it is, and what would be right."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from joma.errors import JomaError


def check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise JomaError for a name that is not known; the message lists the closest ones first.

    Args:
        what: What the names are of, in the singular.
        given: The names to check.
        known: All names there are.
    """
    for name in given:
        if name not in known:
            closest = sorted(
                known, key=lambda one: -difflib.SequenceMatcher(None, name, one).ratio()
            )
            raise JomaError(f"there is no {what} {name!r}; available: {', '.join(closest)}")


def check_whole(name: str, value: Any, least: int, *, below: float = math.inf) -> None:
    """Raise JomaError unless the value is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < below:
        raise JomaError(f"{name} must be a whole number from {least} on, got {value!r}")


def check_number(name: str, value: Any, *, below: float = math.inf) -> None:
    """Raise JomaError unless the value is a number from 0 on, below `below`."""
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not 0 <= value < below:
        end = "" if below == math.inf else f" up to {below:g}"
        raise JomaError(f"{name} must be a number from 0 on{end}, got {value!r}")


def check_one_of(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise JomaError unless the value is one of the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise JomaError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_text(name: str, value: Any) -> None:
    """Raise JomaError unless the value is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise JomaError(f"{name} must be a word, got {value!r}")


def check_truth(name: str, value: Any) -> None:
    """Raise JomaError unless the value is True or False."""
    if not isinstance(value, bool):
        raise JomaError(f"{name} must be true or false, got {value!r}")
