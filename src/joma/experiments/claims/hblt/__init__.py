"""Hierarchical binary latent trees (Section 5, Appendix A.5): Theorem 5 and its limits."""

from joma.experiments.claims.claim import Claim
from joma.experiments.claims.hblt import cooccurrence, limits

CLAIMS: tuple[Claim, ...] = (*cooccurrence.CLAIMS, *limits.CLAIMS)
