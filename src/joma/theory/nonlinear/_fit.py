"""Eqn 6 fitted to the first part of a measured curve, and the rest predicted.

The method is Bayesian: priors as `fit` states them, Gaussian noise of unknown size, and draws of
the posterior from two independent runs of a sampler. What the data do not determine is not
reported as a number but named, with the reason.
"""

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.theory import _checks
from joma.theory._checks import Array
from joma.theory.nonlinear import _flow_table
from joma.theory.nonlinear._fit_model import CurveModel, sample_posterior
from joma.theory.nonlinear._fit_result import Eqn6Fit, estimate, summarize

_DRAWS_OF_WEIGHTS = 800
_DRAWS_OF_ENTROPY = 400  # each costs ten times as much
_FEWEST_ENTROPIES = 20
"""Of fewer, the intervals do not cover as they say: docs/theory/prediction.md."""


def fit(
    t: ArrayLike,
    *,
    v: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    components: tuple[int, int] = (2, 5),
    multiplicity: bool = False,
    scale: float = 1.0,
    largest: float = 5.0,
    spans: tuple[float, float] = (0.02, 50.0),
    noise: float | None = None,
    level: float = 0.9,
    rng: np.random.Generator | int = 0,
) -> Eqn6Fit:
    """Eqn 6 inferred from the first part of v(t) or of the attention's entropy.

    The model is v̇ = (μ - v) exp(v²/2)/τ from v(0) = 0 with one τ for all components, entropy of
    softmax(scale · v²), and independent Gaussian noise. Priors: |μ| uniform up to `largest`; ln τ
    uniform with the last t within `spans` of τ; the number of components uniform in `components`;
    the logarithm of the noise uniform between 1e-4 and 1 of the largest measured value.

    Args:
        t: Times (T,), increasing and ≥ 0, in any unit, such as steps; v is 0 at t = 0.
        v: Measured components (T, M).
        entropy: Measured entropy (T,) in nats. Give either v or entropy.
        components: Fewest and most components, for entropy; v has as many as columns.
        multiplicity: For entropy: whether each μ stands for a free number m ≥ 1 of equal
            components, not necessarily whole. The entropy is then ln m larger.
        scale: The attention is softmax(scale · v²).
        largest: Largest |μ|, at most 6.
        spans: How many τ the measured part lasts: least and most.
        noise: Standard deviation of the noise, where it is known.
        level: Posterior probability of all intervals.
        rng: Seed or generator.

    Returns:
        A `Eqn6Fit`, which predicts the rest of the curve.

    Raises:
        JomaError: An argument is not as described.
    """
    when = _checks.shape("t", _checks.non_negative("t", t), (None,))
    if when.size < 4:
        raise JomaError(f"t must hold at least 4 times, got {when.size}")
    if np.any(np.diff(when) <= 0):
        raise JomaError("t must increase from one measurement to the next")
    if (v is None) == (entropy is None):
        raise JomaError(f"give either v or entropy, got {'neither' if v is None else 'both'}")
    top = _checks.positive_scalar("largest", largest)
    if top > _flow_table.LARGEST_MU:
        raise JomaError(f"largest must be at most {_flow_table.LARGEST_MU:g}, got {top:g}")
    sharpness = _checks.positive_scalar("scale", scale)
    lasts = _checks.shape("spans", _checks.positive("spans", spans), (2,))
    if lasts[0] >= lasts[1]:
        raise JomaError(f"spans must be (least, most), got ({lasts[0]:g}, {lasts[1]:g})")
    known = None if noise is None else _checks.positive_scalar("noise", noise)
    if v is not None:
        data = _checks.finite("v", v, (when.size, None))
        if data.shape[1] == 0:
            raise JomaError("v must have at least one column, got none")
        _check_reach(data, top)
        groups: tuple[int, ...] = (data.shape[1],)
        if multiplicity:
            raise JomaError("multiplicity must be False for v, whose columns are the components")
    else:
        assert entropy is not None
        data = _checks.finite("entropy", entropy, (when.size,))
        if when.size < _FEWEST_ENTROPIES:
            raise JomaError(
                f"entropy must hold at least {_FEWEST_ENTROPIES} measurements, got {when.size}; "
                "fewer do not determine μ, and intervals from them are not reliable"
            )
        bounds = _checks.finite("components", components, (2,))
        few, most = (_checks.whole("components", number, 2) for number in bounds)
        if most < few:
            raise JomaError(f"components must be (fewest, most), got ({few}, {most})")
        groups = tuple(range(few, most + 1))
        if np.max(data) <= 0:
            raise JomaError(f"entropy must be positive somewhere, got at most {np.max(data):.3g}")
    if not np.any(data):
        raise JomaError(f"{'entropy' if v is None else 'v'} must not be zero throughout")
    between = (float(lasts[0]), float(lasts[1]))
    model = CurveModel(when, data, sharpness, top, between, groups, bool(multiplicity), known)
    inside = _checks.scalar("level", level)
    if not 0 < inside < 1:
        raise JomaError(f"level must lie between 0 and 1, got {inside:g}")
    generator = _checks.generator(rng)
    count = _DRAWS_OF_WEIGHTS if model.of_weights else _DRAWS_OF_ENTROPY
    draws, run = sample_posterior(model, count, generator)
    size = estimate(model.draw_noise(draws.squares, generator), inside)
    return summarize(model, draws, run, inside, size)


def _check_reach(v: Array, largest: float) -> None:
    """Raise where the last values of a component lie above the largest |μ|, noise apart."""
    last = np.abs(np.mean(v[-3:], axis=0))
    jitter = np.median(np.abs(np.diff(v, n=2, axis=0)), axis=0) * 1.4826 / np.sqrt(6)
    above = last - 4 * jitter / np.sqrt(3)
    if np.any(above > largest):
        column = int(np.argmax(above))
        raise JomaError(
            f"largest must be at least the largest |μ|: component {column} of v has reached "
            f"{last[column]:.3g}, got largest = {largest:g}"
        )
