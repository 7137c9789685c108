"""Scan&Snap written a second time, independently of `joma.theory`, as the reference of its claims.

The log-likelihood is differentiated by PyTorch. Where symmetry leaves a few variables, the flow of
these alone is integrated, which is fast; the flow of all of them is `scan_snap.evolve`.
"""

from collections.abc import Callable
from math import exp, hypot, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.integrate import odeint

from joma.common.types import Array
from joma.theory.scan_snap import ScanSnapCorpus

if TYPE_CHECKING:
    from torch import Tensor


def _log_likelihood(corpus: ScanSnapCorpus, z: "Tensor", y: "Tensor") -> "Tensor":
    """E[log softmax(Yᵀf_n)_n]."""
    import torch

    tokens = torch.tensor(corpus.token_given_class)
    weights = tokens * torch.exp(z[torch.tensor(corpus.query)])
    f = weights / weights.norm(dim=1, keepdim=True)
    log_alpha = torch.log_softmax(f @ y, dim=1)
    return torch.tensor(corpus.joint) @ log_alpha.diagonal()


def gradient(corpus: ScanSnapCorpus, z: Array, y: Array) -> tuple[Array, Array]:
    """Return the derivatives of the log-likelihood by z and Y, that by z over P(m)."""
    import torch  # not before: claims are listed without it

    at = torch.tensor(z, requires_grad=True), torch.tensor(y, requires_grad=True)
    by_z, by_y = torch.autograd.grad(_log_likelihood(corpus, *at), at)
    return by_z.numpy() / corpus.query_probability[:, None], by_y.numpy()


def initial_acceleration(corpus: ScanSnapCorpus) -> Array:
    """Return z̈(0)/(η_Y η_Z) from z = Y = 0: the derivative of ż along Ẏ, for ż(0) is 0."""
    import torch

    z = torch.zeros((corpus.queries, corpus.tokens), dtype=torch.float64, requires_grad=True)
    y = torch.zeros((corpus.tokens, corpus.classes), dtype=torch.float64, requires_grad=True)
    (by_y,) = torch.autograd.grad(_log_likelihood(corpus, z, y), y, create_graph=True)
    (along,) = torch.autograd.grad((by_y * by_y.detach()).sum(), z)
    return along.numpy() / corpus.query_probability[:, None]


def integrate(
    rate: Callable[[float, Array], Any], start: Array, t: Array, clock: float, rtol: float = 1e-9
) -> Array:
    """Return the states at the times t ≥ 0, integrated in ln(1 + clock·t)."""
    log_time = np.log1p(clock * np.asarray(t))
    if not np.any(log_time):
        return np.tile(start, (len(log_time), 1))

    def in_log_time(s: float, state: Array) -> Any:
        now = np.exp(s)
        return np.asarray(rate((now - 1) / clock, state)) * (now / clock)

    s = np.concatenate([[0.0], log_time])
    limits: dict[str, Any] = {"rtol": rtol, "atol": 1e-3 * rtol, "mxstep": 100_000}
    path, report = odeint(in_log_time, start, s, tfirst=True, full_output=True, **limits)
    if report["message"] != "Integration successful.":
        raise RuntimeError(report["message"])
    return path[1:]


def _clock(eta_y: float, eta_z: float) -> float:
    return max(eta_y, sqrt(eta_y * eta_z))


