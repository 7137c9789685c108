"""The laboratory: a page on which sliders move the closed forms of the theory.

Its mathematics is `assets/dynamics.js`, which runs in the browser and agrees with `joma.theory`;
everything else in `assets` draws. The page is one file that loads nothing.
"""

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib import resources

from joma.report.laboratory._bundle import bundle

__all__ = ["page"]

_ERRATUM = re.compile(r"\{\{erratum:([\w-]+):([^}]*)\}\}")


def page(*, standalone: bool = True, home: str | None = None, errata: str | None = None) -> str:
    """Return the laboratory as one self-contained HTML page.

    Args:
        standalone: Whether the page carries its own Content-Security-Policy, which forbids every
            request. A server that sends such a policy in its headers passes False; it must allow
            the page's inline script and style.
        home: Address of a page to link back to, such as a list of runs; None for no link.
        errata: Address of the page of errata, to which the laboratory then links; None to name the
            entries only.
    """
    script = bundle("laboratory.js", _asset)
    style = _asset("laboratory.css")
    agreement = json.loads(_asset("agreement.json"))
    parts = {
        "policy": _policy(script, style) if standalone else "",
        "style": style,
        "script": script,
        "home": "" if home is None else f'<a class="home" href="{html.escape(home)}">Runs</a>\n',
        "points": f"{agreement['points']:,}",
        "largest": _power(agreement["largest"]),
    }
    text = _ERRATUM.sub(lambda match: _erratum(match, errata), _asset("laboratory.html"))
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], text)


@cache
def _asset(name: str) -> str:
    return (resources.files(__name__) / "assets" / name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """Return the element that forbids every request and every script but the page's own."""
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _erratum(match: re.Match[str], errata: str | None) -> str:
    anchor, title = match[1], html.escape(match[2])
    if errata is None:
        return f"(Erratum “{title}”.)"
    return f'(Erratum <a href="{html.escape(errata)}#{anchor}">“{title}”</a>.)'


def _power(number: float) -> str:
    digits, exponent = f"{number:.0e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if digits == "1" else f"{digits}·10{raised}"
