import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import as_printed, clusters
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
)
from tests.theory._bad import rejects


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
    activity, moment = clusters.expectations(StudentT(3), v, np.zeros(2), np.zeros((3, 5)))
    assert activity.shape == (3, 5)
    assert moment.shape == (3, 5, 2)
    one = clusters.expectations(StudentT(3), v[1, 2], np.zeros(2), 0.0)
    np.testing.assert_allclose(moment[1, 2], one.moment)


def test_linear_activation_sees_the_mean_alone():
    mean = np.array([0.3, -0.7])
    activity, moment = clusters.expectations(Laplace(), [1.0, 2.0], mean, 0.1, slopes=(1.0, 1.0))
    assert activity == 1
    np.testing.assert_allclose(moment, mean)


@pytest.mark.parametrize("marginal", [Gaussian(), Logistic(), Uniform(), Ball(3), Ball(10)])
@pytest.mark.parametrize("distance", [0.1, 1.0, 5.0])
def test_log_concave_clusters_have_no_critical_point(marginal: Marginal, distance: float):
    assert clusters.critical_points(marginal, distance) == []


@given(st.floats(1.3, 20), st.floats(0.1, 10))
@settings(max_examples=40, deadline=None)
def test_student_clusters_have_one_where_the_node_rests(df, distance):
    (point,) = clusters.critical_points(StudentT(df), distance)
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
    assert not clusters.is_stable(Laplace(), point)
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


def test_sufficient_condition_of_the_paper():
    values = [clusters.sufficient_condition(m) for m in (Gaussian(), StudentT(5), StudentT(3))]
    np.testing.assert_allclose(values, [0.159, 0.180, 0.203], atol=1e-3)
    for exact in (Laplace(), StudentT(2)):
        assert clusters.sufficient_condition(exact) == pytest.approx(0.25, rel=1e-12)


WIDE = Scaled(Gaussian(), 2.0)


def test_gaussians_of_unequal_width_rest_if_the_positive_one_is_narrower():
    (point,) = clusters.critical_points(Gaussian(), 2.0, negative=WIDE)
    np.testing.assert_allclose(point, [-1.0151410, 0.9848590, 2.7385274], rtol=1e-6)
    rate = clusters.velocity(
        [Gaussian(), WIDE], [1, -point.ratio], [[2.0, 0.0], [0.0, 0.0]], [1.7, 0], 1.7 * point[0]
    )
    np.testing.assert_allclose([*rate.v, rate.bias], 0, atol=1e-13)
    assert clusters.is_stable(Gaussian(), point, negative=WIDE)
    for distance in (0.1, 2.0, 30.0):
        assert clusters.critical_points(WIDE, distance, negative=Gaussian()) == []


@pytest.mark.parametrize(("distance", "along"), [(0.3, 0.72), (1.0, 1.44), (2.0, 1.03)])
def test_rest_points_between_the_humps_of_a_cluster_are_not_stable(distance, along):
    humps = Density(
        lambda u: (
            (np.exp(-((u - 3) ** 2) / 0.32) + np.exp(-((u + 3) ** 2) / 0.32))
            / (0.8 * np.sqrt(2 * np.pi))
        )
    )
    lower, upper = clusters.critical_points(humps, distance)
    assert clusters.eigenvalues(humps, lower).along == pytest.approx(along, abs=0.01)
    assert not clusters.is_stable(humps, lower)
    assert clusters.is_stable(humps, upper)
    assert clusters.eigenvalues(humps, upper).stable


def test_a_life_that_rises_or_falls_at_both_clusters_may_be_stable():
    def slope(marginal: Marginal, s: float) -> float:
        return 1 - float(marginal.mean_residual(s) / marginal.inverse_hazard(s))

    heavy = StudentT(1.5)
    for positive, distance, negative, sign in (
        (Gaussian(), 2.0, WIDE, 1),
        (heavy, 0.3, Scaled(heavy, 0.8), -1),
    ):
        (point,) = clusters.critical_points(positive, distance, negative=negative)
        slopes = slope(positive, point.s_plus), slope(negative, point.s_minus)
        assert np.all(sign * np.array(slopes) > 0)
        assert slopes[0] > slopes[1]
        assert clusters.is_stable(positive, point, negative=negative)


