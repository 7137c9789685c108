import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import nonlinear, spectra


def time_of(y, mu):
    """F at ln 1/δ = y, in 30 digits, by quadrature."""
    half, bend = mpmath.mpf(mu) ** 2 / 2, min(mpmath.mpf(y), mpmath.mpf(40))
    smooth = mpmath.quad(
        lambda x: mpmath.exp(-half * (1 - mpmath.exp(-x)) ** 2), mpmath.linspace(0, bend, 12)
    )
    return smooth + (y - bend) * mpmath.exp(-half)


@pytest.mark.parametrize("mu", [0.0, 0.3, -1.0, 3.0, 5.0, 6.0, -6.0])
@pytest.mark.parametrize("y", [1e-4, 0.5, 3.0, 10.0, 690.0])
def test_solution_against_30_digits_at_the_same_float_t(mu, y):
    with mpmath.workdps(30):
        t = float(time_of(mpmath.mpf(y), mu))
        exact = mpmath.mpf(y)
        for _ in range(2):
            slope = mpmath.exp(-(mpmath.mpf(mu) ** 2) * (1 - mpmath.exp(-exact)) ** 2 / 2)
            exact += (mpmath.mpf(t) - time_of(exact, mu)) / slope
        v = float(mpmath.mpf(mu) * (1 - mpmath.exp(-exact)))
    assert nonlinear.log_residual([mu], t)[0] == pytest.approx(-float(exact), rel=1e-9)
    assert nonlinear.weights([mu], t)[0] == pytest.approx(v, rel=1e-9)


def test_shapes_and_limits():
    assert nonlinear.weights(np.ones((2, 3)), 0.5).shape == (2, 3)
    assert nonlinear.weights(np.ones((2, 3)), [0.1, 0.5]).shape == (2, 2, 3)
    assert np.all(nonlinear.weights([1.0, 2.0], 0.0) == 0)
    assert nonlinear.log_residual([0.0], 7.0)[0] == pytest.approx(-7, rel=1e-14)
    np.testing.assert_allclose(nonlinear.weights([1.0, -3.0], 1e3), [1.0, -3.0])
    assert np.isfinite(nonlinear.log_residual([30.0], 1e-6)[0])
    assert nonlinear.weights(2.0, 0.5).shape == ()
    assert nonlinear.weights(2.0, [0.1, 0.5]).shape == (2,)
    assert np.all(nonlinear.log_residual([1.0, 6.0, 37.0], 1e308)[1:] == -np.inf)


@given(st.floats(0, 6), st.floats(1e-3, 20))
@settings(max_examples=50, deadline=None)
def test_elapsed_inverts_the_solution(mu, t):
    y = -nonlinear.log_residual([mu], t)[0]
    r = -np.expm1(-y)
    if r < 1 - 1e-6:
        # Where v grows fast, rounding of r itself moves the time.
        assert nonlinear.elapsed(r, mu) == pytest.approx(t, rel=1e-8)


@given(st.floats(0, 6), st.floats(0, 6), st.floats(1e-2, 10))
@settings(max_examples=50, deadline=None)
def test_the_more_salient_converges_faster(a, b, t):
    low, high = sorted((a, b))
    rates = -nonlinear.log_residual([low, high], t)
    assert rates[1] >= rates[0] * (1 - 1e-12)


@pytest.mark.parametrize("mu", [9.0, 11.572588408483718, 25.925146958875942, 36.9])
def test_within_the_sudden_growth_the_time_is_right_to_rounding(mu):
    for t in (
        float(nonlinear.residual_offset(mu)) * (1 + np.array([-1e-16, 0, 1e-16, 1e-12]))
    ).flat:
        y = -float(nonlinear.log_residual([mu], t)[0])
        with mpmath.workdps(400):
            back = mpmath.exp(-(mpmath.mpf(mu) ** 2) / 2) * y
            back += offset_of(mpmath.mpf(1) - mpmath.exp(-mpmath.mpf(y)), mu)
            assert abs(back / mpmath.mpf(float(t)) - 1) < 1e-17


def offset_of(r, mu):
    """H by its power series in μ²/2."""
    half = mpmath.mpf(mu) ** 2 / 2
    total, term, known, power = mpmath.mpf(0), mpmath.mpf(1), mpmath.mpf(0), r
    for k in range(6000):
        total -= term * known
        known += power / (2 * k + 1) + power * r / (2 * k + 2)
        power, term = power * r * r, term * -half / (k + 1)
        if k > half and abs(term) < mpmath.mpf(10) ** -300:
            break
    return total


