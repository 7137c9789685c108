"""Eqn 6 and what follows from it at one point of their domain, for the adversary."""

from typing import Any

import mpmath
import numpy as np

from joma.errors import JomaError
from joma.experiments.claims.measurement import Formula, Measurement
from joma.experiments.claims.reference.eqn6 import courses, follow, slope_at, time_at
from joma.experiments.claims.search import Choice, Integer, Matrix, Point, Real, Search, Vector
from joma.theory import spectra

MU = Real(-6, 6, special=(0.0, 1.872, 6.0))
_FEW_ROWS = Matrix(Real(-3, 3, special=(0.0,)), Integer(1, 5), Integer(1, 3))
_LONG = Real(1e-6, 1e6, log=True)
_ROWS = Matrix(Real(-3, 3, special=(0.0,)), Integer(1, 8), Integer(1, 4))


def _near_growth(mu: float, point: Point) -> float:
    """A time: any, or one close to the sudden growth of this component."""
    if point["where"] == "any" or mu == 0:
        return point["time"]
    y = point["y"]
    return float(max(time_at(-y, mu), 1e-300))


def _log_residual(formula: Formula, point: Point) -> Measurement:
    """F in 30 digits at the answer; the difference to t over the slope is the error of it."""
    mu = point["mu"]
    t = _near_growth(mu, point)
    ours = float(formula([mu], t)[0])
    if ours < -1e290:
        raise JomaError("beyond the range of float64")
    with mpmath.workdps(30):
        off = (time_at(ours, mu) - mpmath.mpf(t)) * slope_at(ours, mu) / ours
    return Measurement(abs(float(off)), 1e-11)


def _weights(formula: Formula, point: Point) -> Measurement:
    """V from the ln 1/δ that one Newton step in 30 digits finds next to the answer's."""
    mu = point["mu"]
    if abs(mu) < 1e-150:
        raise JomaError("v is below the range of float64")
    t = _near_growth(mu, point)
    ours = float(formula([mu], t)[0])
    with mpmath.workdps(40):
        share = mpmath.mpf(ours) / mpmath.mpf(mu)
        if share >= 1 - mpmath.mpf(10) ** -14:
            # Rounded to its target: it must have come so close.
            late = time_at(mpmath.log(mpmath.mpf(10) ** -13), mu)
            return Measurement(float(mpmath.mpf(t) < late) + abs(float(share - 1)), 1e-12)
        guess = mpmath.log1p(-share)
        step = (time_at(guess, mu) - mpmath.mpf(t)) * slope_at(guess, mu)
        change = mpmath.exp(guess) * step / share
    return Measurement(abs(float(change)), 1e-11)


def _against_ode(formula: Formula, point: Point) -> Measurement:
    mu, t = point["mu"], point["time"]
    v = follow(lambda v: (mu - v) * np.exp(v**2 / 2), np.zeros(mu.size), t, 1e-9)
    return Measurement(float(np.max(np.abs(formula(mu, t) - v))), 1e-4)


def _late(formula: Formula, point: Point) -> Measurement:
    """The remainder is μ²δ to leading order, beside the rounding of t - R times e^{μ²/2}."""
    mu, y = point["size"], point["y"]
    with mpmath.workdps(30):
        t = float(time_at(-y, mu))
        exact = -y - float((mpmath.mpf(t) - time_at(-y, mu)) * slope_at(-y, mu))
    slack = 2 * (mu**2 + mu**4 * np.exp(-y)) * np.exp(-y) + 1e-9 * y
    slack += 4e-16 * t * np.exp(mu**2 / 2)
    return Measurement(abs(float(formula(mu, t)) - exact), slack)


