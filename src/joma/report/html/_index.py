"""The list of runs, for a server that shows one page for each."""

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from urllib.parse import quote

from joma.report.html._page import ASSETS, json_in_html, render
from joma.report.html._titles import run_titles
from joma.report.html._words import UNRATED, not_finite_word


def index_page(
    summaries: Iterable[Any],
    live: bool = True,
    *,
    title: str = "Runs",
    api: str = "api",
    identify: Callable[[Any], str] = lambda summary: summary.path.name,
    links: Iterable[tuple[str, str]] = (),
) -> str:
    """Return the HTML of a list of runs, the newest first, complete in itself.

    Args:
        summaries: What `joma.runs.list_runs` returns.
        live: Whether the page listens to `API/events` and fetches `API/runs` when a run changed.
        title: Heading of the page.
        api: Where a live page finds events and the list, relative to the page or absolute.
        identify: Returns the identifier of a run, which its address `runs/ID` is made of.
        links: Further pages, such as the laboratory: address and name of each.
    """
    listed = list(summaries)
    titles = run_titles([summary.path for summary in listed])
    rows = [
        index_row(summary, identify(summary), name)
        for summary, name in zip(listed, titles, strict=True)
    ]
    return render(
        "index.html",
        script=_script(),
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        live=live,
        title=title,
        links=[list(link) for link in links],
        data=json_in_html({"live": live, "api": api, "runs": rows}),
    )


def index_row(summary: Any, identifier: str, title: str | None = None) -> dict[str, Any]:
    """Return what the list shows of a run, ready for JSON.

    Args:
        summary: A `joma.runs.RunSummary`.
        identifier: The run's identifier.
        title: What the run is called; otherwise by its folder alone.
    """
    worst = getattr(summary, "worst", None)
    loss: float | None = getattr(summary, "last_loss", None)
    finite = loss is None or math.isfinite(loss)
    return {
        "id": identifier,
        "href": f"runs/{quote(identifier, safe='/')}",
        "title": title or run_titles([summary.path])[0],
        "name": summary.name,
        "date": summary.date,
        "state": getattr(summary, "state", "unknown"),
        "reason": getattr(summary, "reason", None),
        "last_step": getattr(summary, "last_step", None),
        "last_loss": loss if finite else None,
        "last_loss_text": None if loss is None or finite else not_finite_word(loss),
        "worst": None
        if not worst
        else {
            "severity": str(worst.get("severity") or UNRATED),
            "sentence": str(worst.get("sentence") or ""),
        },
    }


@cache
def _script() -> str:
    parts = (ASSETS / "js" / "10-base.js", ASSETS / "index.js")
    own = "".join(part.read_text(encoding="utf-8") for part in parts)
    return f'(() => {{\n"use strict";\n{own}}})();\n'
