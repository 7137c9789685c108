"""Stable rank of updates."""

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="update_stable_rank",
    order=190,
    sentence="stable rank of how a weight moved since the last such measurement",
    per="weight",
    column="update rank",
    needs="updates",
    probed=False,
    monitored="every tenth",
)