def _derivative(formula: Formula, point: Point) -> Measurement:
    """∫ -μ x² e^{-μ²x²/2} dy over y = ln 1/(1-x), by Gauss's rule in 24 panels."""
    mu, r = point["size"], -np.expm1(-point["y"])
    y = -np.log1p(-r)  # of the float r
    nodes, weights = np.polynomial.legendre.leggauss(16)
    ends = np.linspace(0, y, 25)
    half = (ends[1] - ends[0]) / 2
    x = -np.expm1(-(ends[:-1, None] + half * (1 + nodes)))
    exact = float(np.sum((-mu * x**2 * np.exp(-((mu * x) ** 2) / 2)) @ weights) * half)
    return Measurement(abs(float(formula(r, mu)) - exact), 1e-7 * max(1.0, abs(exact)))


def _minimum(curve: Any, grid: Any, cluster: int) -> float:
    """The smallest value of a curve, with the grid made finer around it, near and farther.

    Where components are of nearly one size, up to `cluster` times of the grid lie close together.
    """
    on_grid = curve(grid)
    lowest = float(np.min(on_grid))
    for reach in (1, cluster):
        at, t = int(np.argmin(on_grid)), grid
        for _ in range(4):
            t = np.linspace(t[max(at - reach, 0)], t[min(at + reach, t.size - 1)], 33)
            values = curve(t)
            at, reach = int(np.argmin(values)), 1
            lowest = min(lowest, float(values[at]))
    return lowest


class Path:
    """Entropy of softmax(v²) along Eqn 6, from courses by quadrature."""

    def __init__(self, mu: Any) -> None:
        size = np.abs(mu)
        self._size, self._count = np.unique(size[size > 0], return_counts=True)
        self._zeros = int(np.sum(size == 0))
        if self._size.size:
            self._courses, self.t = courses(self._size)

    def entropy(self, r: Any) -> Any:
        """S at shares v/μ of shape (…, distinct non-zero sizes)."""
        logits = (r * self._size) ** 2
        counts = self._count
        if self._zeros:
            logits = np.concatenate([logits, np.zeros((*logits.shape[:-1], 1))], axis=-1)
            counts = np.append(counts, self._zeros)
        shifted = logits - np.max(logits, axis=-1, keepdims=True)
        weight = counts * np.exp(shifted)
        total = np.sum(weight, axis=-1, keepdims=True)
        return np.log(total[..., 0]) - np.sum(weight * shifted, axis=-1) / total[..., 0]

    def lowest(self) -> float:
        """The smallest S(t)."""

        def entropy(t: Any) -> Any:
            shares = np.stack([-np.expm1(-one.at(t)) for one in self._courses], axis=-1)
            return self.entropy(shares)

        return min(_minimum(entropy, self.t, 2 * self._size.size + 2), self.end)

    @property
    def end(self) -> float:
        """S at the targets."""
        return float(self.entropy(np.ones(self._size.size)))


def rises_last(mu: Any) -> bool | None:
    """Whether lowering the smallest non-zero logit of the targets lowers S; None if unsure."""
    size, count = np.unique(np.abs(mu), return_counts=True)
    smallest = np.min(size[size > 0])
    with mpmath.workdps(60):

        def entropy(factor: Any) -> Any:
            logits = [mpmath.mpf(s) ** 2 * (factor if s == smallest else 1) for s in size]
            weight = [int(n) * mpmath.exp(a) for n, a in zip(count, logits, strict=True)]
            total = sum(weight)
            return (
                mpmath.log(total) - sum(w * a for w, a in zip(weight, logits, strict=True)) / total
            )

        change = entropy(mpmath.mpf(1)) - entropy(1 - mpmath.mpf(10) ** -20)
        unsure = mpmath.mpf(10) ** -33 * mpmath.mpf(smallest) ** 2
        return None if abs(change) < unsure else bool(change > 0)


def _refuse_near_ties(size: Any) -> None:
    """Sizes that differ by less than 1e-12 grow at times that the reference does not tell apart."""
    gaps = np.diff(np.unique(size))
    if np.any(gaps < 1e-12 * np.max(size)):
        raise JomaError("two sizes are too close for the reference")


