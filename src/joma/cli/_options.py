"""Options that several commands share."""

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


Seed = Annotated[
    int, typer.Option(metavar="N", parser=whole(0), help="Decides every random number.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Run folder to write; otherwise a new ./runs/NAME-DATE-TIME."),
]
