"""Theorem 1 for softmax attention: Eqns 17 and 18, the law with memory and its gap."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from joma.experiments.claims.claim import Formula, Generator, Point, claim, over, without
from joma.experiments.claims.measurement import ClaimMeasurement, largest_error, measured
from joma.experiments.claims.reference import block as reference
from joma.experiments.claims.reference.block import random_point
from joma.experiments.claims.search import Choice, Integer, Real, Seed
from joma.theory import invariants, memory
from joma.theory.block import Block, Samples, Trajectory, simulate

_OVER_PATHS = reference.over_blocks("queries", reach=Real(1e-3, 4.0, log=True))
"""Blocks of one query, and how far they are trained."""


def _mean_scores(setting: reference.Setting) -> Any:
    return np.asarray(setting.samples.probability) @ reference.attention_scores(setting)


@_OVER_PATHS
def _eqn_18_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The error against how far b̄ has moved times how far ½‖V‖² has, samples alike."""
    setting = reference.draw_setting(point, "softmax", queries=1, alike=True)
    path = reference.follow(setting, point["reach"], 10 + int(6 * point["reach"]))
    block = setting.block
    factor = block.eta_z / (block.eta_w * block.tau)
    estimate = formula(block, path.v, _mean_scores(setting))
    error = np.abs(estimate - estimate[0] - (path.z - path.z[0]))
    means = np.stack([_mean_scores(replace(setting, z=z[None])) for z in path.z])
    half = np.sum(path.v**2, axis=(1, 2)) / 2
    moved = np.maximum.accumulate(np.abs(means - means[0]), axis=0)
    # ½‖V‖² may turn within a step, in which it then goes farther than its ends are apart.
    steps = np.abs(np.diff(half))
    turns = np.concatenate([[True], np.diff(np.sign(np.diff(half))) != 0])
    steps = steps + turns * np.maximum(steps, np.append(steps[1:], 0.0))
    way = np.concatenate([[0.0], np.cumsum(steps)])
    bound = factor * moved * way[:, None]
    size = np.max(np.abs(estimate)) + np.max(np.abs(path.z)) + factor * np.max(half)
    return measured(error / (1.001 * bound + 1e-6 * size), 1.0)


@claim("thm1-softmax", invariants.softmax_logits, _eqn_18_at, alike=True)
@without("thm1-softmax", alike=False)
def _eqn_18(formula: Formula, rng: Generator, *, alike: bool) -> ClaimMeasurement:
    """How far the order of the error in the motion of z falls short of two.

    If the samples are not alike, the covariance counts.
    """
    draw = int(rng.integers(2**32))
    motions, errors = [], []
    for eta_z in (0.01, 0.02, 0.04, 0.08):
        point = random_point(rng, draw=draw, alike=alike, eta_z=eta_z, eta_w=1.0)
        setting = reference.draw_setting(point, "softmax")
        path = simulate(setting.block, setting.samples, [0.0, 2.0], initial=setting.state)
        mean = _mean_scores(setting)
        estimate = formula(setting.block, path.v, mean)
        actual = path.z[1] - path.z[0]
        motions.append(np.max(np.abs(actual)))
        errors.append(np.max(np.abs(estimate[1] - estimate[0] - actual)))
    order = np.polyfit(np.log(motions), np.log(errors), 1)[0]
    return measured(max(2 - order, 0.0), 0.1)


def _condition_with_weights(pull: Any, b: Any, v: Any) -> bool:
    """Whether Σ_k E[g_k h′_k b bᵀ] v_k = b̄ Σ_k E[g_k h′_k b]ᵀ v_k."""
    second = np.einsum("nk,nl,nj,jk->l", pull, b, b, v) / len(b)
    first = np.einsum("nk,nj,jk->", pull, b, v) / len(b)
    return bool(np.allclose(second, b.mean(axis=0) * first, atol=1e-10))