def fate_error(formula: Formula, mu: Any, *, numbers: bool) -> Measurement:
    """How far a fate is from what the courses by quadrature do.

    Whether there is a drop or a rebound is compared where it is larger than 1e-9, and where the
    last change, in 60 digits, decides; their sizes are compared to 1e-6.
    """
    mu = np.asarray(mu, dtype=float)
    fate = formula(mu)
    size = np.abs(mu)
    if np.all(size == size[0]):
        error = float(bool(fate[0]) or bool(fate[1]))
        return Measurement(2 * error, 1.0)
    _refuse_near_ties(size)
    path = Path(mu)
    lowest, end = path.lowest(), path.end
    drop, rebound = np.log(size.size) - lowest, end - lowest
    wrong = not fate[0]
    last = rises_last(mu)
    if last or rebound > 1e-9:
        wrong |= not fate[1]
    elif last is False and rebound < 1e-12:
        wrong |= bool(fate[1])
    if not numbers:
        return Measurement(2 * float(wrong), 1.0)
    if last is not None:
        wrong |= bool(fate.rises_last) != last
    error = max(abs(fate.drop - drop), abs(fate.rebound - rebound)) / 1e-6
    return Measurement(max(error, 2 * float(wrong)), 1.0)


def _fate(formula: Formula, point: Point) -> Measurement:
    mu = np.concatenate([point["largest"] * point["shares"], np.zeros(point["zeros"])])
    return fate_error(formula, mu, numbers=True)


def _drops_and_rebounds(formula: Formula, point: Point) -> Measurement:
    mu = point["mu"]
    if np.ptp(np.abs(mu)) == 0:
        raise JomaError("all of one size")
    return fate_error(formula, mu, numbers=False)


def _nodes(formula: Formula, point: Point) -> Measurement:
    """The matrix equation by LSODA, every component on its own."""
    mu, t = point["mu"], point["time"]
    v = follow(
        lambda v: (mu - v) * np.exp(np.sum(v**2, axis=1, keepdims=True) / 2),
        np.zeros_like(mu),
        t,
        1e-9,
    )
    return Measurement(float(np.max(np.abs(formula(mu, t) - v))), 1e-4)


def _rank(formula: Formula, point: Point) -> Measurement:
    """Whole numbers in the targets, so that no singular value is small by chance."""
    mu = np.round(point["mu"])
    if not mu.any():
        raise JomaError("nothing moves")
    v = follow(
        lambda v: (mu - v) * np.exp(np.sum(v**2, axis=1, keepdims=True) / 2),
        np.zeros_like(mu),
        point["time"],
        1e-9,
    )
    # Relative to the entries of the whole: early on V is small in all of them.
    drops = bool(spectra.rank(v, tolerance=1e-5) < spectra.rank(mu, tolerance=1e-9))
    return Measurement(float(bool(formula(mu)) != drops), 0.0)


def rank_error(formula: Formula, mu: Any, *, orthogonal: bool = False) -> Measurement:
    """Lowest, highest, first and last stable rank against those of shares by quadrature."""
    length = np.linalg.norm(mu, axis=1)
    if not length.any():
        raise JomaError("no row moves")
    _refuse_near_ties(length)
    fate = formula(mu)
    sizes, place = np.unique(length, return_inverse=True)
    every, t = courses(sizes)
    t = t[1:]  # at t = 0 there is no matrix yet

    def ranks(when: Any) -> Any:
        shares = np.stack([-np.expm1(-one.at(when)) for one in every], axis=-1)[:, place]
        if orthogonal:  # their lengths are the singular values
            squares = (shares * length) ** 2
            return np.sum(squares, axis=1) / np.max(squares, axis=1)
        return spectra.stable_rank(shares[:, :, None] * mu)

    ends = float(spectra.stable_rank(mu))
    low = _minimum(ranks, t, 2 * sizes.size + 2)
    high = -_minimum(lambda when: -ranks(when), t, 2 * sizes.size + 2)
    error = max(abs(fate.ends - ends), abs(fate.drop - max(ends - low, 0.0))) / 1e-5
    error = max(error, abs(fate.rise - max(high - ends, 0.0)) / 1e-5)
    wrong = orthogonal and not (fate.drop > 0 and high < ends + 1e-9)
    return Measurement(max(error, 2 * float(wrong)), 1.0)


