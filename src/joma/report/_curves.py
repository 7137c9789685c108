"""What curves of a metric are called, to which section they belong, and which points are drawn."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma.probes.metrics import METRICS

_TITLES = {
    "attention_effective": "Effective tokens",
    "attention_first": "Attention to the first token",
    "attention_last": "Attention to the token itself",
    "mlp_dead": "Dead MLP nodes",
    "stable_rank": "Stable rank of weights",
    "effective_rank": "Effective rank of weights",
    "weight_norm": "Norm of weights",
    "gradient_norm": "Norm of gradients",
    "gradient_stable_rank": "Stable rank of gradients",
    "update_relative": "Relative size of one step",
    "update_stable_rank": "Stable rank of updates",
    "theorem1_residual": "Distance from Theorem 1",
}
"""Titles that are not the metric's name."""

_SENTENCES = {
    "loss": "What the training loop reports at every step, and the validation loss where there "
    "is one.",
    "learning_rate": "The largest rate of the optimizer's groups.",
    "weight_decay": "The largest weight decay of the optimizer's groups.",
    "weight_norm": "Frobenius norm of the weight.",
    "gradient_norm": "Frobenius norm of the gradient.",
}
_LOGARITHMIC = ("learning_rate", "gradient_norm", "update_relative", "weight_norm")
_ENERGY = re.compile(r"gradient_energy_(\d+)")

_SECTIONS = {
    "Training": ("loss", "learning_rate", "weight_decay"),
    "Attention": ("attention", "theorem1"),
    "Weights": ("stable_rank", "effective_rank", "weight_norm", "mlp_dead"),
    "Gradients": ("gradient", "update", "projection"),
    "Other": ("",),
}
"""What the metrics of each section begin with."""


def energy_rank(metric: str) -> int | None:
    """Return r of a metric `gradient_energy_r`, None for other metrics."""
    match = _ENERGY.fullmatch(metric)
    return int(match[1]) if match else None


def chart_words(metric: str) -> dict[str, Any]:
    """Return what the chart of a metric says of itself, whether or not joma knows the metric.

    Returns:
        Its "title" and "sentence", the "unit" of the numbers ("" for a share or a count), the
        "section" of the report, and whether it is "logarithmic" at first.
    """
    rank = energy_rank(metric)
    known = METRICS.get("gradient_energy" if rank else metric)
    title = _TITLES.get(metric, metric.replace("_", " ").capitalize())
    words = "" if known is None else known.sentence.replace("`", "")
    sentence = _SENTENCES.get(metric, words and f"{words[:1].upper()}{words[1:]}.")
    if rank:
        title = f"Gradient energy in the top {rank} directions"
        sentence = (
            f"Share of the gradient's squared norm in its {rank} largest directions; 1 means that "
            f"a rank of {rank} holds all of it."
        )
    return {
        "title": title,
        "sentence": sentence,
        "unit": "‖W‖² / σ₁²" if metric == "stable_rank" else "" if known is None else known.unit,
        "section": _section(metric),
        "logarithmic": metric in _LOGARITHMIC,
    }


def chart_order(metric: str) -> tuple[int, int, int, str]:
    """Return what sorts charts: by section, then as the registry of metrics has them."""
    rank = energy_rank(metric) or 0
    known = [*METRICS, "gradient_energy"]
    name = "gradient_energy" if rank else metric
    place = known.index(name) if name in known else len(known)
    section = list(_SECTIONS).index(_section(metric))
    return section, -1 if metric == "loss" else place, rank, metric


def _section(metric: str) -> str:
    return next(name for name, begins in _SECTIONS.items() if metric.startswith(begins))


def kept_points(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Return the indices of the points to draw, at most `most` of them, in their order.

    The series is cut into buckets of equally many points. Of each the smallest and the largest
    finite value stay, and one value that is not finite where there is one; so do the first and the
    last point. A peak of a single step is therefore never lost.

    Args:
        values: The values, in the order of their steps.
        most: The most points to keep, at least 8.
    """
    count = values.size
    if count <= most:
        return np.arange(count)
    finite = np.isfinite(values)
    buckets = (most - 2) // (2 if finite.all() else 3)
    starts = np.linspace(0, count, buckets, endpoint=False).astype(np.intp)
    bucket = np.searchsorted(starts, np.arange(count), side="right") - 1
    lost = np.flatnonzero(~finite)
    order = np.lexsort((np.where(finite, values, np.inf), bucket))
    order = order[finite[order]]
    edges = np.flatnonzero(np.diff(bucket[order], prepend=-1, append=buckets))
    kept = [np.array([0, count - 1]), lost[np.unique(bucket[lost], return_index=True)[1]]]
    kept += [order[edges[:-1]], order[edges[1:] - 1]]
    return np.unique(np.concatenate(kept))
