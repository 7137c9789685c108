"""Twins of the claims of linear dynamics."""

from typing import Any

import numpy as np

from benchmarks.adversary._twin import Twin
from joma.experiments import claims
from joma.experiments.claims.claim import Formula, Point, Search
from joma.experiments.claims.linear.many_nodes import RANKS_WITH_TIES
from joma.experiments.claims.measurement import ClaimMeasurement
from joma.experiments.claims.search import Integer, Real, Vector
from joma.theory import linear, spectra
from joma.theory.block import Block, Samples, simulate

_DERIVED: dict[str, Formula] = {claim.id: claim.derived for claim in claims.CLAIMS}


def _block_without_offset(
    delta: Any, t: Any, v0: Any, z0: Any, normalizer: float, **rates: float
) -> Any:
    """Takes c = z₀/τ without -v₀²/2 where the start is small in its own unit."""
    start = np.asarray(v0) / linear.unit_rates(delta, **rates).scale
    small = np.abs(start) < 0.01
    return _DERIVED["eqn3"](
        delta, t, v0, z0 + rates["tau"] * np.where(small, start**2 / 2, 0), normalizer, **rates
    )


def _ratio_of_series(terms: int) -> Formula:
    """Erf by the first terms of its series."""

    def ratio(delta: Any, v: Any) -> Any:
        x, power, total = v / np.sqrt(2), v / np.sqrt(2), 0.0
        for n in range(terms):
            total = total + power / (2 * n + 1)
            power = -power * x**2 / (n + 1)
        return 2 / np.sqrt(np.pi) * total / delta

    return ratio


def _closed_form_in_float64(delta: Any, t: Any, **given: Any) -> Any:
    """√2 erfinv(erf + way) without long double, where the start is far behind."""
    ours = linear.weights(delta, t, **given)
    if given["initial"] * np.sign(delta[0]) > -20:
        return ours
    way = np.sqrt(2 / np.pi) * np.exp(given["log_offset"]) * t / given["normalizer"]
    from scipy.special import erf, erfinv

    start = given["initial"] / np.sqrt(2)
    return np.sqrt(2) * erfinv(erf(start) + np.asarray(delta) * way)


def _time_of_tail(
    delta: Any, *, initial: Any = 0.0, log_offset: Any = 0.0, normalizer: Any = 1.0
) -> Any:
    """The leading term of erfc's tail from 39.8 on: e^{-u²/2}/u."""
    time = linear.blowup_time(delta, initial=initial, log_offset=log_offset, normalizer=normalizer)
    u = np.sign(delta) * initial
    return np.where(u > 39.8, time * (1 + 1 / np.maximum(u, 1) ** 2), time)


def _winner_of_positive(delta: Any, *, initial: Any) -> Any:
    """Compares sizes to three digits."""
    del initial
    return np.argmax(np.round(np.abs(delta) / np.max(np.abs(delta)), 3))


def _winner_by_float64(delta: Any, **given: Any) -> Any:
    """Compares times in float64, which are all 0 or all infinite where c is large."""
    return np.argmin(linear.blowup_time(delta, **given), axis=-1)


def _winner_to_three_digits(delta: Any, **given: Any) -> Any:
    """Compares the first three digits of own times."""
    times = linear.blowup_time(delta, **given)
    if not np.all((times > 1e-300) & (times < 1e300)):
        return linear.winner(delta, **given)
    return np.argmin(np.round(np.log(times / np.min(times)), 3))


def _limit_of_slow_tokens(delta: Any, *, initial: Any = 0.0, **given: Any) -> Any:
    """Leaves tokens that start ahead and have 1e-12 of their own time at their start."""
    ends = linear.limit(delta, initial=initial, **given)
    times = linear.blowup_time(delta, initial=initial, **given)
    first = np.min(times)
    slow = (first > 0) & (first < 1e-12 * times) & (np.sign(delta) * initial >= 0)
    return np.where(slow, initial, ends)


def _rare_tokens(g: Any, x: Any) -> Any:
    """Counts a token that is rarer than 1e-4 as that frequent."""
    posterior = x / np.maximum(x.sum(axis=0), 1e-4)
    return (g @ posterior) * x.mean(axis=0)


def _gate_up_to(largest: float) -> Formula:
    """exp(‖v‖²/2) up to a largest exponent, for four nodes and more."""

    def velocity(v: Any, delta: Any) -> Any:
        if v.shape[1] < 4:
            return _DERIVED["talk-matrix"](v, delta)
        return np.exp(np.minimum(np.sum(v**2, axis=1, keepdims=True) / 2, largest)) * delta

    return velocity


def _rows_by_component(delta: Any, t: Any) -> Any:
    """Lets very unequal components of a row follow Theorem 2 each on its own."""
    ours = linear.weights_multi(delta, t)
    if np.ndim(t):
        return ours
    size = np.abs(delta)
    ordered = np.sort(np.pad(size, ((0, 0), (1, 0))), axis=1)
    unequal = ordered[:, -1:] > 1e4 * ordered[:, -2:-1]
    return np.where(unequal, linear.weights(delta, t, beyond="inf"), ours)