def test_the_corrected_jacobian_is_stable_where_the_printed_one_is_a_saddle():
    (point,) = clusters.critical_points(StudentT(3), 2.0)
    right = clusters.jacobian(StudentT(3), point)
    wrong = as_printed.jacobian(StudentT(3), point)
    assert right.stable
    assert right.longitudinal == pytest.approx(-0.868, abs=1e-3)
    assert wrong.longitudinal == pytest.approx(2.306, abs=1e-3)


def test_three_equal_gaussians_rest_with_the_odd_one_in_the_middle():
    means, v, bias = [[-1.0, 0], [0, 0], [1, 0]], [1.0, 0], -0.3
    for sign in (1, -1):
        odd = sign * np.array([-1, 1, -1])
        a = clusters.resting_gradients(Gaussian(), means, v, bias, odd)
        assert a is not None
        assert np.all(a * odd > 0)
        rate = clusters.velocity(Gaussian(), a, means, v, bias)
        np.testing.assert_allclose([*rate.v, rate.bias], 0, atol=1e-13)
        values = np.linalg.eigvalsh(clusters.full_jacobian(Gaussian(), a, means, v, bias))
        others = np.delete(values, np.argmin(np.abs(values)))
        assert np.all(sign * others < 0)  # stable if the positive one is in the middle
    assert clusters.resting_gradients(Gaussian(), means, v, bias, [1, 1, -1]) is None
    assert clusters.resting_gradients(Gaussian(), means, v, bias, [-1, -1, -1]) is None


def test_the_quarter_of_eqn_58_gives_no_critical_point_if_the_density_has_a_kink():
    # Mean residual life 1/(1+x²) at s = -x: it rises up to 0, and on from there.
    kink = Density(lambda u: ((1 + u**2) ** 2 - 2 * u) * np.exp(-u - u**3 / 3) / 2)
    assert clusters.sufficient_condition(kink) == pytest.approx(0.25, abs=1e-12)
    for distance in (0.05, 0.5, 2.0):
        assert clusters.critical_points(kink, distance) == []


def test_above_a_quarter_there_are_critical_points_for_near_clusters_only():
    def spiked(u):
        narrow, wide = np.exp(-(u**2) / 0.005) / 0.05, np.exp(-(u**2) / 2)
        return (narrow + wide) / (2 * np.sqrt(2 * np.pi))

    marginal = Density(spiked)
    assert clusters.sufficient_condition(marginal) == pytest.approx(0.877, abs=1e-3)
    for distance in (0.1, 1.0, 2.2):
        assert len(clusters.critical_points(marginal, distance)) == 2
    assert clusters.critical_points(marginal, 2.4) == []


@pytest.mark.parametrize(
    ("df", "border"), [(2.5, 0.490), (3, 0.927), (5, 2.558), (10, 6.546), (20, 14.516)]
)
def test_from_which_distance_on_clusters_at_rest_lie_on_either_side(df, border):
    assert not clusters.straddles(StudentT(df), border - 0.001)
    assert clusters.straddles(StudentT(df), border + 0.001)
    assert not clusters.straddles(Laplace(), border)


def test_phase_boundary():
    assert clusters.phase(Gaussian(), 2.0, 1e6).grows  # F₊/F₋ has no bound
    assert clusters.phase(Logistic(), 2.0, 1.0).boundary == pytest.approx(np.exp(2), rel=1e-9)
    assert clusters.phase(Laplace(), 2.0, 1.0).boundary == pytest.approx(np.exp(2), rel=1e-6)
    assert clusters.phase(Uniform(), 0.5, 1.0).boundary == np.inf
    at = clusters.phase(StudentT(3), 2.0, 5.9)
    assert at.grows
    assert at.boundary == pytest.approx(5.955013, rel=1e-6)
    assert not clusters.phase(StudentT(3), 2.0, 6.0).grows
    heavier = clusters.phase(Scaled(StudentT(3), 2.0), 1.0, 1.0, negative=StudentT(3))
    assert heavier.boundary == pytest.approx(8.0, rel=0.2)
    assert clusters.phase(Uniform(), 0.5, 2.0, negative=Scaled(Uniform(), 4.0)).boundary < 2


@pytest.mark.parametrize("df", [1e4, 1e6])
def test_rest_points_of_nearly_gaussian_clusters_are_found(df):
    (point,) = clusters.critical_points(StudentT(df), 1.0)
    assert point.s_minus == pytest.approx(-np.sqrt(df), rel=0.01)
    assert clusters.is_stable(StudentT(df), point)


