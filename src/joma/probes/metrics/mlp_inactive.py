"""MLP activations near zero."""

from operator import attrgetter

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="mlp_inactive",
    order=50,
    sentence="share of MLP activations near zero: |a| at most 1% of the token's rms",
    per="MLP, expert",
    column="MLP near 0",
    needs="activations",
    measure=attrgetter("near_zero"),
    by_default=True,
)
