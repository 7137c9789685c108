"""Corpora for the claims on Scan&Snap: examples, random ones, and those of a search."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims.claim import Generator, Point
from joma.experiments.claims.reference.scan_snap import Alike, Even
from joma.experiments.claims.search import Integer, Matrix, Real, Seed, Simplex
from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, ScanSnapCorpus

ANY_CORPUS: dict[str, Any] = {
    "weights": Matrix(Real(0.0, 1.0, special=(0.0,)), Integer(2, 4), Integer(2, 6)),
    "joint": Simplex(Integer(2, 4), least=1e-4),
    "queries": Integer(1, 2),
}
ANY_STATE: dict[str, Any] = {
    "z_scale": Real(0.0, 8.0, special=(0.0,)),
    "y_scale": Real(0.0, 20.0, special=(0.0,)),
    "draw": Seed(),
}
ALIKE: dict[str, Any] = {
    "classes": Integer(2, 5),
    "common": Simplex(Integer(1, 3), least=1e-3),
    "distinct": Simplex(Integer(1, 4), least=1e-3),
    "mass": Real(1e-3, 0.999, special=(0.5,)),
}
ALIKE_RUN: dict[str, Any] = {
    "ratio": Real(1e-4, 1e6, log=True, special=(1.0,)),
    "time": Real(1e-2, 1e12, log=True),
}
"""η_Y/η_Z, and √(η_Y η_Z) t."""
BALANCED: dict[str, Any] = {
    "classes": Integer(2, 50, log=True),
    "common": Integer(1, 6),
    "distinct": Integer(1, 6),
    "mass": Real(0.01, 0.99, special=(0.5,)),
}
BALANCED_RUN: dict[str, Any] = {
    "ratio": Real(1e-6, 1e6, log=True, special=(1.0,)),
    "time": Real(1e-3, 1e14, log=True),
}
"""η_Y/η_Z, and √(η_Y η_Z) t."""
DECODER: dict[str, Any] = {
    "classes": Integer(2, 5),
    "share": Real(1e-3, 1.0, special=(0.5, 1.0)),
    "eta_y": Real(1e-3, 1e3, log=True, special=(1.0,)),
}
"""Classes alike with attention frozen, F = `share`."""


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


def any_corpus(point: Point) -> ScanSnapCorpus:
    """Return a corpus of any tokens; entries of 1e-9 and less count as absent."""
    weights = np.where(point["weights"] > 1e-9, point["weights"], 0.0)
    total = weights.sum(axis=1, keepdims=True)
    if np.any(total <= 0):
        raise JomaError("every class needs a token")
    classes = len(weights)
    joint = np.resize(point["joint"], classes)
    query = np.arange(classes) % point["queries"]
    return ScanSnapCorpus(weights / total, query.astype(np.int64), joint / joint.sum())


def any_state(point: Point, corpus: ScanSnapCorpus) -> tuple[Array, Array]:
    """Return random logits and a random decoder for a corpus."""
    rng = np.random.default_rng(point["draw"])
    z = point["z_scale"] * rng.standard_normal((corpus.queries, corpus.tokens))
    return z, point["y_scale"] * rng.standard_normal((corpus.tokens, corpus.classes))


def alike(point: Point) -> Alike:
    """Return the flow of classes that are alike."""
    mass = point["mass"]
    return Alike(point["classes"], mass * point["common"], (1 - mass) * point["distinct"])


def balanced(point: Point) -> Balanced:
    """Return the balanced corpus of a point."""
    return Balanced(point["classes"], point["common"], point["distinct"], point["mass"])


def flow(corpus: Balanced) -> Even:
    """Return the flow of a balanced corpus."""
    return Even(corpus.classes, corpus.common, corpus.distinct, corpus.common_mass)


def rates(point: Point) -> dict[str, float]:
    """Return η_Y and η_Z of a point, whose product is 1."""
    ratio = point["ratio"]
    return {"eta_y": float(np.sqrt(ratio)), "eta_z": float(1 / np.sqrt(ratio))}


def share_at_start(corpus: ScanSnapCorpus) -> float:
    """Return F = Σ f² over the distinct tokens of the first class."""
    f = scan_snap.feature(corpus, np.zeros((1, corpus.tokens)))
    return float(np.sum(f[0, corpus.distinct] ** 2))


def gram_of_classes_alike(classes: int, share: float) -> Array:
    """Return f_nᵀf_n' of classes that are alike: all but the distinct tokens overlap."""
    return share * np.eye(classes) + (1 - share)
