"""Searches of the laws of Scan&Snap."""

import numpy as np
import torch

from joma.common.types import Array
from joma.errors import JomaError
from joma.experiments.claims import scan_snap as checks
from joma.experiments.claims.claim import ClaimMeasurement, Formula, Point, difference, measured
from joma.theory.scan_snap import ScanSnapCorpus
from tests.adversary.domains import Domain, integer, matrix, over, real, seed, simplex

ANY_CORPUS: dict[str, Domain] = {
    "weights": matrix(real(0.0, 1.0, special=(0.0,)), integer(2, 4), integer(2, 6)),
    "joint": simplex(integer(2, 4), least=1e-4),
    "queries": integer(1, 2),
}


ANY_STATE: dict[str, Domain] = {
    "z_scale": real(0.0, 8.0, special=(0.0,)),
    "y_scale": real(0.0, 20.0, special=(0.0,)),
    "draw": seed(),
}


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


def _log_likelihood(corpus: ScanSnapCorpus, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """E[log softmax(Yᵀf_n)_n]."""
    tokens = torch.tensor(corpus.token_given_class)
    weights = tokens * torch.exp(z[torch.tensor(corpus.query)])
    f = weights / weights.norm(dim=1, keepdim=True)
    log_alpha = torch.log_softmax(f @ y, dim=1)
    return torch.tensor(corpus.joint) @ log_alpha.diagonal()


def gradient(corpus: ScanSnapCorpus, z: Array, y: Array) -> tuple[Array, Array]:
    """Return the derivatives of the log-likelihood by z and Y, that by z over P(m)."""
    at = torch.tensor(z, requires_grad=True), torch.tensor(y, requires_grad=True)
    by_z, by_y = torch.autograd.grad(_log_likelihood(corpus, *at), at)
    return by_z.numpy() / corpus.query_probability[:, None], by_y.numpy()


def initial_acceleration(corpus: ScanSnapCorpus) -> Array:
    """Return z̈(0)/(η_Y η_Z) from z = Y = 0: the derivative of ż along Ẏ, for ż(0) is 0."""
    z = torch.zeros((corpus.queries, corpus.tokens), dtype=torch.float64, requires_grad=True)
    y = torch.zeros((corpus.tokens, corpus.classes), dtype=torch.float64, requires_grad=True)
    (by_y,) = torch.autograd.grad(_log_likelihood(corpus, z, y), y, create_graph=True)
    (along,) = torch.autograd.grad((by_y * by_y.detach()).sum(), z)
    return along.numpy() / corpus.query_probability[:, None]


@over("scan-snap-gradient", **ANY_CORPUS, **ANY_STATE)
def _gradient_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance to the log-likelihood's derivatives, relative to the largest g."""
    corpus = any_corpus(point)
    z, y = any_state(point, corpus)
    z_rate, y_rate = formula(corpus, z, y, eta_y=0.7, eta_z=1.3)
    by_z, by_y = gradient(corpus, z, y)
    error = difference(z_rate, 1.3 * by_z) / (1 + np.max(np.abs(y)))
    return measured([error, difference(y_rate, 0.7 * by_y)], 1e-12)


@over("scan-snap-distinct-rise", **ANY_CORPUS)
def _distinct_rise_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance to z̈(0), relative, plus 1 if a distinct token is not pulled up."""
    corpus = any_corpus(point)
    pull, expected = formula(corpus), initial_acceleration(corpus)
    error = difference(pull, expected) / max(float(np.max(np.abs(expected))), 1e-6)
    for class_ in range(corpus.classes):
        shares = bool(np.any(corpus.shared & (corpus.token_given_class[class_] > 0)))
        own = pull[corpus.query[class_], corpus.distinct_of(class_)]
        error += float(np.any(own <= 0) if shares else np.any(own != 0))
    return ClaimMeasurement(error, 1e-8)


@over("scan-snap-frequent-first", **ANY_CORPUS)
def _frequent_first_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of z_l/z_l' at t → 0 from the formula, relative."""
    corpus = any_corpus(point)
    expected = initial_acceleration(corpus)
    error, found = 0.0, False
    for class_ in range(corpus.classes):
        own = corpus.distinct_of(class_)
        of_query = expected[corpus.query[class_]]
        if not np.any(corpus.shared & (corpus.token_given_class[class_] > 0)):
            continue
        for token in own:
            ratio = formula(corpus, class_, own[0], token)
            if min(of_query[own[0]], of_query[token]) < 1e-9:
                continue
            found = found or token != own[0]
            error = max(error, abs(of_query[own[0]] / of_query[token] / ratio - 1))
    if not found:
        raise JomaError("no class has two distinct tokens that move")
    return ClaimMeasurement(error, 1e-6)


@over(
    "scan-snap-relative-gain",
    tokens=simplex(integer(2, 6), least=1e-4),
    common=integer(0, 3),
    z_scale=real(0.0, 3.0, special=(0.0,)),
    gamma=real(1e-3, 1e3, log=True),
    common_g=real(0.0, 10.0, special=(0.0,)),
    share=real(1e-3, 1.0),
    draw=seed(),
)
def _relative_gain_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The distance of dr/dt from that of the logits, relative, at any state."""
    rng = np.random.default_rng(point["draw"])
    p = point["tokens"]
    common = min(point["common"], p.size - 2)
    z = point["z_scale"] * rng.standard_normal(p.size)
    weights = p * np.exp(z - z.max())
    f = weights / np.linalg.norm(weights)
    gamma, share, eta_z = point["gamma"], point["share"], 1.3
    g = gamma * f
    g[:common] = point["common_g"] * rng.standard_normal(common)
    overlap = float(f @ g)
    z_rate = eta_z * share * f * (g - f * overlap)
    first, second = common, common + 1
    if min(f[first], f[second]) < 1e-6:
        raise JomaError("a token without attention")
    ratio = (f[first] / f[second]) ** 2
    expected = 2 * ratio * (z_rate[first] - z_rate[second])
    factors = {"gamma": gamma, "overlap": overlap / gamma}
    ours = formula(ratio - 1, f[first] ** 2, **factors, class_given_query=share, eta_z=eta_z)
    size = 2 * ratio * eta_z * share * (gamma + abs(overlap)) * (f[first] ** 2 + f[second] ** 2)
    return measured(abs(ours - expected) / size, 1e-9)


over(
    "scan-snap-gain-bounds",
    classes=integer(2, 5),
    common=simplex(integer(1, 3), least=1e-3),
    distinct=simplex(integer(1, 4), least=1e-3),
    mass=real(1e-3, 0.999, special=(0.5,)),
    b=real(1e-4, 0.9e3, log=True),
)(checks.gain_bounds_at)
