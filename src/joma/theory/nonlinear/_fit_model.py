"""What a fit of Eqn 6 assumes: the curve of its parameters, their prior, and the noise.

A point of the parameter space is

    (ln s, μ_1 … μ_K)  or  (ln s, ln m, μ_1 … μ_K),   s = t_last/τ,

the measured time span in units of the time scale τ. Each μ stands for m equal components, one
unless a free multiplicity is asked for.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from joma.theory import _special
from joma.theory._checks import Array
from joma.theory.nonlinear import _annealing, _flow_table
from joma.theory.nonlinear._annealing import Draws, Groups

MULTIPLICITIES = (1.0, 1000.0)
NOISES = (1e-4, 1.0)
"""Standard deviation of the noise as a share of the largest measured value."""

_LEVELS = 150
_PRIOR_DRAWS = 20_000
_MANY = 1000
_START_DRAWS = 12_000
_DEFENSIVE = 0.2  # share of the start's draws that come from the prior
_MOVES_OF_WEIGHTS = (10, 64)
_MOVES_OF_ENTROPY = (8, 32)  # its posterior is bent and has several modes
_TAIL = 5.0  # degrees of freedom of the start's Student distribution


@dataclass(frozen=True, eq=False)
class Model:
    """Measured values, the curve that explains them, and the prior.

    Attributes:
        t: Measured times (T,), increasing, the last one > 0.
        data: Measured v (T, M), or entropy (T,).
        scale: The attention is softmax(scale · v²); unused for v.
        largest: The prior of μ is uniform up to this.
        spans: Least and most of s, of whose logarithm the prior is uniform.
        groups: Numbers of components that are possible.
        multiplicity: Whether m is free.
        noise: Known standard deviation of the noise, or None.
    """

    t: Array
    data: Array
    scale: float
    largest: float
    spans: tuple[float, float]
    groups: tuple[int, ...]
    multiplicity: bool
    noise: float | None

    @property
    def of_weights(self) -> bool:
        """Whether v was measured, rather than the entropy."""
        return self.data.ndim == 2

    @property
    def head(self) -> int:
        """Number of coordinates before the μ."""
        return 2 if self.multiplicity else 1

    def curves(self, points: Array, group: Groups, t: Array) -> Array:
        """V (P, T, M) or entropy (P, T) at the times t for each point."""
        when = t / self.t[-1]
        if self.of_weights:
            return _weights(points[:, 0], points[:, 1:], when)
        result = np.empty((len(points), t.size))
        for count in np.unique(group):
            own = group == count
            v = _weights(points[own, 0], points[own, self.head : self.head + count], when)
            result[own] = _entropy(self.scale * v**2)
        if self.multiplicity:
            result += points[:, 1:2]
        return result

    def log_prior(self, points: Array, group: Groups) -> Array:
        """Ln prior density: μ uniform, and for entropy in decreasing order."""
        inside = (points[:, 0] >= np.log(self.spans[0])) & (points[:, 0] <= np.log(self.spans[1]))
        if self.multiplicity:
            inside &= (points[:, 1] >= 0) & (points[:, 1] <= np.log(MULTIPLICITIES[1]))
        mu = points[:, self.head :]
        if self.of_weights:
            inside &= np.all(np.abs(mu) <= self.largest, axis=1)
            return np.where(inside, 0.0, -np.inf)
        # Coordinates that a group does not have are zero, so the order holds for them too.
        inside &= (mu[:, 0] <= self.largest) & np.all(mu >= 0, axis=1)
        inside &= np.all(np.diff(mu, axis=1) <= 0, axis=1)
        ordered = _special.gammaln(group + 1.0) - group * np.log(self.largest)
        return np.where(inside, ordered, -np.inf)

    def squares(self, curves: Array) -> Array:
        """Sum of squares of curves at the measured times less the data."""
        return np.sum((curves - self.data).reshape(len(curves), -1) ** 2, axis=1)

    def log_likelihood(self, squares: Array, level: float) -> Array:
        """Ln likelihood, the noise integrated out, with `level` added to the noise."""
        if squares.size < _MANY:
            return _special.log_sum_exp(self._each_noise(squares, level))
        # Of very many draws, the start of a fit, it is interpolated.
        logarithms = np.log(np.maximum(squares, 1e-300))
        ends = float(np.min(logarithms)), float(np.max(logarithms)) + 1e-9
        nodes: Array = np.linspace(*ends, _MANY - 1)
        return np.interp(logarithms, nodes, self.log_likelihood(np.exp(nodes), level))

    def precision(self, squares: Array, level: float) -> Array:
        """The mean of 1/σ² over the noise, given the sum of squares."""
        weight = _special.softmax(self._each_noise(squares, level))
        return weight @ (1 / (self.noises**2 + level**2))

    @cached_property
    def noises(self) -> Array:
        """Nodes of the integral over the noise."""
        if self.noise is not None:
            return np.array([self.noise])
        # 1/√(2n) is the standard deviation of ln σ: the trapezoidal rule is exact at such steps.
        nodes = 2 + int(float(np.log(NOISES[1] / NOISES[0]) * np.sqrt(2 * self.data.size)) / 1.4)
        return self.top * np.geomspace(NOISES[0], NOISES[1], nodes)

    @cached_property
    def top(self) -> float:
        """The largest measured value, in absolute value."""
        return float(np.max(np.abs(self.data)))

    def _each_noise(self, squares: Array, level: float) -> Array:
        variance = self.noises**2 + level**2
        return -self.data.size / 2 * np.log(variance) - squares[:, None] / (2 * variance)

    def draw_noise(self, squares: Array, rng: np.random.Generator) -> Array:
        """One draw of the noise for each sum of squares."""
        weight = np.cumsum(_special.softmax(self._each_noise(squares, 0.0)), axis=1)
        node = np.sum(weight < rng.uniform(size=(len(squares), 1)), axis=1)
        nodes = np.log(self.noises)
        step = float(nodes[1] - nodes[0]) if nodes.size > 1 else 0.0
        jitter: Array = step * rng.uniform(-0.5, 0.5, len(squares))
        return np.exp(nodes[np.minimum(node, nodes.size - 1)] + jitter)

    def measure(self, points: Array, group: Groups) -> tuple[Array, Array]:
        """Ln prior and sum of squares; outside the prior no curve is computed."""
        prior = self.log_prior(points, group)
        squares = np.zeros(len(points))
        inside = np.nonzero(np.isfinite(prior))[0]
        squares[inside] = self.squares(self.curves(points[inside], group[inside], self.t))
        return prior, squares

    def target(self) -> _annealing.Target:
        """What the sampler needs."""
        wide = np.full(self.head + max(self.groups), self.largest)
        wide[0] = np.log(self.spans[1] / self.spans[0])
        if self.multiplicity:
            wide[1] = np.log(MULTIPLICITIES[1])
        lowest = self.noise / 3 if self.noise is not None else self.top * NOISES[0]
        levels = np.geomspace(10 * max(self.top, self.largest), lowest, _LEVELS)
        return _annealing.Target(
            self.measure,
            self.log_likelihood,
            self.precision,
            {count: self.head + count for count in self.groups},
            np.append(levels, 0.0),
            None if self.of_weights else self.slopes,
            12 / wide**2,
            _MOVES_OF_WEIGHTS if self.of_weights else _MOVES_OF_ENTROPY,
        )

    def slopes(self, points: Array, group: Groups) -> _annealing.Slopes:
        """Ln prior and sum of squares of points, with the slopes of the entropy's."""
        count, size = points.shape
        prior = self.log_prior(points, group)
        slopes = np.zeros((count, self.t.size, size))
        curves = np.zeros((count, self.t.size))
        for number in np.unique(group):
            own = np.nonzero((group == number) & np.isfinite(prior))[0]
            last = self.head + number
            curves[own], slopes[own, :, :last] = self._entropy_slopes(points[own, :last])
        return _annealing.Slopes(
            prior,
            self.squares(curves),
            np.einsum("pt,ptd->pd", curves - self.data, slopes),
            np.swapaxes(slopes, 1, 2) @ slopes,
        )

    def _entropy_slopes(self, points: Array) -> tuple[Array, Array]:
        """Entropy (P, T) of points with one number of components, and its derivatives."""
        when, head = self.t / self.t[-1], self.head
        mu = points[:, head:]
        v = _weights(points[:, 0], mu, when)
        small = 0.01  # a few nodes of the table
        ahead = _weights(points[:, 0], mu + small, when)
        by_mu = (ahead - v) / small
        s = np.exp(points[:, :1]) * when
        by_span = s[:, :, None] * (mu[:, None, :] - v) * np.exp(v**2 / 2)
        p = _special.softmax(self.scale * v**2)
        log_p = np.log(np.maximum(p, 1e-300))
        entropy = -np.sum(p * log_p, axis=-1)
        by_v = -p * (log_p + entropy[..., None]) * 2 * self.scale * v
        slopes = np.empty((len(points), when.size, points.shape[1]))
        slopes[:, :, 0] = np.sum(by_v * by_span, axis=-1)
        slopes[:, :, head:] = by_v * by_mu
        if self.multiplicity:
            slopes[:, :, 1] = 1.0
            entropy = entropy + points[:, 1:2]
        return entropy, slopes


