"""Rules on the losses: not finite, diverged, spikes, a bad start, over-fitting, noisy labels."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from joma.train.findings.attention import COLLAPSED
from joma.train.findings.finding import Finding, NotJudged, found
from joma.train.findings.recorded import (
    Curve,
    Recorded,
    RecordedSeries,
    Verdict,
    checked_series,
    curve_of,
    needs_more,
)

DIVERGED = 0.5
"""Share of what a loss had fallen by that it must rise again to have diverged."""
ABOVE_NOISE = 4.0
"""Times the noise of single losses by which a level must have risen."""
SPIKE = 0.25
"""Share of what a loss had fallen by that a spike rises."""
SPIKE_ABOVE_NOISE = 6.0
"""Times the noise of single losses that a spike rises, which is the largest of many rises."""
BAD_START = 1.5
"""Times ln(vocabulary), the loss of a model that knows nothing, of a badly initialised one."""
OVERFITTED = 0.05
"""Share of its fall by which a validation loss rises again when over-fitting."""
VALIDATIONS = 4
"""Validation losses that are needed to judge them."""
NOISY = 0.3
"""Share of the validation loss's fall by which the training loss stays above it."""


def not_finite(steps: ArrayLike, loss: ArrayLike) -> Finding | None:
    """A loss that is NaN or infinite: critical; a warning where the last 10 are finite again.

    Args:
        steps: Steps of the losses.
        loss: Loss at each.
    """
    at, values = checked_series(steps, loss)
    broken = np.flatnonzero(~np.isfinite(values))
    if not len(broken):
        return None
    again = len(values) > 10 and np.isfinite(values[-10:]).all()
    return found(
        "not_finite",
        "warning" if again else "critical",
        int(at[broken[0]]),
        {"not_finite": float(len(broken)), "steps": float(len(values))},
        case="again" if again else "loss",
        word="NaN" if np.isnan(values[broken[0]]) else "infinite",
    )


def diverged_loss(steps: ArrayLike, loss: ArrayLike) -> Finding | None:
    """A loss that rose again and stays there: by half of what it had fallen by, above the noise.

    Losses are compared in medians of neighbouring steps, 40 pieces of at least 5 steps, so that one
    bad batch decides nothing; the lower of the last two must lie that high. Critical where the loss
    is above where it began, else a warning.

    Args:
        steps: Steps of the losses.
        loss: Loss at each.
    """
    at, values = checked_series(steps, loss)
    curve = curve_of(RecordedSeries("loss", at, values))
    return None if curve is None else _diverged(curve, float(values[0]))


def _diverged(curve: Curve, first: float) -> Finding | None:
    levels = curve.levels
    lowest = int(np.argmin(levels))
    began = max(first, float(levels[0]))
    low, end = float(levels[lowest]), float(min(levels[-2:]))
    fallen, risen = max(began - low, 0.0), end - low
    if risen <= max(DIVERGED * fallen, ABOVE_NOISE * curve.noise) or lowest >= len(levels) - 2:
        return None
    worse = end >= began and fallen > ABOVE_NOISE * curve.noise  # it had learned something
    severity, case = ("critical", "above") if worse else ("warning", "below")
    evidence = {"first": began, "lowest": low, "end": end, "noise": curve.noise}
    return found("diverged_loss", severity, int(curve.steps[lowest]), evidence, case=case)


def loss_spike(steps: ArrayLike, loss: ArrayLike) -> Finding | None:
    """A loss that rose for some steps and came back: by a quarter of its fall, above the noise.

    The largest such rise in medians of 5 steps above the lowest median before it. It has come back
    where a later median is within a quarter of the rise.

    Args:
        steps: Steps of the losses.
        loss: Loss at each.
    """
    at, values = checked_series(steps, loss)
    curve = curve_of(RecordedSeries("loss", at, values), pieces=len(values))
    if curve is None:
        return None
    levels = curve.levels
    before = np.minimum.accumulate(levels)[:-1]
    rises = levels[1:] - before
    fallen = max(float(values[0]), float(levels[0])) - before
    large = rises > np.maximum(SPIKE * fallen, SPIKE_ABOVE_NOISE * curve.noise)
    if not large.any():
        return None
    top = int(np.argmax(np.where(large, rises, -np.inf)))
    rise = float(rises[top])
    if not (levels[top + 2 :] < before[top] + rise / 4).any():
        return None
    evidence = {"rise": rise, "before": float(before[top])}
    return found("loss_spike", "note", int(curve.steps[top + 1]), evidence, top=levels[top + 1])


def bad_initialisation(loss: ArrayLike, vocabulary: int) -> Finding | None:
    """A first loss above 1.5 ln(V), where a model that knows nothing has ln(V).

    Judged only where the loss comes below ln(V) within 20% later, so that it is a mean of
    cross-entropies over V tokens and nothing else.

    Args:
        loss: Loss of every step.
        vocabulary: Number of tokens, V.
    """
    values = np.asarray(loss, dtype=np.float64)
    even = math.log(vocabulary)
    first = float(values[0])
    if not np.isfinite(first) or first <= BAD_START * even:
        return None
    evidence, case = {"first": first, "uniform": even}, "loss"
    return found("bad_initialisation", "note", 1, evidence, case=case, vocabulary=vocabulary)


