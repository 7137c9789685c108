"""Energy of the strongest 10% of MLP nodes."""

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="mlp_top10",
    order=90,
    sentence="share of an MLP's energy in the strongest 10% of the nodes of each token",
    per="MLP, expert",
    column="MLP top 10%",
    needs="activations",
    measure=lambda statistics: statistics.top_energy[0.1],
    collects={"top": (0.1,)},
)