def sample_posterior(
    model: Model, count: int, rng: np.random.Generator
) -> tuple[Draws, NDArray[np.int64]]:
    """Return draws of the posterior from two independent runs, and the run of each."""
    half = count // 2
    target = model.target()
    if model.of_weights:
        starts = [_start_at_best(model, rng) for _ in range(2)]
    else:
        points, group, curves = _prior_curves(
            model.t.tobytes(),
            model.scale,
            model.largest,
            model.spans,
            model.groups,
            model.multiplicity,
        )
        prior = model.log_prior(points, group)
        every = Draws(points, group, prior, model.squares(curves))
        starts = [
            (every.pick(own), prior[own])
            for own in (np.arange(0, prior.size, 2), np.arange(1, prior.size, 2))
        ]
    runs = [_annealing.sample(target, *start, half, rng) for start in starts]
    draws = Draws(*(np.concatenate(parts) for parts in zip(*runs, strict=True)))
    return draws, np.repeat([0, 1], half)


def _weights(log_span: Array, mu: Array, when: Array) -> Array:
    """V (P, T, M) for μ (P, M)."""
    s = np.exp(log_span)[:, None] * when
    share = _flow_table.share_reached(mu[:, :, None], s[:, None, :])
    return np.swapaxes(share * mu[:, :, None], 1, 2)


