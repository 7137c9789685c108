"""What the charts of a report are called, and to which section they belong."""

import math
import re
from dataclasses import dataclass

from joma.probes.metrics import METRICS

_TITLES = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "weight_decay": "Weight decay",
    "attention_entropy": "Attention entropy",
    "attention_effective": "Effective tokens",
    "attention_first": "Attention to the first token",
    "attention_last": "Attention to the token itself",
    "mlp_dead": "Dead MLP nodes",
    "embedding_overlap": "Embedding overlap",
    "stable_rank": "Stable rank of weights",
    "effective_rank": "Effective rank of weights",
    "weight_norm": "Norm of weights",
    "gradient_norm": "Norm of gradients",
    "gradient_stable_rank": "Stable rank of gradients",
    "update_relative": "Relative size of one step",
    "update_stable_rank": "Stable rank of updates",
    "theorem1_residual": "Distance from Theorem 1",
}
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

SECTIONS = ("Training", "Attention", "Weights", "Gradients", "Other")

FACTS = ("requires_grad", "optimized", "tied_layer", "vocabulary", "not_finite", "frozen")
"""Metrics that are recorded as facts, and are listed rather than drawn."""

SETTINGS = ("learning_rate", "weight_decay")
"""Metrics that are drawn only where they change; a constant is listed as a fact."""

SHAPES = ("matrix_rows", "matrix_columns")
"""Metrics that hold the shape of a weight."""

EVEN = "attention_uniform"
"""Metric that holds the entropy of even attention; a line in the chart of the entropy."""

UNRATED = "unrated"
"""Severity of a finding of an older version, which recorded none."""

_CHARTS = {
    "attention_bounce": ("attention_entropy",),
    "attention_collapse": ("attention_entropy",),
    "rank_collapse": ("stable_rank",),
    "dead_mlp": ("mlp_dead",),
    "dead_layer": ("gradient_norm",),
    "frozen_layer": ("update_relative", "gradient_norm"),
    "not_optimized": ("weight_norm", "update_relative"),
    "bad_initialisation": ("attention_entropy",),
    "learning_rate_too_high": ("update_relative",),
    "learning_rate_too_low": ("update_relative",),
}
"""The charts on which a finding of a kind shows, the best first; the loss for all others."""


@dataclass(frozen=True)
class ChartWords:
    """What a chart says of itself.

    Attributes:
        title: Its heading.
        sentence: What is measured, in one sentence.
        unit: Unit of the numbers, "" for a share or a count.
        section: The section of the report, one of `SECTIONS`.
        logarithmic: Whether its values are drawn on a logarithmic axis at first.
    """

    title: str
    sentence: str
    unit: str
    section: str
    logarithmic: bool


def chart_words(metric: str) -> ChartWords:
    """Return what the chart of a metric says of itself, whether or not joma knows the metric."""
    energy = _ENERGY.fullmatch(metric)
    known = METRICS.get("gradient_energy" if energy else metric)
    title = _TITLES.get(metric, metric.replace("_", " ").capitalize())
    sentence = _SENTENCES.get(metric, "" if known is None else _sentence(known.sentence))
    if energy:
        title = f"Gradient energy in {energy[1]} directions"
        sentence = (
            f"Share of the gradient's squared norm in its {energy[1]} largest directions; 1 "
            f"means that a rank of {energy[1]} holds all of it."
        )
    unit = "" if known is None else known.unit
    return ChartWords(title, sentence, unit, _section(metric), metric in _LOGARITHMIC)


def order_of(metric: str) -> tuple[int, int, str]:
    """Return what sorts charts: by section, then as the registry of metrics has them."""
    energy = _ENERGY.fullmatch(metric)
    known = METRICS.get("gradient_energy" if energy else metric)
    place = 10**6 if known is None else list(METRICS).index(known.name)
    if metric == "loss":
        place = -1
    rank = f"{int(energy[1]):09d}" if energy else metric
    return SECTIONS.index(_section(metric)), place, rank


def charts_of_finding(kind: str) -> tuple[str, ...]:
    """Return the metrics on whose charts a finding shows, the best first."""
    return (*_CHARTS.get(kind, ()), "loss")


def not_finite_word(value: float) -> str:
    """Return the word for a number that is not finite."""
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"


def _section(metric: str) -> str:
    if metric in ("loss", "learning_rate", "weight_decay"):
        return "Training"
    if metric.startswith(("attention", "theorem1")):
        return "Attention"
    if metric in ("stable_rank", "effective_rank", "weight_norm", "mlp_dead"):
        return "Weights"
    return "Gradients" if metric.startswith(("gradient", "update", "projection")) else "Other"


def _sentence(words: str) -> str:
    """Return the registry's words for a metric as a sentence."""
    plain = words.replace("`", "")
    return f"{plain[:1].upper()}{plain[1:]}."
