"""`joma laboratory`."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path

from joma.cli import _render
from joma.cli._command import Command, flag, option
from joma.cli._run_folder import writing_to
from joma.errors import JomaError

EXAMPLE = "laboratory --out laboratory.html --open"


@dataclass(frozen=True, kw_only=True)
class Laboratory(Command):
    """Write the laboratory, one page on which sliders move the theorems' closed forms.

    It holds Theorems 1 to 3, Eqn 6 and the hierarchies of JoMA, each as a formula, as printed and
    as a simulation. The page needs no server and no network.
    """

    out: Path = option("FILE", "HTML file to write.", Path("laboratory.html"))
    show: bool = flag("Open the page in a browser.", name="--open")

    def run(self) -> None:
        """Write the page."""
        from joma.common.files import write_bytes
        from joma.report.laboratory import page

        if self.out.is_dir():
            raise JomaError(f"--out must name a file, got the folder {str(self.out)!r}")
        with writing_to(self.out):
            write_bytes(self.out, page().encode())
        _render.say(f"{self.out}: open it in a browser.")
        if self.show and not webbrowser.open(self.out.resolve().as_uri()):
            raise JomaError(
                "--open must be left out where there is no browser; the page is written"
            )