def _entropy(logits: Array) -> Array:
    shifted = logits - np.max(logits, axis=-1, keepdims=True)
    exponential = np.exp(shifted)
    total = np.sum(exponential, axis=-1)
    return np.log(total) - np.sum(exponential * shifted, axis=-1) / total


@lru_cache(maxsize=2)
def _prior_curves(
    times: bytes,
    scale: float,
    largest: float,
    spans: tuple[float, float],
    groups: tuple[int, ...],
    multiplicity: bool,
) -> tuple[Array, Groups, Array]:
    """Draws of the prior with their curves at the measured times, kept for the next fit."""
    rng = np.random.default_rng(20)
    t = np.frombuffer(times)
    model = Model(t, np.zeros(t.size), scale, largest, spans, groups, multiplicity, None)
    group = rng.choice(np.array(groups, dtype=np.int64), _PRIOR_DRAWS)
    points = np.zeros((group.size, model.head + max(groups)))
    points[:, 0] = rng.uniform(np.log(spans[0]), np.log(spans[1]), group.size)
    if multiplicity:
        points[:, 1] = rng.uniform(0, np.log(MULTIPLICITIES[1]), group.size)
    mu = rng.uniform(0, largest, (group.size, max(groups)))
    mu[np.arange(max(groups)) >= group[:, None]] = 0
    points[:, model.head :] = -np.sort(-mu, axis=1)
    return points, group, model.curves(points, group, t)


# The start for v: given the time scale, every component has its own best μ.


