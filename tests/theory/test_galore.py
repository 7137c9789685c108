from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import galore
from joma.theory.galore import ReversibleGradient, descend

few = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**31)


def semidefinite(count: int, size: int, rng: np.random.Generator, ridge: float = 0.3):
    factors = rng.standard_normal((count, size, size))
    return factors @ factors.mT / size + ridge * np.eye(size)


def random_problem(seed: int, terms: int = 2, m: int = 5, n: int = 4) -> ReversibleGradient:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((terms, m, n))
    return ReversibleGradient(a, semidefinite(terms, m, rng), semidefinite(terms, n, rng))


def orthonormal(size: int, rank: int, seed: int):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((size, rank)))[0]


def test_gradient_is_that_of_the_concave_objective():
    problem = random_problem(0)
    rng = np.random.default_rng(1)
    w, direction = rng.standard_normal((2, 5, 4))

    def objective(at):
        curved = sum(np.sum(at * (b @ at @ c)) for b, c in zip(problem.b, problem.c, strict=True))
        return np.sum(problem.a.sum(axis=0) * at) - curved / 2

    slope = (objective(w + 1e-5 * direction) - objective(w - 1e-5 * direction)) / 2e-5
    assert np.sum(problem.gradient(w) * direction) == pytest.approx(slope)
    assert problem.gradient(np.stack([w, direction]))[1] == pytest.approx(
        problem.gradient(direction)
    )


@few
@given(seeds)
def test_exact_rate_is_never_below_the_bound_and_equal_for_one_term(seed):
    p, q = orthonormal(5, 3, seed), orthonormal(4, 2, seed + 1)
    for terms in (1, 3):
        problem = random_problem(seed, terms)
        bound = galore.contraction_rate(problem.b, problem.c, p, q)
        exact = galore.exact_contraction_rate(problem.b, problem.c, p, q)
        assert exact >= bound - 1e-12
        if terms == 1:
            assert exact == pytest.approx(bound)


def test_the_bound_can_be_void_where_the_exact_rate_is_not():
    b = np.stack([np.diag([1.0, 0.0]), np.diag([0.0, 1.0])])
    c = np.stack([np.eye(2), np.eye(2)])
    eye = np.eye(2)
    assert galore.contraction_rate(b, c, eye, eye) == 0
    assert galore.exact_contraction_rate(b, c, eye, eye) == 1
    assert galore.step_limit(0 * b, c, eye, eye) == np.inf


def test_the_bound_fails_just_above_the_step_limit():
    problem = random_problem(4)
    p, q = orthonormal(5, 2, 0), orthonormal(4, 2, 1)
    operator = sum(
        np.kron(p.T @ b @ p, q.T @ c @ q) for b, c in zip(problem.b, problem.c, strict=True)
    )
    worst = np.linalg.eigh(operator)[1][:, -1].reshape(2, 2)
    homogeneous = ReversibleGradient(0 * problem.a, problem.b, problem.c)
    rate = galore.contraction_rate(problem.b, problem.c, p, q)
    limit = galore.step_limit(problem.b, problem.c, p, q)
    for share, holds in ((0.999, True), (1.001, False)):
        run = descend(
            homogeneous,
            p @ worst @ q.T,
            step=share * limit,
            steps=1,
            rank=2,
            projection=lambda g, rank: (p, q),
        )
        ratio = run.projected_norm[1] / run.projected_norm[0]
        assert (ratio <= 1 - share * limit * rate) == holds


def test_averaging_the_gradient_brings_the_talks_factor():
    problem = random_problem(3, terms=4)
    p, q = orthonormal(5, 2, 0), orthonormal(4, 2, 1)
    averaged = galore.contraction_rate(problem.b / 4, problem.c, p, q)
    assert averaged == pytest.approx(galore.contraction_rate(problem.b, problem.c, p, q) / 4)


class Falling:
    """The scalar G = a − (1 − w/2) w, that is B = 1 − w/2 and C = 1."""

    def gradient(self, w):
        return 0.3684 - (1 - w / 2) * w


def test_varying_rate_without_variation_is_the_constant_one():
    none, one = [0.0, 0.0], [1.0, 1.0]
    assert galore.varying_rate([0.2, 0.3], none, none, none, 7.0, one, one) == 0.5


