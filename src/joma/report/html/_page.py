"""Pages of runs and lists of runs: each one file of template, style, script and data."""

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

ASSETS = Path(__file__).with_name("assets")
GENERATOR = '<meta name="generator" content="joma report">'
"""What marks a file as one of ours; it stands near the beginning."""


_COMMON = re.compile(r"monitor(-\d+)?")
"""Names that integrations give: the folder around one says which training it is."""
_PAGE_SCRIPT = sorted((ASSETS / "js").glob("*.js"))
_OF_WORST = ("severity", "sentence")
_PACKED_WORDS = ("name", "metric", "module", "kind")


def page(
    payloads: Sequence[dict[str, Any]],
    *,
    live: bool = False,
    title: str | None = None,
    references: Sequence[dict[str, Any]] = (),
    api: str = "api",
    home: str | None = None,
) -> str:
    """Return the HTML of one run or of several, complete in itself.

    Args:
        payloads: What `payload` returns of each run; at least one.
        live: Whether the page follows the runs: it listens to `API/events`, and fetches
            `API/runs/ID` whenever an event says that the run of this "id" changed.
        title: Heading of the page; otherwise the name of the run.
        references: Curves to draw next to the runs', as `read_reference` returns them.
        api: Where a live page finds events and payloads, relative to the page or absolute.
        home: Address of the list of runs, if the page should link to it.
    """
    assert payloads, "a page shows at least one run"
    first = payloads[0]
    heading = title or (first["title"] if len(payloads) == 1 else f"{len(payloads)} runs")
    data = {
        "live": live,
        "api": api,
        "references": list(references),
        "runs": [_packed(it) for it in payloads],
    }
    return _render(
        "page.html",
        script=_text("vendor/uPlot.iife.min.js") + "\n" + _own_script(*_PAGE_SCRIPT),
        style=_text("vendor/uPlot.min.css") + "\n" + _text("report.css"),
        live=live,
        title=heading,
        about=_about(payloads),
        home=home,
        lines=_lines(payloads),
        data=_json_in_html(data),
    )


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
    return _render(
        "index.html",
        script=_own_script(ASSETS / "js" / "10-base.js", ASSETS / "index.js"),
        style=_text("report.css"),
        live=live,
        title=title,
        links=[list(link) for link in links],
        data=_json_in_html({"live": live, "api": api, "runs": rows}),
    )


def index_row(summary: Any, identifier: str, title: str | None = None) -> dict[str, Any]:
    """Return what the list shows of a run, ready for JSON.

    Args:
        summary: A `joma.runs.RunSummary`.
        identifier: The run's identifier.
        title: What the run is called; otherwise by its folder alone.
    """
    loss, worst = summary.last_loss, summary.worst
    finite = loss is None or math.isfinite(loss)
    shown = {} if worst is None else {it: str(worst.get(it) or "") for it in _OF_WORST}
    return {
        "id": identifier,
        "href": f"runs/{quote(identifier, safe='/')}",
        "title": title or run_titles([summary.path])[0],
        "name": summary.name,
        "date": summary.date,
        "state": summary.state,
        "reason": summary.reason,
        "last_step": summary.last_step,
        "last_loss": loss if finite else None,
        "last_loss_text": None if loss is None or finite else not_finite_word(loss),
        "worst": shown or None,
    }


def run_titles(paths: Sequence[Path]) -> list[str]:
    """Return a title for each run folder: its name, after the folders above it where needed.

    >>> run_titles([Path("a/run"), Path("b/run"), Path("c"), Path("mine/monitor")])
    ['a/run', 'b/run', 'c', 'mine/monitor']

    Args:
        paths: The folders.
    """
    whole = [Path(os.path.abspath(path)).parts for path in paths]
    lengths = [2 if _COMMON.fullmatch(parts[-1]) else 1 for parts in whole]
    while True:
        titles = ["/".join(parts[-length:]) for parts, length in zip(whole, lengths, strict=True)]
        several = {title for title in titles if titles.count(title) > 1}
        longer = [
            length + (title in several and length < len(parts))
            for title, length, parts in zip(titles, lengths, whole, strict=True)
        ]
        if longer == lengths:
            return titles
        lengths = longer


