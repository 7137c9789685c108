"""Every claim of the papers, one file per topic; `TOPICS` lists them in the papers' order.

To add one, write its formula in `joma.theory` (the printed form, if wrong, in
`joma.theory.as_printed`), a measurement that does not use the formula, and a `Claim` in the list
of its file; then break it in `tests/experiments/broken_TOPIC.py`.
"""

from joma.experiments.claims import (
    cdag,
    clusters,
    critical,
    embeddings,
    galore,
    hblt,
    joint,
    linear,
    nonlinear,
    rates,
    scan_snap,
)
from joma.experiments.claims.claim import Claim, Measurement, Verdict, check

TOPICS: dict[str, tuple[Claim, ...]] = {
    "Joint dynamics and its invariants": joint.CLAIMS,
    "Embeddings and bias": embeddings.CLAIMS,
    "Linear activation": linear.CLAIMS,
    "Nonlinear activation: clusters": clusters.CLAIMS,
    "Nonlinear activation: critical points": critical.CLAIMS,
    "Nonlinear activation: attention": nonlinear.CLAIMS,
    "Nonlinear activation: rates": rates.CLAIMS,
    "Hierarchical latent tree": hblt.CLAIMS,
    "CDAG": cdag.CLAIMS,
    "Scan&Snap": scan_snap.CLAIMS,
    "GaLore": galore.CLAIMS,
}
"""The claims under the headings that the overview picture gives them."""

CLAIMS: tuple[Claim, ...] = tuple(claim for topic in TOPICS.values() for claim in topic)

__all__ = ["CLAIMS", "TOPICS", "Claim", "Measurement", "Verdict", "check"]
