"""The laboratory's closed forms next to mpmath at 50 digits, on random settings of its sliders."""

from typing import Any

import mpmath as mp
import numpy as np
import pytest

from tests.report.laboratory._node import evaluate, needs_node, numbers

pytestmark = [needs_node, pytest.mark.slow]

POINTS = 100_000
CHECKED = 400  # of these by mpmath
TOLERANCE = 1e-14


def test_theorem_2_up_to_the_last_digit_before_the_blow_up():
    rng = np.random.default_rng(3)
    settings = []
    for _ in range(POINTS):
        delta = float(rng.choice([-1, 1]) * 10 ** rng.uniform(-12, 1))
        initial = float(rng.choice([0.0, rng.uniform(-3, 3), rng.uniform(-20, 20)]))
        offset, normalizer = float(rng.uniform(-3, 3)), float(10 ** rng.uniform(-1, 1))
        options = {"initial": initial, "logOffset": offset, "normalizer": normalizer}
        settings.append((delta, options))
    # SciPy's erfc is off by up to 1e-13 here: times of its making lie behind the blow-up.
    own = numbers(evaluate([("blowupTimes", [[delta], options]) for delta, options in settings]))
    times = own.ravel() * (1 - 10 ** rng.uniform(-14, -1e-3, POINTS))
    calls = [
        ("weights", [[delta], [float(t)], options])
        for (delta, options), t in zip(settings, times, strict=True)
    ]
    found = numbers(evaluate(calls)).ravel()
    assert np.all(np.isfinite(found))
    worst = 0.0
    with mp.workdps(50):
        for place in range(0, POINTS, POINTS // CHECKED):
            (delta,), (t,), options = calls[place][1]
            v, root2 = mp.mpf(found[place]), mp.sqrt(2)
            start = mp.mpf(options["initial"])
            rate = mp.sqrt(2 / mp.pi) * mp.mpf(delta) * mp.exp(mp.mpf(options["logOffset"]))
            way = rate * mp.mpf(t) / mp.mpf(options["normalizer"])
            miss = _erf_difference(start / root2, v / root2) - way
            error = miss / (mp.sqrt(2 / mp.pi) * mp.exp(-(v**2) / 2))
            worst = max(worst, float(abs(error) / max(abs(v), mp.mpf("1e-6"))))
    assert worst < TOLERANCE, worst


def test_eqn_6_within_the_sudden_growth_too():
    rng = np.random.default_rng(4)
    mu = rng.uniform(0.01, 6, POINTS)
    late = rng.uniform(size=POINTS) < 0.5
    y = 10 ** rng.uniform(-3, 3, POINTS)
    t = np.where(late, 10 ** rng.uniform(-6, 3, POINTS), 0.0)
    pairs = zip(-np.expm1(-np.minimum(y, 30)), mu, strict=True)
    times = numbers(evaluate([("elapsed", [float(r), float(m)]) for r, m in pairs]))
    t = np.where(late, t, times)
    calls = [("logResiduals", [float(m), [float(one)]]) for m, one in zip(mu, t, strict=True)]
    found = numbers(evaluate(calls)).ravel()
    assert np.all(np.isfinite(found))
    worst = 0.0
    with mp.workdps(40):
        for place in range(0, POINTS, POINTS // CHECKED):
            m, when, now = mp.mpf(mu[place]), mp.mpf(t[place]), -mp.mpf(found[place])
            r = -mp.expm1(-now)
            end = mp.exp(-(m**2) / 2)
            smooth = mp.quad(
                lambda x, m=m, end=end: (
                    (mp.exp(-(m**2) * x**2 / 2) - end) / (1 - x) if x != 1 else m**2 * end
                ),
                [0, r / 4, r / 2, 3 * r / 4, r],
            )
            error = (when - end * now - smooth) / mp.exp(-((m * r) ** 2) / 2)
            worst = max(worst, float(abs(error) / now))
    assert worst < 1e-12, worst


def _erf_difference(a: Any, b: Any) -> Any:
    if a > 0 and b > 0:
        return mp.erfc(a) - mp.erfc(b)
    return mp.erf(b) - mp.erf(a) if a * b <= 0 else mp.erfc(-b) - mp.erfc(-a)
