"""Every claim of the papers; `TOPICS` lists them in the papers' order.

A topic is a module, or a package of modules where one would be long; each has `CLAIMS`. A module
holds, for each claim: the check `measure(formula, rng)` that `joma verify` runs; next to it the
search, a measure at one point with the domain that the adversary draws points from (`@over(...)`);
at the end the `Claim` with its texts. `reference` has the numerics that they compare with.

To add a claim, write its formula in `joma.theory` (the printed form, if wrong, in
`joma.theory.as_printed`), a measurement that does not use the formula, and a `Claim` in the
`CLAIMS` of its module, with literal id, title and source; then break it in
`tests/experiments/broken_TOPIC.py`.
"""

from joma.common.renamed import renamed
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
from joma.experiments.claims.claim import Claim, ClaimMeasurement, ClaimVerdict, check

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

__all__ = ["CLAIMS", "TOPICS", "Claim", "ClaimMeasurement", "ClaimVerdict", "check"]

__getattr__ = renamed(__name__, {"Measurement": "ClaimMeasurement", "Verdict": "ClaimVerdict"})
