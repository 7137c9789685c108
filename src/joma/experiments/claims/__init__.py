"""Every claim of the papers; `claims.toml` has their texts, in the papers' order.

A topic is a module, or a package of modules where one would be long; each has `CLAIMS`. A module
holds, for each claim: the check `measure(formula, rng)` that `joma verify` runs; next to it the
search, a measure at one point with the domain that the adversary draws points from (`@over(...)`);
at the end the `claim` that puts them together. `reference` has the numerics that they compare with.

To add a claim, write its formula in `joma.theory` (the printed form, if wrong, in
`joma.theory.as_printed`), a measurement that does not use the formula, its texts in `claims.toml`,
and a `claim` in the `CLAIMS` of its module; then break it in `tests/experiments/broken_TOPIC.py`.
"""

from importlib import import_module

from joma.common.renamed import renamed
from joma.experiments._claim_list import catalogue
from joma.experiments.claims.claim import Claim, ClaimMeasurement, ClaimVerdict, check

TOPICS: dict[str, tuple[Claim, ...]] = {
    topic["heading"]: import_module(f"{__name__}.{name}").CLAIMS
    for name, topic in catalogue().items()
}
"""The claims under the headings that the overview picture gives them."""

CLAIMS: tuple[Claim, ...] = tuple(claim for topic in TOPICS.values() for claim in topic)

__all__ = ["CLAIMS", "TOPICS", "Claim", "ClaimMeasurement", "ClaimVerdict", "check"]

__getattr__ = renamed(__name__, {"Measurement": "ClaimMeasurement", "Verdict": "ClaimVerdict"})
