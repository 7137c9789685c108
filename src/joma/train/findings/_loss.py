"""Rules on the losses: not finite, diverged, spikes, a bad start, over-fitting, noisy labels.

Losses are compared in medians of neighbouring steps, 40 pieces of at least 5 steps, so that one bad
batch decides nothing.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from joma.train.findings._attention import COLLAPSED
from joma.train.findings._finding import Finding, found
from joma.train.findings._recorded import (
    CannotJudgeError,
    LossCurve,
    Recorded,
    RecordedSeries,
    Rule,
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


def judge_finite(recorded: Recorded) -> Iterator[Finding]:
    """Find a loss that is NaN or infinite: critical; a warning where the last 10 are finite again.

    Otherwise find the first weight that is not finite. Where several became so at once, none of
    them is the first.
    """
    loss, weights = _loss(recorded), recorded.by_name["not_finite"]
    broken = np.flatnonzero(~np.isfinite(loss.values))
    if len(broken):
        again = len(loss.values) > 10 and np.isfinite(loss.values[-10:]).all()
        yield found(
            "not_finite",
            "warning" if again else "critical",
            int(loss.steps[broken[0]]),
            {"not_finite": float(len(broken)), "steps": float(len(loss.values))},
            case="again" if again else "loss",
            word="NaN" if np.isnan(loss.values[broken[0]]) else "infinite",
        )
    elif weights:
        step = min(int(one.values[0]) for one in weights)
        first = [one for one in weights if int(one.values[0]) == step]
        where, case = (first[0].module, first[0].layer), "weight"
        if len(first) > 1:
            where, case = (None, None), "weights"
        evidence, among = {"step": float(step), "weights": float(len(first))}, first[0].module
        yield found("not_finite", "critical", step, evidence, *where, case=case, among=among)


def judge_rises(recorded: Recorded) -> Iterator[Finding | None]:
    """Find a loss that rose again and stays there, otherwise one that rose and came back."""
    loss, curve = _loss(recorded), recorded.curve
    if curve is None:
        finite = np.isfinite(loss.values).all() and not recorded.by_name["not_finite"]
        few = f"at least 20 losses; there are {len(loss.values)}"
        raise CannotJudgeError(few if finite else "losses that are finite")
    yield _diverged(curve, float(loss.values[0])) or _spike(loss)


def _diverged(curve: LossCurve, first: float) -> Finding | None:
    """Return that the loss rose by half of what it had fallen by, above the noise, and stays there.

    The lower of the last two pieces must lie that high. Critical where the loss is above where it
    began, else a warning.
    """
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


def _spike(loss: RecordedSeries) -> Finding | None:
    """Return that the loss rose by a quarter of its fall, above the noise, and came back.

    The largest such rise in medians of 5 steps above the lowest median before it. It has come back
    where a later median is within a quarter of the rise.
    """
    curve = curve_of(loss.steps, loss.values, pieces=len(loss.values))
    if curve is None:
        return None
    levels = curve.levels
    before = np.minimum.accumulate(levels)[:-1]
    rises = levels[1:] - before
    fallen = max(float(loss.values[0]), float(levels[0])) - before
    large = rises > np.maximum(SPIKE * fallen, SPIKE_ABOVE_NOISE * curve.noise)
    if not large.any():
        return None
    top = int(np.argmax(np.where(large, rises, -np.inf)))
    rise = float(rises[top])
    if not (levels[top + 2 :] < before[top] + rise / 4).any():
        return None
    evidence = {"rise": rise, "before": float(before[top])}
    return found("loss_spike", "note", int(curve.steps[top + 1]), evidence, top=levels[top + 1])


def judge_start(recorded: Recorded) -> Iterator[Finding | None]:
    """Find attention that is collapsed before anything was learned, or a first loss above 1.5 ln V.

    The loss is judged only where it comes below ln V within 20% later, so that it is a mean of
    cross-entropies over V tokens and nothing else.
    """
    loss, even = _loss(recorded), recorded.even_loss
    if even is None:
        raise CannotJudgeError("a token embedding and an output for every token; not found")
    if loss.steps[0] > 1:
        raise CannotJudgeError(f"the loss of step 1; the first is of step {int(loss.steps[0])}")
    if collapsed := _collapsed_at_first(recorded):
        yield collapsed
        return
    finite, tokens = loss.values[np.isfinite(loss.values)], round(math.exp(even))
    if not len(finite) or not 0 < float(finite.min()) <= 1.2 * even:
        raise CannotJudgeError(f"a loss that is a mean of cross-entropies over {tokens} tokens")
    first = float(loss.values[0])
    if np.isfinite(first) and first > BAD_START * even:
        evidence, case = {"first": first, "uniform": even}, "loss"
        yield found("bad_initialisation", "note", 1, evidence, case=case, vocabulary=tokens)


def _collapsed_at_first(recorded: Recorded) -> Finding | None:
    """Return that most attention is collapsed before anything was learned, if it is."""
    if not recorded.is_fresh:
        return None
    even = recorded.by_module["attention_uniform"]
    first = [
        float(one.values[0]) / float(even[one.module].values[0])
        for one in recorded.by_name["attention_entropy"]
        if one.module in even and one.steps[0] <= 1 and even[one.module].values[0] > 0
    ]
    sharp = [share for share in first if share < COLLAPSED]
    if 2 * len(sharp) <= len(first):
        return None
    evidence = {"sharp": float(len(sharp)), "attentions": float(len(first)), "least": min(sharp)}
    below, case = 100 * COLLAPSED, "attention"
    return found("bad_initialisation", "warning", 1, evidence, case=case, below=below)


def judge_overfitting(recorded: Recorded) -> Iterator[Finding]:
    """Find a validation loss that rises from its lowest while the training loss falls.

    By 5% of what it had fallen by, in the mean of the last two, with at least two after the lowest.
    The training loss must be lower at the end than ever before that step.
    """
    validation, training = _validation(recorded)
    values = validation.values
    lowest = int(np.argmin(values))
    if lowest > len(values) - 3 or not np.isfinite(values).all():
        return
    low, end = float(values[lowest]), float(values[-2:].mean())
    fallen = float(values[: lowest + 1].max()) - low
    noise = 1.4826 * float(np.median(np.abs(np.diff(values, 2)))) / 6**0.5
    if end - low <= max(OVERFITTED * fallen, 0.01 * abs(low), ABOVE_NOISE * noise):
        return
    step = int(validation.steps[lowest])
    before: NDArray[np.float64] = training.levels[training.steps <= step]
    then = float(before.min()) if len(before) else float(training.levels[0])
    now = float(training.levels[-1])
    if now < then:
        evidence = {"lowest": low, "end": end, "fallen": fallen}
        evidence |= {"training_then": then, "training_end": now}
        yield found("overfitting", "warning", step, evidence)


def judge_label_noise(recorded: Recorded) -> Iterator[Finding]:
    """Find a training loss that stays above the validation loss by 30% of its fall."""
    validation, training = _validation(recorded)
    if not recorded.is_fresh:  # of a tuned model, dropout alone makes as much as noisy labels
        raise CannotJudgeError("a training from scratch")
    values = validation.values
    end, now = float(values[-2:].mean()), float(np.mean(training.levels[-2:]))
    fallen = max(float(values[0]), float(training.levels[0])) - end
    gap = now - end
    enough = max(NOISY * fallen, ABOVE_NOISE * training.noise / 2)
    if np.isfinite(values).all() and fallen > 0 and gap > enough:
        evidence = {"training": now, "validation": end, "gap": gap}
        yield found("label_noise", "warning", int(training.steps[-1]), evidence)


def _loss(recorded: Recorded) -> RecordedSeries:
    if recorded.loss is None:
        raise CannotJudgeError("losses: monitor.step(loss)")
    return recorded.loss


def _validation(recorded: Recorded) -> tuple[RecordedSeries, LossCurve]:
    """Return the validation loss, and the training loss in medians."""
    if not recorded.by_name["validation_loss"]:
        raise CannotJudgeError("validation losses: monitor.record_validation(loss)")
    validation = recorded.by_name["validation_loss"][0]
    if len(validation.values) < VALIDATIONS:
        needs = needs_more(len(validation.values), VALIDATIONS, "validation losses")
        raise CannotJudgeError(needs)
    if recorded.curve is None:
        raise CannotJudgeError("at least 20 losses that are finite")
    return validation, recorded.curve


RULES = (
    Rule(("not_finite",), judge_finite),
    Rule(("diverged_loss", "loss_spike"), judge_rises),
    Rule(("bad_initialisation",), judge_start),
    Rule(("overfitting",), judge_overfitting),
    Rule(("label_noise",), judge_label_noise),
)
