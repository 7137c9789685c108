import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from joma.theory import nonlinear, spectra
from tests.theory._bad import rejects


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


def test_weights_solve_eqn_6():
    mu, t = np.array([-2.5, 0.0, 0.4, 1.5, 3.0]), np.array([0.1, 0.7, 4.0])
    flow = integrate.solve_ivp(
        lambda _, v: (mu - v) * np.exp(v**2 / 2),
        (0, 4),
        np.zeros(5),
        "Radau",
        t_eval=t,
        rtol=1e-10,
        atol=1e-12,
    )
    np.testing.assert_allclose(nonlinear.weights(mu, t), flow.y.T, atol=1e-8)


@pytest.mark.parametrize("t", [1e-3, 0.2, 1.0, 30.0])
def test_very_many_components_agree_with_few(t):
    mu = np.random.default_rng(0).uniform(-6, 6, size=30_000)
    many, few = nonlinear.log_residual(mu, t), nonlinear.log_residual(mu[:500], t)
    np.testing.assert_allclose(many[:500], few, rtol=2e-12)


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


def test_offset_is_bounded_and_the_bound_is_sharp():
    mu, r = np.meshgrid(np.linspace(0, 6, 121), np.linspace(0, 1, 101))
    offset = nonlinear.offset(r, mu)
    assert offset.min() >= 0
    assert offset.max() <= nonlinear.offset_bound()
    assert nonlinear.offset_bound() == pytest.approx(0.8643, abs=1e-4)
    assert nonlinear.lemma6_bound() == pytest.approx(0.638, abs=1e-3)
    assert nonlinear.lemma7_bound() == pytest.approx(0.765, abs=1e-3)


def test_rate_ratio_tends_to_theorem_4():
    ratio = nonlinear.rate_ratio(2.0, 1.0, 1e4)
    np.testing.assert_allclose(ratio, np.exp(1.5), rtol=1e-3)


def test_entropy_drops_and_rebounds_only_with_weak_components():
    t = np.concatenate([[0], np.geomspace(1e-3, 50, 500)])
    for mu in ([3.0, 0.5, 0.5], [2.0, 2.0], [3.0, 0.0, 0.0], [1.0, -2.0, 0.0]):
        change = nonlinear.drop_and_rebound(nonlinear.attention_entropy(nonlinear.weights(mu, t)))
        assert nonlinear.entropy_fate(mu) == (change.drop > 1e-6, change.rebound > 1e-6)


def test_stable_rank_drops_and_rebounds():
    mu = np.diag([3.0, 1.2, 1.0])
    v = nonlinear.weights_multi(mu, np.geomspace(1e-4, 50, 200))
    change = nonlinear.drop_and_rebound(spectra.stable_rank(v))
    assert change.drop > 0.1
    assert change.rebound == pytest.approx(change.drop, rel=1e-2)
    assert np.all(spectra.rank(v) == 3)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("mu", lambda: nonlinear.weights([np.nan], 0.1)),
        ("mu", lambda: nonlinear.weights([38.0], 0.1)),
        ("mu", lambda: nonlinear.weights([1j], 0.1)),
        ("mu", lambda: nonlinear.weights("a", 0.1)),  # pyright: ignore[reportArgumentType]
        ("mu", lambda: nonlinear.weights_multi([1.0], 0.1)),
        ("t", lambda: nonlinear.weights([1.0], -1.0)),
        ("t", lambda: nonlinear.weights([1.0], [np.inf])),
        ("r", lambda: nonlinear.elapsed(1.0, 1.0)),
        ("r", lambda: nonlinear.offset(-0.1, 1.0)),
        ("initial", lambda: nonlinear.linear_attention_residual([1.0], 0.1, initial=0.0)),
        ("initial", lambda: nonlinear.linear_attention_residual([1.0], 0.1, initial=2.0)),
        ("scale", lambda: nonlinear.attention_entropy([1.0], scale=0.0)),
    ],
)
def test_bad_input_is_named(argument, call):
    rejects(argument, call)