def _rank_falls(delta: Any) -> bool:
    """Says that V loses rank where six rows are of very unequal length."""
    length = np.linalg.norm(delta, axis=1)
    return bool(len(delta) > 1 and np.max(length) > 5.0 * np.min(length) and len(delta) > 5)


def _always_one(delta: Any) -> float:
    return 1.0


def _limit_of_near_ties(delta: Any) -> float:
    """Counts rows as equally long whose lengths agree to 1e-9."""
    length = np.linalg.norm(delta, axis=1)
    return float(spectra.stable_rank(delta[length >= np.max(length) * (1 - 1e-9)]))


def _ranks_in_float64(delta: Any, t: Any) -> Any:
    """Takes V from lengths in float64, whose digits run out near the end."""
    from scipy.special import erfinv

    length = np.linalg.norm(delta, axis=1)
    if np.ndim(t) or len(delta) < 3:
        return _DERIVED["talk-gradient-rank"](delta, t)
    size = np.sqrt(2) * erfinv(np.minimum(np.sqrt(2 / np.pi) * length * t, 1 - 1e-16))
    v = size[:, None] * delta / length[:, None]
    return spectra.stable_rank(v), spectra.stable_rank(np.exp(size**2 / 2)[:, None] * delta)


def _slow_linear_attention(delta: Any, t: Any, **given: Any) -> Any:
    """Sinh and cosh to second order where the angle is small."""
    v, z = linear.linear_attention(delta, t, **given)
    if np.ndim(t):
        return v, z
    rate = np.sqrt(given["eta_w"] * given["eta_z"]) / given["tau"]
    still = np.abs(rate * delta * t) < 2e-5
    return v, np.where(still, given["logits"], z)


def _one_hot_block(formula: Formula, point: Point) -> ClaimMeasurement:
    """A softmax block that meets the remark's condition exactly, every sample one token."""
    g = point["g"]
    samples = Samples(np.eye(g.size), gradient=g)
    path = simulate(Block("softmax", "linear"), samples, [0.0, point["time"]])
    ratios = formula(g / g.size, path.v[1, :, 0])
    return ClaimMeasurement(float(np.ptp(ratios) / np.abs(np.mean(ratios))), 1e-7)


_ONE_HOT = Search(
    {"g": Vector(Real(0.3, 2), Integer(2, 6)), "time": Real(0.1, 10, log=True)}, _one_hot_block
)

TWINS: tuple[Twin, ...] = (
    Twin("eqn3", _block_without_offset, "c lacks -v₀²/2 where |v₀| is below 0.01 in its unit"),
    Twin("thm2", _ratio_of_series(23), "erf by 23 terms, not enough for large v"),
    Twin("thm2-closed-form", _closed_form_in_float64, "no digits left from starts far behind"),
    Twin("thm2-blowup", _time_of_tail, "the tail of erfc to leading order, from 39.8 on"),
    Twin("thm2-winner", _winner_of_positive, "compares three digits, wrong for near ties"),
    Twin("thm2-own-time", _winner_to_three_digits, "compares three digits, wrong for near ties"),
    Twin(
        "thm2-own-time",
        _winner_by_float64,
        "own times in float64 are all 0 or all infinite for large c",
        was_ours=True,
    ),
    Twin(
        "thm2-losers",
        _limit_of_slow_tokens,
        "tokens that start ahead and have 1e-12 of their own time stay",
    ),
    Twin("thm2-softmax", _ratio_of_series(22), "erf by 22 terms, not enough for large v"),
    Twin(
        "thm2-softmax",
        linear.conserved_ratio,
        "of a softmax block that keeps A and b̄ equal, where v = Δt",
        was_ours=True,
        search=_ONE_HOT,
    ),
    Twin("footnote1", _rare_tokens, "tokens rarer than 1e-4"),
    Twin(
        "talk-matrix", _gate_up_to(5.2), "the gate stops growing at e^5.2 for four nodes and more"
    ),
    Twin("talk-nodes", _rows_by_component, "components of very unequal size in a row"),
    Twin("talk-rank", _rank_falls, "six rows of very unequal length"),
    Twin("talk-stable-rank", _limit_of_near_ties, "rows that nearly tie count as tied"),
    Twin(
        "talk-stable-rank",
        _always_one,
        "tends to 1, without the condition of a unique longest row",
        was_ours=True,
        plain=False,
    ),
    Twin("talk-gradient-rank", _ranks_in_float64, "float64 near the end"),
    Twin(
        "talk-gradient-rank",
        _DERIVED["talk-gradient-rank"],
        "without the condition of a unique longest row",
        was_ours=True,
        search=RANKS_WITH_TIES,
    ),
    Twin("linear-attention", _slow_linear_attention, "z stands still for small angles"),
)
