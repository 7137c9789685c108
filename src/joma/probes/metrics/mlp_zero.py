"""MLP activations that are zero."""

from operator import attrgetter

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="mlp_zero",
    order=60,
    sentence="share of MLP activations that are exactly zero",
    per="MLP, expert",
    column="MLP zero",
    needs="activations",
    measure=attrgetter("zero"),
)
