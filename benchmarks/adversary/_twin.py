"""A wrong statement that passes plain verification."""

from dataclasses import dataclass

from joma.experiments.claims.claim import Claim, Formula, Search


@dataclass(frozen=True)
class Twin:
    """A formula that passes plain `joma verify` and is wrong on a part of its domain.

    Attributes:
        claim: Id of the claim whose twin it is.
        formula: Takes what the claim's formula takes.
        wrong: What is wrong with it, and where.
        was_ours: Whether this package once stated it; such a one may be wrong on a large part.
        search: In place of the claim's, where the statement needs another measure.
        plain: Whether it passes plain `joma verify`; False only for statements whose check has
            become stricter since they were made.
    """

    claim: str
    formula: Formula
    wrong: str
    was_ours: bool = False
    search: Search | None = None
    plain: bool = True

    def searched(self, claim: Claim) -> Search:
        """Return the domain in which it is attacked."""
        found = self.search or claim.search
        assert found is not None, f"{self.claim} has no free parameters"
        return found