def overfitting(
    steps: ArrayLike, validation: ArrayLike, training: Curve | None = None
) -> Finding | None:
    """Over-fitting: the validation loss rises from its lowest while the training loss falls.

    By 5% of what it had fallen by, in the mean of the last two, with at least two after the lowest.

    Args:
        steps: Steps of the validation losses.
        validation: Validation loss at each.
        training: The training loss; must be lower at the end than ever before that step.
    """
    at, values = checked_series(steps, validation)
    if len(values) < VALIDATIONS or not np.isfinite(values).all():
        return None
    lowest = int(np.argmin(values))
    if lowest > len(values) - 3:
        return None
    low, end = float(values[lowest]), float(values[-2:].mean())
    fallen = float(values[: lowest + 1].max()) - low
    noise = 1.4826 * float(np.median(np.abs(np.diff(values, 2)))) / 6**0.5
    if end - low <= max(OVERFITTED * fallen, 0.01 * abs(low), ABOVE_NOISE * noise):
        return None
    step = int(at[lowest])
    evidence = {"lowest": low, "end": end, "fallen": fallen}
    meanwhile = ""
    if training is not None:
        before = training.levels[training.steps <= step]
        then = float(before.min()) if len(before) else float(training.levels[0])
        now = float(training.levels[-1])
        if now >= then:
            return None
        evidence |= {"training_then": then, "training_end": now}
        meanwhile = f", while the training loss fell from {then:.3f} to {now:.3f}"
    return found("overfitting", "warning", step, evidence, meanwhile=meanwhile)


def label_noise(validation: ArrayLike, training: Curve) -> Finding | None:
    """A training loss that stays above the validation loss by 30% of what that has fallen by.

    Args:
        validation: Validation losses, in order.
        training: The training loss.
    """
    values = np.asarray(validation, dtype=np.float64)
    if len(values) < VALIDATIONS or not np.isfinite(values).all():
        return None
    end, now = float(values[-2:].mean()), float(np.mean(training.levels[-2:]))
    fallen = max(float(values[0]), float(training.levels[0])) - end
    gap = now - end
    if fallen <= 0 or gap <= max(NOISY * fallen, ABOVE_NOISE * training.noise / 2):
        return None
    evidence = {"training": now, "validation": end, "gap": gap}
    return found("label_noise", "warning", int(training.steps[-1]), evidence)


def judge_loss(recorded: Recorded) -> Verdict:
    """Judge the losses of a training."""
    loss = recorded.one("loss")
    if loss is None:
        for kind in ("not_finite", "diverged_loss", "loss_spike", "bad_initialisation"):
            yield NotJudged(kind, "losses: monitor.step(loss)")
        return
    # Where a loss is not finite, the first weight that was seen is of little use.
    broken = not_finite(loss.steps, loss.values) or _weights_not_finite(recorded.all("not_finite"))
    yield broken
    curve = curve_of(loss)
    if curve is None:
        few = f"at least 20 losses; there are {len(loss.values)}"
        for kind in ("diverged_loss", "loss_spike"):
            yield NotJudged(kind, few if broken is None else "losses that are finite")
    else:
        yield _diverged(curve, float(loss.values[0])) or loss_spike(loss.steps, loss.values)
    yield _start(recorded, loss)
    yield from _validation(recorded, curve)


def _weights_not_finite(weights: Sequence[RecordedSeries]) -> Finding | None:
    """Name the first weight that is not finite; where several became so at once, none of them."""
    if not weights:
        return None
    step = min(int(one.values[0]) for one in weights)
    first = [one for one in weights if int(one.values[0]) == step]
    where, case = (first[0].module, first[0].layer), "weight"
    if len(first) > 1:
        where, case = (None, None), "weights"
    evidence, among = {"step": float(step), "weights": float(len(first))}, first[0].module
    return found("not_finite", "critical", step, evidence, *where, case=case, among=among)


def _start(recorded: Recorded, loss: RecordedSeries) -> Finding | NotJudged | None:
    kind = "bad_initialisation"
    even = recorded.even_loss
    if even is None:
        return NotJudged(kind, "a token embedding and an output for every token; not found")
    if loss.steps[0] > 1:
        return NotJudged(kind, f"the loss of step 1; the first is of step {int(loss.steps[0])}")
    number = round(math.exp(even))
    if collapsed := _collapsed_at_first(recorded):
        return collapsed
    finite = loss.values[np.isfinite(loss.values)]
    if not len(finite) or not 0 < float(finite.min()) <= 1.2 * even:
        needs = f"a loss that is a mean of cross-entropies over {number} tokens"
        return NotJudged(kind, needs)
    return bad_initialisation(loss.values, number)


def _collapsed_at_first(recorded: Recorded) -> Finding | None:
    """Return that most attention is collapsed before anything was learned, if it is."""
    if not recorded.is_fresh:
        return None
    even = recorded.by_module("attention_uniform")
    first = [
        float(one.values[0]) / float(even[one.module].values[0])
        for one in recorded.all("attention_entropy")
        if one.module in even and one.steps[0] <= 1 and even[one.module].values[0] > 0
    ]
    sharp = [share for share in first if share < COLLAPSED]
    if 2 * len(sharp) <= len(first):
        return None
    evidence = {"sharp": float(len(sharp)), "attentions": float(len(first)), "least": min(sharp)}
    below, case = 100 * COLLAPSED, "attention"
    return found("bad_initialisation", "warning", 1, evidence, case=case, below=below)


def _validation(recorded: Recorded, curve: Curve | None) -> Verdict:
    validation = recorded.one("validation_loss")
    if validation is None:
        needs = "validation losses: monitor.record_validation(loss)"
    elif len(validation.values) < VALIDATIONS:
        needs = needs_more(len(validation.values), VALIDATIONS, "validation losses")
    elif curve is None:
        needs = "at least 20 losses that are finite"
    else:
        yield overfitting(validation.steps, validation.values, curve)
        # Of a tuned model, dropout alone makes as much as noisy labels.
        noise = NotJudged("label_noise", "a training from scratch")
        yield label_noise(validation.values, curve) if recorded.is_fresh else noise
        return
    for kind in ("overfitting", "label_noise"):
        yield NotJudged(kind, needs)