def test_a_fixed_projection_stalls_and_a_changing_one_does_not():
    problem = random_problem(0)
    step = 1 / problem.curvature()[1]
    start = 5 * np.random.default_rng(0).standard_normal((5, 4))
    fixed = descend(problem, start, step=step, steps=1500, rank=2)
    assert fixed.refreshes == 1
    assert fixed.projected_norm[-1] < 1e-12
    assert fixed.gradient_norm[-1] > 1
    left = galore.stalled_gradient(problem, start, fixed.p, fixed.q)
    assert np.linalg.norm(left) == pytest.approx(fixed.gradient_norm[-1])
    assert galore.project(left, fixed.p, fixed.q) == pytest.approx(0, abs=1e-12)
    changing = descend(problem, start, step=step, steps=1500, rank=2, refresh=5)
    assert changing.refreshes == 300
    assert changing.projected_norm[-1] < 1e-9
    assert changing.gradient_norm[-1] < 1e-9


def test_the_noise_floor_at_small_steps_and_at_one_over_the_curvature():
    sizes: dict[str, Any] = {"rank": 2, "rows": 9, "columns": 8}
    assert galore.noise_floor(3.0, **sizes) == pytest.approx(6)
    at_one = galore.noise_floor(3.0, **sizes, relative_step=1.0)
    assert at_one == pytest.approx(3 * (np.sqrt(3) + 2))
    assert galore.noise_floor(3.0, rank=8, rows=9, columns=8, relative_step=1.0) == 3
    assert galore.noise_stall(3.0, **sizes) == pytest.approx(3 * np.sqrt(3))
    assert galore.noise_stall(3.0, rank=8, rows=9, columns=8) == 0


class Noisy:
    """G = a − W on 3 × 3, plus noise ±E₁₁ of mean zero."""

    def __init__(self, a, seed):
        self.a, self.rng = a, np.random.default_rng(seed)

    def gradient(self, w):
        noise = np.zeros((3, 3))
        noise[0, 0] = self.rng.choice([-1.0, 1.0])
        return self.a - w + noise


def outside_after(step, steps, curvature):
    """‖G‖ outside E₁₁ after noise ±E₁₁, from 0.99 of the level; G has this curvature along it."""
    rng = np.random.default_rng(0)
    g = np.diag([0.0, 0.99, 0.99])
    for _ in range(steps):
        noisy = g.copy()
        noisy[0, 0] += rng.choice([-1.0, 1.0])
        p, q = galore.svd_projection(noisy, 1)
        move = step * p @ galore.project(noisy, p, q) @ q.T
        move[0] *= curvature
        g = g - move
    return float(np.linalg.norm(g[1:, 1:]))


@pytest.mark.parametrize("step", [0.02, 0.6, 1.0])
def test_without_curvature_along_the_noise_the_stall_is_for_ever(step):
    level = galore.noise_stall(1.0, rank=1, rows=3, columns=3)
    assert outside_after(step, 2000, 0.0) == pytest.approx(0.99 * level, rel=1e-12)


def test_with_curvature_along_the_noise_the_stall_does_not_last():
    level = galore.noise_stall(1.0, rank=1, rows=3, columns=3)
    long, short = outside_after(0.6, 1000, 1.0), outside_after(0.02, 1000, 1.0)
    assert long < 1e-2 * level
    assert 0.6 * level < short < 0.9 * level


@pytest.mark.parametrize("step", [0.1, 0.01])
def test_noise_of_mean_zero_holds_up_a_changing_projection_for_some_time(step):
    """Plain ascent, and projections that do not use the gradient, come further down."""
    a = np.diag([0.0, 0.9, 0.5])
    steps = round(60 / step)

    def end(rank, projection=galore.svd_projection):
        run = descend(
            Noisy(a, 0),
            np.zeros((3, 3)),
            step=step,
            steps=steps,
            rank=rank,
            refresh=1,
            projection=projection,
        )
        return np.diag(a - run.w[-1])[1:]

    rng = np.random.default_rng(1)

    def independent(g, rank):
        return tuple(np.linalg.qr(rng.standard_normal((3, rank)))[0] for _ in range(2))

    stalled = end(1)
    # The noise is ±1 and G along it fluctuates by about √(η/2).
    assert stalled[0] > 1 - 4 * np.sqrt(step / 2) - 0.1
    assert stalled[1] == pytest.approx(0.5, abs=0.1)
    assert np.abs(end(3)).max() < 1e-9
    assert np.linalg.norm(end(1, independent)) < 0.1 * np.linalg.norm(stalled)


def test_full_rank_is_plain_gradient_ascent():
    problem = random_problem(2)
    step = 1 / problem.curvature()[1]
    run = descend(problem, np.zeros((5, 4)), step=step, steps=5, rank=4, refresh=1)
    w = np.zeros((5, 4))
    for _ in range(5):
        w = w + step * problem.gradient(w)
    assert run.w[-1] == pytest.approx(w)
    # After the last step no projection is chosen any more.
    assert run.projected_norm[:-1] == pytest.approx(run.gradient_norm[:-1])