class Alike:
    """The flow of K equally probable classes of one query that are alike.

    All classes share the common tokens, and the distinct tokens of each have the same frequencies.
    Then Y is y for a class's own distinct tokens, −y/(K − 1) for those of others, and equal for
    all classes on common tokens. The state is (z of common, z of distinct, y of distinct, B).
    """

    def __init__(self, classes: int, common: Array, distinct: Array) -> None:
        self.classes, self.common, self.distinct = classes, common, distinct
        self._log = np.log(np.concatenate([common, distinct]))

    @property
    def corpus(self) -> ScanSnapCorpus:
        """The corpus, common tokens first, then the distinct ones class by class."""
        own = np.kron(np.eye(self.classes), self.distinct)
        tokens: np.ndarray = np.hstack([np.tile(self.common, (self.classes, 1)), own])
        share = np.full(self.classes, 1 / self.classes)
        return ScanSnapCorpus(tokens, np.zeros(self.classes, dtype=np.int64), share)

    def feature(self, z: Array) -> Array:
        """Return f of the common and of a class's own distinct tokens."""
        logs = self._log + z
        weights = np.exp(logs - logs.max(axis=-1, keepdims=True))
        return weights / np.linalg.norm(weights, axis=-1, keepdims=True)

    def square_at_start(self, token: int) -> float:
        """Return f² of a distinct token at z = 0."""
        c, d = len(self.common), len(self.distinct)
        return float(self.feature(np.zeros(c + d))[c + token] ** 2)

    def full_state(self, state: Array) -> tuple[ScanSnapCorpus, Array, Array]:
        """Return the corpus, z and Y, with Y = 0 on common tokens."""
        k, c, d = self.classes, len(self.common), len(self.distinct)
        z = np.concatenate([state[:c], np.tile(state[c : c + d], k)])[None]
        own = np.kron(np.eye(k), state[c + d : c + 2 * d][:, None])
        others = np.kron(1 - np.eye(k), state[c + d : c + 2 * d][:, None])
        y = np.vstack([np.zeros((c, k)), own - others / (k - 1)])
        return self.corpus, z, y

    def path(self, t: Array, eta_y: float, eta_z: float, rtol: float = 1e-9) -> Array:
        """Return the states at the times t."""
        k, c, d = self.classes, len(self.common), len(self.distinct)
        # y is small where attention moves long before the decoder has learned: integrate it larger.
        scale = max(1.0, sqrt(eta_z / eta_y))

        def rate(_: float, state: Array) -> Array:
            f = self.feature(state[: c + d])
            common, own, y = f[:c], f[c:], state[c + d : c + 2 * d] / scale
            fy = float(own @ y)
            miss = (k - 1) / (np.exp(min(k / (k - 1) * fy, 700.0)) + k - 1)
            g, pull = k / (k - 1) * miss * y, k / (k - 1) * miss * fy
            share = float(own @ own)
            return np.concatenate(
                [
                    -eta_z * common * common * pull,
                    eta_z / k * own * (g - own * pull),
                    scale * eta_y / k * miss * own,
                    # γ − f·g = γ(1 − F), and 1 − F is the share of the common tokens.
                    [eta_z / k * pull / share * float(common @ common)],
                ]
            )

        path = integrate(rate, np.zeros(c + 2 * d + 1), t, _clock(eta_y, eta_z), rtol)
        path[:, c + d : c + 2 * d] /= scale
        return path


class Even:
    """The flow of a balanced corpus: K classes, C common and D distinct tokens, alike each.

    The state is (z of a common token, z of a distinct token, y, B).
    """

    def __init__(self, classes: int, common: int, distinct: int, mass: float) -> None:
        self.sizes = classes, common, distinct
        self.ratio = mass**2 / common / ((1 - mass) ** 2 / distinct)

    def rate(self, state: Array, eta_y: float, eta_z: float) -> list[float]:
        """Return the derivatives by t."""
        k, c, d = self.sizes
        z_common, z_distinct, y, _ = state.tolist()
        odds = self.ratio * exp(2 * min(z_common - z_distinct, 300.0))
        distinct, common = 1 / (1 + odds), odds / (1 + odds)
        margin = k / (k - 1) * sqrt(distinct * d) * y
        miss = (k - 1) / (exp(min(margin, 700.0)) + k - 1)
        pull = margin * miss
        return [
            -eta_z * common / c * pull,
            eta_z / k * common / d * pull,
            eta_y / k * sqrt(distinct / d) * miss,
            eta_z / k * common / distinct * pull,
        ]

    def path(self, t: Array, eta_y: float, eta_z: float, rtol: float = 1e-9) -> Array:
        """Return the states at the times t."""
        # y is small where attention moves long before the decoder has learned: integrate it larger.
        scale = np.array([1.0, 1.0, max(1.0, sqrt(eta_z / eta_y)), 1.0])

        def rate(_: float, state: Array) -> Any:
            return scale * self.rate(state / scale, eta_y, eta_z)

        return integrate(rate, np.zeros(4), t, _clock(eta_y, eta_z), rtol) / scale


