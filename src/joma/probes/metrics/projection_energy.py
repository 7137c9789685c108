"""Energy of gradients in GaLore's subspaces."""

from typing import Any

from joma.probes.metrics._metric import Metric


def measure(matrix: Any) -> float | None:
    """Return the share, or None where none was recorded."""
    return matrix.energy


METRIC = Metric(
    name="projection_energy",
    order=210,
    sentence="share of a gradient's ‖G‖_F² in the subspace that a GaLore optimizer projects it to",
    per="weight",
    column="projection energy",
    needs="projection",
    measure=measure,
    probed=False,
    monitored="every measurement",
)
