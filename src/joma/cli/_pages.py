"""`joma report`, `joma serve` and `joma laboratory`: pages for the browser."""

import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import typer

from joma.cli import _command as cmd
from joma.cli import _render
from joma.cli._progress import reports
from joma.cli._run_folder import writing_to
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.server import Address

NAME = "report.html"
_ALL_POINTS = 1_000_000
"""About the most points of all runs of a page together."""
_FEWEST_OF_A_RUN = 6_000
_port = cmd.parsed(int, lambda number: 0 <= number <= 65535, "a whole number, at most 65535")


@dataclass(frozen=True, kw_only=True)
class Report(cmd.Command):
    """Write one HTML file with the findings, charts and tables of one or more runs.

    It opens in any browser without a network, and can be sent to others.
    """

    summary = "Write an HTML page of one or more runs."
    example = "report runs/mine --out mine.html"

    runs: list[Path] = cmd.argument("RUN", "One or more run folders.")
    out: Path | None = cmd.option(
        "FILE", "The file to write; otherwise RUN/report.html, or ./report.html for several runs."
    )
    reference: list[Path] | None = cmd.option(
        "CSV",
        "Recorded curves to draw next to the runs': columns step and either metric and value "
        "or one named after each metric; layer, seed and others tell curves apart.",
    )
    where: list[str] | None = cmd.option(
        "COLUMN=VALUE", "Only these rows of the reference; may be repeated."
    )
    points: int = cmd.count("The most points of a series; longer ones are thinned.", 2000, least=8)
    json: bool = cmd.json_flag()

    def run(self) -> None:
        """Write the page."""
        from joma.common.files import write_bytes
        from joma.report.html import page, read_reference

        began, target = monotonic(), self._target()
        with reports("report") as progress:
            payloads = self._payloads(progress)
            charts = [chart for it in payloads for chart in it["charts"]]
            metrics = {series["metric"] for chart in charts for series in chart["series"]}
            rows = _conditions(self.where or [])
            references = [read_reference(file, metrics, rows) for file in self.reference or []]
            data = page(payloads, references=references).encode()
            with writing_to(target):
                write_bytes(target, data)
        if self.json:
            _render.as_json(
                {
                    "out": str(target),
                    "bytes": len(data),
                    "seconds": round(monotonic() - began, 2),
                    "runs": [
                        {
                            **{name: it[name] for name in ("path", "state", "reason")},
                            "rows": it["summary"].get("rows"),
                            "findings": len(it["findings"]),
                        }
                        for it in payloads
                    ],
                }
            )
            return
        for it in payloads:
            if it["state"] == "damaged":
                _render.say(f"{it['path']} is shown as damaged: {it['reason']}", err=True)
        size = f"{len(data) / 1e6:.1f} MB" if len(data) >= 1e6 else f"{len(data) / 1e3:.0f} kB"
        _render.say(f"{target} ({size}): open it in a browser.")

    def _target(self) -> Path:
        """Return the file to write; one that is something else than a report is refused."""
        from joma.report.html import is_report

        target = self.out or (self.runs[0] / NAME if len(self.runs) == 1 else Path(NAME))
        if target.is_dir():
            target = target / NAME
        if target.exists() and not (target.is_file() and is_report(target)):
            raise JomaError(
                f"--out {target} exists and is not a report of joma; remove it or name another file"
            )
        return target

    def _payloads(self, progress: Any) -> list[dict[str, Any]]:
        """Return the payload of each run; one of several that is damaged is shown as damaged."""
        from joma.report.html import damaged_payload, payload, run_titles
        from joma.runs import Run, is_damaged_run, is_run

        for path in self.runs:
            if not is_run(path) and not is_damaged_run(path):
                raise JomaError(f"{path} is not a run folder")
        several = len(self.runs)
        budget = None if several == 1 else max(_FEWEST_OF_A_RUN, _ALL_POINTS // several)
        found: list[dict[str, Any]] = []
        for number, path in enumerate(self.runs):
            progress(path.name, number, several)
            try:
                made = payload(Run.open(path), most_points=self.points, budget=budget)
            except (JomaError, OSError) as error:
                if several == 1:
                    raise
                made = damaged_payload(path, str(error))
            found.append(made)
        if all(it["state"] == "damaged" for it in found):
            raise JomaError(found[0]["reason"])
        for it, title in zip(found, run_titles(self.runs), strict=True):
            it["title"] = title
        return found


@dataclass(frozen=True, kw_only=True)
class Serve(cmd.Command):
    """Show runs in the browser, also while they are being written, until Ctrl-C.

    The list of runs, the views of `joma report` and the laboratory. The server reads and never
    writes. From another computer: ssh -L 8765:127.0.0.1:8765 THIS-MACHINE.
    """

    summary = "Show runs in the browser while they are written."
    example = "serve runs --port 8765"

    runs: list[Path] | None = cmd.argument(
        "RUNS", "Run folders, or folders to search for runs; otherwise ./runs.", default=None
    )
    port: int | None = cmd.option("N", "Port; otherwise 8765, or the next free one.", parser=_port)
    host: str = cmd.option(
        "HOST", "Address to listen on; elsewhere than here, a token is asked.", "127.0.0.1"
    )
    allow_host: list[str] | None = cmd.option(
        "NAME", "A further name that browsers may reach it by."
    )
    token: bool = cmd.flag("Ask for a token here too: others use this machine.")
    open_: bool = cmd.flag("Open a browser.", name="--open")

    def run(self) -> None:
        """Serve until Ctrl-C."""
        folders = self.runs or [Path("runs")]
        for folder in folders:
            if not folder.is_dir():
                what = "is not a folder" if folder.exists() else "does not exist"
                hint = "" if self.runs else "; give the folder of your runs"
                raise JomaError(f"RUNS {folder} {what}{hint}")
        for name in self.allow_host or ():
            if not name or any(sign in name for sign in "/@*?#: "):
                raise JomaError(
                    f"--allow-host must be a name without scheme, port or path, got {name!r}"
                )
        from joma.common.signals import raising_on_sigterm
        from joma.server import RunServer

        def report(address: "Address") -> None:
            where = ", ".join(str(folder) for folder in folders)
            # In one line, however long: scripts read the address from it.
            typer.echo(_render.printable(f"Serving {where} at {address.url}"))
            _render.say("Ctrl-C ends it.")
            if self.open_:
                webbrowser.open(address.url)

        server = RunServer(
            folders,
            host=self.host,
            port=self.port,
            allowed_hosts=self.allow_host or (),
            ask_token=self.token,
            on_start=report,
        )
        try:
            with raising_on_sigterm():
                server.run()
        except KeyboardInterrupt as error:
            if type(error) is not KeyboardInterrupt:
                raise  # SIGTERM
            _render.say("Stopped.")


@dataclass(frozen=True, kw_only=True)
class Laboratory(cmd.Command):
    """Write the laboratory, one page on which sliders move the theorems' closed forms.

    It holds Theorems 1 to 3, Eqn 6 and the hierarchies of JoMA, each as a formula, as printed and
    as a simulation. The page needs no server and no network.
    """

    summary = "Write a page with sliders for the theorems."
    example = "laboratory --out laboratory.html --open"

    out: Path = cmd.option("FILE", "HTML file to write.", Path("laboratory.html"))
    show: bool = cmd.flag("Open the page in a browser.", name="--open")

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


def _conditions(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for words in given:
        name, equals, value = words.partition("=")
        if not equals or not name.strip():
            raise JomaError(f"--where must be COLUMN=VALUE, such as lr=0.001, got {words!r}")
        found[name.strip()] = value.strip()
    return found
