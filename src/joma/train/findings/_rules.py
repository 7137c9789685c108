"""Findings in plain words: what the recorded series of a training say, each by a written rule.

A finding is decided by numbers alone: every function here takes series that were recorded (by
`joma.Monitor` or by anything else) and returns what its docstring defines, with the numbers that
decided beside the sentence. Nothing here looks at a model.

The rules for attention are those by which the recorded WikiText-2 runs of JoMA's Fig. 6 and 8 fall
apart: attention collapses where the learning rate is too high for the depth, and drops and bounces
back in shallow networks at good learning rates. "The end" of a series is the mean of its last
three looks, so that one odd look decides nothing.
"""

import math
from collections.abc import Mapping
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.errors import JomaError
from joma.train.findings._finding import Finding
from joma.train.findings._series import checked_series

LAST = 3
"""Looks at the end whose mean counts as where a series ends."""
COLLAPSED = 0.25
"""Share of the uniform entropy below which attention has collapsed."""
BOUNCE = 0.2
"""Nats attention must fall and rise again."""
ONE_DIRECTION = 2.0
"""Stable rank below which one direction holds more than half of ‖W‖_F²."""
DEAD = 1e-4
"""Share of the other layers' gradient below which a layer does not learn."""
DIVERGED = 1.0
"""Nats, or as much as the loss ever fell if that is more, by which a diverged loss has risen."""
LOW_RANK = 0.9
"""Share of the gradient's energy that must lie in the top r directions for GaLore at rank r."""
LARGE_STEP = 0.01
"""Share of its own size by which one step moves a weight when the learning rate is too high."""