class TwoClasses:
    """The flow of two classes of one query with one common token and one distinct token each.

    The state is z and w = Y₁ − Y₂, of the common token and the two distinct ones.
    """

    def __init__(self, common: tuple[float, float], share: float) -> None:
        self.common, self.share = common, share

    @property
    def corpus(self) -> ScanSnapCorpus:
        """The corpus, the common token first."""
        (first, second), share = self.common, self.share
        tokens = np.array([[first, 1 - first, 0.0], [second, 0.0, 1 - second]])
        return ScanSnapCorpus(tokens, np.zeros(2, dtype=np.int64), np.array([share, 1 - share]))

    def path(self, t: Array, eta_y: float, eta_z: float, rtol: float = 1e-9) -> Array:
        """Return the states at the times t."""
        first, second = self.common

        def rate(_: float, state: Array) -> list[float]:
            z, z1, z2, w, w1, w2 = state.tolist()
            pairs = ((first, z1, w1, 1.0, self.share), (second, z2, w2, -1.0, 1 - self.share))
            z_rate, w_rate, own_z, own_w = 0.0, 0.0, [], []
            for common, own, weight, sign, share in pairs:
                lead = own - z
                c, d = (
                    (common * exp(-lead), 1 - common)
                    if lead > 0
                    else (common, (1 - common) * exp(lead))
                )
                norm = hypot(c, d)
                c, d = c / norm, d / norm
                margin = sign * (c * w + d * weight)
                miss = 1 / (1 + exp(min(margin, 700.0)))
                z_rate += share * miss * c * (sign * w - c * margin)
                own_z.append(eta_z * share * miss * d * (sign * weight - d * margin))
                w_rate += 2 * share * miss * sign * c
                own_w.append(eta_y * 2 * share * miss * sign * d)
            return [eta_z * z_rate, *own_z, eta_y * w_rate, *own_w]

        return integrate(rate, np.zeros(6), t, _clock(eta_y, eta_z), rtol)


def frozen(
    gram: Array, joint: Array, t: Array, eta_y: float, rtol: float = 1e-9
) -> tuple[Array, Array, Array]:
    """Return scores, B and Ḃ over η_Z of one query while attention stands still.

    Y = Σ_n f_n y_nᵀ, so that only the products f_nᵀf_n' matter.

    Args:
        gram: f_nᵀf_n', shape (classes, classes).
        joint: P(n).
        t: times.
        eta_y: rate of the decoder.
        rtol: relative tolerance.
    """
    classes = len(joint)
    own = np.eye(classes)

    def parts(state: Array) -> tuple[Array, Array, Array]:
        y = state[: classes**2].reshape(classes, classes)
        scores = gram @ y
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        others = (1 - own) * weights / weights.sum(axis=1, keepdims=True)
        residual = own * others.sum(axis=1, keepdims=True) - others
        # γ_n − f_nᵀg_n: what the features of other classes take away.
        b_rate = -joint * np.sum(gram * (1 - own) * (residual @ y.T), axis=1)
        return scores, residual, b_rate

    def rate(_: float, state: Array) -> Array:
        residual, b_rate = parts(state)[1:]
        return np.concatenate([eta_y * (joint[:, None] * residual).ravel(), b_rate])

    start = np.zeros(classes**2 + classes)
    path = integrate(rate, start, t, eta_y, rtol)
    scores = np.stack([parts(state)[0] for state in path])
    return scores, path[:, classes**2 :], np.stack([parts(state)[2] for state in path])
