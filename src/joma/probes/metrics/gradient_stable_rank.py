"""Stable rank of gradients."""

from typing import TYPE_CHECKING

from joma.probes.metrics._metric import BoundedValue, Metric

if TYPE_CHECKING:
    from joma.probes.gradient import GradientRank


def measure(found: "GradientRank") -> dict[str, BoundedValue]:
    """Return the stable rank of a gradient."""
    rank = found.stable_rank
    return {"gradient_stable_rank": BoundedValue(rank.value, rank.bound)}


METRIC = Metric(
    name="gradient_stable_rank",
    order=170,
    sentence="stable rank of a weight's gradient",
    per="weight",
    column="gradient rank",
    needs="gradients",
    measure=measure,
    probed=False,
    monitored="every tenth",
)