def test_many_components_do_not_overflow_next_to_the_sudden_growth():
    mu = np.linspace(30, 37, 6100)
    for t in (0.0347, 0.035046, 0.035287):
        many = nonlinear.log_residual(mu, t)
        few = np.concatenate([nonlinear.log_residual(part, t) for part in np.split(mu, 2)])
        np.testing.assert_allclose(many, few, rtol=1e-10)


_TIMES = np.concatenate([[0], np.geomspace(1e-3, 50, 3000)])


def seen(mu):
    size, place = np.unique(np.abs(mu), return_inverse=True)
    path = nonlinear.weights(size, _TIMES)[:, place]
    return nonlinear.drop_and_rebound(nonlinear.attention_entropy(path))


@pytest.mark.parametrize("mu", [[1.0, 0.9, 0.0], [1.2, 1.0, 0.0, 0.0], [2.0, 1.9, *[0.0] * 6]])
def test_a_weak_component_is_not_enough_for_a_rebound(mu):
    fate = nonlinear.entropy_fate(mu)
    assert fate.drops
    assert not fate.rebounds
    assert not fate.rises_last
    assert fate.rebound == 0
    assert seen(mu).rebound < 1e-12


def test_entropy_may_rise_between_two_falls():
    mu = [2.778, 2.335, *[0.0] * 1000]
    fate = nonlinear.entropy_fate(mu)
    assert fate.rebounds
    assert not fate.rises_last
    assert fate.rebound == pytest.approx(0.01996, abs=1e-4)
    assert seen(mu).rebound == pytest.approx(fate.rebound, abs=1e-5)


def test_without_zeros_there_is_always_a_rebound_that_may_be_tiny():
    for mu, size in (([1.0, 0.001], 1.04e-17), ([0.1, 0.05], 1.63e-169)):
        fate = nonlinear.entropy_fate(mu)
        assert fate.rebounds
        assert fate.rebound == pytest.approx(size, rel=0.01)
    assert nonlinear.entropy_fate([1e-3, 9e-4]).rebounds


@given(st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), min_size=2, max_size=6))
@settings(max_examples=30, deadline=None)
def test_entropy_ends_rising_exactly_if_the_smallest_logit_is_below_the_mean(mu):
    size = np.abs(mu)
    fate = nonlinear.entropy_fate(mu)
    assert fate.drops == bool(np.ptp(size) > 0)
    if not fate.drops:
        assert fate == (False, False, 0.0, 0.0, False)
        return
    weight = np.exp(size**2 - np.max(size**2))
    mean = weight @ size**2 / weight.sum()
    smallest = np.min(size[size > 0]) ** 2
    if abs(smallest - mean) > 1e-9:
        assert fate.rises_last == bool(smallest < mean)
    assert fate.rebounds or not fate.rises_last
    assert 0 <= fate.rebound <= fate.drop + 1e-12


@pytest.mark.parametrize(
    ("rows", "ends", "highest"),
    [([[2, 0], *[[0, 1]] * 12], 1.3333, 1.5356), ([[3, 0], *[[0, 1]] * 100], 1.09, 1.3483)],
)
def test_stable_rank_rises_where_weak_rows_outweigh_the_salient_one(rows, ends, highest):
    fate = nonlinear.stable_rank_fate(rows)
    v = nonlinear.weights_multi(rows, np.geomspace(1e-4, 50, 2000))
    path = spectra.stable_rank(v)
    assert (fate.first, fate.last) == (1, -1)
    assert fate.drop < 1e-12
    assert path.min() > fate.ends - 1e-12
    assert fate.ends == pytest.approx(ends, abs=1e-4)
    assert fate.ends + fate.rise == pytest.approx(highest, abs=1e-4)
    assert path.max() == pytest.approx(highest, abs=1e-4)


@given(st.lists(st.floats(0.1, 5), min_size=2, max_size=5), st.floats(1e-3, 20))
@settings(max_examples=40, deadline=None)
def test_stable_rank_of_orthogonal_rows_is_below_its_ends(lengths, t):
    v = nonlinear.weights_multi(np.diag(lengths), t)
    assert spectra.stable_rank(v) <= spectra.stable_rank(np.diag(lengths)) + 1e-12


def test_stable_rank_without_rows_or_of_one_length():
    assert nonlinear.stable_rank_fate(np.zeros((2, 3))) == (0, 0, 0, 0, 0)
    fate = nonlinear.stable_rank_fate(np.eye(3))
    assert (fate.first, fate.last) == (0, 0)
    assert fate.ends == pytest.approx(3)
    assert max(fate.drop, fate.rise) < 1e-12
