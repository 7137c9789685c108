"""Writes docs/errata.md from the table of errata: `make errata`."""

import re
from pathlib import Path

from joma.experiments.claims import errata
from joma.experiments.claims.errata import CLARIFICATIONS, DOCUMENTS, ERRATA, Erratum
from plain_mathematics import mark

TARGET = Path(__file__).parent.parent / "docs" / "errata.md"

HEADINGS = {
    errata.PREPRINT: "JoMA preprint",
    errata.TALK: "The talk",
    errata.NOTE: "The CDAG draft note",
}

INTRODUCTION = """\
# Errata

This page is written by `make errata` from `joma.experiments.claims.errata`; the numbers in it are
computed. An entry stands here if a careful reader of that very place, in its context, would be
misled. Entries that follow from the same slip stand together, and counts are of slips. Remarks on
places where nothing needs to be changed are [clarifications](#clarifications) and are not counted.

What was checked:

| document | text at hand | errata |
|---|---|---|
{counts}

The text of JoMA is a preprint from before its publication at ICLR 2024. It is not arXiv v3, whose
abstract differs, and any of this may have been corrected since. It shows no page numbers, so places
are given by section and equation. The talk's slides and the CDAG note, an unpublished draft with
remarks of its author in the text, are not refereed publications; their entries stand apart from the
paper's.

What was not checked: the texts of the Scan&Snap and GaLore papers. Of both, only the talk's slides
were at hand.

`joma verify` measures every printed form next to the derived one:

```console
joma verify --claim thm2 --json
```
"""

TEXTS = {
    errata.PREPRINT: "main text and appendix; without a version number",
    errata.TALK: "slides on Scan&Snap, JoMA and GaLore",
    errata.NOTE: "“Multi-layer Analysis”, appended to the text of JoMA",
}


def percent(value: float) -> str:
    """Return a relative error in percent, with one more digit below 10%."""
    return f"{100 * value:.2g}%" if value < 0.1 else f"{100 * value:.0f}%"


def page() -> str:
    """Return the whole page."""
    counts = "\n".join(
        f"| {HEADINGS[document]} | {TEXTS[document]} | {errata.count(document, ERRATA)} |"
        for document in DOCUMENTS
    )
    parts = [INTRODUCTION.format(counts=counts)]
    for document, roots in errata.group(ERRATA).items():
        parts.append(f"## {HEADINGS[document]}\n")
        parts += [_entry(erratum) for members in roots.values() for erratum in members]
    parts.append(
        "## Clarifications\n\nConditions, readings and slips of the pen that a careful reader sees"
        " through. They are not errata and are not counted.\n"
    )
    for document in DOCUMENTS:
        parts.append(f"### {HEADINGS[document]}: clarifications\n\n{_clarifications(document)}\n")
    return "\n".join(parts)


def _entry(erratum: Erratum) -> str:
    roots = {other.id: other for other in ERRATA}
    size = f"{percent(erratum.relative_error())} ({erratum.quantity}; {erratum.example})"
    lines = [f"### {_escaped(erratum.title)} {{ #{erratum.id} }}", ""]
    if erratum.root:
        root = roots[erratum.root]
        lines += [f"Follows from [{_escaped(root.title)}](#{root.id}).", ""]
    texts = {
        "Place": erratum.place,
        "Printed": erratum.printed,
        "Corrected": erratum.corrected,
        "Derivation": erratum.derivation,
        "Consequence": erratum.consequence,
        "Relative error": size,
    }
    lines += [f"- **{name}:** {_sentence(text)}" for name, text in texts.items()]
    lines += [f"- **Measured by:** {_ids(erratum.claims)}.", ""]
    return "\n".join(lines)


def _clarifications(document: str) -> str:
    lines: list[str] = []
    for remark in CLARIFICATIONS:
        if remark.document == document:
            claims = f" ({_ids(remark.claims)})" if remark.claims else ""
            lines.append(f"- **{_escaped(remark.place)}.** {mark(remark.text)}{claims}")
    return "\n".join(lines)


def _ids(claims: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in claims)


def _sentence(text: str) -> str:
    """A text that ends with a full stop, its formulas as TeX."""
    return mark(text if text.endswith(".") else f"{text}.")


def _escaped(text: str) -> str:
    return re.sub(r"([_*|])", r"\\\1", text)


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
