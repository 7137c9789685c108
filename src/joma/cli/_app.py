"""The command line as a whole: its commands in the order of the help."""

from typing import Annotated

import typer

from joma.cli._command import add_command
from joma.cli._demo import Demo
from joma.cli._errors import OneSentenceGroup
from joma.cli._generate import Generate
from joma.cli._memory import Memory
from joma.cli._pages import Laboratory, Report, Serve
from joma.cli._probe import Probe
from joma.cli._reproduce import Reproduce
from joma.cli._runs import app as runs
from joma.cli._series import app as series
from joma.cli._sparsify import app as sparsify
from joma.cli._superposition import Superposition
from joma.cli._train import Train
from joma.cli._verify import Verify

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

for _kind in (
    *(Train, Probe, Superposition, Generate, Memory, Report, Serve, Laboratory),
    *(Verify, Reproduce, Demo),
):
    add_command(app, _kind)
for _name, _group in (("runs", runs), ("series", series), ("sparsify", sparsify)):
    app.add_typer(_group, name=_name)


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
