import math
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special

from joma.theory.marginals import (
    Ball,
    Density,
    Gaussian,
    Laplace,
    Logistic,
    Marginal,
    Scaled,
    StudentT,
    Uniform,
    radial,
    sphere_constant,
)

FAMILIES: list[Marginal] = [
    Gaussian(),
    StudentT(1.5),
    StudentT(3),
    Laplace(),
    Logistic(),
    Uniform(),
    Ball(2),
    Ball(5),
    Density(lambda u: np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi)),
    Density(lambda u: np.where(u <= 2, 0.25, 0.0), breaks=[2.0]),
]
each_family = pytest.mark.parametrize(
    "marginal", FAMILIES, ids=[f"{i}-{type(m).__name__}" for i, m in enumerate(FAMILIES)]
)


@each_family
@pytest.mark.parametrize("s", [-0.95, -0.3, 0.0, 0.8])
def test_integrals_against_quadrature(marginal: Marginal, s: float):
    def density(u: float) -> float:
        return float(marginal.pdf(u))

    def weighted(u: float) -> float:
        return u * density(u)

    top = min(marginal.reach, 50.0)
    cuts = [0.0, 2.0] if isinstance(marginal, Density) else [0.0]
    points = [c for c in cuts if -s < c < top]
    share, _ = integrate.quad(density, -s, top, points=points or None, limit=200)
    moment, _ = integrate.quad(weighted, -s, top, points=points or None, limit=200)
    tail = 0.0
    if marginal.reach > 50 and not isinstance(marginal, Density):
        share += integrate.quad(density, top, np.inf)[0]
        tail = integrate.quad(weighted, top, np.inf)[0]
    assert marginal.theta1(s) == pytest.approx(share, abs=1e-9)
    assert marginal.theta2(s) == pytest.approx(moment + tail, rel=1e-6)
    assert marginal.first_integral(s) == pytest.approx(moment + tail + s * share, rel=1e-5)


@each_family
def test_symmetry_and_limits(marginal):
    s = np.linspace(0, 0.9, 7)
    np.testing.assert_allclose(marginal.theta1(s) + marginal.theta1(-s), 1, rtol=1e-12)
    np.testing.assert_allclose(marginal.theta2(s), marginal.theta2(-s), rtol=1e-12)
    np.testing.assert_allclose(marginal.pdf(s), marginal.pdf(-s))
    assert marginal.theta1(1e9) == pytest.approx(1, abs=1e-4)


@given(st.sampled_from(FAMILIES), st.floats(-3, 3), st.floats(1e-3, 2))
@settings(max_examples=60, deadline=None)
def test_theta1_and_the_first_integral_rise(marginal, s, step):
    assert marginal.theta1(s + step) >= marginal.theta1(s) - 1e-12
    assert marginal.first_integral(s + step) >= marginal.first_integral(s) - 1e-12
    assert marginal.first_integral(s) >= -1e-12


def test_gaussian_mean_residual_far_out():
    s = np.array([-30.0, -49.9, -50.1, -1e4])
    np.testing.assert_allclose(Gaussian().mean_residual(s), -1 / s, rtol=3e-3)
    near = Gaussian().mean_residual(np.array([-49.999999, -50.000001]))
    assert near[0] == pytest.approx(near[1], rel=1e-6)


def test_radial_densities_give_their_marginals():
    s = np.linspace(-0.9, 0.9, 7)
    ball = radial(lambda r: np.where(r <= 1, 2 / np.pi**2, 0.0), 4, breaks=[1.0])
    np.testing.assert_allclose(ball.theta1(s), Ball(4).theta1(s), atol=1e-7)
    normal = radial(lambda r: np.exp(-(r**2) / 2) / (2 * np.pi) ** 2.5, 5)
    np.testing.assert_allclose(normal.theta1(3 * s), Gaussian().theta1(3 * s), atol=1e-12)

    def multivariate_t3(r):
        constant = special.gamma(3) / (special.gamma(1.5) * (3 * np.pi) ** 1.5)
        return constant * (1 + r**2 / 3) ** -3

    np.testing.assert_allclose(
        radial(multivariate_t3, 3).theta2(s), StudentT(3).theta2(s), rtol=1e-6
    )


def test_sphere_constant_is_the_printed_double_factorial():
    for n in range(2, 12):
        if n % 2 == 0:
            printed = 2 ** (n / 2) * np.pi ** (n / 2 - 1) / special.factorial2(max(n - 3, 0))
        else:
            printed = 2 * np.pi ** ((n - 1) / 2) / special.factorial((n - 3) / 2)
        assert sphere_constant(n) == pytest.approx(printed, rel=1e-12)


def test_uniform_is_the_ball_of_one_dimension():
    assert Uniform().pdf(0.3) == pytest.approx(0.5)
    assert Uniform().pdf(1.1) == 0


