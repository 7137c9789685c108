"""Distance from Theorem 1 of JoMA."""

from joma.probes.metrics._metric import Metric

METRIC = Metric(
    name="theorem1_residual",
    order=200,
    sentence="how far one layer, chosen by `theorem1=`, is from Theorem 1 of JoMA",
    per="layer",
    column="theorem 1",
    needs="theorem1",
    probed=False,
    monitored="every measurement",
)
