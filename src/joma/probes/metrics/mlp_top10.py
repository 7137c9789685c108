"""Energy of the strongest 10% of MLP nodes."""

from typing import TYPE_CHECKING

from joma.probes.metrics._metric import Metric

if TYPE_CHECKING:
    from joma.probes.activations import ActivationStatistics


def measure(statistics: "ActivationStatistics") -> float:
    """Return the share of the energy in the strongest 10% of the nodes."""
    return statistics.top_energy[0.1]


METRIC = Metric(
    name="mlp_top10",
    order=90,
    sentence="share of an MLP's energy in the strongest 10% of the nodes of each token",
    per="MLP, expert",
    column="MLP top 10%",
    needs="activations",
    measure=measure,
    collects={"top": (0.1,)},
)
