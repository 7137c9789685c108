"""The command line as a whole: its commands in the order of the help."""

import importlib
from typing import Annotated

import typer

from joma.cli._command import add_command
from joma.cli._errors import OneSentenceGroup

app = typer.Typer(
    name="joma",
    cls=OneSentenceGroup,
    help="How transformers learn: the claims and figures of JoMA, Scan&Snap and GaLore, and "
    "measurements of your own models.",
    epilog="Example: joma demo",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help doubles the time to answer
)

_COMMANDS = {
    "train": "Train a language model and watch it learn.",
    "probe": "Measure a model, or a series of its checkpoints.",
    "superposition": "Find MLP nodes that answer to unrelated contexts.",
    "generate": "Continue a text with a smaller cache, and say what it costs.",
    "memory": "Print what training a model takes of a GPU's memory.",
    "report": "Write an HTML page of one or more runs.",
    "serve": "Show runs in the browser while they are written.",
    "laboratory": "Write a page with sliders for the theorems.",
    "verify": "Check every claim of the papers.",
    "reproduce": "Make figures and tables of the papers again.",
    "demo": "Take the tour: about a minute, no data needed.",
}
"""Each in the module of its name, as the class of its name with an example."""

for _name, _help in _COMMANDS.items():
    _module = importlib.import_module(f"joma.cli._{_name}")
    add_command(app, getattr(_module, _name.capitalize()), _help, _module.EXAMPLE)
for _name in ("runs", "series", "sparsify"):
    app.add_typer(importlib.import_module(f"joma.cli._{_name}").app, name=_name)


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from joma import __version__

        typer.echo(f"joma {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