def test_curve_slope_far_below_zero_and_outside_the_support():
    assert clusters.curve_slope(Gaussian(), -40.0) == pytest.approx(0.0249844042, rel=1e-9)
    with pytest.raises(ValueError, match=r"\bs\b"):
        clusters.curve_slope(Ball(4), -1.5)


@pytest.mark.parametrize(
    ("positive", "negative", "boundary"),
    # By hand: F falls like x^{1-df}, like e^{-x} and (Gaussian) faster.
    [
        (StudentT(3.0), StudentT(3.1), np.inf),
        (StudentT(3.0), StudentT(3.05), np.inf),
        (Laplace(), Scaled(Laplace(), 0.999999), np.inf),
        (Laplace(), Scaled(Logistic(), 0.999999), np.inf),
        (StudentT(1000.0), Laplace(), np.inf),
        (Laplace(), Gaussian(), np.inf),
        (Gaussian(), Ball(2), np.inf),
        (Logistic(), Laplace(), 2 * np.e),
        (Scaled(Scaled(Logistic(), 4.0), 0.5), Scaled(Logistic(), 2.0), np.exp(0.5)),
        (Uniform(), Scaled(Uniform(), 2.0), 2.0),
    ],
)
def test_the_heavier_tail_decides_the_phase(positive, negative, boundary):
    at = clusters.phase(positive, 1.0, 5.0, negative=negative)
    assert at.boundary == pytest.approx(boundary, rel=1e-9)
    assert at.grows == (boundary > 5)


def test_phase_of_the_lighter_positive_tail_is_bounded():
    for positive, negative in ((StudentT(3.1), StudentT(3.0)), (Gaussian(), Laplace())):
        at = clusters.phase(positive, 1.0, 1e3, negative=negative)
        assert 1 < at.boundary < 100
        assert not at.grows


@pytest.mark.parametrize(
    ("width", "distance"), [(1 + 1e-7, 2.0), (2.0, 1e-14), (2.0, 1e-16), (1 + 1e-12, 1.0)]
)
def test_a_rest_point_outside_the_search_is_an_error(width, distance):
    wider = Scaled(Gaussian(), width)
    for call in (
        lambda: clusters.critical_points(Gaussian(), distance, negative=wider),
        lambda: clusters.phase(Gaussian(), distance, 2.0, negative=wider),
    ):
        rejects("distance", call)


@pytest.mark.parametrize("distance", [3e-8, 1e-7, 1e-6, 5e-6, 1e-5])
def test_near_student_clusters_have_one_rest_point(distance):
    for df in (1.5, 2, 3, 20):
        (point,) = clusters.critical_points(StudentT(df), distance)
        assert point.ratio == pytest.approx(1, abs=10 * distance)
    rejects("distance", lambda: clusters.critical_points(StudentT(2), 1e-15))


@pytest.mark.parametrize("distance", [0.1, 2.0, 30.0])
@pytest.mark.parametrize("marginal", [StudentT(1.5), StudentT(3), StudentT(20), Laplace()])
def test_gradients_at_a_rest_point_of_two_clusters(marginal, distance):
    (point,) = clusters.critical_points(marginal, distance)
    turn = np.array([0.6, 0.8])
    for axis in (np.array([1.0, 0.0]), turn):
        means = [distance * axis, [0.0, 0.0]]
        a = clusters.resting_gradients(marginal, means, axis, point.s_minus, [1, -1])
        assert a is not None
        assert -a[1] / a[0] == pytest.approx(point.ratio, rel=1e-9)
    off = point.s_plus + 0.01
    assert (clusters.resting_gradients(marginal, means, axis, off, [1, -1])) is None


@pytest.mark.parametrize(
    ("s", "ratio"),
    # With mpmath in 50 digits: (D θ₁(s₊) + θ₂(s₊))/θ₂(s₋) for D = 1.
    [(-60.0, 7.043991681351e25), (40.0, np.inf), (-38.0, 1.984342407363e16)],
)
def test_fixed_bias_deep_in_the_tails(s, ratio):
    assert clusters.fixed_bias_ratio(Gaussian(), s, 1.0) == pytest.approx(ratio, rel=1e-9)
