"""Attention on the first token."""

from operator import attrgetter

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="attention_first",
    order=20,
    sentence="mean attention on the first token",
    per="head, layer",
    column="on first token",
    needs="attention",
    measure=attrgetter("first"),
    collects={"first": 1},
    by_default=True,
)