def not_finite_word(value: float) -> str:
    """Return the word for a number that is not finite."""
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"


def is_report(path: Path) -> bool:
    """Return whether a file was written by `joma report`, by its first lines."""
    with open(path, "rb") as file:
        return GENERATOR.encode() in file.read(1024)


def content_policy(script: str, style: str, connect: str = "") -> str:
    """Return a Content-Security-Policy that allows this script and style and nothing else.

    Args:
        script: The page's own script, which must not contain "</script".
        style: Its style sheet.
        connect: What else the script may ask, such as "'self'" for the page's own server.
    """
    assert "</script" not in script.lower()
    assert "</style" not in style.lower()
    digests = [base64.b64encode(hashlib.sha256(it.encode()).digest()) for it in (script, style)]
    script_hash, style_hash = (f"'sha256-{digest.decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {script_hash}; style-src {style_hash}; img-src data:; "
        f"{f'connect-src {connect}; ' if connect else ''}base-uri 'none'; form-action 'none'"
    )


def _render(template: str, *, script: str, style: str, live: bool, data: Any, **words: Any) -> str:
    """Return a template with its style, script and data, and a policy that allows nothing else.

    Args:
        template: Name of the file in the assets.
        script: The script.
        style: The style sheet.
        live: Whether the page may ask its own server.
        data: JSON, as `_json_in_html` returns it.
        **words: What else the template shows; everything is escaped.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    own = {"script": script, "style": style, "data": data}
    own["policy"] = content_policy(script, style, "'self'" if live else "")
    return environment.get_template(template).render(
        **{name: Markup(text) for name, text in own.items()},
        **{name: _encodable(value) for name, value in words.items()},
    )


def _json_in_html(value: Any) -> str:
    """Return a value as JSON that can stand in a script element, whatever text is in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _packed(payload: dict[str, Any]) -> dict[str, Any]:
    """Return a payload with shared words and steps written once, as the page's script reads it."""
    words: dict[str, int] = {}
    grids: dict[tuple[int, ...], int] = {}

    def word(text: str | None) -> int | None:
        return None if text is None else words.setdefault(text, len(words))

    def row(series: dict[str, Any]) -> list[Any]:
        return [
            *(word(series[key]) for key in _PACKED_WORDS),
            series["layer"],
            series["head"],
            series["member"],
            word(series["role"]),
            grids.setdefault(tuple(series["steps"]), len(grids)),
            series["values"],
            series["marks"] or 0,
            series["total"] if series["thinned"] else None,
            series.get("bound"),
        ]

    drawn = [
        {
            **{k: v for k, v in chart.items() if k != "series"},
            "packed": list(map(row, chart["series"])),
        }
        for chart in payload["charts"]
    ]
    return {**payload, "charts": drawn, "words": list(words), "grids": list(map(list, grids))}


@cache
def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _own_script(*parts: Path) -> str:
    own = "".join(part.read_text(encoding="utf-8") for part in parts)
    return f'(() => {{\n"use strict";\n{own}}})();\n'


def _about(payloads: Sequence[dict[str, Any]]) -> str:
    if len(payloads) > 1:
        return "Compared by joma report."
    first = payloads[0]
    version = first["summary"].get("version")
    return f"{first['name'] or 'run'} in {first['path']}" + (f", joma {version}" if version else "")


def _lines(payloads: Sequence[dict[str, Any]]) -> list[str]:
    """Return the findings as lines, for browsers without JavaScript."""
    lines: list[str] = []
    for it in payloads:
        lines += [f"{it['title']}: {it['reason']}"] if it["state"] == "damaged" else []
        lines += [
            f"{it['title']}: {found['severity']}, step {found['step']}: {found.get('sentence')} "
            f"{found.get('advice') or ''}"
            for found in it["findings"]
        ]
    return lines or ["No findings."]


def _encodable(value: Any) -> Any:
    """Return text that can be encoded: a name in a file may hold half of a character."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return [_encodable(it) for it in value] if isinstance(value, list) else value
