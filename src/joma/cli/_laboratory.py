"""`joma laboratory`."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from joma.cli import _show
from joma.cli._options import option
from joma.errors import JomaError


def laboratory(
    out: Annotated[Path, option("--out", "FILE", "HTML file to write.")] = Path("laboratory.html"),
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write the laboratory, one page on which sliders move the theorems' closed forms.

    It holds Theorems 1 to 3, Eqn 6 and the hierarchies of JoMA, each as a formula, as printed and
    as a simulation. The page needs no server and no network.
    """
    from joma.common.files import write_bytes
    from joma.report.laboratory import page

    if out.is_dir():
        raise JomaError(f"--out must name a file, got the folder {str(out)!r}")
    try:
        write_bytes(out, page().encode())
    except OSError as error:
        raise JomaError(f"--out must be a file that can be written: {error}") from error
    _show.say(f"{_show.printable(str(out))}: open it in a browser.")
    if show and not webbrowser.open(out.resolve().as_uri()):
        raise JomaError("--open must be left out where there is no browser; the page is written")