def _condition_as_printed(pull: Any, b: Any, v: Any) -> bool:
    """The printed condition, its transpose put back: the sum over nodes without their weights."""
    del v
    total = pull.sum(axis=1)
    second = np.einsum("n,nl,nj->lj", total, b, b) / len(b)
    return bool(np.allclose(second, np.outer(b.mean(axis=0), total @ b / len(b)), atol=1e-10))


@over(case=Choice(0, 1, 2, 3), samples=Integer(1, 12), tokens=Integer(1, 8), draw=Seed())
def _softmax_condition_at(formula: Formula, point: Point) -> ClaimMeasurement:
    rng = np.random.default_rng(point["draw"])
    n, m = point["samples"], point["tokens"]
    x = rng.dirichlet(np.ones(m), size=n)
    g, v = rng.normal(size=(n, 2)), 0.3 * rng.normal(size=(m, 2))
    if point["case"] == 0:
        x = np.tile(x[0], (n, 1))  # every sample alike: it holds for each node
    elif point["case"] == 1:
        g[:, 1] = -g[:, 0]  # the nodes cancel, but their weights differ: it fails
    elif point["case"] == 2:
        g[:, 1], v[:, 1] = -g[:, 0], v[:, 0]  # they cancel with their weights: it holds
    columns = np.eye(m + 1)
    w = np.concatenate([v, np.zeros((1, 2))])
    logits = 0.3 * rng.normal(size=(1, m))
    block, samples = Block("softmax", "linear"), Samples(x, gradient=g)
    setting = reference.Setting(block, samples, columns, w, logits)
    rate, b = reference.rates(setting), reference.attention_scores(setting)
    both = rate.w[:m] * v
    by_law = np.sum(both, axis=1) - b.mean(axis=0) * np.sum(both)
    holds = bool(np.allclose(by_law, rate.z[0], rtol=0, atol=1e-10))
    return measured(bool(formula(g, b, v)) != holds, 0.0)


