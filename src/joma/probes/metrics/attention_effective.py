"""Effective number of tokens attended to."""

from operator import attrgetter

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="attention_effective",
    order=40,
    sentence="mean of exp(entropy): to how many tokens a row attends",
    per="head, layer",
    unit="tokens",
    column="tokens attended",
    needs="attention",
    measure=attrgetter("effective"),
    monitored="every measurement",
)
