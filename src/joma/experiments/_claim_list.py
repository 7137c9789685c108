"""The texts of the claims, `claims/claims.toml`, read without importing what measures them.

The modules of `joma.experiments.claims` import SciPy and more, which takes seconds; a list of what
they claim should not.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple


class ListedClaim(NamedTuple):
    """What `joma verify --list` says of a claim.

    Attributes:
        id: What `joma verify --claim` takes.
        title: The statement in one line.
        source: Where it is printed; "new" when it is ours.
    """

    id: str
    title: str
    source: str


@cache
def catalogue() -> dict[str, Any]:
    """Return the topics by name, each with its heading and the texts of its claims by id."""
    path = Path(__file__).parent / "claims" / "claims.toml"
    return tomllib.loads(path.read_text("utf-8"))


@cache
def claim_texts() -> dict[str, dict[str, Any]]:
    """Return title, source, method and more of every claim by id, in the papers' order."""
    return {name: one for topic in catalogue().values() for name, one in topic["claims"].items()}


def list_claims() -> tuple[ListedClaim, ...]:
    """Return every claim in the order of `joma.experiments.claims.CLAIMS`."""
    return tuple(
        ListedClaim(name, one["title"], one["source"]) for name, one in claim_texts().items()
    )