def _bounce(formula: Formula, point: Point) -> Measurement:
    """Orthogonal rows of unequal length: below the ends at all times."""
    length = point["length"]
    if np.ptp(length) < 1e-3 * np.max(length):
        raise JomaError("rows of one length")
    # Rows along the axes have exactly these lengths.
    return rank_error(formula, np.diag(length)[:, ::-1], orthogonal=True)


def _turns(formula: Formula, point: Point) -> Measurement:
    """The signs of the first and the last change of the stable rank, by small steps.

    At first V is M + ε diag(ℓ²) M, at last M - ε diag(shortest) M, up to a factor.
    """
    mu = point["mu"]
    if point["many"] and len(mu) > 1:  # many short rows that share a direction
        mu = np.vstack([mu, np.repeat(mu[-1:], point["many"], axis=0)])
    length = np.linalg.norm(mu, axis=1)
    kept = length > 1e-3 * np.max(length, initial=0.0)
    mu, length = mu[kept], length[kept]
    if not length.size:
        raise JomaError("nothing moves")
    fate = formula(mu)
    short = length <= np.min(length) * (1 + 1e-13)
    if np.any(~short & (length < np.min(length) * (1 + 1e-6))):
        raise JomaError("rows too close for the reference")
    wrong, guide = False, 0.0
    weight = (length / np.max(length)) ** 2
    for sign, way in ((fate.first, weight), (-fate.last, -short.astype(float))):
        near, far = (
            float(spectra.stable_rank((1 + size * way)[:, None] * mu)) for size in (1e-6, 1e-5)
        )
        ends = float(spectra.stable_rank(mu))
        change = (near - ends) / 1e-6
        straight = abs((far - ends) / 1e-5 - change) < 0.1 * abs(change)
        if abs(change) > 1e-6 and straight:
            wrong |= (sign > 0) != (change > 0)
            guide = max(guide, 0.5 / (1 + 100 * abs(change)))
    return Measurement(2.0 if wrong else guide, 1.0)


_TIMES: dict[str, Any] = {
    "time": _LONG,
    "where": Choice("any", "growth"),
    "y": Real(1e-6, 700, log=True),
}

EQN6 = Search({"mu": MU, **_TIMES}, _weights)
LOG_RESIDUAL = Search({"mu": MU, **_TIMES}, _log_residual)
ODE = Search(
    {"mu": Vector(Real(-4, 4, special=(0.0,)), Integer(1, 8)), "time": Real(1e-4, 50, log=True)},
    _against_ode,
)
LATE = Search({"size": Real(1e-6, 6), "y": Real(2, 700, log=True)}, _late)
DERIVATIVE = Search({"size": Real(1e-3, 6, log=True), "y": Real(1e-3, 30, log=True)}, _derivative)
FATE = Search(
    {
        "largest": Real(1e-2, 37, log=True),
        "shares": Vector(Real(-1, 1, special=(0.0, 1.0)), Integer(1, 12)),
        "zeros": Integer(0, 200),
    },
    _fate,
)
ENTROPY = Search(
    {"mu": Vector(Real(1e-3, 37, log=True, special=(1.0, 3.0)), Integer(2, 12))},
    _drops_and_rebounds,
)
NODES = Search({"mu": _ROWS, "time": Real(1e-3, 30, log=True)}, _nodes)
RANK = Search({"mu": _FEW_ROWS, "time": Real(1e-2, 30, log=True)}, _rank)
STABLE_RANK = Search({"length": Vector(Real(0.01, 37, log=True), Integer(2, 6))}, _bounce)
TURNS = Search({"mu": _ROWS, "many": Integer(0, 100)}, _turns)
