"""Rules on the learning rate: too high, too low.

Both judge how far single steps move the weights, as a share of their size: the learning rate
itself says little, since good ones differ by factors of a thousand between models.
"""

import numpy as np
from numpy.typing import NDArray

from joma.train.findings.attention import COLLAPSED, is_harmful
from joma.train.findings.finding import Finding, NotJudged, found
from joma.train.findings.recorded import (
    LAST,
    Recorded,
    RecordedSeries,
    Verdict,
    at_steps,
    common_steps,
    curve_of,
    end_of,
)

LARGE_STEP = 0.15
"""Share of their size by which single steps move three quarters of the weights, or more."""
STEP_WITH_COLLAPSE = 0.02
"""The same where attention that began evenly has collapsed meanwhile."""
BEGAN_SMALL = 10.0
"""Times by which a weight has grown that began near 0."""
EVEN = 0.5
"""Share of the uniform entropy above which attention began evenly."""
SHORT_PATH = 0.4
"""Share of its size by which the median weight can have moved since the training began."""
HARDLY_FALLEN = 0.6
"""Share of the first loss above which the loss still is."""
ENOUGH_STEPS = 200
"""Steps before it is said that the learning rate is too low."""


def judge_rate(recorded: Recorded) -> Verdict:
    """Judge the learning rate by how far single steps move the weights.

    - `learning_rate_too_high`: at two measurements or more a single step moves three quarters of
      the weights by 15% of their size or more; or by 2% or more, and the attention of a layer that
      began evenly has collapsed.
    - `learning_rate_too_low`: at the end of a training from scratch (the first loss is above
      0.9 ln V) of 200 steps or more, whose learning rate is not rising any more, all steps
      together can have moved the median weight by 40% of its size at most, and the loss is above
      60% of where it began.
    """
    moves = [one for one in recorded.all("update_relative") if len(one.values)]
    steps = common_steps(moves) if moves else np.zeros(0, dtype=np.int64)
    grown = {one.module for one in recorded.all("weight_norm") if _has_grown(one.values)}
    table = np.array([at_steps(one, steps) for one in moves if one.module not in grown])
    table = table[(table > 0).any(axis=1)] if len(table) else table  # of what is trained
    if not moves:
        needs = "update_relative, which was not measured"
    elif len(steps) < LAST:
        needs = f"{LAST} steps whose moves were measured; there are {len(steps)}"
    elif {one.module for one in moves} <= grown:
        needs = (
            "a weight that has not grown tenfold, as those do that begin near 0; all have, which "
            "itself suggests a learning rate that is too high or weights that begin too small"
        )
    elif not len(table):
        needs = "weights that are finite and trained"
    else:
        measured = recorded, steps, table, recorded.one("learning_rate")
        yield _too_high(*measured)
        yield _too_low(*measured)
        return
    for kind in ("learning_rate_too_high", "learning_rate_too_low"):
        yield NotJudged(kind, needs)


def _too_high(
    recorded: Recorded,
    steps: NDArray[np.int64],
    table: NDArray[np.float64],
    rates: RecordedSeries | None,
) -> Finding | None:
    moved = np.quantile(table, 0.25, axis=0)
    second = int(np.argsort(moved)[-2])  # the largest may be of one odd step
    large = float(moved[second])
    collapsed = _collapsed_since(recorded)
    if large < (LARGE_STEP if collapsed is None else STEP_WITH_COLLAPSE):
        return None
    first = int(steps[np.flatnonzero(moved >= large)[0]])  # whose rate is named, not a later one
    why = ""
    if collapsed is not None and large < LARGE_STEP:
        why = (
            f", and attention that began evenly has collapsed (layer {collapsed.layer}, "
            f"{collapsed.module})"
        )
    shown = {"rate": _rate(rates, first), "percent": 100 * large, "second": int(steps[second])}
    return found("learning_rate_too_high", "warning", first, {"move": large}, **shown, why=why)


def _collapsed_since(recorded: Recorded) -> RecordedSeries | None:
    """Return the entropy of an attention that began evenly and has collapsed, the first of them."""
    even = recorded.by_module("attention_uniform")
    for one in recorded.all("attention_entropy"):
        end, uniform = end_of(one.values), even.get(one.module)
        if end is None or uniform is None:
            continue
        level = float(uniform.values[-1])
        fell = one.values[0] > EVEN * level and end < COLLAPSED * level
        if fell and is_harmful(recorded, one, level):
            return one
    return None


def _too_low(
    recorded: Recorded,
    steps: NDArray[np.int64],
    table: NDArray[np.float64],
    rates: RecordedSeries | None,
) -> Finding | NotJudged | None:
    kind = "learning_rate_too_low"
    loss = recorded.one("loss")
    if loss is None or recorded.even_loss is None or loss.steps[0] > 1:
        return NotJudged(kind, "the losses from step 1 on, and a token embedding")
    made = recorded.last_step
    if not recorded.ended:
        return NotJudged(kind, "the end of the training")
    if made < ENOUGH_STEPS:
        return NotJudged(kind, f"{ENOUGH_STEPS} steps; there are {made}")
    if rates is None:
        return NotJudged(kind, "the optimizer: Monitor(model, optimizer)")
    first, curve = float(loss.values[0]), curve_of(loss)
    if curve is None or not recorded.is_fresh:
        return None  # no training from scratch: what was learned before needs small steps
    if _is_rising(rates.values):
        return NotJudged(kind, "the end of the learning rate's warm-up")
    median = np.median(table, axis=0)
    path = float(np.trapezoid(np.append(median, median[-1]), np.append(steps, made)))
    path += float(median[0]) * int(steps[0])
    if path >= SHORT_PATH or float(curve.levels[-1]) < HARDLY_FALLEN * first:
        return None
    evidence = {"path": path, "loss": float(curve.levels[-1]), "first": first}
    shown = {"rate": rates.values.max(), "percent": 100 * path}
    return found(kind, "warning", made, evidence, **shown)


def _has_grown(norms: NDArray[np.float64]) -> bool:
    """Return whether a weight began near 0, as LoRA's do: shares of such a size say nothing."""
    return bool(norms[:LAST].min() < norms.max() / BEGAN_SMALL)


def _is_rising(rates: NDArray[np.float64]) -> bool:
    return len(rates) > 1 and bool(rates[-1] > 1.01 * rates[-2])


def _rate(rates: RecordedSeries | None, step: int) -> str:
    """Return the learning rate at a step, " 0.003", as it was then; "" where it is not known."""
    if rates is None:
        return ""
    at = int(np.searchsorted(rates.steps, step, side="right")) - 1
    return f" {rates.values[max(at, 0)]:.2g}"
