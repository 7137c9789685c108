"""Isotropic distributions, seen along one direction (Lemma 1, Eqns 33-36).

A cluster of Section 4 enters its dynamics only through the density p(u) of its projection on a
line. A `Marginal` is that density with the integrals the theory needs, for the step ψ = 1[x > 0]
of ReLU:

    θ₁(s) = ∫ ψ(u+s) p(u) du,   θ₂(s) = ∫ u ψ(u+s) p(u) du,   F(s) = θ₂(s) + s θ₁(s).

F/θ₁ = E[u+s | u > -s] is a mean residual life; whether it is injective decides Theorem 3.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory._marginal import Density, LightTailed, Marginal, radial, sphere_constant

__all__ = [
    "Ball",
    "Density",
    "Gaussian",
    "Laplace",
    "Logistic",
    "Marginal",
    "Scaled",
    "StudentT",
    "Uniform",
    "radial",
    "sphere_constant",
]


@dataclass(frozen=True)
class Gaussian(LightTailed):
    """The standard normal distribution, in any dimension its own marginal."""

    def log_pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        return -(np.asarray(u, dtype=np.float64) ** 2) / 2 - np.log(2 * np.pi) / 2

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return special.ndtr(np.asarray(s, dtype=np.float64))

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        return self.pdf(s)

    def log_theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return special.log_ndtr(np.asarray(s, dtype=np.float64))

    @property
    def _core(self) -> float:
        return 1.0

    def _tail(self, x: Array) -> tuple[Array, float]:
        return x, np.inf


_HEAVY = 8.0
"""Degrees of freedom below which Student's θ₁ comes from the incomplete beta function."""


@dataclass(frozen=True)
class StudentT(LightTailed):
    """Student's t with `df` > 1 degrees of freedom: the marginal of the multivariate t."""

    df: float

    def __post_init__(self) -> None:
        df = _checks.positive_scalar("df", self.df)
        if df <= 1:
            raise JomaError(f"df must be > 1, or the cluster has no mean; got {df}")
        if df < _HEAVY:
            object.__setattr__(self, "least_mass", Marginal.least_mass)

    def log_pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        u = np.asarray(u, dtype=np.float64)
        fall = (self.df + 1) / 2 * _log_square(u / np.sqrt(self.df))
        return _log_gamma_step(self.df / 2) - np.log(self.df * np.pi) / 2 - fall

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return self.df / (self.df - 1) * np.exp(self.log_pdf(s) + _log_square(s / np.sqrt(self.df)))

    def first_integral(self, s: ArrayLike) -> Array:  # noqa: D102
        return super().first_integral(s) if self.df >= _HEAVY else Marginal.first_integral(self, s)

    def mean_residual(self, s: ArrayLike) -> Array:  # noqa: D102
        return super().mean_residual(s) if self.df >= _HEAVY else Marginal.mean_residual(self, s)

    def inverse_hazard(self, s: ArrayLike) -> Array:  # noqa: D102
        return super().inverse_hazard(s) if self.df >= _HEAVY else Marginal.inverse_hazard(self, s)

    def log_theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return super().log_theta1(s) if self.df >= _HEAVY else Marginal.log_theta1(self, s)

    def mean_residual_error(self, s: ArrayLike) -> Array:  # noqa: D102
        if self.df >= _HEAVY:
            return super().mean_residual_error(s)
        return Marginal.mean_residual_error(self, s)

    @property
    def _core(self) -> float:
        return 1.0

    def _tail(self, x: Array) -> tuple[Array, float]:
        return self.df + x**2, self.df + 1

    def _tail_share(self, x: Array) -> Array:
        if self.df >= _HEAVY:
            return super()._tail_share(x)
        # SciPy's stdtr loses digits far below zero, the incomplete beta function near zero.
        near = 1 / (1 + (x / np.sqrt(self.df)) ** 2)
        return np.asarray(special.betainc(self.df / 2, 0.5, near), dtype=np.float64) / 2


