"""Norms of gradients."""

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="gradient_norm",
    order=150,
    sentence="Frobenius norm of the gradient in `.grad`, and of the weight (`weight_norm`)",
    per="weight",
    column="gradient norm",
    needs="norms",
    probed=False,
    monitored="every measurement",
)
