"""`joma report`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli import _show
from joma.cli._folders import writing_to
from joma.cli._options import Json, count, option
from joma.errors import JomaError

if TYPE_CHECKING:
    from joma.cli._progress import Report

NAME = "report.html"
_ALL_POINTS = 1_000_000
"""About the most points of all runs of a page together."""
_FEWEST_OF_A_RUN = 6_000


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="One or more run folders.")],
    out: Annotated[
        Path | None,
        option(
            "--out",
            "FILE",
            "The file to write; otherwise RUN/report.html, or ./report.html for several runs.",
        ),
    ] = None,
    reference: Annotated[
        list[Path] | None,
        option(
            "--reference",
            "CSV",
            "Recorded curves to draw next to the runs': columns step and either metric and value "
            "or one named after each metric; layer, seed and others tell curves apart.",
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        option("--where", "COLUMN=VALUE", "Only these rows of the reference; may be repeated."),
    ] = None,
    points: Annotated[
        int, count("--points", "The most points of a series; longer ones are thinned.", 8)
    ] = 2000,
    json: Json = False,
) -> None:
    """Write one HTML file with the findings, charts and tables of one or more runs.

    It opens in any browser without a network, and can be sent to others.
    """
    from joma.common.files import write_bytes
    from joma.report.html import page, read_reference

    began = monotonic()
    target = _target(runs, out)
    with _reports() as progress:
        payloads = _payloads(runs, points, progress)
        metrics = {
            series["metric"]
            for it in payloads
            for chart in it["charts"]
            for series in chart["series"]
        }
        chosen = _conditions(where or [])
        references = [read_reference(file, metrics, chosen) for file in reference or []]
        data = page(payloads, references=references).encode()
        with writing_to(target):
            write_bytes(target, data)
    if json:
        _show.as_json(
            {
                "out": str(target),
                "bytes": len(data),
                "seconds": round(monotonic() - began, 2),
                "runs": [
                    {
                        "path": it["path"],
                        "state": it["state"],
                        "reason": it["reason"],
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
            _show.say(f"{it['path']} is shown as damaged: {it['reason']}", err=True)
    _show.say(f"{target} ({_size(len(data))}): open it in a browser.")


def _payloads(runs: list[Path], points: int, progress: "Report") -> list[dict[str, Any]]:
    """Return the payload of each run; one of several that is damaged is shown as damaged."""
    from joma.report.html import damaged_payload, payload, run_titles
    from joma.runs import Run, is_damaged_run, is_run

    for path in runs:
        if not is_run(path) and not is_damaged_run(path):
            raise JomaError(f"{path} is not a run folder")
    budget = None if len(runs) == 1 else max(_FEWEST_OF_A_RUN, _ALL_POINTS // len(runs))
    found: list[dict[str, Any]] = []
    for number, path in enumerate(runs):
        progress(path.name, number, len(runs))
        try:
            made = payload(Run.open(path), most_points=points, budget=budget)
        except (JomaError, OSError) as error:
            if len(runs) == 1:
                raise
            made = damaged_payload(path, str(error))
        found.append(made)
    if all(it["state"] == "damaged" for it in found):
        raise JomaError(found[0]["reason"])
    for it, title in zip(found, run_titles(runs), strict=True):
        it["title"] = title
    return found


def _target(runs: list[Path], out: Path | None) -> Path:
    """Return the file to write; one that is something else than a report is refused."""
    from joma.report.html import is_report

    target = out or (runs[0] / NAME if len(runs) == 1 else Path(NAME))
    if target.is_dir():
        target = target / NAME
    if target.exists() and not (target.is_file() and is_report(target)):
        raise JomaError(
            f"--out {target} exists and is not a report of joma; remove it or name another file"
        )
    return target


def _conditions(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for words in given:
        name, equals, value = words.partition("=")
        if not equals or not name.strip():
            raise JomaError(f"--where must be COLUMN=VALUE, such as lr=0.001, got {words!r}")
        found[name.strip()] = value.strip()
    return found


@contextmanager
def _reports() -> Iterator["Report"]:
    from joma.cli._progress import reports

    with reports("report") as progress:
        yield progress


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
