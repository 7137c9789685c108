"""Rules on attention (collapse, sparse then dense again) and on the learning rate.

Those on attention are what the recorded WikiText-2 runs of JoMA's Fig. 6 and 8 fall apart by:
attention collapses where the learning rate is too high for the depth, and drops and bounces back in
shallow networks at good learning rates. Those on the learning rate judge how far single steps move
the weights, as a share of their size: the rate itself says little, since good ones differ by
factors of a thousand between models.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.train.findings._finding import Finding, as_harmless, found
from joma.train.findings._recorded import (
    LAST,
    CannotJudgeError,
    Recorded,
    RecordedSeries,
    Rule,
    checked_series,
    end_of,
    place_name,
    since,
    table_of,
)

COLLAPSED = 0.25
"""Share of the uniform entropy below which attention has collapsed."""
RIGID = 0.1
"""Share of the uniform entropy below which a collapse is a warning, and not a note."""
BOUNCE = 0.2
"""Nats attention must fall and rise again."""
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


def attention_collapse(
    steps: ArrayLike,
    entropy: ArrayLike,
    uniform: float,
    *,
    layer: int | None = None,
    module: str = "",
    kind: str = "",
) -> Finding | None:
    """Attention that collapsed: the mean of the last 3 entropies is below 0.25 of the uniform one.

    A network that dips below and recovers has not collapsed. Below 0.1 it is a warning, above it a
    note: layers that read a few tokens each are found in good trainings, too.

    Args:
        steps: Steps of the measurements.
        entropy: Mean entropy of attention rows at each, in nats.
        uniform: What it would be if every row spread evenly over the keys it sees: ln(T!)/T for
            causal attention over T tokens.
        layer: Layer index.
        module: Key of the attention.
        kind: Kind of the attention, "decoder cross".
    """
    at, values = checked_series(steps, entropy)
    if not (math.isfinite(uniform) and uniform > 0):
        raise JomaError(f"uniform must be an entropy above 0 in nats, got {uniform!r}")
    end = end_of(values)
    if end is None or not end < COLLAPSED * uniform:
        return None
    rigid = end < RIGID * uniform
    return found(
        "attention_collapse",
        "warning" if rigid else "note",
        since(at, values < COLLAPSED * uniform),
        {"end": end, "uniform": float(uniform), "first": float(values[0])},
        module or None,
        layer,
        case="harmful" if rigid else "harmless",
        place=place_name(layer, module, kind),
        percent=100 * end / uniform,
        below=100 * COLLAPSED,
    )


def attention_bounce(
    steps: ArrayLike,
    entropy: ArrayLike,
    *,
    least: float = BOUNCE,
    layer: int | None = None,
    module: str = "",
    kind: str = "",
) -> Finding | None:
    """Sparse, then dense again: entropy falls by 0.2 nats to its lowest and then rises by as much.

    The fall is from the highest measurement before the lowest one. The rise is from there to the
    mean of the last 3 measurements after it, of which there must be 2 at least, so that a rise
    which is lost again does not count, nor one that a single measurement makes.

    Args:
        steps: Steps of the measurements.
        entropy: Mean entropy of attention rows at each, in nats.
        least: Nats of fall and of rise.
        layer: Layer index.
        module: Key of the attention.
        kind: Kind of the attention, "decoder cross".
    """
    at, values = checked_series(steps, entropy)
    if len(values) < LAST or not np.isfinite(values).all():
        return None
    lowest = int(np.argmin(values))
    after = values[lowest + 1 :]
    if len(after) < 2:
        return None
    low, end = float(values[lowest]), float(after[-LAST:].mean())
    fall, rise = float(values[: lowest + 1].max()) - low, end - low
    if fall < least or rise < least:
        return None
    evidence = {"fall": fall, "rise": rise, "lowest": low, "end": end}
    where = place_name(layer, module, kind)
    return found(
        "attention_bounce", "note", int(at[lowest]), evidence, module or None, layer, place=where
    )


def judge_attention(recorded: Recorded) -> Iterator[Finding | None]:
    """Judge the attention of every layer."""
    series = recorded.by_name["attention_entropy"]
    even = recorded.by_module["attention_uniform"]
    for one in series:
        where = {"layer": one.layer, "module": one.module, "kind": one.kind}
        uniform, collapsed = even.get(one.module), None
        if uniform is not None and uniform.values[-1] > 0:
            level = float(uniform.values[-1])
            collapsed = attention_collapse(one.steps, one.values, level, **where)
            if collapsed is not None and not _is_harmful(recorded, one, level):
                collapsed = as_harmless(collapsed)
        # What has collapsed and rises a little from its lowest is not dense again.
        yield collapsed or attention_bounce(one.steps, one.values, **where)


def _is_harmful(recorded: Recorded, entropy: RecordedSeries, uniform: float) -> bool:
    """Return whether attention that has collapsed is a fault, and not how the model came or solves.

    It is none where it was so at the first measurement of a model that is not known to be new, nor
    where the loss is nearly 0.
    """
    came_so = entropy.values[0] < COLLAPSED * uniform and not recorded.is_fresh
    return not came_so and not recorded.is_solved


def judge_high_rate(recorded: Recorded) -> Iterator[Finding | None]:
    """Judge whether the learning rate is too high.

    It is where at two measurements or more a single step moves three quarters of the weights by 15%
    of their size or more; or by 2% or more, and the attention of a layer that began evenly has
    collapsed.
    """
    steps, table = _moves(recorded)
    moved = np.quantile(table, 0.25, axis=0)
    second = int(np.argsort(moved)[-2])  # the largest may be of one odd step
    large = float(moved[second])
    collapsed = _collapsed_since(recorded)
    if large < (LARGE_STEP if collapsed is None else STEP_WITH_COLLAPSE):
        return
    first = int(steps[np.flatnonzero(moved >= large)[0]])  # whose rate is named, not a later one
    rate = why = ""
    for rates in recorded.by_name["learning_rate"]:  # as it was then
        at = int(np.searchsorted(rates.steps, first, side="right")) - 1
        rate = f" {rates.values[max(at, 0)]:.2g}"
    if collapsed is not None and large < LARGE_STEP:
        where = f"layer {collapsed.layer}, {collapsed.module}"
        why = f", and attention that began evenly has collapsed ({where})"
    shown = {"rate": rate, "percent": 100 * large, "second": int(steps[second]), "why": why}
    yield found("learning_rate_too_high", "warning", first, {"move": large}, **shown)


def judge_low_rate(recorded: Recorded) -> Iterator[Finding | None]:
    """Judge whether the learning rate is too low.

    It is where at the end of a training from scratch (the first loss is above 0.9 ln V) of 200
    steps or more, whose learning rate is not rising any more, all steps together can have moved the
    median weight by 40% of its size at most, and the loss is above 60% of where it began.
    """
    steps, table = _moves(recorded)
    loss, curve, made = recorded.loss, recorded.curve, recorded.last_step
    rates = recorded.by_name["learning_rate"]
    if loss is None or recorded.even_loss is None or loss.steps[0] > 1:
        raise CannotJudgeError("the losses from step 1 on, and a token embedding")
    if not recorded.ended:
        raise CannotJudgeError("the end of the training")
    if made < ENOUGH_STEPS:
        raise CannotJudgeError(f"{ENOUGH_STEPS} steps; there are {made}")
    if not rates:
        raise CannotJudgeError("the optimizer: Monitor(model, optimizer)")
    if curve is None or not recorded.is_fresh:
        return  # no training from scratch: what was learned before needs small steps
    rate = rates[0].values
    if len(rate) > 1 and rate[-1] > 1.01 * rate[-2]:
        raise CannotJudgeError("the end of the learning rate's warm-up")
    median = np.median(table, axis=0)
    path = float(np.trapezoid(np.append(median, median[-1]), np.append(steps, made)))
    path += float(median[0]) * int(steps[0])
    first, end = float(loss.values[0]), float(curve.levels[-1])
    if path >= SHORT_PATH or end < HARDLY_FALLEN * first:
        return
    evidence = {"path": path, "loss": end, "first": first}
    shown = {"rate": rate.max(), "percent": 100 * path}
    yield found("learning_rate_too_low", "warning", made, evidence, **shown)


def _moves(recorded: Recorded) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return steps, and by which share of its size each moved every weight, (weights, steps).

    Weights that began near 0, as LoRA's do, are left out: shares of such a size say nothing.
    """
    moves = recorded.by_name["update_relative"]
    if not moves:
        raise CannotJudgeError("update_relative, which was not measured")
    steps, table = table_of(moves)
    if len(steps) < LAST:
        needs = f"{LAST} steps whose moves were measured; there are {len(steps)}"
        raise CannotJudgeError(needs)
    grown = {
        one.module
        for one in recorded.by_name["weight_norm"]
        if one.values[:LAST].min() < one.values.max() / BEGAN_SMALL
    }
    kept = [one.module not in grown for one in moves]
    if not any(kept):
        raise CannotJudgeError(
            "a weight that has not grown tenfold, as those do that begin near 0; all have, which "
            "itself suggests a learning rate that is too high or weights that begin too small"
        )
    table = table[kept]
    table = table[(table > 0).any(axis=1)]  # of what is trained
    if not len(table):
        raise CannotJudgeError("weights that are finite and trained")
    return steps, table


def _collapsed_since(recorded: Recorded) -> RecordedSeries | None:
    """Return the entropy of an attention that began evenly and has collapsed, the first of them."""
    even = recorded.by_module["attention_uniform"]
    for one in recorded.by_name["attention_entropy"]:
        end, uniform = end_of(one.values), even.get(one.module)
        if end is None or uniform is None:
            continue
        level = float(uniform.values[-1])
        fell = one.values[0] > EVEN * level and end < COLLAPSED * level
        if fell and _is_harmful(recorded, one, level):
            return one
    return None


RULES = (
    Rule(("learning_rate_too_high",), judge_high_rate),
    Rule(("learning_rate_too_low",), judge_low_rate),
    Rule(("attention_collapse", "attention_bounce"), judge_attention, "attention_entropy"),
)
