"""Every claim of the papers; `claims.toml` has their texts, in the papers' order.

The modules of this package are found by scanning; each holds a topic. For each claim it has the
check `measure(formula, rng)` that `joma verify` runs, which `@claim(...)` registers. `reference`
has the numerics that they compare with.

To add a claim, write its formula in `joma.theory` (the printed form, if wrong, in
`joma.theory.as_printed`), a measurement that does not use the formula, under `@claim(...)`, and its
texts in `claims.toml`; then break it in `tests/experiments/broken.py`, and give its free parameters
to the search in `tests/adversary`.
"""

from importlib import import_module
from pkgutil import walk_packages

from joma.experiments._claim_list import catalogue
from joma.experiments.claims.claim import Claim, ClaimMeasurement, ClaimVerdict, check, registered

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)  # registers its claims

TOPICS: dict[str, tuple[Claim, ...]] = {
    topic["heading"]: tuple(map(registered, topic["claims"])) for topic in catalogue().values()
}
"""The claims under the headings that the overview picture gives them."""

CLAIMS: tuple[Claim, ...] = tuple(claim for topic in TOPICS.values() for claim in topic)

__all__ = ["CLAIMS", "TOPICS", "Claim", "ClaimMeasurement", "ClaimVerdict", "check"]
