"""Checks of single settings; each error names the entry, what it is, and what would be right."""

import difflib
import math
from collections.abc import Iterable
from typing import Any

from joma.errors import JomaError


def check_known(what: str, given: Iterable[str], known: list[str]) -> None:
    """Refuses names that are not known, naming those that are, the closest first."""
    for name in given:
        if name not in known:
            closest = sorted(
                known, key=lambda one: -difflib.SequenceMatcher(None, name, one).ratio()
            )
            raise JomaError(f"there is no {what} {name!r}; available: {', '.join(closest)}")


def check_whole(name: str, value: Any, least: int, *, below: float = math.inf) -> None:
    """Refuses what is no whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < below:
        raise JomaError(f"{name} must be a whole number from {least} on, got {value!r}")


def check_number(name: str, value: Any, *, below: float = math.inf) -> None:
    """Refuses what is no number from 0 on, below `below`."""
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not 0 <= value < below:
        end = "" if below == math.inf else f" up to {below:g}"
        raise JomaError(f"{name} must be a number from 0 on{end}, got {value!r}")


def check_one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses what is none of the choices."""
    if value not in choices:
        raise JomaError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_word(name: str, value: Any) -> None:
    """Refuses what is no text, or an empty one."""
    if not isinstance(value, str) or not value:
        raise JomaError(f"{name} must be a word, got {value!r}")


def check_truth(name: str, value: Any) -> None:
    """Refuses what is neither true nor false."""
    if not isinstance(value, bool):
        raise JomaError(f"{name} must be true or false, got {value!r}")
