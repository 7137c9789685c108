"""Hook of mkdocs: TeX between dollar signs becomes MathML when the pages are built.

The pages then need neither a script nor a network to show an equation. `$…$` stands in a line,
`$$…$$` is displayed. Code is left alone.
"""

import re
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert

_CODE_OR_TEX = re.compile(
    r"(?P<fence>^(?P<indent> *)(?P<ticks>```+).*?^(?P=indent)(?P=ticks) *$)"
    r"|(?P<code>(?P<tick>`+)(?!`).+?(?<!`)(?P=tick)(?!`))"
    r"|\$\$(?P<displayed>.+?)\$\$"
    r"|(?<![\\$])\$(?!\s)(?P<inline>[^$\n]*(?:\n[^$\n]+)*?)(?<![\s\\])\$(?!\d)",
    flags=re.DOTALL | re.MULTILINE,
)
_LONG = 45
"""Characters of TeX from which on a formula in a line may be wider than a phone."""
_ROWS = ("math", "mrow", "mtd", "msqrt")
_SCRIPTS = ("msub", "msup", "msubsup", "munder")
_SIGNS = "\u2212+\u00b1\u2213"
_CLOSING = ")]}|\u2016\u27e9\u22a4\u2032\u2026"
_NORM = "\u2016"
_TIGHT = {"lspace": "0", "rspace": "0"}
_NAMES = re.compile(r"[A-Za-z][a-z]+")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace TeX by placeholders, so that Markdown does not read it."""
    found: list[str] = []

    def keep(match: re.Match[str]) -> str:
        if match["fence"] or match["code"]:
            return match[0]
        found.append(mathml(match["displayed"] or match["inline"], bool(match["displayed"])))
        return f"xMATHMLx{len(found) - 1}x"

    text = _CODE_OR_TEX.sub(keep, markdown)
    page.meta["mathml"] = found
    return text


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Put the equations where their placeholders are."""
    found = page.meta.get("mathml", [])

    def put(match: re.Match[str]) -> str:
        made = found[int(match["number"])]
        if not match["before"] + match["after"]:
            return made
        # A comma or a bracket stays on the line of the formula that it belongs to.
        return f'<span class="together">{match["before"]}{made}{match["after"]}</span>'

    return re.sub(r"(?P<before>\(?)xMATHMLx(?P<number>\d+)x(?P<after>[,.;:)]*)", put, html)


def mathml(tex: str, displayed: bool) -> str:
    """Return TeX as MathML, with the spacing and alignment that browsers do not infer.

    Args:
        tex: TeX without its dollar signs.
        displayed: Whether the equation stands on a line of its own.
    """
    made = convert(" ".join(tex.split()), display="block" if displayed else "inline")
    root = ElementTree.fromstring(made.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', ""))
    for element in list(root.iter()):
        _correct(element)
    for element in list(root.iter()):
        if element.tag in _ROWS:
            _space(element)
    made = ElementTree.tostring(root, encoding="unicode")
    if displayed:
        return f'<div class="equation">{made}</div>'
    return f'<span class="formula">{made}</span>' if len(tex) > _LONG else made


def _correct(element: Element) -> None:
    """Change what browsers without the old attributes of MathML draw wrongly."""
    if element.tag in ("mi", "mo") and _NAMES.fullmatch(element.text or ""):
        element.tag = "mi"
    if element.text == "\u221e":
        element.tag = "mi"
    if element.text == "~":
        element.tag, element.text = "mo", "\u223c"
    if element.attrib.pop("mathvariant", None) == "bold":
        element.set("style", "font-weight: bold")
    if (alignment := element.attrib.pop("columnalign", None)) is not None:
        element.set("class", alignment)
    if element.tag == "mover":
        element.set("accent", "true")
    if element.text == "\u00af":
        element.attrib.pop("stretchy", None)
    if element.text == _NORM and "form" not in element.attrib:
        element.attrib.update(_TIGHT, stretchy="false")
    if element.tag in ("msup", "msubsup") and element[-1].text == "\u2032":
        _put_prime_in_line(element)


def _put_prime_in_line(element: Element) -> None:
    """Put a prime next to its letter: the sign is raised already, and too small as a power."""
    letter, prime = element[0], element[-1]
    row = Element("mrow")
    row.extend([letter, Element("mo", _TIGHT)])
    row[1].text = prime.text
    if element.tag == "msup":
        element.tag = "mrow"
        element[:] = row[:]
    else:
        element.tag = "msub"
        element[:] = [row, element[1]]


def _space(row: Element) -> None:
    """Set signs, slashes, bars and names of functions of a row as TeX sets them."""
    children = list(row)
    spaced: list[Element] = []
    inside_bars = False
    for at, child in enumerate(children):
        before = next((c for c in reversed(children[:at]) if c.tag != "mspace"), None)
        after = children[at + 1] if at + 1 < len(children) else None
        bar = child[0] if child.tag in _SCRIPTS else child
        if child.tag == "mo" and child.text == "/":
            child.attrib.update(_TIGHT)
        elif child.tag == "mo" and (child.text or " ") in _SIGNS and _opens(before):
            child.set("form", "prefix")
        elif bar.tag == "mo" and bar.text == "|" and "form" not in bar.attrib:
            given = "stretchy" not in bar.attrib  # by \lvert and \rvert
            if inside_bars or given or _opens(before) or _is_name(before):
                inside_bars = not inside_bars
                bar.attrib.update(_TIGHT, stretchy="false")
                bar.set("form", "prefix" if inside_bars else "postfix")
        named = _is_name(child)
        if named and not _opens(before) and spaced[-1].tag != "mspace":
            spaced.append(_thin_space())
        spaced.append(child)
        if named and after is not None and after.tag != "mspace" and not _is_bracket(after):
            spaced.append(_thin_space())
    row[:] = spaced


def _opens(before: Element | None) -> bool:
    """Whether what follows an element begins a term."""
    if before is None:
        return True
    return before.tag == "mo" and (before.text or "") not in _CLOSING


def _is_name(element: Element | None) -> bool:
    """Whether an element is the name of a function, alone or with an index or power."""
    if element is None:
        return False
    if element.tag in _SCRIPTS:
        return _is_name(element[0])
    return element.tag == "mi" and bool(_NAMES.fullmatch(element.text or ""))


def _is_bracket(element: Element) -> bool:
    """Whether an element is a sign other than a bar, or begins with a bracket."""
    if element.tag == "mrow" and len(element):
        return bool(element[0].get("fence"))
    return element.tag == "mo" and element.text not in ("|", _NORM)


def _thin_space() -> Element:
    return Element("mspace", width="0.167em")
