"""Energy of the strongest 1% of MLP nodes."""

from typing import TYPE_CHECKING

from joma.probes.metrics._metric import Metric

if TYPE_CHECKING:
    from joma.probes.activations import ActivationStatistics


def measure(statistics: "ActivationStatistics") -> float:
    """Return the share of the energy in the strongest 1% of the nodes."""
    return statistics.top_energy[0.01]


METRIC = Metric(
    name="mlp_top1",
    order=80,
    sentence="share of an MLP's energy in the strongest 1% of the nodes of each token",
    per="MLP, expert",
    column="MLP top 1%",
    needs="activations",
    measure=measure,
    collects={"top": (0.01,)},
)
