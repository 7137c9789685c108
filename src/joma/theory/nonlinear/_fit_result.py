"""What a fit of Eqn 6 says: estimates with intervals, predictions, and what is not identified."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.theory import _checks, _special
from joma.theory._checks import Array
from joma.theory.nonlinear._annealing import Draws
from joma.theory.nonlinear._fit_model import MULTIPLICITIES, CurveModel

_WIDE = 0.5  # share of the prior's interval from which a quantity counts as not identified
_CERTAIN = 0.95  # probability of a number of components from which μ is reported
_APART = 1.1  # ratio of spreads, all draws to one run's, from which two runs disagree
_COURSE_NODES = 200


@dataclass(frozen=True, eq=False)
class Estimate:
    """The median of a quantity, and the ends of its interval; NaN where it is not identified."""

    median: Array
    low: Array
    high: Array

    def covers(self, value: ArrayLike) -> NDArray[np.bool_]:
        """Whether the interval holds a value."""
        given = _checks.finite("value", value)
        return (self.low <= given) & (given <= self.high)


@dataclass(frozen=True, eq=False)
class Course:
    """What the entropy does from t = 0 on: how far and how deep it falls, when, how far it rises.

    Attributes:
        drop: Entropy at the start less its minimum, in nats.
        minimum: The lowest entropy, in nats.
        lowest_at: When it is reached, in the unit of t.
        rebound: Entropy at the end less its minimum, in nats.
    """

    drop: Estimate
    minimum: Estimate
    lowest_at: Estimate
    rebound: Estimate


@dataclass(frozen=True, eq=False)
class Eqn6Fit:
    """Eqn 6 as fitted to a measured curve.

    Attributes:
        mu: μ of each component: in the order of the columns of v; from entropy in decreasing order.
        time_scale: τ, in the unit of t: v̇ = (μ - v) exp(v²/2)/τ.
        components: Number of components.
        noise: Standard deviation of the noise, in the unit of what was measured.
        order: Components by decreasing |μ|, the order in which they arrive; None from entropy.
        order_probability: Posterior probability of that order.
        residual_correlation: Correlation of successive residuals of the best draw.
        misfit: Why Eqn 6 does not describe the measured part, or None. If it does not, the
            intervals are too narrow.
        not_identified: What the measured part does not determine, and why.
        level: Posterior probability of the intervals.
    """

    mu: Estimate
    time_scale: Estimate
    components: Estimate
    noise: Estimate
    order: tuple[int, ...] | None
    order_probability: float
    residual_correlation: float
    misfit: str | None
    not_identified: Mapping[str, str]
    level: float
    _model: CurveModel = field(repr=False)
    _draws: Draws = field(repr=False)
    _run: NDArray[np.int64] = field(repr=False)

    def predict(self, t: ArrayLike) -> Estimate:
        """Return v (T, M) or entropy (T,) without noise at the times t, with intervals.

        Raises:
            JomaError: The measured part does not determine the curve at these times.
        """
        when = _checks.times("t", t)
        values = self._model.curves(self._draws.points, self._draws.group, np.atleast_1d(when))
        return self._identified("the curve at these times", values, self._range(), when.ndim == 0)

    def predict_entropy(self, t: ArrayLike) -> Estimate:
        """Return the attention's entropy (T,) at the times t, also from measured v.

        Raises:
            JomaError: The measured part does not determine the entropy at these times.
        """
        when = _checks.times("t", t)
        values = self._entropy(np.atleast_1d(when))
        return self._identified(
            "the entropy at these times", values, self._entropy_range(), when.ndim == 0
        )

    def course(self, until: float) -> Course:
        """Return drop, minimum and rebound of the entropy between t = 0 and `until`.

        Raises:
            JomaError: The measured part does not determine them.
        """
        end = _checks.positive_scalar("until", until)
        t = np.linspace(0, end, _COURSE_NODES)
        values = self._entropy(t)
        lowest = np.min(values, axis=1)
        span = self._entropy_range()
        return Course(
            self._identified("the drop", values[:, 0] - lowest, span),
            self._identified("the minimum", lowest, span),
            self._identified("the time of the minimum", t[np.argmin(values, axis=1)], end),
            self._identified("the rebound", values[:, -1] - lowest, span),
        )

    def _entropy(self, t: Array) -> Array:
        values = self._model.curves(self._draws.points, self._draws.group, t)
        if self._model.of_weights:
            values = _special.entropy(_special.softmax(self._model.scale * values**2))
        return values

    def _range(self) -> float:
        return self._model.largest if self._model.of_weights else self._entropy_range()

    def _entropy_range(self) -> float:
        return float(np.median(np.log(_number(self._model, self._draws))))

    def _identified(self, name: str, values: Array, span: float, single: bool = False) -> Estimate:
        """The interval of draws (P, …), or a refusal where they say too little."""
        found = estimate(values, self.level)
        reason = self.not_identified.get("model")
        if reason is None:
            reason = _too_wide(float(np.mean(found.high - found.low)), span * self.level)
        if reason is None:
            reason = _disagreement(values.reshape(len(values), -1), self._run, span)
        if reason is not None:
            raise JomaError(f"{name} cannot be predicted from the measured part: {reason}")
        if single:
            return Estimate(found.median[0], found.low[0], found.high[0])
        return found


def summarize(
    model: CurveModel, draws: Draws, run: NDArray[np.int64], level: float, noise: Estimate
) -> Eqn6Fit:
    """Return the fit from draws of the posterior and the run that made each."""
    reasons: dict[str, str] = {}
    if not model.of_weights:
        # What the entropy says of one μ depends on all others: if the runs disagree about one, no
        # number is reliable. The components of v depend on each other through τ alone.
        usual = draws.group == np.bincount(draws.group).argmax()
        size = model.head + int(draws.group[usual][0])
        for values in draws.points[usual, :size].T:
            reason = _disagreement(values[:, None], run[usual], model.largest)
            if reason is not None:
                reasons["model"] = reason
    scale_draws = model.t[-1] * np.exp(-draws.points[:, 0])
    width = level * np.log(model.spans[1] / model.spans[0])
    time_scale = _judge("time_scale", scale_draws, np.log(scale_draws), width, run, level, reasons)
    if model.of_weights:
        mu, order, order_probability = _mu_of_weights(model, draws, run, level, reasons)
        count = np.array(float(model.data.shape[1]))
        components = Estimate(count, count, count)
    else:
        order, order_probability = None, 0.0
        reasons["order"] = "the entropy is the same for every order of the components"
        number = _number(model, draws)
        range_ = np.log(model.groups[-1] / model.groups[0])
        if model.multiplicity:
            range_ += np.log(MULTIPLICITIES[1])
        components = _judge(
            "components", number, np.log(number), level * max(range_, 0.1), run, level, reasons
        )
        mu = _mu_of_entropy(model, draws, run, level, reasons)
    best = int(np.argmin(draws.squares))
    one = draws.pick(np.array([best]))
    residuals = (model.curves(one.points, one.group, model.t)[0] - model.data).reshape(
        model.t.size, -1
    )
    correlation, chance = _correlation(residuals), 3 / np.sqrt(residuals.size)
    misfit = None
    if correlation > chance:
        misfit = (
            f"successive residuals have a correlation of {correlation:.2f}; by chance it would be "
            f"below {chance:.2f}"
        )
    return Eqn6Fit(
        mu=mu,
        time_scale=time_scale,
        components=components,
        noise=noise,
        order=order,
        order_probability=order_probability,
        residual_correlation=correlation,
        misfit=misfit,
        not_identified=reasons,
        level=level,
        _model=model,
        _draws=draws,
        _run=run,
    )


def _mu_of_weights(
    model: CurveModel,
    draws: Draws,
    run: NDArray[np.int64],
    level: float,
    reasons: dict[str, str],
) -> tuple[Estimate, tuple[int, ...] | None, float]:
    each: list[Estimate] = []
    for k, values in enumerate(draws.points[:, 1:].T):
        each.append(_judge(f"mu[{k}]", values, values, level * model.largest, run, level, reasons))
    mu = _stacked(each)
    orders = np.argsort(-np.abs(draws.points[:, 1:]), axis=1)
    found, counts = np.unique(orders, axis=0, return_counts=True)
    best = int(np.argmax(counts))
    probability = float(counts[best] / len(orders))
    if probability < level:
        reasons["order"] = f"the most probable order has the probability {probability:.2f}"
    return mu, tuple(int(k) for k in found[best]), probability


def _mu_of_entropy(
    model: CurveModel,
    draws: Draws,
    run: NDArray[np.int64],
    level: float,
    reasons: dict[str, str],
) -> Estimate:
    """μ in decreasing order, given the most probable number of components."""
    found, counts = np.unique(draws.group, return_counts=True)
    number = int(found[np.argmax(counts)])
    probability = float(np.max(counts) / draws.group.size)
    if probability < _CERTAIN:
        reasons["mu"] = (
            f"it is not certain how many different μ there are (probability {probability:.2f} "
            f"of {number})"
        )
        nothing = np.full(number, np.nan)
        return Estimate(nothing, nothing, nothing)
    own = draws.group == number
    each: list[Estimate] = []
    for k in range(number):
        values = draws.points[own, model.head + k]
        # Order statistics of uniform numbers have beta distributions.
        tails = np.array([(1 - level) / 2, (1 + level) / 2])
        ends = _special.betaincinv(number - k, k + 1, tails)
        width = float(model.largest * (ends[1] - ends[0]))
        each.append(_judge(f"mu[{k}]", values, values, width, run[own], level, reasons))
    return _stacked(each)


def _stacked(each: Sequence[Estimate]) -> Estimate:
    ends = np.array([(one.median, one.low, one.high) for one in each])
    return Estimate(ends[:, 0], ends[:, 1], ends[:, 2])


def _number(model: CurveModel, draws: Draws) -> Array:
    number = draws.group.astype(np.float64)
    return number * np.exp(draws.points[:, 1]) if model.multiplicity else number


def _judge(
    name: str,
    values: Array,
    compared: Array,
    prior_width: float,
    run: NDArray[np.int64],
    level: float,
    reasons: dict[str, str],
) -> Estimate:
    """The interval of a quantity, or NaN and a reason where the data say too little of it."""
    spread = estimate(compared, level)
    reason = reasons.get("model")
    if reason is None:
        reason = _too_wide(float(spread.high - spread.low), prior_width)
    if reason is None:
        reason = _disagreement(compared[:, None], run, prior_width)
    if reason is None:
        return estimate(values, level)
    reasons[name] = reason
    nothing = np.array(np.nan)
    return Estimate(nothing, nothing, nothing)


def _too_wide(width: float, prior_width: float) -> str | None:
    share = width / prior_width
    if share <= _WIDE:
        return None
    return f"its interval is {share:.0%} as wide as without any data (at most {_WIDE:.0%})"


def _disagreement(values: Array, run: NDArray[np.int64], span: float) -> str | None:
    """A reason if two runs of the sampler found different values (P, N), else None."""
    within = np.zeros(values.shape[1], dtype=np.float64)
    numbers = [number for number in (0, 1) if np.any(run == number)]
    for number in numbers:
        within += np.var(values[run == number], axis=0) / len(numbers)
    share = np.asarray(np.var(values, axis=0) / (within + (1e-6 * span) ** 2), dtype=np.float64)
    ratio = float(np.sqrt(np.mean(share)))
    if ratio <= _APART:
        return None
    return "several explanations fit the data, and two runs of the sampler disagree about them"


def estimate(values: Array, level: float) -> Estimate:
    """Return median and interval of draws over the first axis."""
    tails = [0.5, (1 - level) / 2, (1 + level) / 2]
    median, low, high = np.asarray(np.quantile(values, tails, axis=0), dtype=np.float64)
    return Estimate(median, low, high)


def _correlation(residuals: Array) -> float:
    """Correlation of successive residuals (T, M)."""
    centred = residuals - np.mean(residuals, axis=0)
    total = float(np.sum(centred**2))
    return float(np.sum(centred[1:] * centred[:-1]) / total) if total > 0 else 0.0
