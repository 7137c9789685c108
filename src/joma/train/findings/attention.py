"""Rules on attention: collapse, and sparse then dense again.

They are those by which the recorded WikiText-2 runs of JoMA's Fig. 6 and 8 fall apart: attention
collapses where the learning rate is too high for the depth, and drops and bounces back in shallow
networks at good learning rates.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from joma.errors import JomaError
from joma.train.findings.finding import Finding, advice_of, found
from joma.train.findings.recorded import (
    LAST,
    Recorded,
    RecordedSeries,
    Verdict,
    checked_series,
    end_of,
    not_enough,
    place_name,
    since,
)

COLLAPSED = 0.25
"""Share of the uniform entropy below which attention has collapsed."""
RIGID = 0.1
"""Share of the uniform entropy below which a collapse is a warning, and not a note."""
BOUNCE = 0.2
"""Nats attention must fall and rise again."""


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


def is_harmful(recorded: Recorded, entropy: RecordedSeries, uniform: float) -> bool:
    """Return whether attention that has collapsed is a fault, and not how the model came or solves.

    It is none where it was so at the first measurement of a model that is not known to be new, nor
    where the loss is nearly 0.

    Args:
        recorded: What was recorded.
        entropy: Entropy of the attention.
        uniform: That of even attention.
    """
    came_so = entropy.values[0] < COLLAPSED * uniform and not recorded.is_fresh
    return not came_so and not recorded.is_solved


def judge_attention(recorded: Recorded) -> Verdict:
    """Judge the attention of every layer."""
    kinds = ("attention_collapse", "attention_bounce")
    series = recorded.all("attention_entropy")
    yield from not_enough(kinds, series, "attention_entropy, which was not measured")
    even = recorded.by_module("attention_uniform")
    for one in series:
        where = {"layer": one.layer, "module": one.module, "kind": one.kind}
        uniform, collapsed = even.get(one.module), None
        if uniform is not None and uniform.values[-1] > 0:
            level = float(uniform.values[-1])
            collapsed = attention_collapse(one.steps, one.values, level, **where)
            if collapsed is not None and not is_harmful(recorded, one, level):
                collapsed = replace(
                    collapsed, severity="note", advice=advice_of(collapsed.kind, "harmless")
                )
        # What has collapsed and rises a little from its lowest is not dense again.
        yield collapsed or attention_bounce(one.steps, one.values, **where)
