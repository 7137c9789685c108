"""The laboratory: a page on which sliders move the closed forms of the theory.

Its mathematics is `assets/dynamics.js`, which runs in the browser and agrees with `joma.theory`;
everything else in `assets` draws. The page is one file that loads nothing.
"""

import html
import json
import re
from functools import cache
from importlib import resources

from joma.report.html._page import content_policy

__all__ = ["page"]

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|let|function|class) (\w+))", re.MULTILINE)
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
    script = _bundled("laboratory.js")
    style = _asset("laboratory.css")
    agreement = json.loads(_asset("agreement.json"))
    policy = content_policy(script, style)
    texts = {
        "policy": f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        if standalone
        else "",
        "style": style,
        "script": script,
        "home": "" if home is None else f'<a class="home" href="{html.escape(home)}">Runs</a>\n',
        "points": f"{agreement['points']:,}",
        "largest": _power(agreement["largest"]),
    }
    text = _ERRATUM.sub(lambda match: _erratum(match, errata), _asset("laboratory.html"))
    return re.sub(r"\{\{(\w+)\}\}", lambda match: texts[match[1]], text)


@cache
def _asset(name: str) -> str:
    return (resources.files(__name__) / "assets" / name).read_text(encoding="utf-8")


def _erratum(match: re.Match[str], errata: str | None) -> str:
    anchor, title = match[1], html.escape(match[2])
    if errata is None:
        return f"(Erratum “{title}”.)"
    return f'(Erratum <a href="{html.escape(errata)}#{anchor}">“{title}”</a>.)'


def _power(number: float) -> str:
    digits, exponent = f"{number:.0e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if digits == "1" else f"{digits}·10{raised}"


def _bundled(entry: str) -> str:
    """Return one script with a module and all that it imports, each in its own scope.

    A page that is opened from a file cannot import others.
    """
    scopes: dict[str, str] = {}

    def add(name: str) -> None:
        if name in scopes:
            return
        source = _asset(name)
        needed: list[str] = []
        for names, module in _IMPORT.findall(source):
            add(module)
            needed.append(f"const {{{' '.join(names.split())}}} = {_scope(module)};\n")
        exported = ", ".join(match[1] for match in _EXPORT.finditer(source))
        body = _EXPORT.sub("", _IMPORT.sub("", source))
        body = f"{''.join(needed)}{body}return {{ {exported} }};"
        scopes[name] = f"const {_scope(name)} = (() => {{\n{body}\n}})();\n"

    add(entry)
    return "".join(scopes.values())


def _scope(module: str) -> str:
    return f"scope_{module.removesuffix('.js')}"
