"""Eqn 6 of JoMA fitted to the first half of each layer's attention entropy.

The report draws a fit only where it accepts the data; everything else is named with its reason.
"""

from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np

from joma.errors import JomaError
from joma.report.html._charts import RecordedSeries, rounded

SECONDS = 60.0
"""Time after which no further layer is fitted."""
_NODES = 120
_MOST_MEASUREMENTS = 400


def entropy_fits(
    recorded: list[RecordedSeries],
    *,
    seconds: float = SECONDS,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Return fits of Eqn 6 to attention entropies, and what could not be fitted.

    Args:
        recorded: The series of a run's log.
        seconds: Time after which no further layer is fitted.
        progress: Called with what is fitted, how many are done and how many there are.
    """
    curves = [
        it
        for it in recorded
        if it.metric == "attention_entropy" and it.head is None and it.member == 0
    ]
    began = monotonic()
    fits: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for number, curve in enumerate(curves):
        if progress is not None:
            progress(curve.name, number, len(curves))
        place = {"module": curve.module, "kind": curve.kind, "layer": curve.layer}
        if monotonic() - began > seconds:
            refused.append({**place, "reason": f"the time of {seconds:.0f} s was used up"})
            continue
        try:
            fits.append({**place, **_fit(curve)})
        except JomaError as error:
            refused.append({**place, "reason": str(error)})
    return {"fits": fits, "refused": refused, "tried": len(curves)}


def _fit(curve: RecordedSeries) -> dict[str, Any]:
    """Return the fit of one curve to its first half, with the interval over all of it.

    Raises:
        JomaError: The measurements do not determine it.
    """
    from scipy.special import ndtri  # here: a report without fits does not wait for SciPy

    from joma.theory import nonlinear

    steps, first = np.unique(curve.steps, return_index=True)
    values = curve.values[first]
    finite = np.isfinite(values)
    steps, values = steps[finite].astype(np.float64), values[finite]
    seen = steps.size // 2
    chosen = np.unique(np.linspace(0, seen - 1, min(seen, _MOST_MEASUREMENTS)).astype(int))
    fit = nonlinear.fit(steps[chosen], entropy=values[chosen], components=(2, 4), multiplicity=True)
    nodes = np.unique(np.linspace(steps[0], steps[-1], _NODES).astype(np.int64))
    curve_there = fit.predict(nodes.astype(np.float64))
    later = fit.predict(steps[seen:])
    noise = float(ndtri((1 + fit.level) / 2) * fit.noise.median)
    inside = np.mean((later.low - noise <= values[seen:]) & (values[seen:] <= later.high + noise))
    last_seen = values[seen - 1]
    return {
        "until": int(steps[seen - 1]),
        "measurements": int(chosen.size),
        "level": fit.level,
        "misfit": fit.misfit,
        "steps": nodes.tolist(),
        "median": rounded(np.asarray(curve_there.median)),
        "low": rounded(np.asarray(curve_there.low)),
        "high": rounded(np.asarray(curve_there.high)),
        "inside": round(float(inside), 4),
        "error": _rms(np.asarray(later.median) - values[seen:]),
        "error_last_value": _rms(last_seen - values[seen:]),
    }


def _rms(errors: np.ndarray) -> float:
    return float(f"{np.sqrt(np.mean(errors**2)):.3g}")
