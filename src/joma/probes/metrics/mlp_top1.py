"""Energy of the strongest 1% of MLP nodes."""

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="mlp_top1",
    order=80,
    sentence="share of an MLP's energy in the strongest 1% of the nodes of each token",
    per="MLP, expert",
    column="MLP top 1%",
    needs="activations",
    measure=lambda statistics: statistics.top_energy[0.01],
    collects={"top": (0.01,)},
)
