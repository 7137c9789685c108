"""How often GaLore chose a subspace."""

from typing import Any

from joma.probes.metrics._metric import Metric


def measure(matrix: Any) -> float | None:
    """Return the number."""
    return float(matrix.refreshes)


METRIC = Metric(
    name="projection_refreshes",
    order=240,
    sentence="how often a GaLore optimizer has chosen the subspace",
    per="weight",
    column="refreshes",
    needs="projection",
    measure=measure,
    probed=False,
    monitored="every measurement",
)
