"""What is sent: the pages of `joma.report` and their data, as bytes."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from joma.errors import JomaError
from joma.runs import Run
from joma.server._runs import ServedRun

_INLINE = re.compile(r"<(?P<kind>script|style)\b[^>]*>(?P<body>.*?)</(?P=kind)>", re.DOTALL)


def payload(run: ServedRun) -> bytes:
    """Return what the pages show of a run, as JSON; of a damaged one, that it is damaged."""
    from joma.report import html as report

    try:
        if run.summary.state == "damaged":
            raise JomaError(run.summary.reason)
        record = report.payload(Run.open(run.path))
    except (JomaError, OSError) as error:
        record = report.damaged_payload(run.path, str(error))
    return _json({**record, "id": run.id, "version": run.version})


def run_page(payloads: Sequence[bytes], home: str) -> bytes:
    """Return the page of one run, or of several next to each other.

    Args:
        payloads: What is shown of each.
        home: The address of the list of runs, relative to the page.
    """
    from joma.report.html import page, run_titles

    runs = [json.loads(it) for it in payloads]
    for run, title in zip(runs, run_titles([Path(run["path"]) for run in runs]), strict=True):
        run["title"] = title
    return page(runs, live=True, api=f"{home}api", home=home).encode("utf-8", "replace")


def run_list(runs: Sequence[ServedRun]) -> bytes:
    """Return the list of runs, as JSON: what the page shows, and what `joma runs list` prints."""
    from joma.report.html import index_row, run_titles

    titles = run_titles([run.path for run in runs])
    listed = [
        {**run.summary.as_json(), **index_row(run.summary, run.id, title)}
        for run, title in zip(runs, titles, strict=True)
    ]
    return _json({"runs": listed})


def list_page(runs: Sequence[ServedRun]) -> bytes:
    """Return the page with the list of runs."""
    from joma.report.html import index_page

    ids = {run.path: run.id for run in runs}
    links = [("laboratory", "Laboratory")]
    summaries = [run.summary for run in runs]
    page = index_page(summaries, identify=lambda it: ids[it.path], links=links)
    return page.encode("utf-8", "replace")


@cache
def laboratory_page() -> bytes:
    """Return the page of the laboratory."""
    from joma.report.laboratory import page

    return page(home="./").encode()


@cache
def run_policy() -> str:
    """Return the Content-Security-Policy of pages of runs."""
    from joma.report.html import damaged_payload

    return policy(run_page([_json(damaged_payload(Path("none"), ""))], "./"))


@cache
def list_policy() -> str:
    """Return the Content-Security-Policy of the list of runs."""
    return policy(list_page([]))


def policy(page: bytes) -> str:
    """Return the Content-Security-Policy that allows the scripts and styles of a page, no others.

    Args:
        page: A page without data of runs, so that nothing that a run holds can become a script.
    """
    allowed: dict[str, list[str]] = {"script": [], "style": []}
    for element in _INLINE.finditer(page.decode()):
        digest = hashlib.sha256(element["body"].encode()).digest()
        allowed[element["kind"]].append(f"'sha256-{base64.b64encode(digest).decode()}'")
    script, style = (" ".join(sorted(set(it))) or "'none'" for it in allowed.values())
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        f"connect-src 'self'; img-src data: blob:; script-src {script}; style-src {style}"
    )


def message_page(title: str, sentence: str, home: str) -> bytes:
    """Return a page with one sentence and a link to the list of runs.

    Args:
        title: Of the page.
        sentence: What there is to say.
        home: The address of the list of runs, relative to the page.
    """
    words = {"title": escape(title), "sentence": escape(sentence), "home": escape(home)}
    return _MESSAGE.format(**words).encode()


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


_MESSAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 15vh auto; padding: 1rem; }}
p {{ overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{sentence}</p>
<p><a href="{home}">All runs</a></p>
</body>
</html>
"""
