"""What a marginal is, and how light tails are integrated."""

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.theory._checks import Array
from joma.theory._tails import centre_nodes, integrate_centre, integrate_tail


class Marginal(ABC):
    """A symmetric density on the line: the projection of an isotropic distribution."""

    @abstractmethod
    def pdf(self, u: ArrayLike) -> Array:
        """p(u), the density along one direction (Eqn 33)."""

    @abstractmethod
    def theta1(self, s: ArrayLike) -> Array:
        """θ₁ (Eqn 40): P[u > -s], the share of the cluster on the active side."""

    @abstractmethod
    def theta2(self, s: ArrayLike) -> Array:
        """θ₂ (Eqn 41): the first moment of the active side; even in s."""

    def first_integral(self, s: ArrayLike) -> Array:
        """F (Lemma 3, Eqn 49): E[max(u+s, 0)] = θ₂(s) + s θ₁(s)."""
        s = np.asarray(s, dtype=np.float64)
        return self.theta2(s) + s * self.theta1(s)

    def mean_residual(self, s: ArrayLike) -> Array:
        """F/θ₁ (Eqn 56): E[u+s | u > -s]; NaN where the active side is empty to rounding."""
        share = self.theta1(s)
        return self.first_integral(s) / np.where(share > 0, share, np.nan)

    def log_theta1(self, s: ArrayLike) -> Array:
        """Ln θ₁, right also where θ₁ is below the smallest float; -inf where it is 0."""
        with np.errstate(divide="ignore"):
            return np.log(self.theta1(s))

    def inverse_hazard(self, s: ArrayLike) -> Array:
        """θ₁/p, the slope of G (after Eqn 57); NaN where both are 0 to rounding."""
        p = self.pdf(s)
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.theta1(s) / p

    def mean_residual_error(self, s: ArrayLike) -> Array:
        """Relative rounding error of `mean_residual`: that of θ₁ and θ₂ before they cancel."""
        s = np.asarray(s, dtype=np.float64)
        terms = self.theta2(s) + np.abs(s) * self.theta1(s)
        total = self.mean_residual(s) * self.theta1(s)
        return self.noise * terms / np.where(total > 0, total, np.inf)

    @property
    def reach(self) -> float:
        """How far out the marginal is known: the end of its support; inf for most."""
        return np.inf

    @property
    def noise(self) -> float:
        """Relative rounding error of θ₁ and θ₂."""
        return 2e-14

    @property
    def least_mass(self) -> float:
        """The θ₁ below which neither is known to that error."""
        return 1e-290


class LightTailed(Marginal):
    """Families whose tails are integrated from the density's own fall, at any depth.

    A subclass says in `_tail` what `integrate_tail` needs. Its θ₁ and mean residual life are then
    known to about 1e-14 also where θ₁ is far below the smallest float.
    """

    @abstractmethod
    def log_pdf(self, u: ArrayLike) -> Array:
        """Ln p(u)."""

    @abstractmethod
    def _tail(self, x: Array) -> tuple[Array, float]:
        """A at x, and κ."""

    @property
    @abstractmethod
    def _core(self) -> float:
        """The place from which on the tail rule is used."""

    def pdf(self, u: ArrayLike) -> Array:
        return np.exp(self.log_pdf(u))

    def theta1(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        x = np.abs(s)
        tail = self._tail_share(x)
        near = np.minimum(x, self._core)
        inner = near * integrate_centre(self.pdf(near[..., None] * centre_nodes()))
        tail = np.where(x < self._core, 0.5 - inner, tail)
        return np.where(s < 0, tail, 1 - tail)

    def log_theta1(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        far = np.maximum(-s, self._core)
        with np.errstate(divide="ignore"):
            return np.where(
                s < -self._core, self.log_pdf(far) + np.log(self._mills(far)), super().log_theta1(s)
            )

    def first_integral(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        far = np.minimum(s, -self._core)
        share = self.theta1(far)
        deep = np.where(share > 0, share * np.nan_to_num(self.mean_residual(far)), 0.0)
        return np.where(s < -self._core, deep, super().first_integral(s))

    def mean_residual(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        inside = np.where(self._inside(s), np.maximum(-s, self._core), self._core)
        _, life = integrate_tail(inside, *self._tail(inside))
        near = np.maximum(s, -self._core)
        life = np.where(
            s < -self._core, life, Marginal.first_integral(self, near) / self.theta1(near)
        )
        return np.where(self._inside(s), life, np.nan)

    def inverse_hazard(self, s: ArrayLike) -> Array:
        s = np.asarray(s, dtype=np.float64)
        near = super().inverse_hazard(np.maximum(s, -self._core))
        far = np.maximum(-s, self._core)
        ratio = np.where(s < -self._core, self._mills(far), near)
        return np.where(self._inside(s), ratio, np.nan)

    def mean_residual_error(self, s: ArrayLike) -> Array:
        return np.full(np.shape(s), 2e-14)

    @property
    def noise(self) -> float:
        # That of the density: rounding of a logarithm of up to -700.
        return 2e-13

    @property
    def least_mass(self) -> float:
        return 0.0

    def _inside(self, s: Array) -> NDArray[np.bool_]:
        return s > -self.reach

    def _tail_share(self, x: Array) -> Array:
        """P[u > x] from `_core` on."""
        return np.exp(self.log_pdf(x)) * self._mills(x)

    def _mills(self, x: Array) -> Array:
        inside = np.where(self._inside(-x), np.maximum(x, self._core), self._core)
        return np.where(self._inside(-x), integrate_tail(inside, *self._tail(inside))[0], 0.0)
