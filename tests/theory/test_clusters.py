import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import clusters, nonlinear
from joma.theory.marginals import (
    Ball,
    Density,
    Gaussian,
    Laplace,
    Logistic,
    Marginal,
    StudentT,
    Uniform,
)
from tests.theory._bad import rejects


def test_expectations_against_samples():
    rng = np.random.default_rng(0)
    v, mean, bias = np.array([1.0, -0.5, 2.0]), np.array([0.2, 0.4, -0.1]), 0.3
    x = mean + rng.normal(size=(400_000, 3))
    active = (x @ v + bias > 0).astype(float)
    activity, moment = clusters.expectations(Gaussian(), v, mean, bias)
    assert activity == pytest.approx(active.mean(), abs=5e-3)
    np.testing.assert_allclose(moment, (active[:, None] * x).mean(axis=0), atol=1e-2)


def test_expectations_in_a_subspace_see_the_projected_weight():
    rng = np.random.default_rng(1)
    basis = np.linalg.qr(rng.normal(size=(4, 2)))[0]
    v, mean, bias = rng.normal(size=4), rng.normal(size=4), -0.2
    x = mean + rng.normal(size=(400_000, 2)) @ basis.T
    active = (x @ v + bias > 0).astype(float)
    activity, moment = clusters.expectations(Gaussian(), v, mean, bias, basis=basis)
    assert activity == pytest.approx(active.mean(), abs=5e-3)
    np.testing.assert_allclose(moment, (active[:, None] * x).mean(axis=0), atol=1e-2)


def test_expectations_vectorise_over_leading_axes():
    v = np.random.default_rng(0).normal(size=(3, 5, 2))
    activity, moment = nonlinear.expectations(StudentT(3), v, np.zeros(2), np.zeros((3, 5)))
    assert activity.shape == (3, 5)
    assert moment.shape == (3, 5, 2)
    one = nonlinear.expectations(StudentT(3), v[1, 2], np.zeros(2), 0.0)
    np.testing.assert_allclose(moment[1, 2], one.moment)


def test_linear_activation_sees_the_mean_alone():
    mean = np.array([0.3, -0.7])
    activity, moment = clusters.expectations(Laplace(), [1.0, 2.0], mean, 0.1, slopes=(1.0, 1.0))
    assert activity == 1
    np.testing.assert_allclose(moment, mean)


@pytest.mark.parametrize("marginal", [Gaussian(), Logistic(), Uniform(), Ball(3), Ball(10)])
@pytest.mark.parametrize("distance", [0.1, 1.0, 5.0])
def test_log_concave_clusters_have_no_critical_point(marginal: Marginal, distance: float):
    assert nonlinear.critical_points(marginal, distance) == []


@given(st.floats(1.3, 20), st.floats(0.1, 10))
@settings(max_examples=40, deadline=None)
def test_student_clusters_have_one_where_the_node_rests(df, distance):
    (point,) = nonlinear.critical_points(StudentT(df), distance)
    assert point.s_plus - point.s_minus == pytest.approx(distance)
    rate = clusters.velocity(
        StudentT(df),
        [1.0, -point.ratio],
        [[distance, 0.0], [0.0, 0.0]],
        [1.7, 0.0],
        1.7 * point.s_minus,
    )
    size = StudentT(df).theta1(point.s_plus) * distance
    np.testing.assert_allclose(rate.v / size, 0, atol=1e-7)
    assert rate.bias / size == pytest.approx(0, abs=1e-7)


def test_known_ratios_of_t3():
    ratios = [clusters.critical_points(StudentT(3), d)[0].ratio for d in (0.5, 1, 2, 4)]
    np.testing.assert_allclose(ratios, [1.599, 2.530, 5.955, 24.02], rtol=1e-3)


def test_t2_is_symmetric():
    # For t₂ the mean residual life is √(s²+2), so that s₊ = -s₋ by hand.
    (point,) = clusters.critical_points(StudentT(2), 3.0)
    assert point.s_plus == pytest.approx(1.5, abs=1e-9)
    assert point.s_minus == pytest.approx(-1.5, abs=1e-9)


def test_laplace_has_a_continuum_with_ratio_exp_distance():
    (point,) = clusters.critical_points(Laplace(), 1.5)
    assert point.ratio == pytest.approx(np.exp(1.5), rel=1e-9)
    assert point.s_plus == pytest.approx(0, abs=1e-5)
    for s in (-1.0, -3.0):
        rate = clusters.velocity(Laplace(), [1.0, -np.exp(1.5)], [[1.5], [0.0]], [1.0], s - 1.5)
        np.testing.assert_allclose(rate.v, 0, atol=1e-12)


