"""The grid on which the laboratory's JavaScript is compared with `joma.theory`.

Each part is a list of calls of the JavaScript with the package's results, and the size below which
a difference counts as absolute: 1e-6 where Theorem 2's weights cross zero, as the package says of
its own, and 1 for entropies, stable ranks and probabilities.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from joma.theory import as_printed, clusters, hblt, linear, marginals, nonlinear, spectra

DELTAS = (
    [1.0, 0.7, 0.4, -0.3],
    [1.0, 1.0, 0.5],
    [2.0, -2.0, 1e-3],
    [1e-6, 1e-12, -1e-6],
    [0.9999999, 1.0, 0.0],
    list(np.linspace(2, -1.8, 20)),
)
STARTS = (0.0, 0.6, -0.6, 2.5, -3.0, 1e-9)
CONSTANTS = (  # c, A, η_W, η_Z, τ
    (0.0, 1.0, 1.0, 1.0, 1.0),
    (0.7, 3.0, 0.3, 2.0, 0.5),
    (-2.0, 0.25, 5.0, 0.2, 3.0),
)
GAPS = np.array([1.0, 0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
MUS = (0.0, 1e-12, 1e-3, 0.3, 1.0, 1.5, 1.872, 2.5, 3.0, 4.0, 5.0, 5.5, 6.0, -2.0)
TIMES = np.concatenate([[0.0], np.geomspace(1e-12, 1e3, 61), np.linspace(0.2, 0.45, 51)])
SHAPES = {
    "t3": marginals.StudentT(3),
    "t5": marginals.StudentT(5),
    "laplace": marginals.Laplace(),
    "gaussian": marginals.Gaussian(),
    "logistic": marginals.Logistic(),
}
RHOS = (0.0, 1e-12, 1e-3, 0.3, 0.9, 0.999, 1 - 1e-6, 1 - 1e-12, 1.0, -0.5, -0.999)


@dataclass
class Part:
    """Calls of the JavaScript, what the package returns, and the floor of relative errors."""

    name: str
    floor: float
    calls: list[tuple[str, list[Any]]] = field(default_factory=list)
    expected: list[np.ndarray] = field(default_factory=list)

    def add(self, expected: Any, name: str, *arguments: Any) -> None:
        """Add one call with what the package says."""
        self.calls.append((name, list(arguments)))
        self.expected.append(np.asarray(expected, dtype=np.float64))

    @property
    def points(self) -> int:
        """How many numbers are compared."""
        return sum(one.size for one in self.expected)


def parts() -> list[Part]:
    """Return the whole grid."""
    return [_theorem2(), _many_nodes(), _theorem3(), _eqn6(), _hierarchies()]


def largest_difference(part: Part, found: list[np.ndarray]) -> float:
    """Return the largest relative difference; infinite where the numbers that are finite differ."""
    worst = 0.0
    for ours, theirs in zip(part.expected, found, strict=True):
        if ours.shape != theirs.shape:
            return np.inf
        finite = np.isfinite(ours)
        if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
            return np.inf
        size = np.maximum(np.abs(ours[finite]), part.floor)
        difference = np.abs(ours[finite] - theirs[finite]) / size
        worst = max(worst, float(np.max(difference, initial=0.0)))
    return worst


def _theorem2() -> Part:
    part = Part("Theorem 2", 1e-6)
    for delta in DELTAS:
        for start in STARTS:
            for offset, normalizer, eta_w, eta_z, tau in CONSTANTS:
                unit = linear.unit_rates(delta, eta_w=eta_w, eta_z=eta_z, tau=tau)
                ours: dict[str, Any] = {
                    "initial": start,
                    "log_offset": offset,
                    "normalizer": normalizer,
                }
                theirs = {"initial": start, "logOffset": offset, "normalizer": normalizer}
                own = linear.blowup_time(unit.delta, **ours)
                part.add(own, "blowupTimes", unit.delta, theirs)
                part.add(linear.limit(unit.delta, **ours), "limits", unit.delta, theirs)
                t = float(np.min(own)) * (1 - GAPS)
                v = linear.weights(unit.delta, t, **ours)
                part.add(v, "weights", unit.delta, t, theirs)
    return part


def _many_nodes() -> Part:
    part = Part("Theorem 2, many nodes", 1e-6)
    rng = np.random.default_rng(0)
    for m, k in ((2, 2), (4, 3), (20, 8)):
        delta = np.round(rng.normal(size=(m, k)), 3)
        t_star = float(np.min(linear.blowup_time(np.linalg.norm(delta, axis=1))))
        t = t_star * (1 - GAPS[1:-1])
        v = linear.weights_multi(delta, t)
        part.add(v, "weightsOfRows", delta, t)
        velocity = linear.velocity_multi(delta, t)
        ranks = np.stack([spectra.stable_rank(v), spectra.stable_rank(velocity)], axis=1)
        part.add(ranks, "stableRankPairs", delta, t)
    return part


def _theorem3() -> Part:
    part = Part("Theorem 3", 1e-300)
    s = np.linspace(-8, 8, 65)
    for name, shape in SHAPES.items():
        part.add(shape.theta1(s), "theta1s", name, s)
        part.add(shape.mean_residual(s), "meanResiduals", name, s)
        for distance in (0.1, 0.5, 1.0, 2.0, 4.0, 8.0):
            for length, bias in ((0.1, 4.0), (0.1, -0.5), (0.5, -1.0), (5.0, -4.0)):
                v, mean = np.array([length]), np.array([distance])
                where = (name, length, distance, bias)
                value = clusters.expectations(shape, v, mean, bias).activity
                part.add(value, "activity", *where)
                value = as_printed.expectations(shape, v, mean, bias).activity
                part.add(value, "printedActivity", *where)
            if name in ("t3", "t5", "laplace"):
                (point,) = clusters.critical_points(shape, distance)
                part.add(point.ratio, "restRatio", name, distance)
    return part


def _eqn6() -> Part:
    part = Part("Eqn 6", 1e-300)
    t = np.unique(TIMES)
    for mu in MUS:
        part.add(nonlinear.log_residual(mu, t), "logResiduals", mu, t)
        part.add(nonlinear.weights(mu, t), "eqn6Weights", mu, t)
        part.add(nonlinear.residual_offset(mu), "residualOffset", mu)
        part.add(nonlinear.settled_threshold(mu), "settledThreshold", mu)
        part.add(as_printed.settled_threshold(mu), "printedThreshold", mu)
        for r in (0.0, 1e-9, 0.3, 0.9, 1 - 1e-9):
            part.add(nonlinear.elapsed(r, mu), "elapsed", r, mu)
            part.add(nonlinear.offset(r, mu), "offset", r, mu)
    entropy = Part("entropy", 1.0)
    for mu in ([3.0, 2.5, 0.5, 0.3], [1.0, 0.9, 0.0], [6.0, 6.0, 1.0], [4.0, 3.0, 2.0, 1.0]):
        v = nonlinear.weights(mu, t)
        for scale in (1.0, 0.5, 1 / 3):
            entropy.add(nonlinear.attention_entropy(v, scale=scale), "entropies", v, scale)
    part.calls += entropy.calls
    part.expected += entropy.expected
    return part


def _hierarchies() -> Part:
    part = Part("Theorem 5", 1e-300)
    for classes, on, off in ((5, 0.05, 0.95), (10, 0.0, 1.0), (2, 0.3, 0.6), (20, 0.0, 0.99)):
        shares, offs = np.full(classes, 1 / classes), np.array([on] + [off] * (classes - 1))
        rho0 = hblt.root_uncertainty(shares, offs)
        printed = as_printed.root_uncertainty(shares, offs)
        part.add(rho0, "rootUncertainty", shares, offs)
        part.add(printed, "printedRootUncertainty", shares, offs)
        for one in (float(rho0), float(printed), 1 - 1e-12, -1.0):
            for rho in RHOS:
                for depth in (1, 2, 5, 20):
                    if one * rho ** (depth - 1) == 1:
                        continue
                    values = hblt.cooccurrence(np.arange(depth), depth, rho, one)
                    part.add(values, "cooccurrences", depth, rho, one)
    for epsilon in (0.0, 1e-6, 0.05, 0.5):
        value = hblt.cooccurrence_near_one(3, 10, epsilon)
        part.add(value, "cooccurrenceNearOne", 3, 10, epsilon)
    return part
