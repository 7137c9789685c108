"""Tails of MLP activations."""

from operator import attrgetter

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="mlp_kurtosis",
    order=100,
    sentence="kurtosis of MLP activations, 3 for normal numbers",
    per="MLP, expert",
    column="MLP kurtosis",
    needs="activations",
    measure=attrgetter("kurtosis"),
)
