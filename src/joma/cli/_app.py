"""The command line as a whole: every command with its help and example."""

from typing import Annotated

import typer

from joma.cli._demo import demo
from joma.cli._errors import OneSentenceGroup, PlainCommand
from joma.cli._generate import generate
from joma.cli._laboratory import laboratory
from joma.cli._memory import memory
from joma.cli._probe import probe
from joma.cli._report import report
from joma.cli._reproduce import reproduce
from joma.cli._runs import app as runs_app
from joma.cli._series import app as series_app
from joma.cli._serve import serve
from joma.cli._sparsify import app as sparsify_app
from joma.cli._superposition import superposition
from joma.cli._train import train
from joma.cli._verify import verify

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
for command, short_help, example in (
    (
        train,
        "Train a language model and watch it learn.",
        "train tiny --out first --set training.steps=100",
    ),
    (
        probe,
        "Measure a model, or a series of its checkpoints.",
        "probe EleutherAI/pythia-70m --revision step1000 --text book.txt",
    ),
    (
        superposition,
        "Find MLP nodes that answer to unrelated contexts.",
        "superposition EleutherAI/pythia-70m --text book.txt",
    ),
    (
        generate,
        "Continue a text with a smaller cache, and say what it costs.",
        "generate model.gguf --prompt 'Once upon a time' --cache heavy-hitter:heavy=64,recent=64",
    ),
    (
        memory,
        "Print what training a model takes of a GPU's memory.",
        "memory llama-7b --optimizer galore-adamw --bits 8 --per-layer --checkpointing",
    ),
    (
        report,
        "Write an HTML page of one or more runs.",
        "report runs/mine --out mine.html",
    ),
    (serve, "Show runs in the browser while they are written.", "serve runs --port 8765"),
    (
        laboratory,
        "Write a page with sliders for the theorems.",
        "laboratory --out laboratory.html --open",
    ),
    (verify, "Check every claim of the papers.", "verify --claim lemma8 --json"),
    (
        reproduce,
        "Make figures and tables of the papers again.",
        "reproduce fig4 --out fig4-again --seed 1",
    ),
    (demo, "Take the tour: about a minute, no data needed.", "demo --out tour"),
):
    app.command(cls=PlainCommand, short_help=short_help, epilog=f"Example: joma {example}")(command)
app.add_typer(runs_app, name="runs")
app.add_typer(series_app, name="series")
app.add_typer(sparsify_app, name="sparsify")


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
