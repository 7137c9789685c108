"""Overlap of the residual stream."""

from operator import attrgetter

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="residual_overlap",
    order=110,
    sentence="mean |cosine| of the residual stream at different tokens",
    per="layer",
    column="overlap",
    needs="residual",
    measure=attrgetter("mean"),
    by_default=True,
)
