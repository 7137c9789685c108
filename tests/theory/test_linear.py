import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import linear, spectra
from joma.theory.block import Block, Samples, simulate
from tests.theory._bad import rejects

finite = st.floats(-3, 3).filter(lambda x: abs(x) > 1e-3)


def reference(delta: float, t: float, start: float, offset: float, normalizer: float) -> float:
    """The weight at the same float t, in 50 digits."""
    with mpmath.workdps(50):
        sign = 1 if delta > 0 else -1
        goal = mpmath.erfc(sign * mpmath.mpf(start) / mpmath.sqrt(2))
        rate = abs(mpmath.mpf(delta)) * mpmath.exp(mpmath.mpf(offset)) / mpmath.mpf(normalizer)
        goal -= mpmath.sqrt(2 / mpmath.pi) * rate * mpmath.mpf(t)
        low, high = mpmath.mpf(-9), mpmath.mpf(9)
        for _ in range(150):
            middle = (low + high) / 2
            low, high = (middle, high) if mpmath.erfc(middle) > goal else (low, middle)
        return float(sign * mpmath.sqrt(2) * low)


@pytest.mark.parametrize("left", [0.9, 0.5, 1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("start", [0.0, 0.6, -1.3, 3.0, -4.0])
@pytest.mark.parametrize(("delta", "offset", "normalizer"), [(1.0, 0, 1), (-2.2, 0.7, 3.7)])
def test_weights_against_50_digits(left, start, delta, offset, normalizer):
    own = linear.blowup_time([delta], initial=start, log_offset=offset, normalizer=normalizer)[0]
    t = float(own * (1 - left))
    ours = linear.weights([delta], t, initial=start, log_offset=offset, normalizer=normalizer)[0]
    assert ours == pytest.approx(reference(delta, t, start, offset, normalizer), rel=1e-9)


def test_one_number_is_enough():
    assert linear.weights(1.0, 0.5).shape == ()
    assert linear.weights(1.0, [0.1, 0.5]).shape == (2,)
    assert linear.blowup_time(1.0) == pytest.approx(np.sqrt(np.pi / 2))


def test_numbers_out_of_range_do_not_become_nan():
    np.testing.assert_array_equal(linear.blowup_time([1, 0.0], log_offset=1000.0), [0, np.inf])
    assert linear.blowup_time([1.0, 0.0], initial=40.0)[1] == np.inf
    small = linear.blowup_time([1.0], log_offset=-1000.0, normalizer=1e-300)[0]
    assert np.log(small) == pytest.approx(1000 - 300 * np.log(10) + np.log(np.pi / 2) / 2)
    assert linear.weights([1.0], 0.0, log_offset=12000.0)[0] == 0
    v = linear.weights_multi([[3e-200, 4e-200]], 1e199)
    np.testing.assert_allclose(v, 0.52288006 * np.array([[0.6, 0.8]]), rtol=1e-6)


def test_starts_far_from_zero_move_forward():
    behind = linear.weights([1.0], 0.01, initial=-37.8, log_offset=-(37.8**2) / 2)[0]
    assert behind == pytest.approx(-37.79151755, abs=1e-8)
    ahead = linear.weights([1.0], 0.01, initial=37.8, log_offset=-(37.8**2) / 2)[0]
    assert ahead == pytest.approx(37.81256162, abs=1e-8)
    late = linear.limit([1e-3, 1.0], initial=[40.0, 0.0], log_offset=[-800.0, 0.0])
    assert late[0] == pytest.approx(40.00128582, abs=1e-8)
    assert late[1] == np.inf


@pytest.mark.parametrize("offset", [0.0, 800.0, -800.0, 1e6])
def test_the_winner_is_found_where_its_time_is_no_float(offset):
    assert linear.winner([1.0, 2.0], log_offset=offset) == 1
    np.testing.assert_array_equal(np.isinf(linear.limit([1.0, 2.0], log_offset=offset)), [0, 1])


@pytest.mark.parametrize("start", [-8.0, -1.0, 0.3, 25.5, -30.0, 100.0])
@pytest.mark.parametrize("left", [0.5, 1e-4, 1e-8])
def test_weights_from_any_start(start, left):
    given = {"initial": start, "log_offset": 0.3 - start**2 / 2, "normalizer": 0.7}
    t = float(linear.blowup_time([1.3], **given)[0] * (1 - left))
    v = float(linear.weights([1.3], t, **given)[0])
    with mpmath.workdps(60):
        goal = mpmath.mpf(1.3) * mpmath.mpf(t) / mpmath.mpf(0.7)
        goal *= mpmath.exp(mpmath.mpf(given["log_offset"])) * mpmath.sqrt(2 / mpmath.pi)
        begin, end = (mpmath.mpf(x) / mpmath.sqrt(2) for x in (start, v))
        missing = goal - (mpmath.erfc(begin) - mpmath.erfc(end))
        change = missing * mpmath.sqrt(mpmath.pi / 2) * mpmath.exp(mpmath.mpf(v) ** 2 / 2)
    assert abs(float(change)) < 1e-9 * max(abs(v), 1e-6)


def test_shapes():
    delta = np.ones((2, 3, 4))
    assert linear.weights(delta, 0.1).shape == (2, 3, 4)
    assert linear.weights(delta, [0.1, 0.2]).shape == (2, 2, 3, 4)
    assert linear.weights_multi(np.ones((4, 3)), [0.1, 0.2]).shape == (2, 4, 3)
    assert linear.weights_multi(np.ones((4, 3)), 0.1).shape == (4, 3)
    assert linear.blowup_time(delta).shape == (2, 3, 4)


def test_the_joint_solution_ends_with_the_winner():
    delta = [1.0, 0.7, 0.0, -0.3]
    first = linear.blowup_time(delta).min()
    assert first == pytest.approx(np.sqrt(np.pi / 2), rel=1e-15)
    assert linear.blowup_time(delta)[2] == np.inf
    rejects("t", lambda: linear.weights(delta, first))
    rejects("t", lambda: linear.weights(delta, [0.0, 2 * first]))
    alone = linear.weights(delta, 2.0, beyond="inf")
    assert alone[0] == alone[1] == np.inf
    assert alone[2] == 0
    assert -np.inf < alone[3] < 0
    assert linear.weights(delta, 99.0, beyond="inf")[3] == -np.inf


def test_limit_is_where_the_others_are_when_the_winner_leaves():
    delta = np.array([1.5, 1.0, -0.6, 0.0])
    limit = linear.limit(delta)
    assert limit[0] == np.inf
    np.testing.assert_allclose(
        limit[1:], linear.weights(delta[1:], linear.blowup_time([1.5])[0]), rtol=1e-9
    )
    assert np.all(np.isposinf(linear.limit([1.0, 1.0])))
    np.testing.assert_allclose(linear.limit([1.0, 0.8], initial=[0.0, 0.6])[0], 1.006, atol=1e-3)


def test_winner_depends_on_the_start():
    assert linear.winner([1.0, 0.8]) == 0
    assert linear.winner([1.0, 0.8], initial=[0.0, 0.6]) == 1
    np.testing.assert_allclose(
        linear.blowup_time([1, 0.8], initial=[0, 0.6]), [1.253, 0.859], atol=1e-3
    )


@given(finite, st.floats(-2, 2), st.floats(0.01, 0.9), st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None)
def test_stopping_and_going_on_is_the_same(delta, start, share, part):
    t = share * linear.blowup_time([delta], initial=start)[0]
    middle = linear.weights([delta], part * t, initial=start)
    whole = linear.weights([delta], t, initial=start)
    rest = linear.weights([delta], t - part * t, initial=middle)
    np.testing.assert_allclose(rest, whole, rtol=1e-7, atol=1e-9)


def test_stable_rank_falls_while_the_rank_stays():
    rng = np.random.default_rng(3)
    delta = rng.normal(size=(5, 3)) * np.array([1.3, 1, 0.8, 0.6, 0.5])[:, None]
    end = np.sqrt(np.pi / 2) / np.linalg.norm(delta, axis=1).max()
    t = end * (1 - np.array([0.5, 1e-1, 1e-3, 1e-9]))
    v, rate = linear.weights_multi(delta, t), linear.velocity_multi(delta, t)
    assert np.all(spectra.rank(v) == 3)
    assert np.all(np.diff(spectra.stable_rank(v)) < 0)
    assert np.all(spectra.stable_rank(rate) < spectra.stable_rank(v))
    assert spectra.stable_rank(rate)[-1] == pytest.approx(1, abs=1e-6)


def test_the_stable_rank_tends_to_that_of_the_longest_rows():
    assert linear.stable_rank_limit([[1.0, 0.0], [0.0, 0.999]]) == 1
    assert linear.stable_rank_limit([[1.0, 0.0], [0.0, 1.0], [0.9, 0.0]]) == pytest.approx(2)
    assert linear.stable_rank_limit([[3.0, 4.0], [-3.0, -4.0], [0.0, 1.0]]) == pytest.approx(1)
    rejects("delta", lambda: linear.stable_rank_limit([[0.0, 0.0]]))


def test_the_stable_rank_does_not_tend_to_one_where_rows_tie():
    delta, end = np.array([[1.0, 0.0], [0.0, 1.0], [0.9, 0.0]]), np.sqrt(np.pi / 2)
    t = end * (1 - np.array([0.5, 1e-9]))
    weights = spectra.stable_rank(linear.weights_multi(delta, t))
    gradients = spectra.stable_rank(linear.velocity_multi(delta, t))
    assert weights[0] < weights[1] < gradients[1]
    assert gradients[1] == pytest.approx(2, abs=1e-3)


def test_the_stable_rank_comes_down_very_slowly():
    v = linear.weights_multi([[1.0, 0.0], [0.0, 0.999]], np.sqrt(np.pi / 2) * (1 - 1e-14))
    assert spectra.stable_rank(v) == pytest.approx(1.18, abs=0.01)


def test_softmax_attention_on_samples_of_one_token_does_not_obey_theorem_2():
    g = np.array([0.5, 0.8, 1.0, 1.2, 1.5])
    path = simulate(Block("softmax", "linear"), Samples(np.eye(5), gradient=g), [0.0, 5.0])
    np.testing.assert_allclose(path.v[1, :, 0], g, rtol=1e-9)  # v = Δt
    ratios = linear.conserved_ratio(g / 5, path.v[1, :, 0])
    np.testing.assert_allclose(ratios[[0, -1]], [3.829, 2.888], atol=1e-3)


def test_zero_rows_stay_zero():
    assert np.all(linear.weights_multi([[1.0, 0.5], [0.0, 0.0]], 0.5)[1] == 0)


def test_linear_attention_needs_a_start():
    v, z = linear.linear_attention([1.0, -0.5], [0.0, 2.0], logits=0.0)
    assert np.all(v == 0)
    assert np.all(z == 0)
    v, z = linear.linear_attention([1.0, -0.5], 2.0)
    np.testing.assert_allclose(z**2 - v**2, 1, rtol=1e-12)
