"""Entropy of attention."""

from operator import attrgetter

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="attention_entropy",
    order=10,
    sentence="mean entropy of attention rows, −Σ p ln p in nats",
    per="head, layer",
    unit="nats",
    column="entropy",
    needs="attention",
    measure=attrgetter("entropy"),
    by_default=True,
    monitored="every measurement",
)
