"""Scan&Snap written a second time, independently of `joma.theory`, as the reference of its claims.

The log-likelihood is differentiated by PyTorch. Where symmetry leaves a few variables, the flow of
these alone is integrated, which is fast; the flow of all of them is `scan_snap.evolve`.
"""

from collections.abc import Callable, Iterator
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.integrate import odeint

from joma.common.types import Array
from joma.experiments.claims.claim import Generator, Point
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, ScanSnapCorpus

if TYPE_CHECKING:
    pass


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


def one_query(tokens: Any, joint: Any) -> ScanSnapCorpus:
    """Return a corpus of one query, P(l|n) and P(n)."""
    tokens = np.asarray(tokens, dtype=float)
    return ScanSnapCorpus(tokens, np.zeros(len(tokens), dtype=np.int64), np.asarray(joint))


PULLED_DOWN = one_query([[0.25, 0.75, 0.00], [0.85, 0.00, 0.15]], [0.5, 0.5])
"""Its last token is distinct, next to one with P = .25 and .85: it rises and then falls."""
UNEVEN = one_query([[0.8, 0.2, 0.0], [0.8, 0.0, 0.2]], [0.8, 0.2])
"""One equally common token, but classes of unequal probability: the frequent one's can fall."""
FALLING = ((PULLED_DOWN, 5.0, 1e4), (PULLED_DOWN, 100.0, 1e18), (UNEVEN, 0.02, 1e4))
"""Corpora, an η_Y/η_Z and a time by which a distinct token and B have fallen below 0."""


def random_corpus(
    rng: Generator,
    classes: int,
    common: int,
    distinct: int,
    *,
    mass: float = 0.5,
    equal: bool = True,
) -> ScanSnapCorpus:
    """Return a corpus of one query: tokens equally common in all classes, others of one class."""
    tokens = np.zeros((classes, common + classes * distinct))
    tokens[:, :common] = mass * rng.dirichlet(np.full(common, 3.0))
    for class_ in range(classes):
        own = common + class_ * distinct
        tokens[class_, own : own + distinct] = (1 - mass) * rng.dirichlet(np.full(distinct, 3.0))
    joint = np.full(classes, 1 / classes) if equal else rng.dirichlet(np.full(classes, 4.0))
    return one_query(tokens, joint)


def balanced_corpora(
    rng: Generator, *sizes: tuple[int, int, int], spread: float = 0.2
) -> Iterator[Balanced]:
    """Yield balanced corpora of given sizes K, C, D, with a random mass on the common tokens."""
    for size in sizes:
        yield Balanced(*size, common_mass=float(rng.uniform(0.5 - spread, 0.5 + spread)))


def alike(point: Point) -> Alike:
    """Return the flow of classes that are alike."""
    mass = point["mass"]
    return Alike(point["classes"], mass * point["common"], (1 - mass) * point["distinct"])


def balanced(point: Point) -> Balanced:
    """Return the balanced corpus of a point."""
    return Balanced(point["classes"], point["common"], point["distinct"], point["mass"])


def share_at_start(corpus: ScanSnapCorpus) -> float:
    """Return F = Σ f² over the distinct tokens of the first class."""
    f = scan_snap.feature(corpus, np.zeros((1, corpus.tokens)))
    return float(np.sum(f[0, corpus.distinct] ** 2))