def test_user_densities_are_searched_too():
    heavy = Density(lambda u: 2 / (np.pi * np.sqrt(3)) * (1 + u**2 / 3) ** -2)
    (ours,), (known,) = (clusters.critical_points(m, 1.0) for m in (heavy, StudentT(3)))
    np.testing.assert_allclose(ours, known, rtol=1e-7)
    light = Density(lambda u: np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi))
    assert clusters.critical_points(light, 1.0) == []


@pytest.mark.parametrize(
    ("df", "distance", "s_minus", "ratio"),
    # Found with mpmath in 60 digits.
    [
        (200, 50.0, -53.18481, 3.03e116),
        (100, 200.0, -198.0609, 1.33e131),
        (1000, 4.0, -33.5597, 2.99e27),
    ],
)
def test_rest_points_deep_in_light_tails(df, distance, s_minus, ratio):
    (point,) = clusters.critical_points(StudentT(df), distance)
    assert point.s_minus == pytest.approx(s_minus, rel=1e-5)
    assert point.ratio == pytest.approx(ratio, rel=5e-3)


@pytest.mark.parametrize("distance", [1e-7, 1e-3, 0.1, 4.0, 50.0])
def test_no_rest_points_out_of_rounding(distance):
    logistic = Density(lambda u: Logistic().pdf(u))
    for marginal in (Logistic(), Gaussian(), Ball(4), logistic):
        assert clusters.critical_points(marginal, distance) == []


@pytest.mark.parametrize("distance", [0.5, 18.0, 50.0])
def test_laplace_at_any_distance(distance):
    for marginal in (Laplace(), Density(lambda u: np.exp(-u) / 2)):
        points = clusters.critical_points(marginal, distance)
        if distance < 20 or isinstance(marginal, Laplace):
            assert points[0].ratio == pytest.approx(np.exp(distance), rel=1e-6)


def test_sufficient_condition_of_the_paper():
    values = [clusters.sufficient_condition(m) for m in (Gaussian(), StudentT(5), StudentT(3))]
    np.testing.assert_allclose(values, [0.159, 0.180, 0.203], atol=1e-3)
    for exact in (Laplace(), StudentT(2)):
        assert clusters.sufficient_condition(exact) == pytest.approx(0.25, rel=1e-12)


def test_jacobian_says_whether_the_node_returns():
    (point,) = clusters.critical_points(StudentT(3), 2.0)
    eigenvalues = clusters.jacobian(StudentT(3), point)
    assert eigenvalues.stable == (eigenvalues.transverse < 0 and eigenvalues.longitudinal < 0)
    doubled = clusters.jacobian(StudentT(3), point, length=2.0)
    assert doubled.transverse == pytest.approx(eigenvalues.transverse / 2)
    assert doubled.longitudinal == pytest.approx(eigenvalues.longitudinal / 2)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("v", lambda: clusters.expectations(Gaussian(), [0.0, 0.0], [1.0, 1.0], 0.0)),
        ("v", lambda: clusters.expectations(Gaussian(), [np.nan], [1.0], 0.0)),
        ("mean", lambda: clusters.expectations(Gaussian(), [1.0], [1.0, 2.0], 0.0)),
        ("bias", lambda: clusters.expectations(Gaussian(), [1.0], [1.0], np.inf)),
        (
            "basis",
            lambda: clusters.expectations(
                Gaussian(), [1.0, 0.0], [1.0, 0.0], 0.0, basis=[[2], [0]]
            ),
        ),
        ("means", lambda: clusters.velocity(Gaussian(), [1.0], [[1.0], [2.0]], [1.0], 0.0)),
        ("marginal", lambda: clusters.critical_points(None, 1.0)),  # pyright: ignore[reportArgumentType]
        ("marginal", lambda: clusters.expectations("normal", [1.0], [1.0], 0.0)),  # pyright: ignore[reportArgumentType]
        ("bias", lambda: clusters.expectations(Gaussian(), [[1.0]] * 2, [1.0], [0.0] * 3)),
        ("distance", lambda: clusters.critical_points(Gaussian(), 0.0)),
        ("distance", lambda: clusters.critical_points(Gaussian(), np.nan)),
        ("distance", lambda: clusters.critical_points(Gaussian(), [1.0, 2.0])),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_input_is_named(argument, call):
    rejects(argument, call)
