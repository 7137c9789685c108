"""`joma report`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from joma.cli import _render
from joma.cli._command import Command, argument, count, json_flag, option
from joma.cli._progress import reports
from joma.cli._run_folder import writing_to
from joma.errors import JomaError

EXAMPLE = "report runs/mine --out mine.html"
NAME = "report.html"
_ALL_POINTS = 1_000_000
"""About the most points of all runs of a page together."""
_FEWEST_OF_A_RUN = 6_000


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write one HTML file with the findings, charts and tables of one or more runs.

    It opens in any browser without a network, and can be sent to others.
    """

    runs: list[Path] = argument("RUN", "One or more run folders.")
    out: Path | None = option(
        "FILE", "The file to write; otherwise RUN/report.html, or ./report.html for several runs."
    )
    reference: list[Path] | None = option(
        "CSV",
        "Recorded curves to draw next to the runs': columns step and either metric and value "
        "or one named after each metric; layer, seed and others tell curves apart.",
    )
    where: list[str] | None = option(
        "COLUMN=VALUE", "Only these rows of the reference; may be repeated."
    )
    points: int = count("The most points of a series; longer ones are thinned.", 2000, least=8)
    json: bool = json_flag()

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


def _conditions(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for words in given:
        name, equals, value = words.partition("=")
        if not equals or not name.strip():
            raise JomaError(f"--where must be COLUMN=VALUE, such as lr=0.001, got {words!r}")
        found[name.strip()] = value.strip()
    return found
