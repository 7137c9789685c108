"""Checks of single arguments: each error names the argument, what was given, and what is right."""

import difflib
import math
import operator
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from joma.errors import JomaError


def whole_number(name: str, value: Any, least: int, *, below: int = 2**63) -> int:
    """Return an argument as an int; raise JomaError if it is no whole number in the range.

    Args:
        name: The argument's name.
        value: Its value, an integer of Python or NumPy; True and False are refused.
        least: The smallest number allowed.
        below: The smallest number that is too large.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise JomaError(f"{name} must be a whole number from {least} on, got {value!r}")
    if number >= below:
        limit = "2**63" if below == 2**63 else below
        raise JomaError(f"{name} must be a whole number below {limit}, got {value!r}")
    return number


def check_at_least(least: int, **values: float | None) -> None:
    """Raise JomaError for the first of some arguments, by name, that is too small; None passes."""
    for name, value in values.items():
        if value is not None and value < least:
            raise JomaError(f"{name} must be at least {least}, got {value}")


def check_one_of(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise JomaError where an argument is none of the choices."""
    if value not in choices:
        raise JomaError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


_CLOSEST = 5
"""How many of many names an error lists."""


def check_known(
    what: str, given: Iterable[str], known: Collection[str], list_command: str = ""
) -> None:
    """Raise JomaError for a name that is not known; the message lists the closest ones first.

    Args:
        what: What the names are of, in the singular.
        given: The names to check.
        known: All names there are.
        list_command: The command that lists them all; with it only the closest are named.
    """
    for name in given:
        if name in known:
            continue
        closest = sorted(known, key=partial(_unlike, name))
        if not list_command:
            raise JomaError(f"there is no {what} {name!r}; available: {', '.join(closest)}")
        raise JomaError(
            f"there is no {what} {name!r}; the closest are {', '.join(closest[:_CLOSEST])}; "
            f"`{list_command}` lists all"
        )


def _unlike(given: str, name: str) -> float:
    return -difflib.SequenceMatcher(None, given.lower(), name.lower()).ratio()


def check_number(name: str, value: Any, *, below: float = math.inf) -> None:
    """Raise JomaError unless the value is a number from 0 on, below `below`."""
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if not fits or not 0 <= value < below:
        end = "" if below == math.inf else f" up to {below:g}"
        raise JomaError(f"{name} must be a number from 0 on{end}, got {value!r}")


def check_text(name: str, value: Any) -> None:
    """Raise JomaError unless the value is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise JomaError(f"{name} must be a word, got {value!r}")


def check_truth(name: str, value: Any) -> None:
    """Raise JomaError unless the value is True or False."""
    if not isinstance(value, bool):
        raise JomaError(f"{name} must be true or false, got {value!r}")
