"""Gradient rank, and what GaLore would save: from recorded gradients and shapes of weights."""

import re
from typing import Any

import numpy as np

from joma.report.html._charts import RecordedSeries

_ENERGY = re.compile(r"gradient_energy_(\d+)")
_BYTES = 4  # of a number in float32


def gradient_ranks(recorded: list[RecordedSeries]) -> dict[str, Any] | None:
    """Return the last finite rank of every gradient, and the optimizer's memory by rank.

    AdamW keeps two moments of a matrix of m × n, 2mn numbers. GaLore of rank r keeps two moments
    of r × max(m, n) and a basis of min(m, n) × r; a matrix whose smaller side is at most r is not
    projected.

    Args:
        recorded: The series of a run's log.

    Returns:
        None where no gradient's rank was measured.
    """
    found: dict[str, dict[str, Any]] = {}
    for series in recorded:
        energy = _ENERGY.fullmatch(series.metric)
        finite = np.flatnonzero(np.isfinite(series.values))
        if series.head is not None or series.member or not series.module or not finite.size:
            continue
        entry = found.setdefault(series.module, {"layer": series.layer, "energy": {}})
        last = float(series.values[finite[-1]])
        if energy or series.metric == "gradient_stable_rank":
            entry["step"] = int(series.steps[finite[-1]])
            entry["lost"] = entry.get("lost", False) or finite[-1] + 1 < series.values.size
        if energy:
            entry["energy"][int(energy[1])] = round(last, 6)
        elif series.metric == "gradient_stable_rank":
            entry["stable_rank"] = float(f"{last:.4g}")
        elif series.metric in ("matrix_rows", "matrix_columns"):
            entry[series.metric] = int(last)
    weights = [{"module": module, **entry} for module, entry in found.items() if "step" in entry]
    if not weights:
        return None
    lost = [weight.pop("lost") for weight in weights]
    ranks = sorted({rank for weight in weights for rank in weight["energy"]})
    shaped = [it for it in weights if "matrix_rows" in it and "matrix_columns" in it]
    return {
        "weights": weights,
        "ranks": [_at_rank(rank, weights, shaped) for rank in ranks],
        "finite": not any(lost),
        "shapes": len(shaped),
        "adamw_bytes": sum(2 * _BYTES * _size(it) for it in shaped) or None,
    }


def _at_rank(
    rank: int, weights: list[dict[str, Any]], shaped: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return what a rank holds of the gradients, and what it would take of memory."""
    energies = sorted(it["energy"][rank] for it in weights if rank in it["energy"])
    return {
        "rank": rank,
        "gradients": len(energies),
        "least": energies[0],
        "median": energies[(len(energies) - 1) // 2],
        "galore_bytes": sum(_BYTES * _galore_numbers(it, rank) for it in shaped) or None,
    }


def _galore_numbers(weight: dict[str, Any], rank: int) -> int:
    small, large = sorted((weight["matrix_rows"], weight["matrix_columns"]))
    return 2 * small * large if small <= rank else rank * (2 * large + small)


def _size(weight: dict[str, Any]) -> int:
    return weight["matrix_rows"] * weight["matrix_columns"]
