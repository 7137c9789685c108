"""Options that several commands share, and how their values are read."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from joma.errors import JomaError

LARGEST = 2**63 - 1
"""The largest whole number that an option takes: what torch and NumPy hold in 64 bits."""


def whole(least: int) -> Callable[[str | int], int]:
    """Return a parser of whole numbers from `least` on, whose error says what was given."""

    def parse(given: str | int) -> int:
        try:
            number = int(given)
        except ValueError:
            number = least - 1
        if number < least:
            raise typer.BadParameter(f"it must be a whole number from {least} on, not {given!r}.")
        if number > LARGEST:
            raise typer.BadParameter(f"it must be a whole number below 2**63, not {given!r}.")
        return number

    return parse


def positive(given: str | float) -> float:
    """Return a positive number; the error of another says what was given."""
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise typer.BadParameter(f"it must be a positive number, not {given!r}.")
    return number


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a parser of one of a few words."""

    def parse(given: str) -> str:
        if given not in choices:
            raise typer.BadParameter(f"it must be {', '.join(choices)}, not {given!r}.")
        return given

    return parse


def option(name: str, metavar: str, help: str, **more: Any) -> Any:
    """Return an option with its name written out: some versions of typer would take the metavar."""
    return typer.Option(name, metavar=metavar, help=help, **more)


def count(name: str, help: str, least: int = 1) -> Any:
    """Return an option that takes a whole number."""
    return option(name, "N", help, parser=whole(least))


Seed = Annotated[int, count("--seed", "Decides every random number.", 0)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Out = Annotated[
    Path | None,
    option("--out", "DIR", "Run folder to write; otherwise a new ./runs/NAME-DATE-TIME."),
]
Model = typer.Argument(
    metavar="MODEL", help="A model's folder, hub id, .gguf file or llama2.c checkpoint."
)
Tokenizer = Annotated[
    str | None,
    option(
        "--tokenizer",
        "PATH",
        "Another tokenizer than the model's; bytes takes every byte as a token.",
    ),
]
Text = Annotated[
    str,
    option(
        "--text",
        "TEXT",
        "What it reads: embedded (prose that comes with Python), wikitext-2, a file, "
        "or - for standard input.",
    ),
]


Dtype = Annotated[
    str,
    option(
        "--dtype",
        "DTYPE",
        "What the model computes in.",
        parser=one_of("float32", "float16", "bfloat16"),
    ),
]


def device_option(help: str) -> Any:
    """Return the option --device."""
    return option("--device", "DEVICE", help, parser=one_of("auto", "cpu", "cuda"))


Device = Annotated[
    str, device_option("Where it runs: cpu, cuda, or auto, which takes cuda if it is there.")
]


def note_idle(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Say of those of the options that were given that they change nothing.

    Args:
        context: of the command.
        names: of its arguments.
        why: they do not, as the end of a sentence.
    """
    given = [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(context.get_parameter_source(name), "name", None) == "COMMANDLINE"
    ]
    if given:
        options = " and ".join(filter(None, (", ".join(given[:-1]), given[-1])))
        verb = "has" if len(given) == 1 else "have"
        typer.echo(f"joma: {options} {verb} no effect {why}", err=True)


def chosen_device(asked: str) -> str:
    """Return the device that `--device` means on this machine."""
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and found == "cpu":
        raise JomaError("--device must be cpu or auto where torch sees no GPU, got 'cuda'")
    return found if asked == "auto" else asked