@claim(
    "thm1-softmax-condition",
    _condition_with_weights,
    _softmax_condition_at,
    printed=_condition_as_printed,
)
def _softmax_condition(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """Does the condition tell where Eqn 17, the rate of z from the rates of v, holds?"""
    sizes = {"samples": 7, "tokens": 5}
    cases = (
        Point({**sizes, "case": case % 4, "draw": int(rng.integers(2**32))}) for case in range(32)
    )
    return measured(np.mean([_softmax_condition_at(formula, one).error for one in cases]), 0.0)


@reference.over_blocks("queries")
def _softmax_rate_at(formula: Formula, point: Point) -> ClaimMeasurement:
    """The rate of the logits against the law's and a formula of what it leaves out."""
    setting = reference.draw_setting(point, "softmax", queries=1)
    left_out = formula(setting.block, setting.samples, setting.state)
    size = np.sum(reference.rate_sizes(setting)) / setting.block.tau
    return measured(np.abs(_left_out(setting) - left_out), 1e-9 * float(size) + 1e-300)


@claim("thm1-softmax-rate", memory.covariance, _softmax_rate_at)
def _softmax_rate(formula: Formula, rng: Generator) -> ClaimMeasurement:
    drives = ("gradient", "labels")
    return largest_error(_softmax_rate_at(formula, random_point(rng, drive=one)) for one in drives)


def _left_out(setting: reference.Setting, slopes: Any = None) -> Any:
    """What the law of Eqn 17 gives too much, by the rates themselves."""
    block, m = setting.block, setting.samples.tokens
    rate = reference.rates(setting, slopes)
    both = setting.state.v * (setting.columns[:, :m].T @ rate.w)
    by_law = np.sum(both, axis=1) - _mean_scores(setting) * np.sum(both)
    return block.eta_z / (block.eta_w * block.tau) * by_law - rate.z[0]


def _remembered(
    formula: Formula, setting: reference.Setting, reach: float, points: int
) -> tuple[Trajectory, Any]:
    """A training and, at every second of its times, the logits by a formula.

    The error of the formula's rule is extrapolated away.
    """
    path = reference.follow(setting, reach, 2 * points)
    fine, coarse = (
        formula(setting.block, setting.samples, v, path.z[0]) for v in (path.v, path.v[::2])
    )
    return path, (4 * fine[::2] - coarse) / 3


def _memory_of(formula: Formula, point: Point, *, alike: bool = True) -> ClaimMeasurement:
    setting = reference.draw_setting(point, "softmax", queries=1, alike=alike)
    path, predicted = _remembered(formula, setting, point["reach"], 5 + int(5 * point["reach"]))
    tolerance = (1 + point["reach"]) * _motion(path) + _rounding(path)
    return measured(np.abs(predicted - path.z[::2]), tolerance)


@claim("thm1-softmax-memory", memory.logits, _OVER_PATHS(_memory_of), alike=True)
@without("thm1-softmax-memory", alike=False)
def _memory(formula: Formula, rng: Generator, *, alike: bool) -> ClaimMeasurement:
    drives = ("gradient", "labels")
    points = (random_point(rng, drive=one, reach=2.0, alike=alike) for one in drives)
    return largest_error(_memory_of(formula, point, alike=alike) for point in points)


def _motion(path: Trajectory) -> float:
    """What counts as zero next to the motion of z: a path with switches has only second order."""
    share = 1e-4 if path.block.phi.smooth else 1e-3
    return share * (float(np.max(np.abs(path.z - path.z[0]))) + path.block.tau)


def _rounding(path: Trajectory) -> float:
    """What the rounding of the weights is worth in the logits."""
    block = path.block
    squares = float(np.max(np.sum(path.v**2, axis=(1, 2))))
    return 1e-14 * block.eta_z / (block.eta_w * block.tau) * squares * len(path.t)


@_OVER_PATHS
def _gap_at(formula: Formula, point: Point) -> ClaimMeasurement:
    setting = reference.draw_setting(point, "softmax", queries=1)
    points = 5 + int(5 * point["reach"])
    path, predicted = _remembered(memory.logits, setting, point["reach"], points)
    gap = np.linalg.norm(predicted - path.z[::2], axis=1)
    # What the trapezoidal rule may miss, which is much where a node switches: within a step of the
    # reference the switches stay. The columns are orthonormal, so w is what its projections say.
    states = [
        replace(setting, w=setting.columns @ np.concatenate([v, bias]), z=z[None])
        for v, bias, z in zip(path.v, path.bias, path.z, strict=True)
    ]
    before = np.array([np.linalg.norm(_left_out(one)) for one in states])
    after = before[1:]
    if not setting.block.phi.smooth:
        pairs = pairwise(states)
        after = [np.linalg.norm(_left_out(b, reference.slopes_of(a))) for a, b in pairs]
    jumps = np.abs(np.diff(before)) + np.maximum(after - before[1:], 0)
    missed = np.concatenate([[0.0], np.cumsum(np.diff(path.t) * jumps / 2)])
    allowed = 1.001 * formula(path) + missed + _rounding(path)
    allowed = allowed + (1 + point["reach"]) * _motion(path)
    return measured(gap / allowed[::2], 1.0)


@claim("thm1-softmax-gap", memory.gap_bound, _gap_at)
def _gap(formula: Formula, rng: Generator) -> ClaimMeasurement:
    """By how much z leaves the bound; and how far below it stays where the path is short."""
    points = (random_point(rng, drive=drive, reach=2.0) for drive in ("gradient", "labels"))
    worst = max(_gap_at(formula, point).error - 1 for point in points)
    path, predicted = _remembered(
        memory.logits, reference.draw_setting(random_point(rng), "softmax"), 1e-3, 10
    )
    attained = np.linalg.norm(predicted[-1] - path.z[-1]) / formula(path)[-1]
    return measured(max(worst, abs(1 - attained)), 0.01)
