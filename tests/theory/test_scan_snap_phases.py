"""Scan&Snap, how B grows: the balanced solution, scanning, snapping and the decoder's rate."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from joma.theory import scan_snap
from joma.theory.scan_snap import Balanced, ScanSnapCorpus

few = settings(max_examples=10, deadline=None)
sizes = st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))


def test_times_need_not_be_sorted_for_the_balanced_solution():
    t = np.array([5.0, 0.0, 1.0])
    b = Balanced(3, 2, 1).b_at(t, eta_y=1.0, eta_z=1.0)
    np.testing.assert_allclose(b[[1, 2, 0]], Balanced(3, 2, 1).b_at(t[[1, 2, 0]], eta_y=1, eta_z=1))
    assert b[1] == pytest.approx(0, abs=1e-15)


@few
@given(sizes, st.floats(0.1, 0.95), st.floats(-3, 6))
def test_b_never_grows_faster_in_ln_t_than_its_limit(size, mass, log_ratio):
    balanced = Balanced(*size, common_mass=mass)
    t = np.geomspace(1e-5, 1e5, 400)
    slope = np.diff(balanced.b_at(t, eta_y=1.0, eta_z=10**log_ratio)) / np.diff(np.log(t))
    assert np.max(slope) < balanced.scanning_slope_limit * (1 + 1e-6)
    assert balanced.scanning_slope_limit >= balanced.slope


def test_slope_of_b_in_ln_t_between_the_start_and_the_snap():
    """With η_Z ≫ η_Y there is room in between, where B = s ln t."""
    balanced = Balanced(4, 2, 3)
    t = np.array([1e-3, 2e-3])
    run = scan_snap.evolve(balanced.corpus, t, eta_y=1.0, eta_z=1e12)
    assert np.diff(run.b[:, 0]) / np.log(2) == pytest.approx(balanced.slope, rel=0.01)


@pytest.mark.parametrize("classes", [5, 12, 30])
def test_the_decoder_decides_at_the_snapping_time(classes):
    """The right class passes probability ½ within a factor two of t₀, for one common token."""
    corpus = Balanced(classes, 1, 1).corpus
    end = scan_snap.snapping_time(classes, corpus.tokens, 2.0)
    run = scan_snap.evolve(corpus, [end / 2, 2 * end], eta_y=2.0, eta_z=0.01)
    before, after = np.exp(scan_snap.objective(corpus, run.z, run.y))
    assert before < 0.5 < after


def test_critical_margin():
    assert scan_snap.critical_margin(2) == pytest.approx(2)
    margins = [scan_snap.critical_margin(k) for k in (2, 3, 4, 10, 100, 10**6)]
    assert np.all(np.diff(margins) > 0)
    for k, margin in zip((3, 100), (margins[1], margins[4]), strict=True):
        # B ∝ Δ²/η_Y, so the turn is where Δ grows as √t: by the law itself, numerically.
        up, down = (
            float(scan_snap.margin_time(margin * by, classes=k, distinct_share=1, eta_y=1))
            for by in (1.0001, 0.9999)
        )
        assert np.log(1.0001 / 0.9999) / np.log(up / down) == pytest.approx(0.5, rel=1e-6)


def test_larger_decoder_rate_is_sparser_early_and_denser_late():
    balanced = Balanced(3, 8, 1, common_mass=0.6)
    slow, fast = (
        scan_snap.evolve(balanced.corpus, [0.3, 1e4], eta_y=rate, eta_z=1.0) for rate in (2, 10)
    )
    assert np.all(fast.entropy[0] < slow.entropy[0])
    assert np.all(fast.entropy[1] > slow.entropy[1])
    assert 0.3 < scan_snap.decoder_rate_turn(classes=3, distinct_share=0.5, eta_y=5.0) < 1e4
    assert scan_snap.late_decoder_rate_effect(1e40, balanced, eta_y=5.0, eta_z=1.0) < 0


def test_the_turn_and_the_margin_need_classes_that_are_alike():
    """[[.3, .7, 0], [.7, 0, .3]]: the formulas give two turns, the flow has one."""
    corpus = ScanSnapCorpus(
        np.array([[0.3, 0.7, 0.0], [0.7, 0.0, 0.3]]), np.array([0, 0]), np.array([0.5, 0.5])
    )
    square = scan_snap.feature(corpus, np.zeros((1, 3))) ** 2
    said = [
        scan_snap.decoder_rate_turn(classes=2, distinct_share=float(share), eta_y=1.0)
        for share in (square[0, 1], square[1, 2])
    ]
    np.testing.assert_allclose(said, [9.93, 54.06], atol=0.01)
    t, step = np.linspace(8, 18, 200), 0.01
    more, less = (
        scan_snap.evolve(corpus, t, eta_y=np.exp(by), eta_z=1e-5, rtol=1e-10).b
        for by in (step, -step)
    )
    for class_ in range(2):
        change = (more - less)[:, class_]
        assert np.interp(0.0, -change, t) == pytest.approx(13.15, abs=0.05)


def test_larger_rates_together_need_not_make_attention_sparser():
    balanced = Balanced(3, 1, 1, 0.9)
    entropy = [
        scan_snap.evolve(balanced.corpus, [3.0], eta_y=2 * by, eta_z=by).entropy[0, 0]
        for by in (1.0, 5.0)
    ]
    np.testing.assert_allclose(entropy, [0.332, 0.652], atol=1e-3)
    assert balanced.densest == pytest.approx(np.log(9))
    assert Balanced(3, 12, 1, 0.7).densest == 0


def test_the_right_class_passes_one_half_earlier_where_attention_moves():
    balanced = Balanced(5, 1, 1)
    half = scan_snap.deciding_time(classes=5, distinct_share=0.5, eta_y=1.0)
    for eta_z, expected in ((1e-7, 0.5), (10.0, 0.6)):
        run = scan_snap.evolve(balanced.corpus, [half], eta_y=1.0, eta_z=eta_z)
        right = float(np.exp(scan_snap.objective(balanced.corpus, run.z, run.y)[0]))
        assert right == pytest.approx(0.5, abs=1e-5) if eta_z < 1 else right > expected
    # M does not enter, so that t₀ can be any number of times larger.
    assert half / scan_snap.snapping_time(5, 10**6, 1.0) < 0.13
    shares = [
        scan_snap.deciding_time(classes=k, distinct_share=1.0, eta_y=1.0)
        / scan_snap.snapping_time(k, k + 1, 1.0)
        for k in range(2, 2000)
    ]
    assert np.argmax(shares) + 2 == 30
    assert np.max(shares) == pytest.approx(0.6098, abs=1e-4)


def test_small_separations_keep_their_digits():
    """A common mass of .99: u₀ is 20 000, and ζ a difference of large numbers."""
    balanced = Balanced(2, 2, 4, 0.99)
    y = np.array([1e-7, 1e-5, 1e-3])
    rates: dict[str, Any] = {"eta_y": 1.0, "eta_z": 1e-3}
    zeta = balanced.separation(y, **rates)
    # dζ (1 + 1/u₀) = drive dy² at first.
    ratio = balanced.common_over_distinct
    first = -balanced.conserved(0.0, y, **rates) / (1 + 1 / ratio)
    np.testing.assert_allclose(zeta, first, rtol=1e-6)


def test_scanning_and_snapping_on_sampled_sequences():
    """B scans up to t₀ and freezes after it, as on the flow."""
    balanced = Balanced(2, 2, 2)
    rates: dict[str, Any] = {"eta_y": 0.2, "eta_z": 1.0}
    run = scan_snap.train_on_samples(balanced.corpus, 500, 4000, 16, rng=2, every=10, **rates)
    b = run.b.mean(axis=1)
    end = scan_snap.snapping_time(2, balanced.corpus.tokens, rates["eta_y"])
    slope = np.diff(b[1:]) / np.diff(np.log(run.t[1:]))
    assert np.max(slope) < 1.05 * balanced.scanning_slope_limit
    assert np.max(slope[run.t[2:] < end]) > 3 * np.mean(slope[run.t[2:] > 30 * end])
    late = run.t > 10 * end
    line = np.polynomial.Polynomial.fit(np.log(np.log(run.t[late])), b[late], 1)
    assert np.max(np.abs(line(np.log(np.log(run.t[late]))) - b[late])) < 0.02 * b[-1]
