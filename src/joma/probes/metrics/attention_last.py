"""Attention on the last tokens."""

from operator import attrgetter

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="attention_last",
    order=30,
    sentence="mean attention on the last 16 tokens up to the query",
    per="head, layer",
    column="on last 16",
    needs="attention",
    measure=attrgetter("last"),
    collects={"last": 16},
)