def test_densities_of_single_numbers_and_with_edges_anywhere():
    scalar = Density(pdf=lambda u: math.exp(-u) / 2)
    s = np.linspace(-3, 3, 7)
    np.testing.assert_allclose(scalar.theta1(s), Laplace().theta1(s), rtol=1e-10)
    np.testing.assert_allclose(scalar.theta2(s), Laplace().theta2(s), rtol=1e-10)
    width = np.sqrt(3.0)
    uniform = Density(lambda u: np.where(u <= width, 0.5 / width, 0.0))
    np.testing.assert_allclose(uniform.theta1(s), Uniform().theta1(s / width), atol=1e-9)
    narrow = Density(lambda u: np.exp(-(u**2) / 2e-10) / np.sqrt(2e-10 * np.pi))
    assert narrow.theta1(1e-5) == pytest.approx(Gaussian().theta1(1.0), rel=1e-9)


@pytest.mark.parametrize("df", [1.05, 1.2, 2.0])
def test_heavy_tails_keep_their_moment(df):
    known = StudentT(df)
    np.testing.assert_allclose(Density(known.pdf).theta2(0.0), known.theta2(0.0), rtol=1e-6)


@pytest.mark.parametrize("marginal", [StudentT(1e3), StudentT(1e5), StudentT(1e9), Ball(1000)])
def test_nearly_gaussian_marginals_keep_their_digits(marginal):
    # Against 40 digits, which the constant of the density loses first.
    with mpmath.workdps(40):
        if isinstance(marginal, Ball):
            n = mpmath.mpf(marginal.n)
            log = mpmath.loggamma(n / 2 + 1) - mpmath.loggamma((n + 1) / 2)
            width = 1 / mpmath.sqrt(n)
            constant = mpmath.exp(log) / mpmath.sqrt(mpmath.pi)

            def density(u):
                return constant * (1 - u**2) ** ((n - 1) / 2)

            end = mpmath.mpf(1)
        else:
            df, width = mpmath.mpf(marginal.df), mpmath.mpf(1)
            log = mpmath.loggamma((df + 1) / 2) - mpmath.loggamma(df / 2)
            constant = mpmath.exp(log) / mpmath.sqrt(df * mpmath.pi)

            def density(u):
                return constant * (1 + u**2 / df) ** (-(df + 1) / 2)

            end = mpmath.mpf(20)
        for x in (0.3, 2.0, 6.0):
            start = x * width
            cuts = [start, *(start + k * width for k in (0.5, 1, 2, 4)), end]
            share: Any = mpmath.quad(density, cuts)
            moment: Any = mpmath.quad(lambda u, start=start: (u - start) * density(u), cuts)
            s = -float(start)
            assert float(marginal.theta1(s)) == pytest.approx(float(share), rel=1e-13)
            assert float(marginal.mean_residual(s)) == pytest.approx(
                float(moment / share), rel=1e-13
            )


def test_mean_residual_at_the_edge_of_a_ball():
    gap = np.array([1e-15, 1e-12, 1e-8, 1e-4])
    life = Ball(8).mean_residual(gap - 1)
    assert np.all(life > 0)
    # Near the edge p ∝ gap^{7/2}, so that the mean of what is left is gap · 2/11.
    np.testing.assert_allclose(life[1:], (1 + (gap[1:] - 1)) * 2 / 11, rtol=1e-4)


def test_deep_tails_have_logarithms():
    for marginal in (Gaussian(), StudentT(1e4), Logistic(), Laplace(), Scaled(Gaussian(), 2.0)):
        logs = marginal.log_theta1(np.array([-3.0, -100.0]))
        assert logs[0] == pytest.approx(np.log(marginal.theta1(-3.0)), rel=1e-12)
        assert -6000 < logs[1] < -90
    assert Gaussian().inverse_hazard(-100.0) == pytest.approx(0.0099990002998, rel=1e-10)


@pytest.mark.parametrize("df", [1.2, 2.46, 7.0])
def test_student_near_zero(df):
    # The incomplete beta function loses half the digits there.
    s = -7e-8
    expected = 0.5 + s * float(StudentT(df).pdf(0.0))
    assert StudentT(df).theta1(s) == pytest.approx(expected, rel=1e-14)


def test_scaled_marginals():
    scaled, s = Scaled(StudentT(5), 3.0), np.linspace(-4, 4, 9)
    density = Density(lambda u: StudentT(5).pdf(u / 3) / 3)
    np.testing.assert_allclose(scaled.theta1(s), density.theta1(s), rtol=1e-8)
    np.testing.assert_allclose(scaled.theta2(s), density.theta2(s), rtol=1e-8)
    np.testing.assert_allclose(scaled.first_integral(s), density.first_integral(s), rtol=1e-7)
    np.testing.assert_allclose(scaled.mean_residual(s), density.mean_residual(s), rtol=1e-7)
    assert Scaled(Ball(3), 2.0).reach == 2.0
