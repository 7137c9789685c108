"""Every claim of the papers, one file per topic; `CLAIMS` lists them in the papers' order.

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
from joma.experiments.claims._claim import Claim, Measurement, Verdict, check

CLAIMS: tuple[Claim, ...] = (
    *joint.CLAIMS,
    *embeddings.CLAIMS,
    *linear.CLAIMS,
    *clusters.CLAIMS,
    *critical.CLAIMS,
    *nonlinear.CLAIMS,
    *rates.CLAIMS,
    *hblt.CLAIMS,
    *cdag.CLAIMS,
    *scan_snap.CLAIMS,
    *galore.CLAIMS,
)

__all__ = ["CLAIMS", "Claim", "Measurement", "Verdict", "check"]
