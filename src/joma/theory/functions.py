"""The two functions of a block: attention σ with its law's H = ∫ σ/σ′, and activation φ."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from joma.theory import _checks
from joma.theory._checks import Array

Function = Callable[[Array], Array]


@dataclass(frozen=True)
class Attention:
    """An attention σ and what Theorem 1 needs of it.

    Attributes:
        name: how it is called.
        score: σ, applied to z/τ.
        derivative: σ′.
        integral: H = ∫ σ/σ′, whose difference from the weights is conserved.
        normalized: whether A = Σ_l σ(z_l/τ) x_l (softmax) instead of a constant.
        normalizer: A, when constant.
    """

    name: str
    score: Function
    derivative: Function
    integral: Function
    normalized: bool = False
    normalizer: float = 1.0

    def __post_init__(self) -> None:
        _checks.positive_scalar("normalizer", self.normalizer)


@dataclass(frozen=True)
class Activation:
    """An activation φ with its derivative.

    Attributes:
        name: how it is called.
        value: φ.
        derivative: φ′.
        smooth: whether φ′ is continuous; if not, the flow is integrated in fixed steps.
    """

    name: str
    value: Function
    derivative: Function
    smooth: bool = True


def linear_attention() -> Attention:
    """Eqn 1, linear attention: σ(y) = y, H = y²/2."""
    return Attention("linear", lambda y: y, np.ones_like, lambda y: y**2 / 2)


def exp_attention(normalizer: float = 1.0) -> Attention:
    """Eqn 1, exp attention: σ(y) = e^y over a constant A, H = y."""
    return Attention("exp", np.exp, np.exp, lambda y: y, normalizer=normalizer)


def softmax_attention() -> Attention:
    """Eqn 1, softmax attention: e^y over its sum; it conserves the sum of z instead."""
    return Attention("softmax", np.exp, np.exp, lambda y: y, normalized=True)


def sigmoid_attention() -> Attention:
    """Theorem 1 for another σ, sigmoid attention: σ(y) = 1/(1+e^{-y}), H = y + e^y."""
    return Attention("sigmoid", special.expit, _sigmoid_derivative, lambda y: y + np.exp(y))


def leaky_relu(slope: float = 0.01) -> Activation:
    """Lemma 5, leaky ReLU: c₋ = slope below zero, 1 above."""
    slope = _checks.scalar("slope", slope)
    return Activation(
        f"leaky_relu({slope:g})",
        lambda y: np.where(y > 0, y, slope * y),
        lambda y: np.where(y > 0, 1.0, slope),
        smooth=False,
    )


def _sigmoid_derivative(y: Array) -> Array:
    return special.expit(y) * special.expit(-y)


def _tanh_derivative(y: Array) -> Array:
    # 1 - tanh² would keep no digits where tanh is close to 1.
    small = np.exp(-2 * np.abs(y))
    return 4 * small / (1 + small) ** 2


ATTENTIONS: dict[str, Callable[[], Attention]] = {
    "linear": linear_attention,
    "exp": exp_attention,
    "softmax": softmax_attention,
    "sigmoid": sigmoid_attention,
}
ACTIVATIONS: dict[str, Callable[[], Activation]] = {
    "linear": lambda: Activation("linear", lambda y: y, np.ones_like),
    "tanh": lambda: Activation("tanh", np.tanh, _tanh_derivative),
    "softplus": lambda: Activation("softplus", lambda y: np.logaddexp(0.0, y), special.expit),
    "sigmoid": lambda: Activation("sigmoid", special.expit, _sigmoid_derivative),
    "relu": lambda: Activation(
        "relu", lambda y: np.maximum(y, 0), lambda y: (y > 0).astype(np.float64), smooth=False
    ),
    "leaky_relu": leaky_relu,
}
