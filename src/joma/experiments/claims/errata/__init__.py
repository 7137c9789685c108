"""What should be changed in print: the errata, and remarks where nothing needs to be changed.

An entry of `errata.toml` is one sentence or formula that would mislead a careful reader of that
place. Entries that follow from another one name it as their root, and counts are of roots. Remarks
that help a reader although nothing is wrong are clarifications; they are not counted.
"""

import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from joma.errors import JomaError
from joma.experiments.claims.errata import examples

PREPRINT, TALK, NOTE = "JoMA preprint", "talk", "CDAG draft note"

DOCUMENTS = (PREPRINT, TALK, NOTE)
"""The documents that were checked, in the order in which errata are listed."""


@dataclass(frozen=True)
class Erratum:
    """One place in print that should be changed.

    Attributes:
        id: Anchor of the entry on the errata page.
        title: The place and the slip in a few words.
        document: Document in which it stands, one of `DOCUMENTS`.
        place: Section and equation.
        printed: What is printed.
        corrected: What should be there.
        derivation: Why, in a few lines.
        consequence: What follows from the correction, and what does not.
        quantity: What the relative error is of, in a few words.
        example: The case in which the relative error is quoted.
        relative_error: Returns the error of the printed statement in that case.
        claims: Ids of the claims that measure it.
        root: Id of the erratum that it follows from; empty for a slip of its own.
    """

    id: str
    title: str
    document: str
    place: str
    printed: str
    corrected: str
    derivation: str
    consequence: str
    quantity: str
    example: str
    relative_error: Callable[[], float]
    claims: tuple[str, ...]
    root: str = ""

    def __post_init__(self) -> None:
        if self.document not in DOCUMENTS:
            raise JomaError(f"document must be one of {', '.join(DOCUMENTS)}, got {self.document}")


@dataclass(frozen=True)
class Clarification:
    """A condition, a reading or a slip of the pen that a careful reader sees through.

    Attributes:
        document: Document in which the place is.
        place: Section and equation.
        text: The remark.
        claims: Ids of the claims that measure it, if any.
    """

    document: str
    place: str
    text: str
    claims: tuple[str, ...] = ()


def _erratum(entry: dict[str, Any]) -> Erratum:
    example = getattr(examples, entry["relative_error"])
    return Erratum(**{**entry, "relative_error": example, "claims": tuple(entry["claims"])})


_TABLES = tomllib.loads(resources.files(__name__).joinpath("errata.toml").read_text("utf-8"))

ERRATA: tuple[Erratum, ...] = tuple(_erratum(entry) for entry in _TABLES["errata"])

CLARIFICATIONS: tuple[Clarification, ...] = tuple(
    Clarification(**{**entry, "claims": tuple(entry.get("claims", ()))})
    for entry in _TABLES["clarifications"]
)


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
