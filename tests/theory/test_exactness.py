"""Digits that a shorter way would lose, against 30 digits or a slower method."""

from typing import Any

import mpmath
import numpy as np
import pytest

from joma.theory import linear, nonlinear


@pytest.mark.parametrize("share", [0.95, 0.99, 0.995, 1 - 1e-9])
def test_only_ties_with_the_winner_diverge_with_it(share: float):
    limit = linear.limit([1.0, share, -share, 1.0])
    assert np.isposinf(limit[[0, 3]]).all()
    with mpmath.workdps(30):
        exact = float(mpmath.sqrt(2) * mpmath.erfinv(mpmath.mpf(share)))
    np.testing.assert_allclose(limit[1:3], [exact, -exact], rtol=1e-12)


@pytest.mark.parametrize("left", [0.02, 5e-3, 1e-4, 2e-6])
def test_weights_near_their_blow_up_keep_their_digits(left: float):
    t = float(linear.blowup_time([1.0])[0]) * (1 - left)
    with mpmath.workdps(40):
        covered = mpmath.sqrt(2 / mpmath.pi) * mpmath.mpf(t)
        exact = float(mpmath.sqrt(2) * mpmath.erfinv(covered))
    assert float(linear.weights([1.0], t)[0]) == pytest.approx(exact, rel=1e-12)


def exact_offset(r: float, mu: float) -> float:
    with mpmath.workdps(30):
        top, half = mpmath.mpf(r), mpmath.mpf(mu) ** 2 / 2

        def integrand(x):
            if x == 1:
                return 2 * half * mpmath.exp(-half)
            return (mpmath.exp(-half * x**2) - mpmath.exp(-half)) / (1 - x)

        cuts = [n / mpmath.mpf(mu) for n in (1, 2, 4, 6, 9, 12, 16, 24)]
        found: Any = mpmath.quad(integrand, [0, *(cut for cut in cuts if cut < top), top])
        return float(found)


@pytest.mark.parametrize("r", [0.01, 0.7, 1.0])
@pytest.mark.parametrize("mu", [0.5, 5.9, 11.9, 12.1, 24.5, 300.0, 1e5])
def test_offset_at_any_mu(r: float, mu: float):
    assert float(nonlinear.offset(r, mu)) == pytest.approx(exact_offset(r, mu), rel=1e-14)


@pytest.mark.parametrize("mu", [1e8, 1e101, 1e200, 1.7e308])
def test_offset_falls_as_one_over_mu(mu: float):
    scaled = float(nonlinear.offset(1.0, mu)) * mu
    assert scaled == pytest.approx(float(mpmath.sqrt(mpmath.pi / 2)), rel=2e-8)