def attention_collapse(
    steps: ArrayLike,
    entropy: ArrayLike,
    uniform: float,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Finding | None:
    """Attention collapsing: the mean of the last 3 looks lies below .25 of the uniform entropy.

    A network that dips below and recovers has not collapsed.

    Args:
        steps: of the looks.
        entropy: mean entropy of attention rows at each, in nats.
        uniform: what it would be if every row spread evenly over the keys it sees: ln(T!)/T for
            causal attention over T tokens.
        layer: where.
        head: which, if of one.
    """
    at, values = checked_series(steps, entropy)
    if not (math.isfinite(uniform) and uniform > 0):
        raise JomaError(f"uniform must be an entropy above 0 in nats, got {uniform!r}")
    end = end_of(values)
    if end is None or not end < COLLAPSED * uniform:
        return None
    below = values < COLLAPSED * uniform
    since = int(at[len(at) - 1 - int(np.argmin(below[::-1]))]) if not below.all() else int(at[0])
    return Finding(
        "attention_collapse",
        "warning",
        since,
        f"Attention of {_place(layer, head)} has collapsed: its entropy ends at {end:.2f} nats, "
        f"{100 * end / uniform:.0f}% of what even attention has ({uniform:.2f}); after step "
        f"{since} it stays below {100 * COLLAPSED:.0f}%.",
        "",
        {"end": end, "uniform": float(uniform), "first": float(values[0])},
        layer=layer,
        head=head,
    )


def attention_bounce(
    steps: ArrayLike,
    entropy: ArrayLike,
    *,
    least: float = BOUNCE,
    layer: int | None = None,
    head: int | None = None,
) -> Finding | None:
    """Sparse, then dense again: entropy falls by .2 nats to its lowest look and ends .2 above it.

    The fall is from the highest look before the lowest one; the rise from there to the mean of the
    last 3 looks, so that a rise which is lost again does not count.

    Args:
        steps: of the looks.
        entropy: mean entropy of attention rows at each, in nats.
        least: nats of fall and of rise.
        layer: where.
        head: which, if of one.
    """
    at, values = checked_series(steps, entropy)
    end = end_of(values)
    if end is None or not np.isfinite(values).all():
        return None
    lowest = int(np.argmin(values))
    low = float(values[lowest])
    fall, rise = float(values[: lowest + 1].max()) - low, end - low
    if fall < least or rise < least:
        return None
    return Finding(
        "attention_bounce",
        "note",
        int(at[lowest]),
        f"Attention of {_place(layer, head)} became sparse and then dense again: entropy fell by "
        f"{fall:.2f} nats to {low:.2f} at step {int(at[lowest])} and rose by {rise:.2f} since.",
        "",
        {"fall": fall, "rise": rise, "lowest": low, "end": end},
        layer=layer,
        head=head,
    )


def rank_collapse(
    steps: ArrayLike,
    ranks: ArrayLike,
    *,
    what: str = "a weight",
    layer: int | None = None,
    head: int | None = None,
) -> Finding | None:
    """Rank collapse: a stable rank that began at 4 or more ends below 2.

    Below 2 one direction holds more than half of ‖W‖_F². The end is the mean of the last 3 looks;
    a weight that began so low has not collapsed.

    Args:
        steps: of the looks.
        ranks: stable rank at each.
        what: the rank is of.
        layer: where.
        head: which, if of one.
    """
    at, values = checked_series(steps, ranks)
    end = end_of(values)
    if end is None or not end < ONE_DIRECTION or not values[0] >= 2 * ONE_DIRECTION:
        return None
    since = int(at[int(np.argmax(values < ONE_DIRECTION))])
    return Finding(
        "rank_collapse",
        "warning",
        since,
        f"The rank of {what} in {_place(layer, head)} has collapsed: its stable rank was "
        f"{values[0]:.1f} and ends at {end:.2f}, so that one direction holds more than half of it.",
        "",
        {"first": float(values[0]), "end": end},
        layer=layer,
        head=head,
    )


def dead_layers(steps: ArrayLike, norms: Mapping[int, ArrayLike]) -> list[Finding]:
    """Dead layers: gradients below 10⁻⁴ of the other layers' median at each of the last 3 looks.

    Args:
        steps: of the looks.
        norms: for each layer, the norm of its gradient at each look.
    """
    if len(norms) < 2:
        return []
    series = {layer: checked_series(steps, norm)[1] for layer, norm in norms.items()}
    at = np.asarray(steps)
    if len(at) < LAST:
        return []
    found = []
    for layer, norm in series.items():
        others = np.median([other for key, other in series.items() if key != layer], axis=0)
        share = norm[-LAST:] / np.where(others[-LAST:] > 0, others[-LAST:], np.nan)
        if not (share < DEAD).all():
            continue
        found.append(
            Finding(
                "dead_layer",
                "warning",
                int(at[-LAST]),
                f"Layer {layer} does not learn: at the last {LAST} looks its gradient was "
                f"{share.max():.1e} of the other layers' or less.",
                "",
                {"share": float(share.max()), "norm": float(norm[-1])},
                layer=layer,
            )
        )
    return found


def diverged_loss(steps: ArrayLike, loss: ArrayLike) -> Finding | None:
    """Diverged or NaN loss: one that is not finite, or that has risen far above its lowest.

    Far is by more than 1, and by more than it had ever fallen: losses here are medians of
    neighbouring steps (a hundredth of the series, 5 at least), so that one bad batch is none.

    Args:
        steps: of the losses.
        loss: at each.
    """
    at, values = checked_series(steps, loss)
    broken = np.flatnonzero(~np.isfinite(values))
    if len(broken):
        step, value = int(at[broken[0]]), values[broken[0]]
        word = "NaN" if np.isnan(value) else "infinite"
        return Finding(
            "diverged_loss",
            "critical",
            step,
            f"The loss is {word} from step {step} on ({len(broken)} of {len(values)} steps).",
            "",
            {"broken": float(len(broken)), "steps": float(len(values))},
        )
    width = max(5, len(values) // 100)
    if len(values) < 2 * width:
        return None
    pieces = [values[start : start + width] for start in range(0, len(values), width)]
    levels = np.array([median(piece.tolist()) for piece in pieces])
    lowest = int(np.argmin(levels))
    fallen, risen = float(levels[0] - levels[lowest]), float(levels[-1] - levels[lowest])
    if risen <= max(DIVERGED, fallen):
        return None
    step = int(at[min(lowest * width, len(at) - 1)])
    return Finding(
        "diverged_loss",
        "critical",
        step,
        f"The loss has diverged: it was {levels[lowest]:.3f} near step {step} and is now "
        f"{levels[-1]:.3f}, above where it began ({levels[0]:.3f}).",
        "",
        {"first": float(levels[0]), "lowest": float(levels[lowest]), "end": float(levels[-1])},
    )


def low_rank_gradients(
    steps: ArrayLike, energy: Mapping[str, ArrayLike], rank: int, *, left_out: int = 0
) -> Finding | None:
    """Gradients low-rank enough for GaLore: the top r directions hold 90% of every one's energy.

    Of every weight given, at each of the last 3 looks. A weight whose shorter side is below 2r is
    to be left out: there GaLore would save nothing to speak of.

    Args:
        steps: of the looks.
        energy: for each weight, the share of ‖G‖_F² in its top r directions at each look.
        rank: r.
        left_out: how many weights were left out.
    """
    series = {name: checked_series(steps, share)[1][-LAST:] for name, share in energy.items()}
    at = np.asarray(steps)
    if not series or len(at) < LAST:
        return None
    if not all((share >= LOW_RANK).all() for share in series.values()):
        return None
    worst = min(series, key=lambda name: float(series[name].min()))
    least = float(series[worst].min())
    others = f" ({left_out} smaller weights left out)" if left_out else ""
    return Finding(
        "low_rank_gradients",
        "note",
        int(at[-1]),
        f"Gradients are low-rank enough for GaLore at rank {rank}: the top {rank} directions hold "
        f"at least {100 * least:.0f}% of the energy of each of {len(series)} weights' "
        f"gradients{others}, least in {worst}.",
        "",
        {"rank": float(rank), "least": least, "weights": float(len(series))},
    )


def learning_rate_too_high(
    steps: ArrayLike, moves: ArrayLike, *, layer: int, learning_rate: float | None = None
) -> Finding | None:
    """Learning rate too high for a layer: one step moves its weights by more than 1% of their size.

    The mean over the last 3 looks of ‖ΔW‖/‖W‖ for a single optimizer step, for the layer's weight
    that moves most. A training that goes well is near 0.1%. Weights that a far too high rate has
    made large move little against their size: what is found then is that attention collapsed.

    Args:
        steps: of the looks.
        moves: ‖ΔW‖/‖W‖ of one step at each.
        layer: where.
        learning_rate: to name it.
    """
    at, values = checked_series(steps, moves)
    end = end_of(values)
    if end is None or not end > LARGE_STEP:
        return None
    named = "" if learning_rate is None else f" {learning_rate:g}"
    return Finding(
        "learning_rate_too_high",
        "warning",
        int(at[-1]),
        f"The learning rate{named} is too high for layer {layer}: one step moves its weights by "
        f"{100 * end:.1f}% of their size, where 0.1% is usual.",
        "",
        {"move": end},
        layer=layer,
    )


def end_of(values: NDArray[np.float64]) -> float | None:
    """Where a series ends, None where it is too short to say."""
    return float(values[-LAST:].mean()) if len(values) >= LAST else None


def _place(layer: int | None, head: int | None) -> str:
    where = "the model" if layer is None else f"layer {layer}"
    return where if head is None else f"head {head} of {where}"
