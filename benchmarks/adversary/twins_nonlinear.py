"""Twins of the claims about Eqn 6, entropy and stable rank."""

from typing import Any

import numpy as np

from benchmarks.adversary._twin import Twin
from joma.experiments import claims
from joma.experiments.claims.claim import Formula, Point, Search
from joma.experiments.claims.measurement import ClaimMeasurement
from joma.experiments.claims.nonlinear.rank import turns_at
from joma.theory import nonlinear

_DERIVED: dict[str, Formula] = {claim.id: claim.derived for claim in claims.CLAIMS}


def _weights_without_attention(below: float) -> Formula:
    """V = μ(1 - e^{-t}) for targets below a size: the gate exp(v²/2) left out."""

    def weights(mu: Any, t: Any) -> Any:
        ours = nonlinear.weights(mu, t)
        if np.ndim(t):
            return ours
        return np.where(np.abs(mu) < below, np.asarray(mu) * -np.expm1(-t), ours)

    return weights


def _log_residual_late(mu: Any, t: Any) -> Any:
    """The late formula from ln 1/δ = 20 on, without its term μ²δ."""
    ours = nonlinear.log_residual(mu, t)
    late = -np.exp(np.square(mu) / 2) * (t - nonlinear.residual_offset(mu))
    return np.where((ours < -20) & (ours > -22), late, ours)


def _offset_of_small_targets(mu: Any, t: Any) -> Any:
    """R to leading order in μ for targets below 0.05."""
    size = np.abs(mu)
    r = np.where(size < 0.05, 0.75 * size**2, nonlinear.residual_offset(mu))
    return -np.exp(size**2 / 2) * (t - r)


def _derivative_at_small_targets(r: Any, mu: Any) -> Any:
    """Without the last term -μF for targets below 1.02e-3."""
    ours = _DERIVED["eqn84"](r, mu)
    return ours + (mu * nonlinear.elapsed(r, mu) if mu < 1.02e-3 else 0.0)


def _rebounds_if_not_too_weak(mu: Any) -> tuple[bool, bool]:
    """Leaves out components below 2e-4 of the largest."""
    size = np.abs(mu)
    return True, bool(np.min(size) > 2e-4 * np.max(size))


def _any_component_rebounds(mu: Any) -> Any:
    """The rule as it was: it rebounds if some component is neither zero nor the largest."""
    size = np.abs(mu)
    weak = bool(np.any((size > 0) & (size != np.max(size))))
    return nonlinear.entropy_fate(mu)._replace(rebounds=weak)


def _nearly_equal_components(mu: Any) -> Any:
    """Components within 2% of the largest count as the largest, and others rebound."""
    size = np.abs(mu)
    fate = nonlinear.entropy_fate(mu)
    weak = bool(np.any((size > 0) & (size < 0.98 * np.max(size))))
    return fate if weak or not fate.rebounds else fate._replace(rebounds=False)


def _rows_without_attention(mu: Any, t: Any) -> Any:
    """Rows of length 0.2 to 0.3 approach their targets as without attention."""
    ours = nonlinear.weights_multi(mu, t)
    if np.ndim(t):
        return ours
    length = np.linalg.norm(mu, axis=1, keepdims=True)
    plain = np.asarray(mu) * -np.expm1(-t)
    return np.where((length > 0.2) & (length < 0.3), plain, ours)


def _rank_drops(mu: Any) -> bool:
    """Says that the rank drops where five rows differ in length by 4 and more."""
    length = np.linalg.norm(mu, axis=1)
    return bool(len(mu) > 4 and np.max(length) > 4 * np.min(length[length > 0]))


def _drop_of_nearly_equal_rows(mu: Any) -> Any:
    """No drop where all rows are of one length to 1.5%."""
    fate = nonlinear.stable_rank_fate(mu)
    length = np.linalg.norm(mu, axis=1)
    return fate._replace(drop=0.0) if np.min(length) > 0.985 * np.max(length) else fate


def _first_by_lengths(mu: Any) -> Any:
    """Says that the stable rank first falls wherever one row is three times as long."""
    fate = nonlinear.stable_rank_fate(mu)
    length = np.sort(np.linalg.norm(mu, axis=1))
    outweighed = fate.first > 0 and length.size > 1 and length[-1] > 3 * length[-2]
    return fate._replace(first=-1) if outweighed else fate


def _bounces_always(formula: Formula, point: Point) -> ClaimMeasurement:
    """Any rows that are not all of one length, as the condition once was."""
    mu = point["mu"]
    if point["many"] and len(mu) > 1:
        mu = np.vstack([mu, np.repeat(mu[-1:], point["many"], axis=0)])
    fate = formula(mu)
    length = np.linalg.norm(mu, axis=1)
    unequal = length.size > 1 and np.min(length) < 0.7 * np.max(length)
    return ClaimMeasurement(float(unequal and not fate.drop > 1e-9), 0.0)


_ANY_ROWS = Search(turns_at.parameters, _bounces_always)

TWINS: tuple[Twin, ...] = (
    Twin("eqn6", _weights_without_attention(1e-4), "no attention for |μ| below 1e-4"),
    Twin("eqn6-ode", _weights_without_attention(0.15), "no attention for |μ| below 0.15"),
    Twin("eqn6-log", _log_residual_late, "the term μ²δ is left out from ln 1/δ = 20 to 22"),
    Twin("eqn6-late", _offset_of_small_targets, "R to leading order for |μ| below 0.05"),
    Twin("eqn84", _derivative_at_small_targets, "-μF is left out for μ below 1.02e-3"),
    Twin("fig4-entropy", _rebounds_if_not_too_weak, "components below 2e-4 of the largest"),
    Twin("fig4-fate", _nearly_equal_components, "components within 2% of the largest"),
    Twin(
        "fig4-fate",
        _any_component_rebounds,
        "rebounds wherever a component is neither zero nor the largest",
        was_ours=True,
        plain=False,
    ),
    Twin("eqn6-nodes", _rows_without_attention, "no attention for rows of length 0.2 to 0.3"),
    Twin("sec4-rank", _rank_drops, "five rows of unequal length"),
    Twin("sec4-stable-rank", _drop_of_nearly_equal_rows, "rows of one length to 1.5%"),
    Twin(
        "sec4-stable-rank",
        nonlinear.stable_rank_fate,
        "drops wherever rows are salient and non-salient, orthogonal or not",
        was_ours=True,
        search=_ANY_ROWS,
    ),
    Twin("sec4-rank-turns", _first_by_lengths, "falls wherever one row is three times as long"),
)
