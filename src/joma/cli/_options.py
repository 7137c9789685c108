"""Options that several commands share, and how their values are read."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def whole(least: int) -> Callable[[str | int], int]:
    """A parser of whole numbers from `least` on, whose error says what was given."""

    def parse(given: str | int) -> int:
        try:
            number = int(given)
        except ValueError:
            number = least - 1
        if number < least:
            raise typer.BadParameter(f"it must be a whole number from {least} on, not {given!r}.")
        return number

    return parse


def positive(given: str | float) -> float:
    """A parser of positive numbers, whose error says what was given."""
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"it must be a positive number, not {given!r}.")
    return number


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser of one of a few words."""

    def parse(given: str) -> str:
        if given not in choices:
            raise typer.BadParameter(f"it must be {', '.join(choices)}, not {given!r}.")
        return given

    return parse


Seed = Annotated[
    int, typer.Option(metavar="N", parser=whole(0), help="Decides every random number.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Run folder to write; otherwise a new ./runs/NAME-DATE-TIME."),
]
