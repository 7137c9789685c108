"""What should be changed in print: the errata, and remarks where nothing needs to be changed.

An entry is one sentence or formula that would mislead a careful reader of that place. Entries that
follow from another one name it as their root, and counts are of roots. Remarks that help a reader
although nothing is wrong are `CLARIFICATIONS`; they are not counted.
"""

from collections.abc import Iterable, Sequence

from joma.experiments.claims.errata import examples
from joma.experiments.claims.errata.clarifications import CLARIFICATIONS, Clarification
from joma.experiments.claims.errata.entries import DOCUMENTS, ERRATA, NOTE, PREPRINT, TALK, Erratum


def find(ids: Iterable[str]) -> tuple[Erratum, ...]:
    """Return the errata with these ids, in the order of the list."""
    wanted = set(ids)
    return tuple(erratum for erratum in ERRATA if erratum.id in wanted)


def measured_by(claim: str) -> tuple[Erratum, ...]:
    """Return the errata that the claim with this id measures."""
    return tuple(erratum for erratum in ERRATA if claim in erratum.claims)


def group(errata: Iterable[Erratum]) -> dict[str, dict[str, list[Erratum]]]:
    """Return errata by document and, within it, by the id of their root."""
    grouped: dict[str, dict[str, list[Erratum]]] = {}
    for erratum in errata:
        root = erratum.root or erratum.id
        grouped.setdefault(erratum.document, {}).setdefault(root, []).append(erratum)
    return grouped


def count(document: str, errata: Sequence[Erratum]) -> str:
    """Return how many errata of a document there are and from how many slips, in words.

    Args:
        document: One of `DOCUMENTS`.
        errata: Those to be counted, of any document.
    """
    roots = group(errata).get(document, {})
    number = sum(map(len, roots.values()))
    words = f"{_plural(number, 'erratum', 'errata')} from {_plural(len(roots), 'slip', 'slips')}"
    elsewhere = [e.document for e in ERRATA if e.id in roots and e.document != document]
    if not elsewhere:
        return words
    repeated = f"repeated from the {', '.join(sorted(set(elsewhere)))}"
    if len(elsewhere) == len(roots):
        return f"{_plural(number, 'erratum', 'errata')}, {repeated}"
    return f"{words}, {len(elsewhere)} {repeated}"


def _plural(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


__all__ = [
    "CLARIFICATIONS",
    "DOCUMENTS",
    "ERRATA",
    "NOTE",
    "PREPRINT",
    "TALK",
    "Clarification",
    "Erratum",
    "count",
    "examples",
    "find",
    "group",
    "measured_by",
]
