"""The page: template, style, script and data in one file that loads nothing."""

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from joma.report.html._pack import packed

ASSETS = Path(__file__).with_name("assets")
GENERATOR = '<meta name="generator" content="joma report">'
"""What marks a file as one of ours; it stands near the beginning."""


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
        "runs": [packed(it) for it in payloads],
    }
    return render(
        "page.html",
        script=_script(),
        style=_style(),
        live=live,
        title=heading,
        about=_about(payloads),
        home=home,
        lines=_lines(payloads),
        data=json_in_html(data),
    )


def render(template: str, *, script: str, style: str, live: bool, data: Any, **words: Any) -> str:
    """Return a template with its style, script and data, and a policy that allows nothing else.

    Args:
        template: Name of the file in the assets.
        script: The script, which must not contain "</script".
        style: The style sheet.
        live: Whether the page may ask its own server.
        data: JSON, as `json_in_html` returns it.
        **words: What else the template shows; everything is escaped.
    """
    import jinja2
    from markupsafe import Markup

    assert "</script" not in script.lower()
    assert "</style" not in style.lower()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "img-src data:",
            f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(
        policy=Markup(policy),  # quotation marks inside; every word of it is ours
        script=Markup(script),
        style=Markup(style),
        data=Markup(data),
        **{name: _sound(value) for name, value in words.items()},
    )


def json_in_html(value: Any) -> str:
    """Return a value as JSON that can stand in a script element, whatever text is in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def is_report(path: Path) -> bool:
    """Return whether a file was written by `joma report`, by its first lines."""
    with open(path, "rb") as file:
        return GENERATOR.encode() in file.read(1024)


@cache
def _script() -> str:
    parts = [ASSETS / "vendor" / "uPlot.iife.min.js", *sorted((ASSETS / "js").glob("*.js"))]
    vendored, *own = (part.read_text(encoding="utf-8") for part in parts)
    return f'{vendored}\n(() => {{\n"use strict";\n{"".join(own)}}})();\n'


@cache
def _style() -> str:
    parts = (ASSETS / "vendor" / "uPlot.min.css", ASSETS / "report.css")
    return "\n".join(part.read_text(encoding="utf-8") for part in parts)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


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


def _sound(value: Any) -> Any:
    """Return text that can be encoded: a name in a file may hold half of a character."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return [_sound(it) for it in value] if isinstance(value, list) else value