def _start_at_best(model: Model, rng: np.random.Generator) -> tuple[Draws, Array]:
    """Draws from a Student distribution at the best fit, mixed with the prior, and ln density."""
    best, covariance = _best(model)
    size = best.size
    root = np.linalg.cholesky(covariance)
    count = model.data.shape[1]
    spans = np.log(np.array(model.spans))
    log_volume = np.log(spans[1] - spans[0]) + count * np.log(2 * model.largest)
    log_det = 2 * np.sum(np.log(np.diag(root)))
    constant = float(
        _special.gammaln((_TAIL + size) / 2)
        - _special.gammaln(_TAIL / 2)
        - size / 2 * np.log(_TAIL * np.pi)
        - log_det / 2
    )

    far = np.sqrt(_TAIL / rng.chisquare(_TAIL, (_START_DRAWS, 1)))
    near = best + far * (rng.normal(size=(_START_DRAWS, size)) @ root.T)
    wide = np.column_stack(
        [
            rng.uniform(spans[0], spans[1], _START_DRAWS),
            rng.uniform(-model.largest, model.largest, (_START_DRAWS, count)),
        ]
    )
    points = np.where(rng.uniform(size=(_START_DRAWS, 1)) < _DEFENSIVE, wide, near)
    group = np.full(_START_DRAWS, count, dtype=np.int64)
    prior, squares = model.measure(points, group)
    away = np.linalg.solve(root, (points - best).T)
    student = constant - (_TAIL + size) / 2 * np.log1p(np.sum(away**2, axis=0) / _TAIL)
    start = np.logaddexp(np.log(1 - _DEFENSIVE) + student, np.log(_DEFENSIVE) - log_volume + prior)
    inside = np.nonzero(np.isfinite(prior))[0]
    return Draws(points, group, prior, squares).pick(inside), start[inside]


def _best(model: Model) -> tuple[Array, Array]:
    """The best fit (ln s, μ) by least squares from the best node of a grid, and its covariance."""
    count = model.data.shape[1]
    nodes, mu, share = _grid(model.t.tobytes(), model.spans, model.largest)
    curves = share * mu[:, None]  # (S, U, T)
    product = np.einsum("sut,tk->suk", curves, model.data)
    squares = np.sum(curves**2, axis=2)[:, :, None] - 2 * np.abs(product)
    at = np.argmin(squares, axis=1)
    total = np.sum(np.min(squares, axis=1), axis=1)
    node = int(np.argmin(total))
    sign = np.sign(product[node, at[node], np.arange(count)])
    first = np.concatenate([[nodes[node]], sign * mu[at[node]]])

    group = np.array([count])
    spans = np.log(np.array(model.spans))
    wide = np.concatenate([[spans[1] - spans[0]], np.full(count, 2 * model.largest)])

    def residuals(x: Array) -> Array:
        return (model.curves(x[None], group, model.t)[0] - model.data).ravel()

    low = np.concatenate([[spans[0]], np.full(count, -model.largest)])
    found: Any = optimize.least_squares(
        residuals,
        np.clip(first, low + 1e-6, low + wide - 1e-6),
        bounds=(low, low + wide),
        x_scale=wide / 10,
        diff_step=np.full(count + 1, 1e-5),
        max_nfev=60,
    )
    spare = max(model.data.size - count - 1, 1)
    variance = max(2 * float(found.cost) / spare, (NOISES[0] * np.max(np.abs(model.data))) ** 2)
    if model.noise is not None:
        variance = model.noise**2
    jacobian = np.asarray(found.jac, dtype=np.float64)
    precision = jacobian.T @ jacobian / variance + np.diag(12 / wide**2)
    return np.asarray(found.x, np.float64), np.asarray(1.5 * np.linalg.inv(precision), np.float64)


@lru_cache(maxsize=2)
def _grid(times: bytes, spans: tuple[float, float], largest: float) -> tuple[Array, Array, Array]:
    t = np.frombuffer(times)
    nodes: Array = np.linspace(float(np.log(spans[0])), float(np.log(spans[1])), 64)
    mu = np.linspace(0, largest, 101)
    s = np.exp(nodes)[:, None] * (t / t[-1])
    return nodes, mu, _flow_table.share_reached(mu[None, :, None], s[:, None, :])