@dataclass(frozen=True)
class Laplace(Marginal):
    """The double exponential density e^{-|u|}/2."""

    least_mass = 0.0

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        return np.exp(-np.abs(np.asarray(u, dtype=np.float64))) / 2

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return np.where(s < 0, self.pdf(s), 1 - self.pdf(s))

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return (1 + np.abs(s)) * self.pdf(s)

    def first_integral(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return np.maximum(s, 0) + self.pdf(s)

    def mean_residual(self, s: ArrayLike) -> Array:  # noqa: D102
        above = np.maximum(np.asarray(s, dtype=np.float64), 0)
        return self.first_integral(above) / self.theta1(above)

    def log_theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return np.where(s < 0, s - np.log(2), np.log1p(-self.pdf(s)))

    def inverse_hazard(self, s: ArrayLike) -> Array:  # noqa: D102
        above = np.maximum(np.asarray(s, dtype=np.float64), 0)
        with np.errstate(divide="ignore"):
            return self.theta1(above) / self.pdf(above)

    def mean_residual_error(self, s: ArrayLike) -> Array:  # noqa: D102
        return np.full(np.shape(s), self.noise)


@dataclass(frozen=True)
class Logistic(Marginal):
    """The logistic density e^{-u}/(1 + e^{-u})²."""

    least_mass = 0.0

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        u = np.asarray(u, dtype=np.float64)
        return special.expit(u) * special.expit(-u)

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return special.expit(np.asarray(s, dtype=np.float64))

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        s = -np.abs(np.asarray(s, dtype=np.float64))
        return np.logaddexp(0.0, s) - s * special.expit(s)

    def first_integral(self, s: ArrayLike) -> Array:  # noqa: D102
        return np.logaddexp(0.0, np.asarray(s, dtype=np.float64))

    def mean_residual(self, s: ArrayLike) -> Array:  # noqa: D102
        above = np.maximum(np.asarray(s, dtype=np.float64), -40)  # constant to rounding below
        return self.first_integral(above) / self.theta1(above)

    def log_theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return -np.logaddexp(0.0, -np.asarray(s, dtype=np.float64))

    def inverse_hazard(self, s: ArrayLike) -> Array:  # noqa: D102
        with np.errstate(divide="ignore", over="ignore"):
            return 1 / special.expit(-np.asarray(s, dtype=np.float64))

    def mean_residual_error(self, s: ArrayLike) -> Array:  # noqa: D102
        return np.full(np.shape(s), self.noise)


@dataclass(frozen=True)
class Ball(LightTailed):
    """Uniform in the unit ball of `n` dimensions: p(u) ∝ (1 - u²)^{(n-1)/2} (Eqns 33-36)."""

    n: int
    reach = 1.0

    def __post_init__(self) -> None:
        _checks.whole("n", self.n, 1)

    def log_pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        u = np.abs(np.asarray(u, dtype=np.float64))
        inside = np.where(u < 1, (1 - u) * (1 + u), 1.0)
        constant = _log_gamma_step((self.n + 1) / 2) - np.log(np.pi) / 2
        log = constant + (self.n - 1) / 2 * np.log(inside)
        edge = constant if self.n == 1 else -np.inf
        return np.where(u < 1, log, np.where(u == 1, edge, -np.inf))

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64)
        return np.clip((1 + s) / 2, 0.0, 1.0) if self.n == 1 else super().theta1(s)

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.clip(np.asarray(s, dtype=np.float64), -1.0, 1.0)
        constant = np.exp(_log_gamma_step((self.n + 1) / 2)) / np.sqrt(np.pi)
        return constant * ((1 - s) * (1 + s)) ** ((self.n + 1) / 2) / (self.n + 1)

    def mean_residual(self, s: ArrayLike) -> Array:  # noqa: D102
        if self.n > 1:
            return super().mean_residual(s)
        s = np.asarray(s, dtype=np.float64)
        return np.where(s > -1, np.where(s < 1, (1 + s) / 2, s), np.nan)

    def inverse_hazard(self, s: ArrayLike) -> Array:  # noqa: D102
        return super().inverse_hazard(s) if self.n > 1 else Marginal.inverse_hazard(self, s)

    def first_integral(self, s: ArrayLike) -> Array:  # noqa: D102
        if self.n > 1:
            return super().first_integral(s)
        s = np.asarray(s, dtype=np.float64)
        return np.where(s < 1, np.maximum(1 + s, 0.0) ** 2 / 4, s)

    def log_theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return super().log_theta1(s) if self.n > 1 else Marginal.log_theta1(self, s)

    @property
    def _core(self) -> float:
        return 1 / np.sqrt(self.n)

    def _tail(self, x: Array) -> tuple[Array, float]:
        return -(1 - x) * (1 + x), -(self.n - 1.0)


def Uniform() -> Ball:  # noqa: N802 - stands among the families, which are classes
    """The uniform density on [-1, 1]: the ball of one dimension."""
    return Ball(1)


@dataclass(frozen=True)
class Scaled(Marginal):
    """A marginal stretched by `width`: that of a cluster whose points are `width` times as far."""

    marginal: Marginal
    width: float

    def __post_init__(self) -> None:
        _checks.positive_scalar("width", self.width)
        object.__setattr__(self, "reach", self.width * self.marginal.reach)
        object.__setattr__(self, "noise", self.marginal.noise)
        object.__setattr__(self, "least_mass", self.marginal.least_mass)

    def pdf(self, u: ArrayLike) -> Array:  # noqa: D102
        return self.marginal.pdf(np.asarray(u, dtype=np.float64) / self.width) / self.width

    def theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return self.marginal.theta1(np.asarray(s, dtype=np.float64) / self.width)

    def theta2(self, s: ArrayLike) -> Array:  # noqa: D102
        return self.width * self.marginal.theta2(np.asarray(s, dtype=np.float64) / self.width)

    def first_integral(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64) / self.width
        return self.width * self.marginal.first_integral(s)

    def mean_residual(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64) / self.width
        return self.width * self.marginal.mean_residual(s)

    def log_theta1(self, s: ArrayLike) -> Array:  # noqa: D102
        return self.marginal.log_theta1(np.asarray(s, dtype=np.float64) / self.width)

    def inverse_hazard(self, s: ArrayLike) -> Array:  # noqa: D102
        s = np.asarray(s, dtype=np.float64) / self.width
        return self.width * self.marginal.inverse_hazard(s)

    def mean_residual_error(self, s: ArrayLike) -> Array:  # noqa: D102
        return self.marginal.mean_residual_error(np.asarray(s, dtype=np.float64) / self.width)


def _log_square(x: Array) -> Array:
    """Ln(1 + x²), also where x² overflows."""
    x = np.abs(x)
    with np.errstate(divide="ignore"):
        return np.where(x < 1e8, np.log1p(np.minimum(x, 1e8) ** 2), 2 * np.log(x))


def _log_gamma_step(x: float) -> float:
    """Ln Γ(x + ½) - ln Γ(x), without the cancellation of large arguments."""
    if x < 20:
        return float(special.gammaln(x + 0.5) - special.gammaln(x))
    inverse = 1 / x
    series = -inverse / 8 + inverse**3 / 192 - inverse**5 / 640 + 17 * inverse**7 / 14336
    return float(np.log(x) / 2 + series)
