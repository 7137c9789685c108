"""Searches of what training a block conserves, and of embeddings."""

from typing import Any

import numpy as np

from joma.experiments.claims import embeddings, joint
from joma.experiments.claims.claim import ClaimMeasurement, Formula, Point, measured
from joma.experiments.claims.reference.block import (
    PHI,
    POINTWISE,
    Setting,
    draw_setting,
    law_derivative,
    law_sizes,
)
from tests.adversary.domains import Domain, Measure, choice, integer, over, real, seed, vector

PARAMETERS: dict[str, Domain] = {
    "tokens": integer(1, 8),
    "nodes": integer(1, 5),
    "queries": integer(1, 4),
    "samples": integer(1, 12),
    "weights": real(1e-3, 30.0, log=True),
    "logits": real(1e-3, 12.0, log=True),
    "absent": real(0.0, 0.9, special=(0.0,)),
    "eta_w": real(1e-3, 1e3, log=True, special=(1.0,)),
    "eta_z": real(1e-3, 1e3, log=True, special=(1.0,)),
    "tau": real(0.05, 20.0, log=True, special=(1.0,)),
    "activation": choice(*PHI),
    "drive": choice("gradient", "labels"),
    "draw": seed(),
}
"""Sizes, rates and data of any block; claims add an attention and embeddings, or fix some."""


def _over_blocks(claim: str, measure: Measure, *left_out: str, **added: Domain) -> None:
    kept = {name: one for name, one in PARAMETERS.items() if name not in left_out}
    over(claim, **{**kept, **added})(measure)


def _law(claim: str, *attentions: str, embeddings: str = "orthonormal", **given: Any) -> None:
    """Search for a block in which a law formula(block, v, z) moves; some values are given."""

    def measure(formula: Formula, point: Point) -> ClaimMeasurement:
        """How fast the quantity moves, in units of the sums that must cancel in it."""
        fixed = {name: it(point) if callable(it) else it for name, it in given.items()}
        setting = draw_setting(point, point["attention"], embeddings, **fixed)

        def law(at: Setting) -> Any:
            return formula(at.block, at.state.v[None], at.logits())

        derivative, h = law_derivative(law, setting)
        own = 1e-14 * np.ravel(np.abs(np.asarray(law(setting)))) / h
        whole = embeddings != "orthonormal" or point["attention"] == "softmax"
        return measured(np.abs(derivative) / (law_sizes(setting, h, whole=whole) + own), 1.0)

    _over_blocks(claim, measure, *given, attention=choice(*attentions))


_law("thm1-linear", "linear", queries=1, eta_z=lambda it: it["eta_w"])
_law("thm1-exp", "exp", queries=1, eta_z=lambda it: it["eta_w"] * it["tau"])
_law("thm1-rates", "linear", "exp", queries=1, tau=1.0)
_law("thm1-pointwise", *POINTWISE, queries=1)
_law("thm1-loss", *POINTWISE, drive="labels")
_law("thm1-queries", *POINTWISE)
_law("thm1-softmax-sum", "softmax", queries=1)
_law("thm1-embeddings", *POINTWISE, embeddings="apart")
_ATTENTIONS = choice(*POINTWISE, "softmax")
_over_blocks(
    "eqn2",
    joint.gradient_at,
    attention=_ATTENTIONS,
    embeddings=choice("orthonormal", "apart", "any"),
)
_over_blocks("assumption1-rate", joint.stationarity_at, "drive", attention=_ATTENTIONS)
_over_blocks("thm1-softmax-rate", joint.softmax_rate_at, "queries")
_over_blocks("sec7-drift", embeddings.drift_rate_at, attention=choice(*POINTWISE))
over(
    "thm1-softmax-condition",
    case=choice(0, 1, 2, 3),
    samples=integer(1, 12),
    tokens=integer(1, 8),
    draw=seed(),
)(joint.softmax_condition_at)
over("sec7-coherence", epsilon=real(0.01, 0.999, log=True), tokens=real(2.0, 1e60, log=True))(
    embeddings.coherence_at
)
over(
    "superposition",
    tokens=vector(real(1, 5), integer(1, 5)),
    size=real(0.0, 100.0, special=(0.0,)),
    draw=seed(),
)(embeddings.superposition_at)
